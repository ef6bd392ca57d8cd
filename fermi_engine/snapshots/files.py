"""One snapshot, one file: safetensors, sealed (sealed_file.py), readable by the safetensors library.

Tensors: `tokens` I32 [N]; `logits` F32 [vocab] where they are kept; of a linear layer `layers.I.conv` F32 [taps-1, C] and
`layers.I.recurrent` F32 [HV, K, V]; of a full-attention layer `layers.I.k` and `layers.I.v`, U8 [HK, N, row bytes] in the cache's
own format, page size forgotten; `open.I.*` F32 where GPU prefill left a chunk open. Metadata: format and its version, the numeric
path by parts, position, digest of the prefix, images, shift, kind, trail, page size, time, and what the caller adds.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fermi_engine.config import ModelConfig
from fermi_engine.errors import SnapshotError
from fermi_engine.formats import kv_row_bytes
from fermi_engine.kept_memory import allocate
from fermi_engine.pack_writer import ITEM_BYTES, PackPlan
from fermi_engine.snapshots import sealed_file
from fermi_engine.snapshots.cache import KINDS, Snapshot
from fermi_engine.snapshots.prefix import ImageSpan, NumericPath, Prefix
from fermi_engine.snapshots.sealed_file import SealedFile, Tensor, tensor
from fermi_engine.state import FIRST_PAGES, DeltaState, HybridState, KVPages, OpenChunks, empty_deltas

FORMAT, VERSION = "fermi-engine-snapshot", "1"
_OPEN = ("state", "k", "v", "g", "beta")


@dataclass(frozen=True)
class Info:
    """What a file says about itself. digest: of its prefix; nbytes: memory of the tensors; extra: metadata of the caller's."""

    path: Path
    numeric: NumericPath
    position: int
    digest: bytes
    kind: str
    has_logits: bool
    nbytes: int
    created_s: float
    images: tuple[ImageSpan, ...] = ()
    trail: tuple[tuple[int, str], ...] = ()
    open_tokens: int = 0
    shift: int = 0
    extra: dict[str, str] = field(default_factory=dict)


class SnapshotFile:
    """A snapshot on its way into a file: where each byte goes is settled, none is copied."""

    def __init__(self, snapshot: Snapshot, extra: Mapping[str, str] | None = None) -> None:
        """extra: metadata by name, kept apart from the format's own."""
        self._tensors = _tensors(snapshot)
        self._plan: PackPlan = sealed_file.plan(self._tensors, _metadata(snapshot, extra or {}))

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self._plan.total_bytes

    def write(self, fd: int) -> None:
        """The whole file, from offset 0. OSError where the disk refuses."""
        sealed_file.write(fd, self._plan, self._tensors)


def tensor_bytes(snapshot: Snapshot) -> int:
    """Bytes of the tensors of its file: all of it but header, seal and padding."""
    return sum(ITEM_BYTES[t.dtype] * math.prod(t.shape) for t in _tensors(snapshot))


