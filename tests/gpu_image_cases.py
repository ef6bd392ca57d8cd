"""Models that see, prompts with images and talks about them, which the tests of images on the GPU share. Fixture: `seeing`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fermi_engine import Engine, EngineConfig
from fermi_engine.convert import convert
from fermi_engine.session import Session
from fermi_engine.state import HybridState
from fermi_engine.vision.patches import PreparedImage
from tools.make_checkpoint import make_checkpoint
from tools.noise import nudge

MODELS = {"minicpm": {"family": "minicpm", "tied": True}, "dense": {"family": "dense"},
          "moe": {"experts": 4, "experts_per_tok": 2}}
# A path and a model on it: resident models are dense.
PATHS = [("resident", "minicpm"), ("resident", "dense"), ("hybrid", "moe"), ("hybrid", "minicpm")]
SIZES = {0: [], 1: [(70, 50)], 3: [(40, 90), (60, 60), (90, 30)]}  # height and width by number of images
_made: dict[str, Path] = {}


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small packs with towers by name. Of seed 5, a prompt has a token whose delta rule nearly cancels before a norm: its error
    is the largest by far and one draw of many, which no few others bound."""
    if not _made:
        directory = tmp_path_factory.mktemp("seeing")
        for name, options in MODELS.items():
            checkpoint = make_checkpoint(directory / f"{name}.d", seed=6, **{"layers": 4, "key_dim": 32, **options})
            _made[name] = convert(checkpoint, directory / name, format="q8_0")
    return _made


def engine(pack: Path, path: str = "cpu", **options: Any) -> Engine:
    """With float32 activations; path: 'cpu', 'hybrid' or 'resident', those on an emulated GPU. Without snapshots unless asked."""
    ways = {"cpu": {}, "hybrid": {"prefill": "gpu"}, "resident": {"decode": "gpu"}}
    given = {"threads": 1, "activations": "f32", "device": "emulated", "gemm": "own", "snapshot_ram": 0, **ways[path], **options}
    return Engine.load(pack, config=EngineConfig(**given))


def shaken(pack: Path, seed: int) -> Engine:
    """On the CPU, the input of each layer of text model and tower moved by one unit in the last place."""
    found = engine(pack)
    nudge(found.decoder, seed)
    nudge(found.vision.tower, seed)
    return found


def pictures(count: int, seed: int = 0) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, 256, (*size, 3)).astype(np.uint8) for size in SIZES[count]]


@dataclass(frozen=True)
class Prompt:
    """Ids int32 [T], and the images among them."""

    ids: list[int]
    images: list[PreparedImage]


def prompt(seen: Engine, pixels: Sequence[np.ndarray], text: int = 40, seed: int = 0) -> Prompt:
    """`text` tokens before each image and behind the last one."""
    draw = np.random.default_rng(seed)
    images = [seen.vision.prepare(one) for one in pixels]
    token = seen.vision.config.image_token_id

    def words() -> list[int]:
        return draw.integers(0, 256, text).tolist()

    ids = words()
    for _ in images:
        ids += [token, *words()]
    return Prompt(seen.vision.expand(seen.tokenizer, ids, images), images)


def twin(pixels: Sequence[np.ndarray], which: int = -1) -> list[np.ndarray]:
    """The same pictures, one of them with another pixel."""
    found = [one.copy() for one in pixels]
    found[which][20, 20, 1] ^= 255
    return found


def everything(session: Session, logits: np.ndarray) -> dict[str, bytes]:
    """Logits and the whole state as bytes by name."""
    state: HybridState = session.state
    found = {"logits": logits.tobytes(), **{name: array.tobytes() for name, array in state.arrays().items()}}
    chunks = state.open_chunks
    for layer, arrays in (chunks.layers if chunks is not None and chunks.position == state.position else {}).items():
        found |= {f"open.{layer}.{name}": array.tobytes() for name, array in arrays.items()}
    return found
