"""Write a synthetic pack of a real model's size: `python tools/bench/make_pack.py --geometry NAME -o FILE`.

For measuring speed where the weights themselves cannot be had. Random codes under sane scales, written by the project's
own writer in the stored layout, so that the pack opens, verifies and runs like a converted one; its text means nothing.
A seed gives the same bytes on every machine. Memory does not grow with the pack.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

if not __package__:  # run as a script, which puts this folder on the path instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from fermi_engine import report
from fermi_engine.compression.rules import Assignment, Rule, assign
from fermi_engine.config import ModelConfig
from fermi_engine.convert import plan_pack
from fermi_engine.errors import ConfigError, FermiError, PackError
from fermi_engine.formats import FORMATS, LANES, Format
from fermi_engine.pack import FILE_PREFIX, Pack
from fermi_engine.pack_layout import Part
from fermi_engine.pack_writer import PackPlan, PackWriter
from fermi_engine.report import Progress
from fermi_engine.shapes import pack_shapes
from fermi_engine.vision.config import VisionConfig, is_vision
from tools.bench.geometries import GEOMETRIES, TOWERS, geometry
from tools.bench.synthetic_tokenizer import write as write_tokenizer
from tools.random_weights import values

CHUNK_BYTES = 8 << 20  # of stored weights in memory at a time
SCALES = 1024  # different scales of a matrix: its own deviation times +-(0.5..1.5)
# Deviation of what a code stands for, before its scale: uniform -8..7 about 0 and uniform -127..127.
CODE_DEVIATION = {"q4_0": math.sqrt(21.5), "q8_0": 73.6}
SCALE_RMS = math.sqrt(1 + 1 / 12)  # of 0.5..1.5
TOKENIZERS = ("none", "synthetic")


@dataclass(frozen=True)
class Source:
    """What a pack is planned from (the part of Checkpoint that `plan_pack` asks for): a geometry and a seed."""

    name: str
    seed: int
    format: str
    files: dict[str, Path] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    vision: VisionConfig | None = None

    @property
    def config(self) -> ModelConfig:
        """Configuration of the geometry."""
        return geometry(self.name)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors of the pack."""
        return pack_shapes(self.config, self.vision)

    def identity(self) -> dict[str, Any]:
        """What the pack says about its origin: that no checkpoint ever held these weights."""
        return {"synthetic": {"geometry": self.name, "seed": self.seed}}


def make_pack(path: str | os.PathLike[str], name: str, *, seed: int = 0, format: str = "q4_0", tokenizer: str = "none",
              vision: str = "none", force: bool = False, progress: Progress | None = None) -> Path:
    """Write the pack of geometry `name` to `path` and return it.

    tokenizer 'synthetic' puts in a tokenizer.json of the released size (or what the vocabulary holds). vision: the format of
    the family's tower, which 'none' leaves out. Raises ConfigError for unknown names and geometries without a tower,
    PackError where `path` exists (unless `force`) or the disk has no room for the whole pack.
    """
    path = Path(path)
    for word, value, known in (("geometry", name, GEOMETRIES), ("format", format, FORMATS),
                               ("tokenizer", tokenizer, TOKENIZERS), ("vision", vision, ("none", *FORMATS))):
        if value not in known:
            raise ConfigError(f"unknown {word} {value!r}; choose one of {', '.join(known)}")
    if vision != "none" and name not in TOWERS:
        raise ConfigError(f"geometry {name!r} has no vision tower; choose one of {', '.join(TOWERS)} or leave --vision out")
    if path.exists() and not force:
        raise PackError(f"{path} exists; remove it, choose another name or pass --force")
    with tempfile.TemporaryDirectory(prefix="make_pack.") as directory:
        files = write_tokenizer(Path(directory), geometry(name).vocab_size, seed) if tokenizer == "synthetic" else {}
        source = Source(name, seed, format, files, vision=TOWERS[name] if vision != "none" else None)
        assignments = assign(source.shapes, format, tower_rules(source.shapes, vision))
        _write(path, source, assignments, plan_pack(source, assignments, format), progress)
    Pack.open(path).close()
    return path


def tower_rules(shapes: dict[str, tuple[int, ...]], format: str) -> tuple[Rule, ...]:
    """`format` for the matrices of a tower that may leave f32; none where `format` is "none"."""
    free = [name for name, found in assign(shapes, "q8_0").items() if is_vision(name) and found.format == "q8_0"]
    return () if format == "none" else tuple(Rule(name, format) for name in free)


def _write(path: Path, source: Source, assignments: dict[str, Assignment], plan: PackPlan,
           progress: Progress | None) -> None:
    with PackWriter(path, plan, f"synthetic {source.name} {source.seed}") as writer:
        for slot in writer.remaining():
            writer.put(slot.name, _chunks(source, slot.name, assignments))
            if progress:
                progress(writer.done_bytes, plan.total_bytes, slot.name)
        writer.finish()


def _chunks(source: Source, name: str, assignments: dict[str, Assignment]) -> Iterator[np.ndarray]:
    """Stored uint8 bytes of one tensor of the plan, in order."""
    if name.startswith(FILE_PREFIX):
        yield np.frombuffer(source.files[name[len(FILE_PREFIX):]].read_bytes(), np.uint8)
    elif name.endswith(".experts.blob"):
        yield from _experts(source, name.removesuffix(".blob"), assignments)
    else:
        shape = source.shapes[name]
        if assignments[name].format in CODE_DEVIATION:
            yield from stored(Part(assignments[name].format, *shape), name, source.seed)
        else:
            yield from _floats(source, name, shape, assignments[name].format)


