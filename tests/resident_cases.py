"""Models, timelines and a device without memory, which the tests of the resident model share. Fixture: import `dense`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fermi_engine import Engine, EngineConfig
from fermi_engine.config import ModelConfig
from fermi_engine.convert import convert
from fermi_engine.formats import FORMATS, Matrix
from fermi_engine.gpu.resident import Resident
from fermi_engine.kernels.checked_device import CheckedDevice
from fermi_engine.kernels.emulated import EmulatedDevice
from fermi_engine.shapes import expected_shapes
from fermi_engine.state import HybridState
from tools.make_checkpoint import make_checkpoint

MODELS = {"q8_0": {"tied": True}, "q4_0": {"value_heads": 6, "value_dim": 64}, "f32": {"layers": 4, "conv_kernel": 3}}
_made: dict[str, Engine] = {}


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Engine]:
    """Small dense models by format; the CPU path runs with float32 activations."""
    if not _made:
        directory = tmp_path_factory.mktemp("dense")
        for name, options in MODELS.items():
            _made[name] = _load(directory, name, options)
    return _made


def _load(directory: Path, name: str, options: dict[str, Any]) -> Engine:
    checkpoint = make_checkpoint(directory / name, seed=8, **{"layers": 4, "family": "dense", "key_dim": 32, **options})
    path = convert(checkpoint, directory / f"{name}.pack", format=name)
    return Engine.load(path, config=EngineConfig(activations="f32", threads=1))


def resident(engine: Engine, device: Any = None, notes: list[str] | None = None, **options: Any) -> Resident:
    said = [] if notes is None else notes
    return Resident(device or EmulatedDevice(), engine.pack, engine.decoder, note=said.append, **{"gemm": "own", **options})


def ids_for(engine: Engine, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, engine.config.vocab_size, length).astype(np.int32)


def fresh(engine: Engine) -> HybridState:
    return HybridState.fresh(engine.config, 64, "f32")


Call = tuple[str, Any]


def drive(r: Resident, state: HybridState, calls: Sequence[Call]) -> list[np.ndarray]:
    """Logits of each call: ("prefill", ids) or ("decode", id)."""
    return [r.prefill(what, state) if kind == "prefill" else r.decode(int(what), state) for kind, what in calls]


def everything(r: Resident, state: HybridState) -> dict[str, bytes]:
    """The whole state, as bytes by name, once the host has it."""
    r.fetch(state)
    found = {name: array.tobytes() for name, array in state.arrays().items()}
    chunks = state.open_chunks
    if chunks is not None:
        found |= {f"open.{i}.{name}": array.tobytes() for i, arrays in chunks.layers.items() for name, array in arrays.items()}
    return found


class Hollow(CheckedDevice):
    """A device that checks what it is given and does nothing: for plans at sizes that the emulator would take hours for."""

    def __init__(self, total_bytes: int) -> None:
        super().__init__("hollow", total_bytes, 14)
        self._next = itertools.count(1 << 20, 1 << 32)
        self._used, self.launches = 0, 0

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self._used

    def _alloc(self, nbytes: int, name: str) -> int:
        if nbytes > self.free_bytes:
            raise self._no_memory(nbytes, name, "out of memory")
        self._used += -(-nbytes // 256) * 256
        return next(self._next)

    def _free(self, buffer: Any) -> None:
        self._used -= -(-buffer.nbytes // 256) * 256

    def _pinned(self, nbytes: int) -> tuple[np.ndarray, Any]:
        return np.zeros(nbytes, np.uint8), None

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    _pin = _unpin = _h2d = _d2h = _d2d = _memset = _sgemm = synchronize = _nothing

    def _needs(self, entry: Any) -> tuple[int, int]:
        return 0, 1024

    def _launch(self, *_: Any) -> None:
        self.launches += 1

    def vendor(self) -> str:
        return "none"

    def stream(self, name: str) -> Any:
        return _Point()

    def event(self) -> Any:
        return _Point()


class _Point:
    """A stream or an event of a device on which everything has happened."""

    def _nothing(self, *_: Any) -> None:
        pass

    wait = record = synchronize = _nothing

    def seconds_since(self, earlier: Any) -> float:
        return 0.0


class Unread:
    """Weights of a configuration in memory that the system has not given yet: zeros, never touched."""

    def __init__(self, config: ModelConfig, form: str) -> None:
        self.config, self._form, self._shapes = config, form, expected_shapes(config)

    def vector(self, name: str) -> np.ndarray:
        shape = self._shapes[name]
        return np.zeros((shape[-1], shape[0]) if "conv1d" in name else shape, np.float32)

    def matrix(self, name: str) -> Matrix:
        rows, cols = self._shapes[name]
        return Matrix(self._form, rows, cols, np.zeros(FORMATS[self._form].stored_shape(rows, cols), np.uint8))
