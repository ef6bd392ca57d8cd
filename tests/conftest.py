"""Test settings: one thread for torch, Hypothesis profiles, soak tests where they are asked for, few packages for `-m gpu`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # plain `pytest` puts only tests/ there
    sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: its threads are far slower on models this small

SOAK = bool(os.environ.get("FERMI_SOAK"))
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=80, database=None, print_blob=True,
                          suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("soak", deadline=None, max_examples=2000, print_blob=True,
                          suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("soak" if SOAK else "ci")


GPU_WORDS = ("mark.gpu", "on_devices(")  # one of them stands in every module with tests for the card


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu` modules without such tests are not even imported: a machine with a card has torch, and not all that the
    others want (transformers, gguf, pillow)."""
    if config.getoption("-m") != "gpu" or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text(encoding="utf-8")
    return True if not any(word in text for word in GPU_WORDS) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without FERMI_SOAK, tests marked `soak` are deselected (and counted as such)."""
    if SOAK:
        return
    long = [item for item in items if item.get_closest_marker("soak")]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if item not in long]
