"""A Hugging Face checkpoint directory of the Qwen3.5/3.6 family: config.json, safetensors shards, tokenizer files.

`Checkpoint.open` accounts for every tensor before one byte of data is read: the expected set and its shapes follow from
the configuration, and whatever is missing, left over, misshapen or in an unknown dtype is refused. Data is then read
with pread, not through a mapping, so that resident memory is the caller's block and nothing else.
"""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fermi_engine.config import ModelConfig
from fermi_engine.errors import CheckpointError
from fermi_engine.safetensors_header import Entry, Header, read_headers, read_json
from fermi_engine.shapes import expected_shapes
from fermi_engine.vision.config import VisionConfig, is_vision, vision_shapes

PREFIXES = ("model.language_model.", "language_model.model.", "model.")  # longest first: `model.` also starts the first
HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")
UNUSED_PARTS = ("mtp", "visual", "vision_tower", "merger")  # speculative head; image towers that config.json does not describe
DTYPES = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
SIDE_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json", "generation_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "preprocessor_config.json",
)
SAMPLES, SAMPLE_BYTES = 64, 4096
PRUNED = "pruned"  # what a model from which experts were left out says about that: in config.json, in a pack's source


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: dtype "BF16", "F16" or "F32"; `offset` (absolute in `file`) and `nbytes` in bytes."""

    name: str
    source: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose structure has been proven consistent; see `open`.

    tensors: canonical name -> TensorInfo of every tensor of text and vision; experts fused or one by one, as stored.
    unused: names in the files that are skipped on purpose: multi-token prediction, a head that is tied, an image tower that
        config.json does not describe.
    files: the tokenizer and generation files that are present, by file name.
    shards: file name -> (path, bytes, data_start) of each weight file.
    vision: the image tower; None where config.json describes none, or the files hold nothing of it.
    """

    path: Path
    config: ModelConfig
    raw_config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    unused: list[str]
    files: dict[str, Path]
    shards: dict[str, tuple[Path, int, int]]
    vision: VisionConfig | None = None

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Read config.json and all headers and check them against each other; tensor data stays unread.

        Raises CheckpointError (files, tensors, shapes, dtypes) or ConfigError (config.json contradicts itself).
        """
        path = Path(path)
        names = _listing(path)
        raw = _read_config(path, names)
        config = ModelConfig.from_hf(raw)
        headers = read_headers(path, names)
        vision = _vision(path, names, raw, config, headers)
        tensors, unused = _assign(path, config, headers, vision)
        _check_dtypes(tensors.values(), raw)
        _check_against(path, config, vision, tensors)
        shards = {name: (path / name, h.file_bytes, h.data_start) for name, h in headers.items()}
        files = {name: path / name for name in SIDE_FILES if name in names}
        return cls(path, config, raw, tensors, unused, files, shards, vision)

    @property
    def pruned(self) -> Any:
        """What config.json says of experts left out, or None."""
        return self.raw_config.get(PRUNED)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor by canonical name. KeyError for a name outside `tensors`."""
        return self.tensors[name].shape

    def rows(self, name: str, begin: int, end: int) -> np.ndarray:
        """Rows [begin, end) as float32 [end - begin, n]: n the last axis, leading axes flattened, a vector is one row.

        bf16, f16 and f32 widen exactly. Raises CheckpointError if the file can no longer be read or has become shorter.
        """
        info = self.tensors[name]
        n = info.shape[-1]
        count = math.prod(info.shape[:-1])
        if not 0 <= begin <= end <= count:
            raise ValueError(f"rows {begin}..{end} of {name}, which has {count}")
        kind = DTYPES[info.dtype]
        raw = np.empty((end - begin, n), kind)
        _pread(info, raw, info.offset + begin * n * kind.itemsize)
        return _widen(raw, info.dtype)

    def read(self, name: str) -> np.ndarray:
        """A whole tensor as float32 in its own shape."""
        shape = self.tensors[name].shape
        return self.rows(name, 0, math.prod(shape[:-1])).reshape(shape)

    def expert_rows(self, layer: int, part: str, expert: int, begin: int, end: int) -> np.ndarray:
        """Rows [begin, end) of one expert's matrix as float32, the same for fused and per-expert files.

        part "gate_up": [2*moe_intermediate, hidden], gate rows first, then up; "down": [hidden, moe_intermediate].
        """
        c = self.config
        height = {"gate_up": 2 * c.moe_intermediate_size, "down": c.hidden_size}[part]
        if not (0 <= expert < c.num_experts and 0 <= begin <= end <= height):
            raise ValueError(f"rows {begin}..{end} of expert {expert}: there are {c.num_experts} of {height} rows")
        stem = f"layers.{layer}.mlp.experts"
        if f"{stem}.{part}_proj" in self.tensors:
            return self.rows(f"{stem}.{part}_proj", expert * height + begin, expert * height + end)
        if part == "down":
            return self.rows(f"{stem}.{expert}.down_proj.weight", begin, end)
        half = c.moe_intermediate_size
        gate = self.rows(f"{stem}.{expert}.gate_proj.weight", min(begin, half), min(end, half))
        up = self.rows(f"{stem}.{expert}.up_proj.weight", max(begin, half) - half, max(end, half) - half)
        return np.concatenate((gate, up)) if len(gate) and len(up) else (gate if len(gate) else up)

    def identity(self) -> dict[str, dict[str, Any]]:
        """What tells this checkpoint from another, cheaply: per shard, and for config.json, its size and hashes.

        "header_blake2b" covers the header (all of config.json); "sample_blake2b" covers 64 evenly spaced blocks of 4096
        bytes of the data, which tells two trainings of one architecture apart. A copy has the same identity.
        """
        text = _read_span(self.path / "config.json", 0, None)
        result: dict[str, dict[str, Any]] = {"config.json": {"bytes": len(text), "header_blake2b": _hash(text)}}
        for name, (path, size, data_start) in sorted(self.shards.items()):
            header = _read_span(path, 0, data_start)
            last = max(data_start, size - SAMPLE_BYTES)
            begins = {data_start + (last - data_start) * i // (SAMPLES - 1) for i in range(SAMPLES)}
            sample = b"".join(_read_span(path, b, min(b + SAMPLE_BYTES, size)) for b in sorted(begins))
            result[name] = {"bytes": size, "header_blake2b": _hash(header), "sample_blake2b": _hash(sample)}
        return result


def _listing(path: Path) -> set[str]:
    if os.path.isfile(path):
        raise CheckpointError(f"{path} is a file; give the checkpoint directory that holds config.json and the shards")
    try:
        return set(os.listdir(path))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; give a Hugging Face checkpoint directory") from None
    except OSError as err:
        raise CheckpointError(f"cannot read the directory {path}: {err.strerror}") from None


def _read_config(path: Path, names: set[str]) -> dict[str, Any]:
    if "config.json" not in names:
        raise CheckpointError(f"{path} has no config.json; it is no Hugging Face checkpoint directory, or part of one")
    return read_json(path / "config.json")


def _vision(path: Path, names: set[str], raw: dict[str, Any], config: ModelConfig,
            headers: dict[str, Header]) -> VisionConfig | None:
    """The tower; None too where a checkpoint was stripped of it. Raises ConfigError for one that this engine does not run."""
    stored = {_bare(source) for header in headers.values() for source in header.tensors}
    if not any(map(is_vision, stored)):
        return None
    name = "preprocessor_config.json"
    return VisionConfig.from_hf(raw, config.hidden_size, read_json(path / name) if name in names else None)


def _bare(source: str) -> str:
    """A name without the prefix of the whole model, as towers are called."""
    return source.removeprefix("model.")


def _assign(path: Path, config: ModelConfig, headers: dict[str, Header],
            vision: VisionConfig | None) -> tuple[dict[str, TensorInfo], list[str]]:
    """Canonical name -> tensor, and the names left out on purpose."""
    tensors: dict[str, TensorInfo] = {}
    unused: list[str] = []
    for shard, header in headers.items():
        for source, entry in header.tensors.items():
            if not (vision and is_vision(_bare(source))) and _is_unused(source, config.tie_word_embeddings):
                unused.append(source)
                continue
            info = _info(path / shard, source, entry, header.data_start)
            if info.name in tensors:
                other = tensors[info.name]
                raise CheckpointError(f"{path}: {other.source} ({other.file.name}) and {source} ({shard}) are both the "
                                      f"tensor {info.name}; a checkpoint has it once")
            tensors[info.name] = info
    _check_prefix(path, tensors)
    return tensors, sorted(unused)


def _is_unused(source: str, tied: bool) -> bool:
    if source in HEAD_NAMES:
        return tied
    rest = next((source[len(p):] for p in (*PREFIXES, "language_model.") if source.startswith(p)), source)
    return rest.split(".")[0] in UNUSED_PARTS


def _info(file: Path, source: str, entry: Entry, data_start: int) -> TensorInfo:
    name = "lm_head.weight" if source in HEAD_NAMES else source
    if is_vision(_bare(source)):
        name = _bare(source)
    else:
        name = next((source[len(prefix):] for prefix in PREFIXES if source.startswith(prefix)), name)
    return TensorInfo(name, source, file, entry.dtype, entry.shape, data_start + entry.begin, entry.end - entry.begin)


def _check_prefix(path: Path, tensors: dict[str, TensorInfo]) -> None:
    """All tensors of text but the head carry one and the same prefix."""
    first: TensorInfo | None = None
    for info in tensors.values():
        if info.source in HEAD_NAMES or is_vision(info.name):
            continue
        prefix = _prefix(info)
        if not prefix:
            raise CheckpointError(f"{info.file}: tensor {info.source} is unknown; names of the text model start "
                                  f"with one of {', '.join(PREFIXES)}")
        first = first or info
        if prefix != _prefix(first):
            raise CheckpointError(f"{path} mixes name prefixes: {first.source} and {info.source}; all must start with "
                                  f"the same one of {', '.join(PREFIXES)}")


def _prefix(info: TensorInfo) -> str:
    return info.source[: len(info.source) - len(info.name)]


def _check_dtypes(tensors: Any, raw: dict[str, Any]) -> None:
    for info in tensors:
        if info.dtype not in DTYPES:
            quantization = raw.get("quantization_config")
            method = quantization.get("quant_method") if isinstance(quantization, dict) else None
            why = f" (quantised with {method})" if method else ""
            raise CheckpointError(f"{info.file}: tensor {info.source} has dtype {info.dtype}{why}, expected "
                                  f"{', '.join(DTYPES)}; use the unquantised release")


def _check_against(path: Path, config: ModelConfig, vision: VisionConfig | None, tensors: dict[str, TensorInfo]) -> None:
    """The tensors are exactly those the configuration asks for."""
    expected = expected_shapes(config, _fused_layers(config, tensors)) | (vision_shapes(vision) if vision else {})
    missing = [name for name in expected if name not in tensors]
    extra = [info for name, info in tensors.items() if name not in expected]
    if missing:
        also = f", and holds {extra[0].source} that it does not" if extra else ""
        raise CheckpointError(f"{path} lacks {_some(missing)} that config.json asks for{also}; "
                              "fetch the missing files, or the config.json that belongs to these")
    if extra:
        sources = _some([info.source for info in extra])
        raise CheckpointError(f"{extra[0].file} holds {sources} that a {config.model_type} model with this config.json "
                              "does not have; is config.json that of another model?")
    for name, shape in expected.items():
        info = tensors[name]
        if info.shape != shape:
            axes = " (vocab_size, hidden_size)" if name in ("embed_tokens.weight", "lm_head.weight") else ""
            raise CheckpointError(f"{info.file}: tensor {info.source} has shape {list(info.shape)}, config.json asks "
                                  f"for {list(shape)}{axes}; weights and config.json are not of one release")


def _fused_layers(config: ModelConfig, tensors: dict[str, TensorInfo]) -> frozenset[int]:
    """Layers to hold against the fused layout: all but those with any per-expert name and no fused one."""
    single = {name.split(".")[1] for name in tensors if ".mlp.experts." in name and name.endswith(".weight")}
    ends = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
    fused = {name.split(".")[1] for name in tensors if name.endswith(ends)}
    return frozenset(i for i in range(config.num_hidden_layers) if str(i) in fused or str(i) not in single)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(names[:3])}{more}"


