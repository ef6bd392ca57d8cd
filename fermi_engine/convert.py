"""Checkpoint -> pack: streaming by blocks of rows, so that memory does not grow with the model or its tensors."""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

import fermi_engine
from fermi_engine.checkpoint import PRUNED, Checkpoint
from fermi_engine.compression.rules import Assignment, Rule, assign
from fermi_engine.compression.scales import PLAIN, Scales
from fermi_engine.compression.sensitivity import resolve
from fermi_engine.config import eos_ids
from fermi_engine.errors import CheckpointError, FormatError, PackError
from fermi_engine.formats import FORMATS, LANES, Format, find_format
from fermi_engine.pack import (
    FILE_PREFIX,
    LINE,
    NORM_CONVENTION,
    PACK_FORMAT,
    PACK_VERSION,
    PAGE,
    PLAIN_NORMS,
    Blob,
    Pack,
    Part,
    Progress,
    blob_name,
    is_pack,
)
from fermi_engine.pack_writer import PackPlan, PackWriter, Wanted, read_back
from fermi_engine.safetensors_header import INDEX, SINGLE, read_json
from fermi_engine.shapes import pack_shapes
from fermi_engine.vision.config import is_vision

BLOCK_BYTES = 8 << 20  # of f32 source rows in memory at a time; quantised copies add at most twice as much
GATE_UP, DOWN, CONV = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj", ".conv1d.weight"

Rows = Callable[[int, int], np.ndarray]  # (begin, end) -> f32 [end - begin, cols]
Quantize = Callable[[np.ndarray], np.ndarray]  # f32 [rows, cols] -> plain bytes


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    format: str = "q4_0",
    rules: str | Sequence[Rule] | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
    scales: Scales = PLAIN,
) -> Path:
    """Convert the checkpoint directory `src` into the pack file `dst`, check every byte of it, and return its path.

    An interrupted conversion leaves `dst.fermi-part`, and the same call goes on from there, with the same bytes in the
    end. `progress(done_bytes, total_bytes, name)` runs over the pack twice: written, then read back. `scales`: how those of
    q4_0 are chosen.
    Raises PackError (`src` is a pack, `dst` exists or is a file of `src`, disk full), CheckpointError or ConfigError
    (`src`, `rules`), FormatError naming tensor and row (NaN, infinity, values the format cannot hold).
    """
    src, dst = Path(src), Path(dst)
    if is_pack(src) or is_pack(src / SINGLE):
        raise PackError(f"{src} is already a pack; convert the checkpoint it was made from")
    checkpoint = Checkpoint.open(src)
    _check_destination(checkpoint, dst, overwrite)
    shapes = pack_shapes(checkpoint.config, checkpoint.vision)
    wishes = resolve(rules, shapes, format) if rules is None or isinstance(rules, str) else tuple(rules)
    assignments = assign(shapes, format, wishes)
    plan = plan_pack(checkpoint, assignments, format, scales.label)
    total = 2 * plan.total_bytes
    with PackWriter(dst, plan, json.dumps(_stamps(checkpoint), sort_keys=True)) as writer:
        for slot in writer.remaining():
            writer.put(slot.name, _chunks(checkpoint, slot.name, assignments, scales))
            if progress:
                progress(writer.done_bytes, total, slot.name)
        writer.finish()
    read_back(dst, progress, total)
    return dst


def _check_destination(checkpoint: Checkpoint, dst: Path, overwrite: bool) -> None:
    if not dst.exists() or dst.is_dir():  # the writer has its own word about directories
        return
    if any(path.exists() and path.samefile(dst) for path in (*_sources(checkpoint), checkpoint.path / INDEX)):
        raise PackError(f"{dst} is a file of the checkpoint itself; choose another name for the pack")
    if not overwrite:
        raise PackError(f"{dst} exists; remove it, choose another name or ask for it to be overwritten")


def plan_pack(checkpoint: Checkpoint, assignments: Mapping[str, Assignment], default_format: str,
              more: Mapping[str, str] = MappingProxyType({})) -> PackPlan:
    """Sizes, order and metadata of the pack, `more` of the latter beside the usual; the order is that of the configuration,
    whatever the shards' order."""
    wanted, layout = [], {}
    for name, shape in pack_shapes(checkpoint.config, checkpoint.vision).items():
        format = assignments[name].format
        if name.endswith(GATE_UP):
            layer = _layer(name)
            blob = _plan_blob(checkpoint, format, assignments[f"layers.{layer}{DOWN}"].format)
            parts = {"gate_up": blob.gate_up._asdict(), "down": blob.down._asdict()}
            layout[blob_name(layer)] = {**blob._asdict(), **parts}
            wanted.append(Wanted(blob_name(layer), "U8", (blob.experts, blob.stride), PAGE))
        elif name.endswith(CONV):
            wanted.append(Wanted(name, "F32", (shape[-1], shape[0])))
        elif len(shape) == 1:
            wanted.append(Wanted(name, "F32", shape))
        elif not name.endswith(DOWN):
            part = Part(format, *shape)
            layout[name] = part._asdict()
            wanted.append(Wanted(name, "U8", part.stored_shape))
    for name, path in sorted(checkpoint.files.items()):
        wanted.append(Wanted(FILE_PREFIX + name, "U8", (_stat(path).st_size,)))
    return PackPlan.build(wanted, {**_metadata(checkpoint, default_format, layout), **more})