def _experts(source: Source, stem: str, assignments: dict[str, Assignment]) -> Iterator[np.ndarray]:
    """gate_up and down of each expert, padded to whole pages as the plan has them."""
    c, position = source.config, 0
    shapes = {"gate_up_proj": (2 * c.moe_intermediate_size, c.hidden_size),
              "down_proj": (c.hidden_size, c.moe_intermediate_size)}
    for expert in range(c.num_experts):
        for (kind, shape), align in zip(shapes.items(), (4096, 64), strict=True):
            yield np.zeros(-position % align, np.uint8)
            position += -position % align
            format, name = assignments[f"{stem}.{kind}"].format, f"{stem}.{expert}.{kind}.weight"
            part = Part(format, *shape)
            yield from (stored(part, name, source.seed) if format in CODE_DEVIATION
                        else _floats(source, name, shape, format))
            position += math.prod(part.stored_shape)
    yield np.zeros(-position % 4096, np.uint8)


def _floats(source: Source, name: str, shape: tuple[int, ...], format: str) -> Iterator[np.ndarray]:
    """Values as a generated checkpoint draws them: norms about one, decays and time steps as training starts them."""
    tied = source.config.tie_word_embeddings
    blocks = values(source.seed, f"model.{name}" if is_vision(name) else name, shape, tied)
    if name.endswith(".conv1d.weight"):  # stored taps first
        whole = np.concatenate(list(blocks)).reshape(shape[0], shape[-1])
        blocks = iter([np.ascontiguousarray(whole.T).reshape(-1)])
    for block in blocks:
        yield block.astype("<f2" if format == "f16" else "<f4").view(np.uint8)


def stored(part: Part, name: str, seed: int) -> Iterator[np.ndarray]:
    """Stored bytes of a q4_0 or q8_0 matrix in pieces of uint8 [groups, bytes]: random codes, scales of both signs.

    The values have the deviation of a sane initialisation: 1/sqrt(row length), less at the end of a branch.
    """
    row, (groups, width) = FORMATS[part.format], part.stored_shape
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    bits = np.random.SFC64(np.random.SeedSequence([seed, key]))
    scales = _scale_table(_deviation(name, part.cols) / (CODE_DEVIATION[part.format] * SCALE_RMS))
    step = max(1, CHUNK_BYTES // width)
    for begin in range(0, groups, step):
        count = min(step, groups - begin)
        piece = bits.random_raw(-(-count * width // 8)).view(np.uint8)[: count * width].reshape(count, width)
        _put_scales(piece, row, scales)
        if begin + count == groups and part.rows % LANES:
            _clear_padding(piece[-1], row, part.rows % LANES)
        yield piece


def _put_scales(piece: np.ndarray, row: Format, scales: np.ndarray) -> None:
    """The random bits that stand where scales belong choose them from the table."""
    blocks = piece.reshape(-1, LANES * row.block_bytes)
    head = blocks[:, : 2 * LANES].view(np.uint16)
    head[...] = scales[head & (SCALES - 1)].view(np.uint16)
    if row.name == "q8_0":  # no quantiser writes -128
        codes = blocks[:, 2 * LANES :].view(np.int8)
        np.maximum(codes, -127, out=codes)


def _clear_padding(group: np.ndarray, row: Format, used: int) -> None:
    """Rows from `used` on of a stored group become zeros, as the layout wants them."""
    blocks = group.reshape(-1, LANES * row.block_bytes)
    blocks[:, : 2 * LANES].view(np.uint16)[:, used:] = 0
    blocks[:, 2 * LANES :].view(np.uint32).reshape(len(blocks), -1, LANES)[..., used:] = 0


def _scale_table(base: float) -> np.ndarray:
    """SCALES f16 scales, half of them negative, spread evenly over +-(0.5..1.5) of `base`."""
    magnitudes = base * (0.5 + (np.arange(SCALES // 2) + 0.5) / (SCALES // 2))
    return np.concatenate([magnitudes, -magnitudes]).astype(np.float16)


def _deviation(name: str, cols: int) -> float:
    """As tools/random_weights.py: embeddings of deviation one, calm ends of branches."""
    module = name.split(".")[-2]
    gain = {"embed_tokens": math.sqrt(cols), "out_proj": 0.3, "o_proj": 0.3, "down_proj": 0.3}.get(module, 1.0)
    return gain / math.sqrt(cols)


def main(argv: list[str] | None = None) -> int:
    """The command line; exit status 2 for a mistake, told in one line."""
    parser = argparse.ArgumentParser(description="Write a synthetic pack for speed measurements.")
    parser.add_argument("--geometry", required=True, metavar="NAME", help=", ".join(GEOMETRIES))
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: NAME.fermi")
    parser.add_argument("--format", default="q4_0", help=", ".join(FORMATS))
    parser.add_argument("--tokenizer", default="none", help=", ".join(TOKENIZERS))
    parser.add_argument("--vision", default="none", help=f"format of the tower: none, {', '.join(FORMATS)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--force", action="store_true", help="replace FILE where it exists")
    o = parser.parse_args(argv)
    path = o.output or Path(f"{o.geometry}.fermi")
    try:
        with report.progress("writing") as progress:
            make_pack(path, o.geometry, seed=o.seed, format=o.format, tokenizer=o.tokenizer,
                      vision=o.vision, force=o.force, progress=progress)
    except FermiError as err:
        report.note(f"error: {err}")
        return 2
    print(f"{path}: {report.size(path.stat().st_size)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
