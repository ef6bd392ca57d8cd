"""Our model file: a safetensors file with its own layout, mapped read-only and used in place.

The data and every expert start at multiples of 4096 bytes (SSD reads and page locks want whole pages), every other
tensor at a multiple of 64 (a cache line); named U8 tensors `_pad.N` fill the gaps, because safetensors forbids holes.
A matrix is a U8 tensor of stored bytes (see formats), its format and size stand in the metadata; vectors are F32.
`layers.i.mlp.experts.blob` [experts, stride] holds gate_up and down of one expert side by side: one read fetches both.
`_file.<name>` are the checkpoint's tokenizer files. `_seal`, last, holds a 32-byte blake2b of every tensor before it,
in file order, then one over the header and those digests: damage to layout or seal shows without reading the data.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from fermi_engine.config import ModelConfig
from fermi_engine.errors import ConfigError, FormatError, PackError
from fermi_engine.formats import FORMATS, Experts, Matrix
from fermi_engine.pack_layout import LINE, PAGE, Blob, Part, blob_name, parse_part
from fermi_engine.report import Progress
from fermi_engine.safetensors_header import Entry, Header, read_header
from fermi_engine.shapes import pack_shapes
from fermi_engine.vision.config import VisionConfig

PACK_FORMAT = "fermi-engine-pack"
PACK_VERSION = 1
DIGEST_BYTES = 32
SEAL, PAD_PREFIX, FILE_PREFIX = "_seal", "_pad.", "_file."
PART_SUFFIX = ".fermi-part"  # as pack_writer names unfinished files
NORM_CONVENTION = "offset_from_one"  # RMSNorm multiplies by 1 + weight ...
PLAIN_NORMS = "layers.*.linear_attn.norm.weight"  # ... except here, by the weight itself
_KEYS = ("version", "engine_version", "model_config", "eos_ids", "norm_convention", "plain_norms", "default_format",
         "tensors", "source", "unused")
_CHECK_BYTES = 8 << 20


def tensor_digest() -> blake2b:
    """A fresh hash of the kind the seal stores."""
    return blake2b(digest_size=DIGEST_BYTES)


def seal_digest(header: bytes, digests: bytes) -> bytes:
    """The last digest of the seal: over the whole header (length field and padding included) and the digests before."""
    return blake2b(header + digests, digest_size=DIGEST_BYTES).digest()


def is_pack(path: str | os.PathLike[str]) -> bool:
    """True for a complete safetensors file that calls itself a pack, of whatever version."""
    try:
        return read_header(path, PackError).metadata.get("format") == PACK_FORMAT
    except PackError:
        return False


class Pack:
    """An open pack. Matrices and vectors are read-only views of the mapping and stay valid after `close`."""

    def __init__(self, path: Path, fd: int, header: Header, header_bytes: bytes) -> None:
        self.path, self._fd = path, fd
        self._metadata, self._entries, self._start = header.metadata, header.tensors, header.data_start
        fields = _parse_metadata(path, header.metadata)
        self.config: ModelConfig = fields["model_config"]
        self.vision: VisionConfig | None = fields["vision_config"]
        self.eos_ids: tuple[int, ...] = tuple(fields["eos_ids"])
        self.default_format: str = fields["default_format"]
        self.source: dict[str, Any] = fields["source"]
        self.unused: list[str] = fields["unused"]
        self._layout: dict[str, Part | Blob] = fields["tensors"]
        self._mapping: np.ndarray | None = np.frombuffer(mmap.mmap(fd, 0, prot=mmap.PROT_READ), np.uint8)
        self.placed = "mapped"  # how and where the weights lie, in words
        self._check_layout()
        self._digests, self.hash = self._check_seal(header_bytes)
        self._check_model()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Pack:
        """Map a pack and prove its header, offsets, sizes, seal, and that it holds the tensors its configuration asks for;
        the weights are not read (see `check`).

        Raises PackError, one line, for anything that is not a finished pack this version reads.
        """
        path = Path(path)
        _refuse_other_things(path)
        header = read_header(path, PackError)
        _check_kind(path, header.metadata)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return cls(path, fd, header, os.pread(fd, header.data_start, 0))
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Give back the file; views handed out keep their part of the mapping alive until they go."""
        if self._mapping is not None:
            self._mapping = None
            os.close(self._fd)

    def place(self, prepare: Callable[[np.ndarray, int], tuple[np.ndarray, str]]) -> None:
        """Let `prepare(mapping, file descriptor)` read, lock or replace the mapping; before any view is handed out.

        Closes the pack when that fails.
        """
        try:
            self._mapping, self.placed = prepare(self._mapped(), self._fd)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Pack:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def mapped(self) -> np.ndarray:
        """The whole file as it is mapped, read-only uint8. PackError after `close`."""
        return self._mapped()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all weights in file order: matrices, vectors and expert blobs."""
        return tuple(name for name in self._entries if not name.startswith((PAD_PREFIX, FILE_PREFIX, SEAL)))

    @property
    def matrix_names(self) -> tuple[str, ...]:
        """Those of `names` that `matrix` serves: stored matrices in whatever format, expert blobs not among them."""
        return tuple(name for name in self.names if isinstance(self._layout.get(name), Part))

    def fileno(self) -> int:
        """Descriptor of the open file. PackError after `close`."""
        self._mapped()
        return self._fd

    @property
    def file_names(self) -> tuple[str, ...]:
        """Names of the checkpoint's files that the pack carries."""
        return tuple(name[len(FILE_PREFIX):] for name in self._entries if name.startswith(FILE_PREFIX))

    def files(self) -> dict[str, bytes]:
        """The checkpoint's tokenizer and generation files, by file name."""
        return {name[len(FILE_PREFIX):]: self._bytes(name).tobytes()
                for name in self._entries if name.startswith(FILE_PREFIX)}

    def vector(self, name: str) -> np.ndarray:
        """A tensor stored as f32 in its shape, zero copy: norms, router, gates; conv1d.weight is [K, C], taps first."""
        entry, part = self._entry(name), self._layout.get(name)
        if part is not None and (isinstance(part, Blob) or part.format != "f32"):
            raise PackError(f"{self.path}: {name} is quantised, not f32; this engine reads it otherwise, "
                            "convert the checkpoint again")
        shape = (part.rows, part.cols) if part else entry.shape
        return self._bytes(name).view(np.float32).reshape(shape)

    def matrix(self, name: str) -> Matrix:
        """A weight matrix in its format, zero copy."""
        self._entry(name)
        part = self._layout.get(name)
        if not isinstance(part, Part):
            raise PackError(f"{self.path}: {name} is no single matrix; this engine reads it otherwise, "
                            "convert the checkpoint again")
        return part.matrix(self._bytes(name))

    def experts(self, layer: int) -> tuple[Experts, Experts]:
        """gate_up [2*moe_intermediate, hidden] and down [hidden, moe_intermediate] of all experts of a layer, zero copy."""
        name = blob_name(layer)
        self._entry(name)
        gate_up, down = self._layout[name].projections(self._bytes(name))
        return gate_up, down

    def expert(self, layer: int, expert: int) -> tuple[Matrix, Matrix]:
        """The two matrices of one expert, zero copy. IndexError beyond the last."""
        gate_up, down = self.experts(layer)
        return gate_up.matrix(expert), down.matrix(expert)

    def info(self) -> dict[str, Any]:
        """Sizes and facts for printing; `formats` counts tensors, weights and stored bytes, padding rows included."""
        blobs = [part for part in self._layout.values() if isinstance(part, Blob)]
        return {
            "path": str(self.path), "bytes": self._start + self._entries[SEAL].end, "hash": self.hash,
            "version": PACK_VERSION, "engine_version": self._metadata["engine_version"],
            "model_type": self.config.model_type, "default_format": self.default_format, "scales": self._metadata.get("scales"),
            "formats": self._format_sizes(), "expert_layers": len(blobs),
            "experts": blobs[0].experts if blobs else 0, "expert_stride": blobs[0].stride if blobs else 0,
            "files": {name[len(FILE_PREFIX):]: e.end - e.begin for name, e in self._entries.items()
                      if name.startswith(FILE_PREFIX)},
            "eos_ids": list(self.eos_ids), "unused": list(self.unused),
        }

    def stored(self, name: str) -> list[tuple[Part, int]]:
        """The matrices of a tensor and how many there are of each: of a blob gate_up and down of all experts."""
        part, shape = self._layout.get(name), self._entry(name).shape
        if isinstance(part, Blob):
            return [(part.gate_up, part.experts), (part.down, part.experts)]
        return [(part or Part("f32", int(np.prod(shape[:-1])), shape[-1]), 1)]

    def _format_sizes(self) -> dict[str, dict[str, int]]:
        sizes: dict[str, dict[str, int]] = {}
        for name in self.names:
            for matrix, count in self.stored(name):
                total = sizes.setdefault(matrix.format, {"tensors": 0, "weights": 0, "bytes": 0})
                total["tensors"] += 1
                total["weights"] += count * matrix.rows * matrix.cols
                total["bytes"] += count * int(np.prod(matrix.stored_shape))
        return sizes

    def check(self, progress: Progress | None = None) -> None:
        """Read every byte: each tensor's checksum, each scale and float finite. PackError names the first bad tensor.

        Reads through a small buffer, so that resident memory does not grow with the pack.
        `progress(done_bytes, total_bytes, name)` is called after each piece.
        """
        total = self._entries[SEAL].begin
        for (name, entry), digest in zip(self._entries.items(), self._digests, strict=False):
            running, finite = tensor_digest(), True
            for piece, position in self._pieces(name):
                running.update(piece)
                finite = finite and self._piece_is_finite(name, piece)
                if progress:
                    progress(position, total, name)
            if running.digest() != digest:
                raise PackError(f"{self.path}: tensor {name} ({entry.end - entry.begin} bytes) does not match its "
                                "checksum; the file is damaged, convert the checkpoint again")
            if not finite:
                raise PackError(f"{self.path}: tensor {name} holds a scale or value that is NaN or infinite; "
                                "convert the checkpoint again")

    def _pieces(self, name: str) -> Iterator[tuple[np.ndarray, int]]:
        """uint8 pieces [rows, bytes] of a tensor, whole rows of its stored shape, and the data offset after each."""
        self._mapped()
        entry = self._entries[name]
        width = 4 * entry.shape[-1] if entry.dtype == "F32" else entry.shape[-1] if len(entry.shape) > 1 else 1
        step = max(1, _CHECK_BYTES // max(1, width)) * width
        for begin in range(entry.begin, entry.end, max(1, step)):
            piece = np.empty(min(step, entry.end - begin), np.uint8)
            if os.preadv(self._fd, [piece], self._start + begin) != piece.size:
                raise PackError(f"{self.path} ends inside tensor {name}; the file changed while it was in use")
            yield piece.reshape(-1, width), begin + piece.size

    def _piece_is_finite(self, name: str, piece: np.ndarray) -> bool:
        part = self._layout.get(name)
        if isinstance(part, Part):
            return FORMATS[part.format].is_finite(piece)
        if isinstance(part, Blob):
            parts = part.gate_up, part.down
            return all(FORMATS[p.format].is_finite(p.matrix(expert).data) for expert in piece for p in parts)
        return self._entries[name].dtype != "F32" or FORMATS["f32"].is_finite(piece)

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise PackError(f"{self.path} has no tensor {name}; it was made for another model")
        return self._entries[name]

    def _mapped(self) -> np.ndarray:
        if self._mapping is None:
            raise PackError(f"{self.path} was closed; open it again")
        return self._mapping

    def _bytes(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        return self._mapped()[self._start + entry.begin:self._start + entry.end]

    def _check_layout(self) -> None:
        """Every tensor is where and as large as the metadata say."""
        if self._start % PAGE:
            self._damaged(f"its data starts at byte {self._start}, expected a multiple of {PAGE}")
        for name, entry in self._entries.items():
            part = self._layout.get(name)
            align = PAGE if isinstance(part, Blob) else LINE
            if entry.begin % align and not name.startswith(PAD_PREFIX):
                self._damaged(f"tensor {name} starts at byte {entry.begin} of the data, expected a multiple of {align}")
            weight = part is None and not name.startswith((PAD_PREFIX, FILE_PREFIX, SEAL))
            expected = ("F32" if weight else "U8"), _expected_shape(part) or entry.shape
            if (entry.dtype, entry.shape) != expected:
                self._damaged(f"tensor {name} is {entry.dtype} {list(entry.shape)}, "
                              f"expected {expected[0]} {list(expected[1])}")
        for name in self._layout:
            self._entry(name)

    def _check_seal(self, header_bytes: bytes) -> tuple[list[bytes], str]:
        entries = list(self._entries.items())
        begins = [entry.begin for _, entry in entries]
        if not entries or entries[-1][0] != SEAL or begins != sorted(begins):
            self._damaged(f"its last tensor is not {SEAL}, or tensors are not listed in file order")
        seal = self._bytes(SEAL).tobytes()
        if len(seal) != DIGEST_BYTES * len(entries):
            self._damaged(f"its seal has {len(seal)} bytes, expected {DIGEST_BYTES * len(entries)}")
        digests, last = seal[:-DIGEST_BYTES], seal[-DIGEST_BYTES:]
        if last != seal_digest(header_bytes, digests):
            self._damaged("its seal does not match its header")
        return [digests[i:i + DIGEST_BYTES] for i in range(0, len(digests), DIGEST_BYTES)], last.hex()

    def _check_model(self) -> None:
        """Names and shapes are those that the pack's own configuration asks for: kernels trust them from here on."""
        expected, found = pack_shapes(self.config, self.vision), self._model_shapes()
        for name in (*expected, *found):
            wanted, shape = expected.get(name), found.get(name)
            if shape != wanted:
                has = "is absent" if shape is None else f"has shape {list(shape)}"
                asks = "no such tensor" if wanted is None else list(wanted)
                raise PackError(f"{self.path}: tensor {name} {has}, the pack's model configuration asks for {asks}; "
                                "convert the checkpoint again")

    def _model_shapes(self) -> dict[str, tuple[int, ...]]:
        """All weights under the names and in the shapes a checkpoint with fused experts has them."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name in self.names:
            part, shape = self._layout.get(name), self._entries[name].shape
            if isinstance(part, Blob):
                for kind, matrix in (("gate_up", part.gate_up), ("down", part.down)):
                    shapes[f"{name.removesuffix('.blob')}.{kind}_proj"] = part.experts, matrix.rows, matrix.cols
            elif part:
                shapes[name] = part.rows, part.cols
            elif name.endswith(".conv1d.weight") and len(shape) == 2:
                shapes[name] = shape[1], 1, shape[0]
            else:
                shapes[name] = shape
        return shapes

    def _damaged(self, what: str) -> None:
        raise PackError(f"{self.path} is damaged: {what}; convert the checkpoint again")


def _expected_shape(part: Part | Blob | None) -> tuple[int, ...] | None:
    if isinstance(part, Blob):
        return part.experts, part.stride
    return part.stored_shape if part else None


def _refuse_other_things(path: Path) -> None:
    if path.is_dir():
        raise PackError(f"{path} is a directory, not a pack; convert the checkpoint in it to a pack first")
    if path.suffix == PART_SUFFIX and path.is_file():
        expected = _promised_bytes(path)
        raise PackError(f"{path} is an unfinished pack: expected {expected} bytes, found {path.stat().st_size}; "
                        "run the same conversion again to finish it")
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError as err:
        raise PackError(f"cannot read {path}: {err.strerror}; give a pack made by `fermi-engine convert`") from None
    if magic == b"GGUF":
        raise PackError(f"{path} is a GGUF file, not a pack; convert the Hugging Face checkpoint instead")


def _promised_bytes(path: Path) -> int | str:
    """How long an unfinished pack will be, as far as its header is there."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            fields = json.loads(file.read(min(length, path.stat().st_size)))
        return 8 + length + fields[SEAL]["data_offsets"][1]
    except (OSError, ValueError, LookupError, TypeError):
        return "more"


def _check_kind(path: Path, metadata: dict[str, str]) -> None:
    kind = metadata.get("format")
    if kind != PACK_FORMAT:
        what = f"a safetensors file of format {kind!r}" if kind else "a safetensors file without a format"
        raise PackError(f"{path} is {what}, not a pack ({PACK_FORMAT!r}); convert its checkpoint directory first")
    version = metadata.get("version", "")
    if version.isdecimal() and int(version) > PACK_VERSION:
        raise PackError(f"{path} is a pack of version {version}, this engine reads version {PACK_VERSION}; "
                        "update the engine or convert the checkpoint again")
    if version != str(PACK_VERSION):
        raise PackError(f"{path} is a pack of version {version!r}, this engine reads version {PACK_VERSION}; "
                        "convert the checkpoint again")
    missing = [key for key in _KEYS if key not in metadata]
    if missing:
        raise PackError(f"{path} is damaged: its metadata lack {', '.join(missing)}; convert the checkpoint again")
    norms = metadata["norm_convention"], metadata["plain_norms"]
    if norms != (NORM_CONVENTION, PLAIN_NORMS):
        raise PackError(f"{path} stores norm weights as {norms[0]!r} (plain: {norms[1]}), expected "
                        f"{NORM_CONVENTION!r} (plain: {PLAIN_NORMS}); convert the checkpoint again")


def _parse_metadata(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    try:
        fields = {key: json.loads(metadata[key]) for key in ("model_config", "eos_ids", "tensors", "source", "unused")}
        fields["model_config"] = ModelConfig.from_dict(fields["model_config"])
        vision = json.loads(metadata.get("vision_config", "null"))
        fields["vision_config"] = None if vision is None else VisionConfig.from_dict(vision)
        fields["tensors"] = {name: parse_part(value) for name, value in fields["tensors"].items()}
        if not isinstance(fields["source"], dict):
            raise ValueError("source is no object")
        for key, kind in (("eos_ids", int), ("unused", str)):
            if not isinstance(fields[key], list) or not all(type(value) is kind for value in fields[key]):
                raise ValueError(f"{key} is no list of {kind.__name__}")
    except (ValueError, TypeError, AttributeError, LookupError, ConfigError, FormatError) as err:
        raise PackError(f"{path} is damaged: its metadata cannot be read ({err}); "
                        "convert the checkpoint again") from None
    return {**fields, "default_format": metadata["default_format"]}
