"""Strict reader of safetensors headers: nothing of a file is used before every offset in it has been accounted for.

Format: 8 bytes little-endian header length N, N bytes of JSON (name -> dtype, shape, data_offsets), then the tensor
bytes, which must fill the rest of the file without a hole, an overlap or a byte left over. Weights spread over several
files come with an index, which must say the same as their headers.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from fermi_engine.errors import CheckpointError, FermiError

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit: a larger length field is noise, not a header
LFS_MAGIC = b"version https://git-lfs"
_MIXED = "index and shards are not of one release"


class Entry(NamedTuple):
    """One tensor of a header. `begin` and `end` are bytes relative to the file's `data_start`."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """A whole header, `tensors` in its own order; `data_start` in bytes from the start of the file."""

    tensors: dict[str, Entry]
    metadata: dict[str, str]
    data_start: int

    @property
    def file_bytes(self) -> int:
        """Size of the file, which ends where the last tensor does."""
        return self.data_start + max((entry.end for entry in self.tensors.values()), default=0)


def read_header(path: str | os.PathLike[str], error: type[FermiError] = CheckpointError) -> Header:
    """Read and validate the header of a safetensors file; no tensor byte is read.

    Raises `error` with one line naming the file when it is missing, unreadable, a git-lfs pointer, truncated or too
    long, when the header is no JSON of the format, or when dtypes, shapes and offsets do not tile the data.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            return header_of(file, path, error)
    except OSError as err:
        raise error(f"cannot read {path}: {err.strerror}") from None


def header_of(file: BinaryIO, path: Path, error: type[FermiError] = CheckpointError) -> Header:
    """The same of a file that is open already, at its first byte; OSError where it cannot be read."""
    raw, size = _header_bytes(file, path, error)
    data_start = 8 + len(raw)
    fields = _parse(path, raw, error)
    metadata = _metadata(path, fields.pop("__metadata__", {}), error)
    tensors = {name: _entry(path, name, value, error) for name, value in fields.items()}
    _check_tiling(path, tensors, size - data_start, error)
    return Header(tensors, metadata, data_start)


def _header_bytes(file: BinaryIO, path: Path, error: type[FermiError]) -> tuple[bytes, int]:
    size = os.fstat(file.fileno()).st_size
    head = file.read(len(LFS_MAGIC))
    if head == LFS_MAGIC:
        raise error(f"{path} is a git-lfs pointer, not the weights; run `git lfs pull` in its directory")
    if len(head) < 8:
        raise error(f"{path} has {size} bytes, a safetensors file starts with 8 bytes of header length; "
                    "fetch the file again")
    length = int.from_bytes(head[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise error(f"{path} is not a safetensors file: its header length field says {length} bytes, "
                    f"the format allows {MAX_HEADER_BYTES}")
    if 8 + length > size:
        raise error(f"{path} is truncated inside its header: expected at least {8 + length} bytes, "
                    f"found {size}; fetch the file again")
    file.seek(8)
    raw = file.read(length)
    if len(raw) != length:
        raise error(f"{path} became shorter while it was read; wait for the download to end")
    return raw, size


def _parse(path: Path, raw: bytes, error: type[FermiError]) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise error(f"{path}: the header lists {twice!r} twice; the file is damaged or made by a faulty writer")
        return fields

    try:
        fields = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as err:
        raise error(f"{path}: the header is not JSON ({_one_line(err)}); fetch the file again") from None
    if not isinstance(fields, dict):
        raise error(f"{path}: the header is a JSON {type(fields).__name__}, expected an object; fetch the file again")
    return fields


def _metadata(path: Path, value: Any, error: type[FermiError]) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise error(f"{path}: __metadata__ in the header is not a table of strings; the file is damaged")
    return value


def _entry(path: Path, name: str, value: Any, error: type[FermiError]) -> Entry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise error(f"{path}: tensor {name} in the header is not a table of dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise error(f"{path}: tensor {name} has dtype {dtype!r}, which the safetensors format does not define")
    if not _naturals(shape):
        raise error(f"{path}: tensor {name} has shape {shape!r}, expected a list of whole numbers")
    if not _naturals(offsets) or len(offsets) != 2:
        raise error(f"{path}: tensor {name} has data_offsets {offsets!r}, expected two whole numbers")
    begin, end = offsets
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits != (end - begin) * 8:
        raise error(f"{path}: tensor {name} ({dtype} {list(shape)}) needs {-(-bits // 8)} bytes, "
                    f"its data_offsets span {end - begin}; the file is damaged")
    return Entry(dtype, tuple(shape), begin, end)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _check_tiling(path: Path, tensors: dict[str, Entry], data_bytes: int, error: type[FermiError]) -> None:
    """Tensors in order of offset must follow each other without hole or overlap, and end where the file ends."""
    position, previous = 0, "the start of the data"
    for name, entry in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if entry.begin != position:
            kind = "overlaps" if entry.begin < position else "leaves a hole after"
            raise error(f"{path}: tensor {name} {kind} {previous}: expected it at byte {position} of the data, "
                        f"found {entry.begin}; the file is damaged")
        position, previous = entry.end, name
    if data_bytes < position:
        raise error(f"{path} is truncated: expected {position} bytes of tensor data, found {data_bytes}; "
                    "fetch the file again")
    if data_bytes > position:
        raise error(f"{path} is longer than its header says: expected {position} bytes of tensor data, "
                    f"found {data_bytes}; fetch the file again")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a checkpoint directory. Raises CheckpointError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise CheckpointError(f"cannot read {path}: {err.strerror}") from None
    except (ValueError, RecursionError) as err:
        raise CheckpointError(f"{path} is not JSON ({_one_line(err)}); fetch the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, expected an object; fetch the file again")
    return value


def read_headers(path: Path, names: set[str]) -> dict[str, Header]:
    """Headers of a directory's weight files by file name: one model.safetensors, or what its index lists.

    `names` is the directory's listing. Raises CheckpointError as `read_header` does, and when weights are absent, a
    shard is missing or lies outside the directory, a tensor is in two shards, or index and shards disagree on a name.
    """
    if INDEX not in names:
        if SINGLE not in names:
            raise CheckpointError(_no_weights(path, names))
        return {SINGLE: read_header(path / SINGLE)}
    weight_map = _weight_map(path / INDEX)
    shards = sorted(set(weight_map.values()))
    if SINGLE in names and SINGLE not in shards:
        raise CheckpointError(f"{path} holds {SINGLE} and an {INDEX} that does not list it, so the weights are there "
                              "twice; remove the one that is out of date")
    for shard in shards:
        if not os.path.isfile(path / shard):
            raise CheckpointError(f"{path / INDEX} names the shard {shard}, which is missing; fetch that file")
    headers = {shard: read_header(path / shard) for shard in shards}
    _check_index(path, weight_map, headers)
    return headers


def _no_weights(path: Path, names: set[str]) -> str:
    if any(n.startswith("pytorch_model") and n.endswith((".bin", ".bin.index.json")) for n in names):
        return f"{path} holds pytorch_model.bin weights, but safetensors is needed; fetch or save {SINGLE} instead"
    loose = sorted(n for n in names if n.endswith(".safetensors"))
    if loose:
        return f"{path} holds {loose[0]} but no {INDEX}, which says what belongs to the model; fetch the index"
    return f"{path} has neither {SINGLE} nor {INDEX}; fetch the weights"


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{path} has no weight_map of tensor names to file names; fetch the file again")
    for name, shard in weight_map.items():
        pure = PurePosixPath(shard)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in shard:
            raise CheckpointError(f"{path} puts tensor {name} into {shard!r}, outside the checkpoint directory; "
                                  "do not use this file")
    return weight_map


def _check_index(path: Path, weight_map: dict[str, str], headers: dict[str, Header]) -> None:
    home: dict[str, str] = {}
    for shard, header in headers.items():
        for name in header.tensors:
            if name in home:
                raise CheckpointError(f"{path}: tensor {name} is in two shards, {home[name]} and {shard}; "
                                      "remove the one that does not belong")
            home[name] = shard
    for name, shard in weight_map.items():
        if home.get(name) != shard:
            found = f"it is in {home[name]}" if name in home else "no shard has it"
            raise CheckpointError(f"{path / INDEX} puts tensor {name} into {shard}, but {found}; {_MIXED}")
    for name, shard in home.items():
        if name not in weight_map:
            raise CheckpointError(f"{path / shard} holds tensor {name}, which {INDEX} does not list; {_MIXED}")


def _one_line(err: BaseException) -> str:
    return " ".join(str(err).split()) or type(err).__name__