def _widen(raw: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":  # a bf16 is the upper half of a float32
        wide = np.empty(raw.shape, np.uint32)
        np.left_shift(raw, 16, out=wide, dtype=np.uint32)
        return wide.view(np.float32)
    return raw.astype(np.float32, copy=False)


def _pread(info: TensorInfo, out: np.ndarray, offset: int) -> None:
    """Fill `out` from the file; one call may return less than asked for, and never more than 2 GiB."""
    view = memoryview(out).cast("B") if out.size else memoryview(b"")
    try:
        fd = os.open(info.file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while view:
                got = os.preadv(fd, [view], offset)
                if got == 0:
                    raise CheckpointError(f"{info.file} ends inside tensor {info.source}: expected {len(view)} more "
                                          f"bytes at offset {offset}; the file changed while it was in use")
                view, offset = view[got:], offset + got
        finally:
            os.close(fd)
    except OSError as err:
        raise CheckpointError(f"cannot read tensor {info.source} of {info.file}: {err.strerror}; check the disk, then "
                              "run it again") from None


def _read_span(path: Path, begin: int, end: int | None) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(begin)
            return file.read() if end is None else file.read(end - begin)
    except OSError as err:
        raise CheckpointError(f"cannot read {path}: {err.strerror}") from None


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()