def _layer(name: str) -> int:
    return int(name.split(".")[1])


def _plan_blob(checkpoint: Checkpoint, gate_up: str, down: str) -> Blob:
    c = checkpoint.config
    first = Part(gate_up, 2 * c.moe_intermediate_size, c.hidden_size)
    begin = _aligned(_stored_bytes(first), LINE)
    second = Part(down, c.hidden_size, c.moe_intermediate_size, begin)
    return Blob(first, second, _aligned(begin + _stored_bytes(second), PAGE), c.num_experts)


def _stored_bytes(part: Part) -> int:
    groups, width = part.stored_shape
    return groups * width


def _aligned(size: int, align: int) -> int:
    return size + -size % align


def _metadata(checkpoint: Checkpoint, default_format: str, layout: dict[str, Any]) -> dict[str, str]:
    values = {
        "model_config": checkpoint.config.to_dict(),
        "eos_ids": checkpoint_eos_ids(checkpoint),
        "tensors": layout,
        "source": source_of(checkpoint),
        "unused": sorted(checkpoint.unused),
        **({"vision_config": checkpoint.vision.to_dict()} if checkpoint.vision else {}),
    }
    return {
        "format": PACK_FORMAT, "version": str(PACK_VERSION), "engine_version": fermi_engine.__version__,
        "norm_convention": NORM_CONVENTION, "plain_norms": PLAIN_NORMS, "default_format": default_format,
        **{key: json.dumps(value, sort_keys=True) for key, value in values.items()},
    }


def source_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a pack says about the checkpoint it is made of."""
    pruned = getattr(checkpoint, "pruned", None)
    return {**checkpoint.identity(), **({PRUNED: pruned} if pruned else {})}


def checkpoint_eos_ids(checkpoint: Checkpoint) -> list[int]:
    """End-of-turn ids of config, nested text_config and generation_config together, sorted.

    Raises CheckpointError for a generation_config.json that cannot be read or names no ids.
    """
    found = set(checkpoint.config.eos_token_ids)
    path = checkpoint.files.get("generation_config.json")
    if path:
        fields = read_json(path)
        try:
            found |= eos_ids(fields)
        except ValueError:
            raise CheckpointError(f"{path}: eos_token_id is {fields['eos_token_id']!r}, expected a token id or a list; "
                                  "fetch the file again") from None
    return sorted(found)


def _chunks(checkpoint: Checkpoint, name: str, assignments: Mapping[str, Assignment],
            scales: Scales = PLAIN) -> Iterator[np.ndarray]:
    """Stored uint8 bytes of one tensor of the plan, in order."""
    if name.startswith(FILE_PREFIX):
        path = checkpoint.files[name[len(FILE_PREFIX):]]
        try:
            yield np.frombuffer(path.read_bytes(), np.uint8)
        except OSError as err:
            raise CheckpointError(f"cannot read {path}: {err.strerror}; fetch the file again") from None
    elif name.endswith(".experts.blob"):
        yield from _blob_chunks(checkpoint, _layer(name), assignments, scales)
    elif is_vision(name):
        yield from _vision_chunks(checkpoint, name, FORMATS[assignments[name].format], scales)
    elif name.endswith(CONV) or len(checkpoint.shape(name)) == 1:
        yield _vector_bytes(checkpoint, name)
    else:
        rows, cols = checkpoint.shape(name)
        format = FORMATS[assignments[name].format]
        yield from _matrix_chunks(lambda begin, end: checkpoint.rows(name, begin, end), rows, cols,
                                  lambda x: scales.quantize(format, x, name), format, name)


def _vision_chunks(checkpoint: Checkpoint, name: str, format: Format, scales: Scales) -> Iterator[np.ndarray]:
    """A tower's tensor in its stored shape: zeros where that is larger, a patch convolution as a matrix."""
    stored, shape = pack_shapes(checkpoint.config, checkpoint.vision)[name], checkpoint.shape(name)
    height, width = (1, shape[0]) if len(shape) == 1 else (shape[0], math.prod(shape[1:]))
    rows, columns = (1, stored[0]) if len(stored) == 1 else stored
    lines = width // shape[-1]  # of the file in a row

    def read(begin: int, end: int) -> np.ndarray:
        block, last = np.zeros((end - begin, columns), np.float32), min(end, height)
        if begin < last:
            block[: last - begin, :width] = checkpoint.rows(name, begin * lines, last * lines).reshape(-1, width)
        return block

    if len(stored) == 1:
        yield FORMATS["f32"].interleave(_quantize(FORMATS["f32"].quantize, read(0, 1), name, 0)).reshape(-1)
    else:
        yield from _matrix_chunks(read, rows, columns, lambda x: scales.quantize(format, x, name), format, name)


