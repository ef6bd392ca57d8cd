"""Leaves experts out of a pack: kept experts are copied byte for byte, router rows follow, everything else stays.

Nothing is dequantised, and the source is read with pread in small pieces, so memory does not grow with the pack.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fermi_engine.checkpoint import PRUNED
from fermi_engine.errors import PackError, RequestError
from fermi_engine.pack import PAD_PREFIX, SEAL, Pack
from fermi_engine.pack_layout import LINE, PAGE
from fermi_engine.pack_writer import PackPlan, PackWriter, Slot, Wanted, read_back
from fermi_engine.quality.resume import digest_of
from fermi_engine.report import Progress
from fermi_engine.safetensors_header import Header, read_header

PIECE_BYTES = 8 << 20
ROUTER, BLOB = ".mlp.gate.weight", ".mlp.experts.blob"


def check_keep(experts: int, top_k: int, keep: int, path: Path, pruned: Any) -> None:
    """Whether a model of `experts` experts, `top_k` a token, may be left with `keep`. RequestError where not; `pruned` is
    what the model says of an earlier pruning."""
    if not experts:
        raise RequestError(f"{path} is a dense model; it has no experts to prune")
    if pruned:
        raise RequestError(f"{path} is already pruned ({_words(pruned)}); prune the model it was made from, whose scores of "
                           "all experts are known")
    if not 1 <= keep <= experts or keep < top_k:
        raise RequestError(f"--keep {keep}: {path} has {experts} experts a layer and routes every token to {top_k} of them; "
                           f"keep {top_k} to {experts}")


def _words(pruned: Any) -> str:
    fields = pruned if isinstance(pruned, dict) else {}
    return f"from {fields.get('experts', '?')} to {fields.get('kept', '?')} experts"


def check_new_pack(src: Path, dst: Path, overwrite: bool) -> None:
    """Before any work: whether `dst` may be written. PackError."""
    if dst.is_dir() or not dst.absolute().parent.is_dir():
        problem = "is a directory" if dst.is_dir() else "lies in no directory that is there"
        raise PackError(f"{dst} {problem}; give the name of the pack file to write")
    if dst.exists():
        if dst.samefile(src):
            raise PackError(f"{dst} is the pack to prune itself; choose another name")
        if not overwrite:
            raise PackError(f"{dst} exists; remove it, choose another name or ask for it to be overwritten")


def prune_pack(src: str | os.PathLike[str], dst: str | os.PathLike[str], kept: Sequence[Sequence[int]] | np.ndarray,
               progress: Progress | None = None, overwrite: bool = False) -> Path:
    """Write the pack `dst`: `src` with the experts `kept` [layers, keep] of each layer, rising ids, and return its path.

    Keeping all of them gives the same file to the byte. An interrupted call goes on where it was, as a conversion does.
    progress(done_bytes, total_bytes, name) runs over the new pack twice: written, then read back.
    Raises PackError (`src` no pack, `dst` in the way, disk full), RequestError for a choice that the model cannot have.
    """
    src, dst = Path(src), Path(dst)
    chosen = np.asarray(kept, np.int64)
    check_new_pack(src, dst, overwrite)
    with Pack.open(src) as pack:
        c = pack.config
        check_keep(c.num_experts, c.num_experts_per_tok, chosen.shape[-1], src, pack.source.get(PRUNED))
        check_choice(chosen, c.num_hidden_layers, c.num_experts)
        header = read_header(src, PackError)
        plan = _plan(header, chosen, c.num_experts)
        total = 2 * plan.total_bytes
        with PackWriter(dst, plan, json.dumps(["prune", pack.hash, digest_of(chosen)])) as writer:
            for slot in writer.remaining():
                writer.put(slot.name, _pieces(pack, header, slot, chosen))
                if progress:
                    progress(writer.done_bytes, total, slot.name)
            writer.finish()
    read_back(dst, progress, total)
    return dst


def check_choice(chosen: np.ndarray, layers: int, experts: int) -> None:
    """Whether `chosen` [layers, keep] names experts of each layer, rising. RequestError where not."""
    rising = chosen.ndim == 2 and bool((np.diff(chosen, axis=1) > 0).all())
    if not rising or len(chosen) != layers or chosen.min() < 0 or chosen.max() >= experts:
        raise RequestError(f"the experts to keep are {list(chosen.shape)}, expected rising ids below {experts} for each of "
                           f"{layers} layers; measure the scores again")


def _plan(header: Header, chosen: np.ndarray, experts: int) -> PackPlan:
    keep, wanted = chosen.shape[1], []
    for name, entry in header.tensors.items():
        if name == SEAL or name.startswith(PAD_PREFIX):
            continue
        sliced = name.endswith((ROUTER, BLOB))
        shape = (keep, *entry.shape[1:]) if sliced else entry.shape
        wanted.append(Wanted(name, entry.dtype, shape, PAGE if name.endswith(BLOB) else LINE))
    return PackPlan.build(wanted, header.metadata if keep == experts else _metadata(header.metadata, keep, experts))


def _metadata(metadata: dict[str, str], keep: int, experts: int) -> dict[str, str]:
    """As the pack has them, but for the number of experts and a word about it."""
    config, layout, source = (json.loads(metadata[name]) for name in ("model_config", "tensors", "source"))
    config["num_experts"] = keep
    source[PRUNED] = pruned_from(experts, keep)
    for name, part in layout.items():
        if name.endswith(BLOB):
            part["experts"] = keep
        elif name.endswith(ROUTER):
            part["rows"] = keep
    changed = {"model_config": config, "tensors": layout, "source": source}
    return {**metadata, **{name: json.dumps(value, sort_keys=True) for name, value in changed.items()}}


def pruned_from(experts: int, keep: int) -> dict[str, Any]:
    """What a pruned model says about itself."""
    return {"method": "REAP", "experts": experts, "kept": keep}


def _pieces(pack: Pack, header: Header, slot: Slot, chosen: np.ndarray) -> Iterator[np.ndarray]:
    """The bytes of a tensor of the new pack, uint8."""
    entry = header.tensors[slot.name]
    begin = header.data_start + entry.begin
    if not slot.name.endswith((ROUTER, BLOB)):
        yield from _read(pack, begin, entry.end - entry.begin)
        return
    width = (entry.end - entry.begin) // entry.shape[0]
    for expert in chosen[int(slot.name.split(".")[1])].tolist():
        yield from _read(pack, begin + expert * width, width)


def _read(pack: Pack, offset: int, count: int) -> Iterator[np.ndarray]:
    for at in range(offset, offset + count, PIECE_BYTES):
        piece = np.empty(min(PIECE_BYTES, offset + count - at), np.uint8)
        if os.preadv(pack.fileno(), [piece], at) != piece.size:
            raise PackError(f"{pack.path} ends early; the file changed while it was in use")
        yield piece
