"""Leaves experts out of a Hugging Face checkpoint: the same shards with the dropped experts' bytes missing.

Experts fused or one by one, in the dtype they have; dropped experts' names close up. `mtp.*` tensors are left out: they have
experts of their own, which nothing here has measured, and one config.json counts both. Everything else is copied.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fermi_engine.checkpoint import PRUNED, Checkpoint
from fermi_engine.compression.prune_pack import PIECE_BYTES, check_choice, check_keep, pruned_from
from fermi_engine.errors import CheckpointError
from fermi_engine.quality.resume import digest_of
from fermi_engine.report import Progress
from fermi_engine.safetensors_header import DTYPE_BITS, INDEX, Entry, Header, read_header, read_json

PART_SUFFIX, ORIGIN = ".fermi-part", ".origin.json"
COPIED = (".json", ".jinja", ".txt", ".model", ".md")  # what lies beside the weights and belongs to the model
ONE_BY_ONE = re.compile(r"layers\.(\d+)\.mlp\.experts\.(\d+)\.")
SLICED = re.compile(r"layers\.(\d+)\.mlp\.(gate\.weight|experts\.(gate_up_proj|down_proj))$")


class Copy(NamedTuple):
    """A tensor of a new shard: its name and shape there, and the spans (offset, bytes) of the old file that make it up."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    spans: list[tuple[int, int]]

    @property
    def nbytes(self) -> int:
        return sum(count for _, count in self.spans)


@dataclass
class Plan:
    """New shards by file name, with the `__metadata__` each old one has; `left_out` names tensors."""

    shards: dict[str, list[Copy]]
    metadata: dict[str, dict[str, str]]
    left_out: list[str]

    @property
    def total_bytes(self) -> int:
        """Of all tensors."""
        return sum(copy.nbytes for copies in self.shards.values() for copy in copies)


def prune_checkpoint(src: str | os.PathLike[str], dst: str | os.PathLike[str], kept: Any,
                     progress: Progress | None = None) -> Path:
    """Write the checkpoint directory `dst`: `src` with the experts `kept` [layers, keep], rising ids; returns its path.

    It appears complete or not at all; shards finished before an interrupt are not written again. progress(done_bytes,
    total_bytes, file name). Raises CheckpointError (`src`, a `dst` that exists, disk), RequestError as `prune_pack`.
    """
    checkpoint, dst = Checkpoint.open(src), Path(dst)
    c, chosen = checkpoint.config, np.asarray(kept, np.int64)
    check_new_directory(dst)
    check_keep(c.num_experts, c.num_experts_per_tok, chosen.shape[-1], checkpoint.path, checkpoint.pruned)
    check_choice(chosen, c.num_hidden_layers, c.num_experts)
    plan = _plan(checkpoint, chosen)
    part = _part_directory(dst, digest_of("prune", checkpoint.identity(), chosen))
    _check_space(part, plan)
    try:
        done = 0
        for name, copies in plan.shards.items():
            report = progress and (lambda count, name=name, done=done: progress(done + count, plan.total_bytes, name))
            _write_shard(checkpoint.path / name, part / name, copies, plan.metadata[name], report)
            done += sum(copy.nbytes for copy in copies)
        _write_beside(checkpoint, part, plan, chosen.shape[1])
        Checkpoint.open(part)  # names, shapes and offsets are those that the new config.json asks for
        os.replace(part, dst)
        (dst / ORIGIN).unlink()
    except OSError as err:
        raise CheckpointError(f"cannot write {part}: {err.strerror}; run it again to go on from there once the disk takes "
                              "writes, or choose another place") from None
    return dst


def check_new_directory(dst: Path) -> None:
    """Before any work: whether the directory may be made. CheckpointError."""
    if dst.exists():
        raise CheckpointError(f"{dst} exists; remove it, or choose another name for the pruned checkpoint")
    if not dst.absolute().parent.is_dir():
        raise CheckpointError(f"{dst.parent} is not a directory; create it before writing {dst.name} there")


def _plan(checkpoint: Checkpoint, chosen: np.ndarray) -> Plan:
    canonical = {info.source: name for name, info in checkpoint.tensors.items()}
    dropping = chosen.shape[1] < checkpoint.config.num_experts
    plan = Plan({}, {}, [name for name in checkpoint.unused if dropping and "mtp" in name.split(".")])
    for shard in sorted(checkpoint.shards):
        header = read_header(checkpoint.path / shard)
        plan.metadata[shard] = header.metadata
        tensors = sorted(header.tensors.items(), key=lambda item: item[1].begin)
        found = (_copy(source, entry, header, canonical.get(source), chosen) for source, entry in tensors
                 if source not in plan.left_out)
        copies = [copy for copy in found if copy is not None]
        if copies:
            plan.shards[shard] = copies
    return plan


