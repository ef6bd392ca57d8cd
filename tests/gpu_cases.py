"""Models, states and runs that the tests of GPU prefill share. Fixtures: import `packs` and `engines` where they are used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fermi_engine import Engine, EngineConfig
from fermi_engine.convert import convert
from fermi_engine.gpu.prefill import HybridPrefill
from fermi_engine.kernels.emulated import EmulatedDevice
from fermi_engine.model.decoder import Decoder
from fermi_engine.state import HybridState
from tools.make_checkpoint import make_checkpoint
from tools.noise import nudge

TINY = Path(__file__).resolve().parent.parent / "golden" / "tiny"
NOISE_DRAWS = 4
LENGTH = 150  # two chunks of the delta rule and an open one, two blocks of attention


_made: dict[str, Any] = {}  # a fixture that two files import is set up for each of them


@pytest.fixture(scope="session")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small models by name."""
    if "packs" not in _made:
        _made["packs"] = _make_packs(tmp_path_factory.mktemp("gpu"))
    return _made["packs"]


def _make_packs(directory: Path) -> dict[str, Path]:
    found = {"trained": convert(TINY, directory / "trained.pack", format="q4_0")}
    for name, options in {"moe": {"layers": 4}, "dense": {"layers": 4, "family": "dense"},
                          "f16": {"layers": 1}, "narrow": {"layers": 1, "key_dim": 16}}.items():
        checkpoint = make_checkpoint(directory / name, seed=8, **{"key_dim": 32, **options})
        found[name] = convert(checkpoint, directory / f"{name}.pack", format="f16" if name == "f16" else "q4_0")
    found["moe-q8_0"] = convert(directory / "moe", directory / "q8.pack", format="q8_0")
    return found


@pytest.fixture(scope="session")
def engines(packs: dict[str, Path]) -> dict[str, Engine]:
    """Engines whose CPU path runs with float32 activations."""
    if "engines" not in _made:
        options = EngineConfig(activations="f32", threads=1)
        _made["engines"] = {name: Engine.load(path, config=options) for name, path in packs.items()}
    return _made["engines"]


@pytest.fixture(scope="session")
def plain(engines: dict[str, Engine]) -> dict[str, dict[str, bytes]]:
    """Outcomes of an undisturbed run in one pass, everything resident."""
    if "plain" not in _made:
        _made["plain"] = {name: run(engines[name], ids_for(engines[name])) for name in ("moe", "dense")}
    return _made["plain"]


def ids_for(engine: Engine, length: int = LENGTH, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, engine.config.vocab_size, length).astype(np.int32)


def fresh(engine: Engine, kv_format: str = "f32") -> HybridState:
    return HybridState.fresh(engine.config, 64, kv_format)


def hybrid(engine: Engine, device: Any = None, notes: list[str] | None = None, **options: Any) -> HybridPrefill:
    said = [] if notes is None else notes
    return HybridPrefill(device or EmulatedDevice(), engine.pack, engine.decoder, note=said.append, **options)


def outcome(hidden: np.ndarray, state: HybridState) -> dict[str, bytes]:
    """Everything a prefill leaves behind, as bytes by name."""
    found = {name: array.tobytes() for name, array in state.arrays().items()}
    if state.open_chunks is not None:
        for layer, arrays in state.open_chunks.layers.items():
            found |= {f"open.{layer}.{name}": array.tobytes() for name, array in arrays.items()}
    return {**found, "hidden": hidden.tobytes()}


def run(engine: Engine, ids: np.ndarray, device: Any = None, notes: list[str] | None = None, **options: Any) -> dict[str, bytes]:
    state = fresh(engine)
    return outcome(hybrid(engine, device, notes, **options).run(ids, state), state)


def cpu_run(engine: Engine, ids: np.ndarray, seed: int | None = None) -> dict[str, np.ndarray]:
    """Last hidden row and state of the CPU path; with a seed each layer's input is moved by one unit in the last place."""
    state, decoder = fresh(engine), engine.decoder
    if seed is not None:
        decoder = nudge(Decoder(engine.pack, engine.kernels, decoder.mode), seed)
    hidden = decoder.hidden(ids, state)
    return {**state.arrays(), "hidden": hidden[-1:]}