def _vector_bytes(checkpoint: Checkpoint, name: str) -> np.ndarray:
    values = checkpoint.read(name)
    rows = values.reshape(len(values), -1) if name.endswith(CONV) else values[None]
    _quantize(FORMATS["f32"].quantize, rows, name, 0)
    return np.ascontiguousarray(rows.T if name.endswith(CONV) else rows, np.float32).view(np.uint8)


def _matrix_chunks(read: Rows, rows: int, cols: int, quantize: Quantize, format: Format, label: str) -> Iterator[np.ndarray]:
    step = max(1, BLOCK_BYTES // (4 * cols * LANES)) * LANES
    for begin in range(0, rows, step):
        yield format.interleave(_quantize(quantize, read(begin, min(rows, begin + step)), label, begin))


def _quantize(quantize: Quantize, x: np.ndarray, label: str, begin: int) -> np.ndarray:
    try:
        return quantize(x)
    except FormatError as err:
        raise FormatError(f"{label}: row {begin + err.row} {err.problem}") from None


def _blob_chunks(checkpoint: Checkpoint, layer: int, assignments: Mapping[str, Assignment],
                 scales: Scales) -> Iterator[np.ndarray]:
    formats = (assignments[f"layers.{layer}{suffix}"].format for suffix in (GATE_UP, DOWN))
    blob = _plan_blob(checkpoint, *formats)
    for expert in range(blob.experts):
        position = 0
        for kind, suffix, part in (("gate_up", GATE_UP, blob.gate_up), ("down", DOWN, blob.down)):
            yield np.zeros(part.offset - position, np.uint8)
            name, format = f"layers.{layer}{suffix}", FORMATS[part.format]

            def read(begin: int, end: int, expert: int = expert, kind: str = kind) -> np.ndarray:
                return checkpoint.expert_rows(layer, kind, expert, begin, end)

            def quantize(x: np.ndarray, expert: int = expert, name: str = name, format: Format = format) -> np.ndarray:
                return scales.quantize(format, x, name, expert)

            yield from _matrix_chunks(read, part.rows, part.cols, quantize, format, f"{name} of expert {expert}")
            position = part.offset + _stored_bytes(part)
        yield np.zeros(blob.stride - position, np.uint8)


def _sources(checkpoint: Checkpoint) -> list[Path]:
    """Every file whose contents a pack depends on."""
    return [checkpoint.path / "config.json", *(path for path, _, _ in checkpoint.shards.values()),
            *checkpoint.files.values()]


def _stamps(checkpoint: Checkpoint) -> dict[str, list[int]]:
    """Size in bytes and modification time in ns of every file a conversion reads: has the source been touched?"""
    stats = {path.name: _stat(path) for path in _sources(checkpoint)}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as err:  # a download cache links files, and a link may point nowhere
        raise CheckpointError(f"cannot read {path}: {err.strerror}; fetch the file again") from None


def cached_pack(
    checkpoint_dir: str | os.PathLike[str], format: str = "q4_0", progress: Progress | None = None
) -> Path:
    """The pack of a checkpoint directory, converted on first use into a cache and found there afterwards.

    The cache is $FERMI_CACHE, else `fermi_engine` under $XDG_CACHE_HOME or ~/.cache. A pack's name covers the format,
    what the checkpoint holds, sizes and times of its files, and the pack version. Where two processes ask at once, one
    converts and the other waits for it. Raises as `convert`, and PackError where the cache cannot be written.
    """
    find_format(format)  # before it becomes part of a file name
    checkpoint = Checkpoint.open(checkpoint_dir)
    parts = [checkpoint.identity(), _stamps(checkpoint), PACK_VERSION]
    key = json.dumps([*parts, "vision"] if checkpoint.vision else parts, sort_keys=True)
    digest = blake2b(key.encode(), digest_size=8).hexdigest()
    path = cache_directory() / f"{checkpoint.path.resolve().name}-{format}-{digest}.safetensors"
    if _opens(path):
        return path
    lock = _lock(path.with_suffix(".lock"))
    try:
        return path if _opens(path) else convert(checkpoint_dir, path, format, None, progress, overwrite=True)
    finally:
        os.close(lock)


def cache_directory() -> Path:
    """Where `cached_pack` keeps its packs; it need not exist."""
    chosen = os.environ.get("FERMI_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(chosen) if chosen else Path(base) / "fermi_engine"


def _opens(path: Path) -> bool:
    try:
        Pack.open(path).close()
    except PackError:
        return False
    return True


def _lock(path: Path) -> int:
    """Wait for the lock on `path`; it dies with the process, so a killed conversion leaves no stale one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as err:
        raise PackError(f"cannot use the cache directory {path.parent}: {err.strerror}; set FERMI_CACHE to a directory "
                        "you can write to, or convert the checkpoint to a pack first") from None
    return fd