def _copy(source: str, entry: Entry, header: Header, name: str | None, chosen: np.ndarray) -> Copy | None:
    """None for a dropped expert. `name` is canonical, None for a tensor that the engine has no use for."""
    begin, count = header.data_start + entry.begin, entry.end - entry.begin
    single = ONE_BY_ONE.match(name or "")
    if single:
        layer, expert = int(single[1]), int(single[2])
        place = np.flatnonzero(chosen[layer] == expert)
        if not place.size:
            return None
        head, tail = source.rsplit(f".experts.{expert}.", 1)
        return Copy(f"{head}.experts.{place[0]}.{tail}", entry.dtype, entry.shape, [(begin, count)])
    sliced = SLICED.match(name or "")
    if not sliced:
        return Copy(source, entry.dtype, entry.shape, [(begin, count)])
    ids, width = chosen[int(sliced[1])].tolist(), count // entry.shape[0]
    return Copy(source, entry.dtype, (len(ids), *entry.shape[1:]), [(begin + i * width, width) for i in ids])


def _part_directory(dst: Path, key: str) -> Path:
    """The directory that grows; one of another source or choice is emptied, a stranger's left alone."""
    part = dst.with_name(dst.name + PART_SUFFIX)
    origin = part / ORIGIN
    if part.exists() and not origin.is_file():
        raise CheckpointError(f"{part} is in the way: nothing in it says that a pruning left it; move it or choose another "
                              "name")
    if origin.is_file() and origin.read_text(encoding="ascii", errors="replace") != key:
        shutil.rmtree(part)
    part.mkdir(exist_ok=True)
    origin.write_text(key, encoding="ascii")
    return part


def _check_space(part: Path, plan: Plan) -> None:
    there = sum(path.stat().st_size for path in part.iterdir())
    stats = os.statvfs(part)
    needed, free = plan.total_bytes - there, stats.f_bavail * stats.f_frsize
    if free < needed:
        raise CheckpointError(f"cannot write {part}: {needed} more bytes are needed, {free} are free; make room or choose "
                              "another place")


def _write_shard(src: Path, dst: Path, copies: list[Copy], metadata: dict[str, str],
                 report: Callable[[int], None] | None) -> None:
    if dst.exists():  # it got its name when it was complete
        return
    done = 0
    head, unfinished = _header(copies, metadata), dst.with_name(dst.name + ".tmp")
    with open(src, "rb") as old, open(unfinished, "wb") as new:
        new.write(head)
        for copy in copies:
            for piece in _pieces(old.fileno(), src, copy):
                new.write(piece)
                done += len(piece)
                if report:
                    report(done)
        new.flush()
        os.fsync(new.fileno())
    os.replace(unfinished, dst)


def _header(copies: list[Copy], metadata: dict[str, str]) -> bytes:
    fields: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for copy in copies:
        assert copy.nbytes * 8 == math.prod(copy.shape) * DTYPE_BITS[copy.dtype], copy.name
        fields[copy.name] = {"dtype": copy.dtype, "shape": copy.shape, "data_offsets": (position, position + copy.nbytes)}
        position += copy.nbytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _pieces(fd: int, path: Path, copy: Copy) -> Iterator[bytes]:
    for begin, count in copy.spans:
        for at in range(begin, begin + count, PIECE_BYTES):
            size = min(PIECE_BYTES, begin + count - at)
            piece = os.pread(fd, size, at)
            if len(piece) != size:
                raise CheckpointError(f"{path} ends early; the file changed while it was in use")
            yield piece


def _write_beside(checkpoint: Checkpoint, part: Path, plan: Plan, keep: int) -> None:
    """config.json with the new number of experts, the index, and what else belongs to the model."""
    experts, skipped = checkpoint.config.num_experts, {"config.json", INDEX}
    if keep == experts:
        shutil.copyfile(checkpoint.path / "config.json", part / "config.json")
    else:
        raw = json.loads(json.dumps(checkpoint.raw_config))
        (raw["text_config"] if isinstance(raw.get("text_config"), dict) else raw)["num_experts"] = keep
        raw[PRUNED] = pruned_from(experts, keep)
        (part / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    if (checkpoint.path / INDEX).is_file():
        index = read_json(checkpoint.path / INDEX)
        index["weight_map"] = {copy.name: shard for shard, copies in plan.shards.items() for copy in copies}
        index["metadata"] = {**(index.get("metadata") or {}), "total_size": plan.total_bytes}
        (part / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for path in sorted(checkpoint.path.iterdir()):
        if path.is_file() and path.suffix in COPIED and path.name not in skipped:
            shutil.copyfile(path, part / path.name)
