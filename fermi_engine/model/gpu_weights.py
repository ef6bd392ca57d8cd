"""A layer's weights as a GPU sees them: what there is, where each tensor lies in one block of bytes, and views of such blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fermi_engine.config import ModelConfig
from fermi_engine.formats import FORMATS, Experts
from fermi_engine.kernels.device_arrays import DeviceArray, DeviceExperts, DeviceMatrix
from fermi_engine.kernels.gpu import DeviceBuffer
from fermi_engine.model.weights import Weights

ALIGNMENT = 256  # bytes, of every tensor in a block
_GDN = ("in_proj_qkv", "in_proj_z", "out_proj"), ("conv1d.weight", "A_log", "dt_bias", "norm.weight")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj"), ("q_norm.weight", "k_norm.weight")
_FLOAT_MATRICES = {"linear_attn": ("in_proj_a", "in_proj_b"), "mlp": ("gate", "shared_expert_gate")}
_NORMS = ("input_layernorm", "post_attention_layernorm")
_SWIGLU = ("gate_proj", "up_proj", "down_proj")


class Layout:
    """Arrays side by side in one buffer, each at a multiple of 256 bytes."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, Any] | None = None, begin: int = 0) -> None:
        """dtypes: of those that are not float32. begin: offset of the first in bytes, a multiple of 256."""
        self._rows: dict[str, tuple[tuple[int, ...], np.dtype, int]] = {}
        self.end = begin
        for name, shape in shapes.items():
            dtype = np.dtype((dtypes or {}).get(name, np.float32))
            self._rows[name] = shape, dtype, self.end
            self.end += aligned(math.prod(shape) * dtype.itemsize)

    def within(self, buffer: DeviceBuffer, begin: int = 0) -> dict[str, DeviceArray]:
        """The arrays by name, from byte `begin` of the buffer on. ValueError when it is too small."""
        return {name: DeviceArray.within(buffer, shape, dtype, begin + offset)
                for name, (shape, dtype, offset) in self._rows.items()}

    def over(self, host: np.ndarray) -> dict[str, np.ndarray]:
        """The same arrays in flat uint8 host memory."""
        return {name: host[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
                for name, (shape, dtype, offset) in self._rows.items()}


def aligned(nbytes: int) -> int:
    """The next multiple of 256."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class _Tensor:
    parts: tuple[np.ndarray, ...]  # uint8, flat; they lie end to end
    offset: int
    shape: tuple[int, ...]
    format: str | None  # of a matrix

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class WeightBlock:
    """Tensors side by side in one block of `nbytes` bytes."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._tensors: dict[str, _Tensor] = {}

    def _vector(self, weights: Weights, name: str, full: str) -> None:
        array = weights.vector(full)
        self._add(name, array, array.shape, None)

    def _float_matrix(self, weights: Weights, name: str, full: str) -> None:
        array = weights.vector(full)
        self._add(name, array, array.shape, "f32")

    def _matrix(self, weights: Weights, name: str, full: str) -> None:
        matrix = weights.matrix(full)
        self._add(name, matrix.data, (matrix.rows, matrix.cols), matrix.format)

    def _add(self, name: str, data: np.ndarray, shape: tuple[int, ...], format: str | None) -> None:
        self._join(name, [data], shape, format)

    def _join(self, name: str, parts: Sequence[np.ndarray], shape: tuple[int, ...], format: str | None) -> None:
        """One tensor whose stored bytes are those of several, end to end."""
        host = tuple(np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts)
        self._tensors[name] = _Tensor(host, self.nbytes, shape, format)
        self.nbytes += aligned(self._tensors[name].nbytes)

    @property
    def formats(self) -> set[str]:
        """Formats of its matrices."""
        return {tensor.format for tensor in self._tensors.values() if tensor.format}

    @property
    def expanded_bytes(self) -> int:
        """Bytes of its largest quantised matrix as float32."""
        return max((4 * math.prod(tensor.shape) for tensor in self._tensors.values() if tensor.format not in (None, "f32")),
                   default=0)

    @property
    def most_columns(self) -> int:
        """Columns of its widest matrix."""
        return max(tensor.shape[-1] for tensor in self._tensors.values() if tensor.format)

    def pieces(self) -> list[tuple[int, np.ndarray]]:
        """(offset in the block, host bytes) of every tensor, or of its parts."""
        found = []
        for tensor in self._tensors.values():
            offset = tensor.offset
            for part in tensor.parts:
                found.append((offset, part))
                offset += part.nbytes
        return found

    def within(self, buffer: DeviceBuffer) -> dict[str, Any]:
        """DeviceMatrix or DeviceArray (float32) by name, in a buffer that holds a block."""
        return {name: _view(buffer, tensor) for name, tensor in self._tensors.items()}


class DenseWeights(WeightBlock):
    """Everything of a layer but its routed experts, `nbytes` in one block. Names lose their prefix and `.weight`:
    `in_proj_qkv`, `shared_expert.gate_proj`."""

    def __init__(self, weights: Weights, layer: int) -> None:
        super().__init__()
        c, prefix = weights.config, f"layers.{layer}."
        for name in _NORMS:
            self._vector(weights, name, f"{prefix}{name}.weight")
        mixer = "self_attn" if c.layer_types[layer] == "full_attention" else "linear_attn"
        matrices, vectors = _ATTENTION if mixer == "self_attn" else _GDN
        for name in matrices:
            self._matrix(weights, name, f"{prefix}{mixer}.{name}.weight")
        for name in vectors:
            self._vector(weights, name.removesuffix(".weight"), f"{prefix}{mixer}.{name}")
        for part in (mixer, "mlp" if c.num_experts else ""):
            for name in _FLOAT_MATRICES.get(part, ()):
                self._float_matrix(weights, name, f"{prefix}{part}.{name}.weight")
        inner = "shared_expert." if c.num_experts else ""
        for name in _SWIGLU:
            self._matrix(weights, inner + name, f"{prefix}mlp.{inner}{name}.weight")


class EndWeights(WeightBlock):
    """What stands before the first layer and behind the last: `embed_tokens`, `norm`, and `lm_head`, where the embedding does
    not serve as head, too."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self._is_tied = weights.config.tie_word_embeddings
        self._vector(weights, "norm", "norm.weight")
        for name in ("embed_tokens",) if self._is_tied else ("embed_tokens", "lm_head"):
            self._matrix(weights, name, f"{name}.weight")

    def within(self, buffer: DeviceBuffer) -> dict[str, Any]:
        """As of any block, with an `lm_head` in every case."""
        found = super().within(buffer)
        return {"lm_head": found["embed_tokens"], **found} if self._is_tied else found


def _view(buffer: DeviceBuffer, tensor: _Tensor) -> DeviceMatrix | DeviceArray:
    if tensor.format is None:
        return DeviceArray.within(buffer, tensor.shape, np.float32, tensor.offset)
    data = DeviceArray.within(buffer, (tensor.nbytes,), np.uint8, tensor.offset)
    return DeviceMatrix(tensor.format, *tensor.shape, data)


class ExpertWeights:
    """A layer's routed experts: `nbytes` from the first byte of the first to the last of the last, as they lie in the pack."""

    def __init__(self, weights: Weights, layer: int) -> None:
        self.gate_up, self.down = weights.experts(layer)
        start = self.gate_up.data.ctypes.data
        self.stride, self.count = self.gate_up.stride, self.gate_up.count
        self._apart = self.down.data.ctypes.data - start
        if self.down.stride != self.stride or not _stored(self.gate_up) <= self._apart <= self.stride - _stored(self.down):
            raise ValueError(f"layer {layer}: gate_up and down of an expert do not lie side by side")
        self.expert_bytes = self._apart + _stored(self.down)
        self.nbytes = (self.count - 1) * self.stride + self.expert_bytes
        self.host = self.gate_up.data[: self.nbytes]

    @property
    def formats(self) -> set[str]:
        """Formats of its matrices."""
        return {self.gate_up.format, self.down.format}

    def piece(self, expert: int) -> tuple[int, np.ndarray]:
        """(offset, host bytes) of one expert."""
        begin = expert * self.stride
        return begin, self.host[begin : begin + self.expert_bytes]

    def within(self, buffer: DeviceBuffer) -> tuple[DeviceExperts, DeviceExperts]:
        """gate_up and down in a buffer that holds them."""
        return self._part(buffer, self.gate_up, 0), self._part(buffer, self.down, self._apart)

    def _part(self, buffer: DeviceBuffer, part: Experts, offset: int) -> DeviceExperts:
        data = DeviceArray.within(buffer, (self.nbytes - offset,), np.uint8, offset)
        return DeviceExperts(part.format, part.count, part.rows, part.cols, part.stride, data)


def _stored(experts: Experts) -> int:
    return math.prod(FORMATS[experts.format].stored_shape(experts.rows, experts.cols))


def unfit(config: ModelConfig, dense: set[str], experts: set[str]) -> str | None:
    """Why the GPU's kernels cannot run a model with matrices of these formats; None when they can."""
    c = config
    delta = "linear_attention" in c.layer_types
    full = "full_attention" in c.layer_types
    rules = [
        ("f16" not in dense | experts, "matrices are stored as f16; convert the checkpoint to q4_0 or q8_0"),
        (experts <= {"q4_0", "q8_0"}, "experts are not quantised; convert the checkpoint to q4_0 or q8_0"),
        (c.num_experts <= 512, f"{c.num_experts} experts, at most 512"),
        (c.num_experts_per_tok <= 32, f"{c.num_experts_per_tok} experts a token, at most 32"),
        (not full or c.head_dim % 32 == 0, f"heads of {c.head_dim}, expected a multiple of 32"),
        *((not delta or (dim % 32 == 0 and dim <= 128), f"delta rule heads of {dim}, expected a multiple of 32 up to 128")
          for dim in (c.linear_key_head_dim, c.linear_value_head_dim)),
    ]
    return next((text for holds, text in rules if not holds), None)
