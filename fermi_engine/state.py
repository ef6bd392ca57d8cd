"""HybridState: everything a sequence leaves behind after its tokens have passed, at one position.

Gated DeltaNet layers keep the last conv inputs and the recurrent state; attention layers keep keys and values in pages.
A recurrent state cannot be rewound, so all parts always stand at the same token count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fermi_engine.config import ModelConfig
from fermi_engine.formats import kv_row_bytes

FIRST_PAGES = 64  # entries of a page table to begin with


@dataclass
class DeltaState:
    """conv: last taps-1 inputs of the convolution [taps-1, C], zeros before the first token; recurrent [HV, K, V]."""

    conv: np.ndarray
    recurrent: np.ndarray


def _zeros(shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(shape, np.uint8)


class KVPages:
    """Keys and values in pages of `page_tokens` positions, uint8 [kv_heads, page_tokens, row bytes] in one of the formats of
    formats.kv_row_bytes; unused rows are zero. Kernels find them through two tables of addresses (formats.KVLayout)."""

    def __init__(self, kv_heads: int, page_tokens: int, head_dim: int, format: str = "f32",
                 allocate: Callable[[tuple[int, ...]], np.ndarray] = _zeros) -> None:
        self.kv_heads, self.page_tokens, self.head_dim, self.format = kv_heads, page_tokens, head_dim, format
        self._allocate = allocate  # uint8 pages
        self.row_bytes = kv_row_bytes(format, head_dim)
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self.k_table, self.v_table = np.zeros(FIRST_PAGES, np.uintp), np.zeros(FIRST_PAGES, np.uintp)

    @property
    def capacity(self) -> int:
        """Positions that have a page."""
        return len(self.keys) * self.page_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(page.nbytes for page in (*self.keys, *self.values))

    def reserve(self, end: int) -> bool:
        """Have pages for the positions before `end`; whether the tables had to move for it."""
        pages = -(-end // self.page_tokens)
        moved = pages > len(self.k_table)
        if moved:
            size = max(pages, 2 * len(self.k_table))
            self.k_table, self.v_table = _longer(self.k_table, size), _longer(self.v_table, size)
        while len(self.keys) < pages:
            shape = (self.kv_heads, self.page_tokens, self.row_bytes)
            self._add(self._allocate(shape), self._allocate(shape))
        return moved

    def _add(self, keys: np.ndarray, values: np.ndarray) -> None:
        page = len(self.keys)
        self.keys.append(keys)
        self.values.append(values)
        self.k_table[page], self.v_table[page] = keys.ctypes.data, values.ctypes.data

    def filled(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of the first `length` positions, float32 [length, kv_heads, D] each: for checks, page size and
        format forgotten."""
        rows = [self._joined(pages)[:, :length] for pages in (self.keys, self.values)]
        keys, values = (self._values(part).transpose(1, 0, 2) for part in rows)
        return keys, values

    def _joined(self, pages: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(pages, axis=1) if pages else np.zeros((self.kv_heads, 0, self.row_bytes), np.uint8)

    def _values(self, rows: np.ndarray) -> np.ndarray:
        rows = np.ascontiguousarray(rows)
        if self.format == "f32":
            return rows.view(np.float32)
        if self.format == "f16":
            return rows.view(np.float16).astype(np.float32)
        codes = rows[..., : self.head_dim].view(np.int8).astype(np.float32)
        d = np.ascontiguousarray(rows[..., self.head_dim :]).view(np.float16).astype(np.float32)
        return codes * np.repeat(d, 32, axis=-1)

    def copy(self) -> KVPages:
        other = KVPages(self.kv_heads, self.page_tokens, self.head_dim, self.format)
        other.k_table, other.v_table = np.zeros_like(self.k_table), np.zeros_like(self.v_table)
        for keys, values in zip(self.keys, self.values, strict=True):
            other._add(keys.copy(), values.copy())
        return other


def _longer(table: np.ndarray, size: int) -> np.ndarray:
    longer = np.zeros(size, table.dtype)
    longer[: len(table)] = table
    return longer


@dataclass
class HybridState:
    """State of all layers after `position` tokens; `layers[i]` is a DeltaState or KVPages by the layer's type.

    `program` is the decoder's: kernel calls recorded over exactly these arrays, dropped when one of them moves.
    `open_chunks` is what GPU prefill carries beside them (gpu_state.OpenChunks); it counts at its own position only.
    """

    position: int
    layers: list[DeltaState | KVPages]
    program: Any = field(default=None, repr=False, compare=False)
    open_chunks: Any = field(default=None, repr=False, compare=False)

    @classmethod
    def fresh(cls, config: ModelConfig, kv_block: int, kv_format: str = "f32") -> HybridState:
        """The state before the first token. ConfigError where keys do not fit `kv_format`."""
        delta = iter(_fresh_deltas(config))
        heads, size = config.num_key_value_heads, config.head_dim
        return cls(0, [KVPages(heads, kv_block, size, kv_format) if kind == "full_attention" else next(delta)
                       for kind in config.layer_types])

    def reserve(self, end: int) -> None:
        """Have room for the keys and values of all positions before `end`."""
        for layer in self.layers:
            if isinstance(layer, KVPages) and layer.reserve(end):
                self.program = None

    def copy(self) -> HybridState:
        """Independent deep copy."""
        states = [layer for layer in self.layers if isinstance(layer, DeltaState)]
        delta = iter(_copy_deltas(states) if states else ())
        layers = [next(delta) if isinstance(layer, DeltaState) else layer.copy() for layer in self.layers]
        return HybridState(self.position, layers, open_chunks=self.open_chunks)

    def arrays(self) -> dict[str, np.ndarray]:
        """Every value of the state by name, page size forgotten; equal states give equal bytes."""
        named: dict[str, np.ndarray] = {"position": np.array([self.position])}
        for i, layer in enumerate(self.layers):
            if isinstance(layer, DeltaState):
                named[f"layers.{i}.conv"], named[f"layers.{i}.recurrent"] = layer.conv, layer.recurrent
            else:
                named[f"layers.{i}.k"], named[f"layers.{i}.v"] = layer.filled(self.position)
        return named


def _fresh_deltas(c: ModelConfig) -> list[DeltaState]:
    """One allocation for all layers: NumPy asks for huge pages from 4 MB on, and the state of a layer is smaller."""
    layers = c.layer_types.count("linear_attention")
    conv = np.empty((layers, c.linear_conv_kernel_dim - 1, c.conv_dim), np.float32)
    recurrent = np.empty((layers, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim), np.float32)
    for part in (conv, recurrent):
        part[...] = 0  # the system gives the memory now, not page by page to the first token
    return [DeltaState(*parts) for parts in zip(conv, recurrent, strict=True)]


def _copy_deltas(states: list[DeltaState]) -> list[DeltaState]:
    parts = [np.stack([getattr(state, name) for state in states]) for name in ("conv", "recurrent")]
    return [DeltaState(*both) for both in zip(*parts, strict=True)]