def memory_bytes(info: Info, c: ModelConfig, kv_block: int) -> int:
    """What the snapshot of a file takes in memory, with pages of `kv_block`: at most, to the page tables' growth."""
    pages = -(-info.position // kv_block)
    row = 2 * c.num_key_value_heads * kv_row_bytes(info.numeric.kv_format, c.head_dim)  # keys and values of a position
    tables = 2 * np.dtype(np.uintp).itemsize * max(FIRST_PAGES, 2 * pages)
    full = c.layer_types.count("full_attention")
    return info.nbytes + full * (row * (pages * kv_block - info.position) + tables)


def read_info(path: Path) -> Info:
    """What the file says, once header and seal are found to agree; no tensor is read.

    Raises FileNotFoundError, and SnapshotError with one line for anything that is no snapshot of this format.
    """
    with _opened(path) as file:
        return _info(file)


def read_snapshot(path: Path, config: ModelConfig, numeric: NumericPath, kv_block: int) -> Snapshot:
    """The snapshot of a file of this model and numeric path, its keys and values in pages of `kv_block`, every byte proven.

    Raises FileNotFoundError, and SnapshotError with one line for a file of something else or with a wrong byte.
    """
    with _opened(path) as file:
        info = _info(file)
        check_path(info, numeric)
        state = _empty_state(config, info, kv_block)
        ids = np.empty(info.position, np.int32)
        logits = allocate((config.vocab_size,)) if info.has_logits else None
        _read(file, _state_tensors(ids, state, logits))
    prefix = Prefix(_checked_ids(path, ids, config.vocab_size), numeric, info.images)
    if prefix.digest() != info.digest:
        raise SnapshotError(f"{path} contradicts itself: its tokens do not have the digest it names")
    if logits is not None:
        logits.flags.writeable = False
    return Snapshot(prefix, state, logits, info.kind, info.trail, info.shift)


def check_path(info: Info, numeric: NumericPath) -> None:
    """SnapshotError, one line, where a file's state is of another model, engine version or rounding."""
    mine, its = numeric.fields(), info.numeric.fields()
    for name, words in (("version", "engine version"), ("pack_hash", "pack"), ("activations", "activations"),
                        ("kv_format", "key/value format"), ("prefill", "prefill path")):
        if mine[name] != its[name]:
            cut = 12 if name == "pack_hash" else None
            raise SnapshotError(f"{info.path} belongs to {words} {its[name][:cut]!r}, this is {mine[name][:cut]!r}")


def _opened(path: Path) -> SealedFile:
    try:
        return SealedFile.open(path)
    except FileNotFoundError:
        raise
    except OSError as err:
        raise SnapshotError(f"cannot read {path}: {err.strerror}") from None


def _read(file: SealedFile, tensors: list[Tensor]) -> None:
    try:
        file.read(tensors)
    except OSError as err:
        raise SnapshotError(f"cannot read {file.path}: {err.strerror}") from None


def _metadata(snapshot: Snapshot, extra: Mapping[str, str]) -> dict[str, str]:
    prefix, chunks = snapshot.prefix, snapshot.state.current_chunks()
    pages = [layer.page_tokens for layer in snapshot.state.layers if isinstance(layer, KVPages)]
    own = {
        "format": FORMAT, "format_version": VERSION, **{f"path.{k}": v for k, v in prefix.path.fields().items()},
        "position": str(snapshot.position), "prefix": prefix.digest().hex(), "kind": snapshot.kind,
        "images": json.dumps([[image.begin, image.end, image.digest.hex()] for image in prefix.images]),
        "shift": str(snapshot.shift),
        "trail": json.dumps(snapshot.trail), "page_tokens": str(pages[0] if pages else 0),
        "open_tokens": str(chunks.tokens if chunks else 0), "created_s": repr(time.time()),
        "checksum": "blake2b of 256 bits over each tensor, then over header and those, in the tensor _seal",
    }
    return {**own, **{f"extra.{name}": text for name, text in extra.items()}}


def _info(file: SealedFile) -> Info:
    """Nothing in the file is believed before it has the right form."""
    said = file.metadata
    if said.get("format") != FORMAT:
        raise SnapshotError(f"{file.path} is no snapshot: its format is {said.get('format')!r}")
    if said.get("format_version") != VERSION:
        raise SnapshotError(f"{file.path} has snapshot format {said.get('format_version')!r}, this engine reads {VERSION}")
    try:
        names = NumericPath.__dataclass_fields__
        info = Info(
            file.path, NumericPath(**{name: said[f"path.{name}"] for name in names}), int(said["position"]),
            bytes.fromhex(said["prefix"]), said["kind"], "logits" in file.entries,
            sum(entry.end - entry.begin for entry in file.entries.values()), float(said["created_s"]),
            tuple(ImageSpan(begin, end, bytes.fromhex(digest)) for begin, end, digest in json.loads(said["images"])),
            tuple((int(end), str(who)) for end, who in json.loads(said["trail"])), int(said["open_tokens"]),
            int(said.get("shift", "0")), {name[6:]: text for name, text in said.items() if name.startswith("extra.")})
        is_sound = (info.position,) == file.entries["tokens"].shape and 0 <= info.open_tokens <= info.position \
            and -info.position <= info.shift <= 0
        if info.kind not in KINDS or not is_sound:
            raise ValueError(f"kind {info.kind!r}, position {info.position}, {info.open_tokens} tokens of an open chunk")
    except (KeyError, ValueError, TypeError, RecursionError) as err:
        raise SnapshotError(f"{file.path} is no snapshot of this format: {type(err).__name__} in its metadata") from None
    return info


def _checked_ids(path: Path, ids: np.ndarray, vocab_size: int) -> np.ndarray:
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise SnapshotError(f"{path} holds a token outside the vocabulary of {vocab_size}")
    return ids


def _tensors(snapshot: Snapshot) -> list[Tensor]:
    return _state_tensors(snapshot.prefix.ids, snapshot.state, snapshot.logits)


def _state_tensors(ids: np.ndarray, state: HybridState, logits: np.ndarray | None) -> list[Tensor]:
    """The same tensors whether they are to be written or to be filled: 4-byte values first, then rows of any length."""
    named = [("tokens", ids)] + ([("logits", logits)] if logits is not None else [])
    rows: list[Tensor] = []
    for i, layer in enumerate(state.layers):
        if isinstance(layer, DeltaState):
            named += [(f"layers.{i}.conv", layer.conv), (f"layers.{i}.recurrent", layer.recurrent)]
        else:
            rows += [_rows(f"layers.{i}.k", layer, layer.keys, state.position),
                     _rows(f"layers.{i}.v", layer, layer.values, state.position)]
    chunks = state.current_chunks()
    for i, arrays in sorted(chunks.layers.items()) if chunks else ():
        named += [(f"open.{i}.{name}", arrays[name]) for name in _OPEN]
    return [*(tensor(name, array) for name, array in named), *rows]


def _rows(name: str, cache: KVPages, pages: Sequence[np.ndarray], length: int) -> Tensor:
    return Tensor(name, "U8", (cache.kv_heads, length, cache.row_bytes), _Rows(cache, pages, length))


@dataclass(frozen=True)
class _Rows:
    """The first `length` rows of every head, as views of the pages: made as they are asked for, a long context has many."""

    cache: KVPages
    pages: Sequence[np.ndarray]
    length: int

    def __iter__(self) -> Iterator[np.ndarray]:
        size = self.cache.page_tokens
        for head in range(self.cache.kv_heads):
            for page in range(self.cache.pages_for(self.length)):
                yield self.pages[page][head, : self.length - page * size]


def _empty_state(config: ModelConfig, info: Info, kv_block: int) -> HybridState:
    """A state of the model at the file's position, to be filled."""
    deltas = iter(empty_deltas(config, allocate))
    heads, size = config.num_key_value_heads, config.head_dim
    layers = [KVPages(heads, kv_block, size, info.numeric.kv_format) if kind == "full_attention" else next(deltas)
              for kind in config.layer_types]
    for layer in layers:
        if isinstance(layer, KVPages):
            layer.reserve(info.position)
    return HybridState(info.position, layers, open_chunks=_empty_chunks(config, info))


def _empty_chunks(c: ModelConfig, info: Info) -> OpenChunks | None:
    tokens = info.open_tokens
    if not tokens:
        return None
    shapes = {"state": (c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim),
              "k": (tokens, c.linear_num_key_heads, c.linear_key_head_dim),
              "v": (tokens, c.linear_num_value_heads, c.linear_value_head_dim),
              "g": (tokens, c.linear_num_value_heads), "beta": (tokens, c.linear_num_value_heads)}
    layers: dict[int, dict[str, Any]] = {
        i: {name: allocate(shape) for name, shape in shapes.items()}
        for i, kind in enumerate(c.layer_types) if kind != "full_attention"}
    return OpenChunks(info.position, tokens, layers)
