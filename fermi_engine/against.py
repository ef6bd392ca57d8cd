"""Holds a whole model against a dump of the reference: every layer fed the dump's input, free-running drift beside it.

A porter reads off which layer and which tensor of it goes wrong first. NumPy only; tools/dump_reference.py writes dumps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fermi_engine.engine import Engine
from fermi_engine.errors import VerifyError
from fermi_engine.model.decoder import Positions
from fermi_engine.model.weights import INNER
from fermi_engine.safetensors_header import read_header
from fermi_engine.state import HybridState, KVPages

DUMP_FORMAT = "fermi-engine-dump"
DUMP_VERSION = "1"
ROUTED = ("router_weights", "ffn", "output")  # tensors that a router's choice changes by more than rounding
REMAKE = "make it again with tools/dump_reference.py"
_DTYPES = {"F32": np.float32, "F64": np.float64, "I32": np.int32}


@dataclass(frozen=True)
class Row:
    """One tensor. fed: largest error when its layer got the dump's input; free: in a run left to itself; limit: what `fed`
    may be; skipped: positions left out because the router's choice there lies within the noise."""

    tensor: str
    fed: float
    free: float
    limit: float
    skipped: int

    @property
    def passed(self) -> bool:
        return self.fed <= self.limit


def against(engine: Engine, path: str | Path) -> list[Row]:
    """Rows in the order of the forward pass. Raises VerifyError when the dump is damaged or of another model."""
    dump = _read(Path(path), engine)
    free: dict[str, np.ndarray] = {}
    state = HybridState.fresh(engine.config, engine.options.kv_block)
    engine.decoder.logits(engine.decoder.hidden(dump["ids"], state, free.__setitem__), free.__setitem__)
    return [_row(name, value, free, dump) for name, value in _fed(engine, dump) if name.rsplit(".", 1)[-1] not in INNER]


def first_failure(rows: list[Row]) -> Row | None:
    """The first tensor over its limit, in the order of the forward pass."""
    return next((row for row in rows if not row.passed), None)


def _fed(engine: Engine, dump: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) of every tensor, each layer fed the dump's input and an empty state."""
    decoder = engine.decoder
    ids = dump["ids"]
    yield "embed", decoder.kernels.rows(decoder.embed_tokens, ids)
    at = Positions.of(decoder, 0, len(ids))
    last = None
    for layer in decoder.layers:
        seen: dict[str, np.ndarray] = {}
        state = HybridState.fresh(engine.config, engine.options.kv_block).layers[layer.index]
        if isinstance(state, KVPages):
            state.reserve(len(ids))
        x = _input(dump, f"layers.{layer.index}.input", engine)
        layer.forward(decoder.kernels, x, state, at, decoder.mode, seen.__setitem__)
        yield from seen.items()
        last = f"layers.{layer.index}.output"
    seen = {}
    decoder.logits(_input(dump, last, engine), seen.__setitem__)
    yield from seen.items()


def _row(name: str, value: np.ndarray, free: dict[str, np.ndarray], dump: dict[str, np.ndarray]) -> Row:
    truth = _tensor(dump, name, value.shape)
    kind = name.rsplit(".", 1)[-1]
    counted = np.ones(len(truth), bool)
    if kind in ROUTED or kind == "router_ids":
        counted = _decided(name, dump, len(truth))
    if kind == "router_ids":
        differing = [int((got != truth)[counted].any(axis=1).sum()) for got in (value, free[name])]
        return Row(name, differing[0], differing[1], 0, int((~counted).sum()))
    fed, drift = (_error(got[counted], truth[counted]) for got in (value, free[name]))
    return Row(name, fed, drift, _limit(dump, name), int((~counted).sum()))


def _decided(name: str, dump: dict[str, np.ndarray], tokens: int) -> np.ndarray:
    """Positions whose k-th and next router logits lie further apart than both may move."""
    layer = name.split(".")[1]
    if f"margin.{layer}" not in dump:
        return np.ones(tokens, bool)
    return _entry(dump, f"margin.{layer}", (tokens,)) > 2 * _limit(dump, f"layers.{layer}.router_logits")


def _error(got: np.ndarray, truth: np.ndarray) -> float:
    """Largest absolute difference; NaN or infinity where the truth is finite counts as infinite."""
    if not got.size:
        return 0.0
    difference = np.abs(got.astype(np.float64) - truth)
    return float(np.where(np.isfinite(difference), difference, np.inf).max())


def _input(dump: dict[str, np.ndarray], name: str, engine: Engine) -> np.ndarray:
    """What a layer or the head is fed, float32 [T, H]: the kernels trust both."""
    x = _tensor(dump, name, (len(dump["ids"]), engine.config.hidden_size))
    if x.dtype != np.float32:
        raise VerifyError(f"dump tensor {name} is {x.dtype}, expected float32; {REMAKE}")
    return np.ascontiguousarray(x)


def _tensor(dump: dict[str, np.ndarray], name: str, shape: tuple[int, ...]) -> np.ndarray:
    return _entry(dump, f"tensor.{name}", shape)


def _limit(dump: dict[str, np.ndarray], name: str) -> float:
    return float(_entry(dump, f"limit.{name}", (1,))[0])


def _entry(dump: dict[str, np.ndarray], name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name not in dump:
        raise VerifyError(f"the dump lacks {name}: it is of another model or was cut; {REMAKE}")
    if dump[name].shape != shape:
        raise VerifyError(f"the dump's {name} has shape {list(dump[name].shape)}, expected {list(shape)}: it is of another "
                          f"model or layout; {REMAKE}")
    return dump[name]


def _read(path: Path, engine: Engine) -> dict[str, np.ndarray]:
    tensors, metadata, start = read_header(path, VerifyError)
    if metadata.get("format") != DUMP_FORMAT or metadata.get("version") != DUMP_VERSION:
        raise VerifyError(
            f"{path} is not a version {DUMP_VERSION} reference dump; make one with tools/dump_reference.py"
        )
    if metadata.get("pack") != engine.pack_hash:
        raise VerifyError(
            f"{path} was made from pack {metadata.get('pack', '?')[:12]}, the model is pack "
            f"{engine.pack_hash[:12]}; dump the reference of this pack"
        )
    if metadata.get("activations") != engine.options.activations:
        raise VerifyError(
            f"{path} holds activations={metadata.get('activations')}, the engine runs "
            f"{engine.options.activations}; pass --activations {metadata.get('activations')}"
        )
    for name, entry in tensors.items():
        if entry.dtype not in _DTYPES:
            raise VerifyError(f"{path}: tensor {name} has dtype {entry.dtype}, a dump has {', '.join(_DTYPES)}; {REMAKE}")
    data = path.read_bytes()[start:]
    dump = {
        name: np.frombuffer(data[begin:end], _DTYPES[dtype]).reshape(shape)
        for name, (dtype, shape, begin, end) in tensors.items()
    }
    _check_ids(path, dump.get("ids"), engine)
    return dump


def _check_ids(path: Path, ids: np.ndarray | None, engine: Engine) -> None:
    """Kernels look up the rows that ids name and trust them."""
    if ids is None or ids.dtype != np.int32 or ids.ndim != 1 or not ids.size:
        found = "no ids" if ids is None else f"ids {ids.dtype} {list(ids.shape)}"
        raise VerifyError(f"{path} holds {found}, expected token ids as a list of int32, one at least; {REMAKE}")
    vocabulary = engine.config.vocab_size
    outside = ids[(ids < 0) | (ids >= vocabulary)]
    if outside.size:
        raise VerifyError(f"{path}: token id {outside[0]} is outside the model's 0..{vocabulary - 1}; {REMAKE}")
    if ids.size > engine.context:
        raise VerifyError(f"{path} holds {ids.size} token ids, the context is {engine.context}; dump fewer of them")

