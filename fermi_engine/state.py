"""HybridState: everything a sequence leaves behind after its tokens have passed, at one position.

Gated DeltaNet layers keep the last conv inputs and the recurrent state; attention layers keep keys and values in pages.
A recurrent state cannot be rewound, so all parts always stand at the same token count. Copies have recurrent states of their own
and share pages: whoever wants to write into a shared page takes a copy of it first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fermi_engine import kept_memory
from fermi_engine.config import ModelConfig
from fermi_engine.formats import kv_row_bytes
from fermi_engine.kept_memory import Allocate, copy_arrays, memory_of

FIRST_PAGES = 64  # entries of a page table to begin with


@dataclass
class DeltaState:
    """conv: last taps-1 inputs of the convolution [taps-1, C], zeros before the first token; recurrent [HV, K, V]."""

    conv: np.ndarray
    recurrent: np.ndarray


@dataclass(frozen=True)
class OpenChunks:
    """What GPU prefill carries beside a HybridState at `position`: `tokens` (1..63) since the last chunk boundary, and by layer
    the float32 arrays `state` [HV, K, V] there, k [tokens, HK, K], v [tokens, HV, V], g and beta [tokens, HV]. Never changed,
    so copies of a state may share it."""

    position: int
    tokens: int
    layers: dict[int, dict[str, np.ndarray]]


def _zeros(shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(shape, np.uint8)


class KVPages:
    """Keys and values in pages of `page_tokens` positions, uint8 [kv_heads, page_tokens, row bytes] in one of the formats of
    formats.kv_row_bytes. Kernels find them through two tables of addresses (formats.KVLayout). Rows that were never written are
    zero; in pages that came from a longer sequence the rows beyond are its own, and nothing reads them.

    `copy` shares pages. A shared page is read-only for all its holders for good: `reserve` puts a copy in its place before it is
    written again. Only the last page of a sequence can be, so that is all that sharing ever costs.
    """

    def __init__(self, kv_heads: int, page_tokens: int, head_dim: int, format: str = "f32",
                 allocate: Callable[[tuple[int, ...]], np.ndarray] = _zeros) -> None:
        self.kv_heads, self.page_tokens, self.head_dim, self.format = kv_heads, page_tokens, head_dim, format
        self._allocate = allocate  # uint8 pages
        self.row_bytes = kv_row_bytes(format, head_dim)
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self.k_table, self.v_table = np.zeros(FIRST_PAGES, np.uintp), np.zeros(FIRST_PAGES, np.uintp)
        self._shared = 0  # so many pages, from the first on, may have other holders

    @property
    def capacity(self) -> int:
        """Positions that have a page."""
        return len(self.keys) * self.page_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(page.nbytes for page in (*self.keys, *self.values))

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of keys or of values."""
        return self.kv_heads * self.page_tokens * self.row_bytes

    def pages_for(self, length: int) -> int:
        """How many pages so many positions take."""
        return -(-length // self.page_tokens)

    def reserve(self, end: int, written: int = 0) -> bool:
        """Have pages for the positions before `end`, those from position `written` on this one's alone; whether the tables had
        to move for it."""
        pages = self.pages_for(end)
        moved = self._room(pages)
        for page in range(written // self.page_tokens, self._shared):
            self.keys[page], self.values[page] = self._own(self.keys[page]), self._own(self.values[page])
            self._point(page)
        self._shared = min(self._shared, written // self.page_tokens)
        while len(self.keys) < pages:
            shape = (self.kv_heads, self.page_tokens, self.row_bytes)
            self.keys.append(self._allocate(shape))
            self.values.append(self._allocate(shape))
            self._point(len(self.keys) - 1)
        return moved

    def _room(self, pages: int) -> bool:
        if pages <= len(self.k_table):
            return False
        size = max(pages, 2 * len(self.k_table), FIRST_PAGES)
        self.k_table, self.v_table = _longer(self.k_table, size), _longer(self.v_table, size)
        return True

    def _own(self, page: np.ndarray) -> np.ndarray:
        copy = self._allocate(page.shape)
        copy[...] = page
        return copy

    def _point(self, page: int) -> None:
        self.k_table[page], self.v_table[page] = self.keys[page].ctypes.data, self.values[page].ctypes.data

    def filled(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of the first `length` positions, float32 [length, kv_heads, D] each: for checks, page size and
        format forgotten."""
        keys, values = (part.transpose(1, 0, 2) for part in self.heads(length))
        return keys, values

    def heads(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """The same head by head, float32 [kv_heads, length, D] each, new arrays."""
        keys, values = (self._values(part) for part in self.rows(length))
        return keys, values

    def rows(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """The same as they are kept, page size forgotten: uint8 [kv_heads, length, row bytes] each, new arrays."""
        return self._joined(self.keys, length), self._joined(self.values, length)

    def fill(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Take what `rows` gave as the positions 0..length."""
        length = keys.shape[1]
        self.reserve(length)
        for pages, rows in ((self.keys, keys), (self.values, values)):
            for page in range(self.pages_for(length)):
                part = rows[:, page * self.page_tokens : (page + 1) * self.page_tokens]
                pages[page][:, : part.shape[1]] = part

    def _joined(self, pages: list[np.ndarray], length: int) -> np.ndarray:
        out = np.empty((self.kv_heads, length, self.row_bytes), np.uint8)
        for page in range(self.pages_for(length)):
            part = out[:, page * self.page_tokens : (page + 1) * self.page_tokens]
            part[...] = pages[page][:, : part.shape[1]]
        return out

    def _values(self, rows: np.ndarray) -> np.ndarray:
        if self.format == "f32":
            return rows.view(np.float32)
        if self.format == "f16":
            return rows.view(np.float16).astype(np.float32)
        codes = rows[..., : self.head_dim].view(np.int8).astype(np.float32)
        d = np.ascontiguousarray(rows[..., self.head_dim :]).view(np.float16).astype(np.float32)
        return codes * np.repeat(d, 32, axis=-1)

    def copy(self, length: int | None = None) -> KVPages:
        """Another holder of the pages, or of those with the first `length` positions."""
        other = KVPages(self.kv_heads, self.page_tokens, self.head_dim, self.format, self._allocate)
        count = len(self.keys) if length is None else min(len(self.keys), self.pages_for(length))
        other.k_table, other.v_table = (kept_memory.allocate((count,), np.uintp) for _ in "kv")
        other._take(self, count)
        return other

    def restore(self, source: KVPages, length: int) -> bool:
        """Hold `source`'s pages with the first `length` positions in place of one's own; whether the tables had to move."""
        count = min(len(source.keys), self.pages_for(length))
        moved = self._room(count)
        self._take(source, count)
        return moved

    def _take(self, source: KVPages, count: int) -> None:
        source._share(count)
        self.keys, self.values, self._shared = source.keys[:count], source.values[:count], count
        for mine, its in ((self.k_table, source.k_table), (self.v_table, source.v_table)):
            mine[:count] = its[:count]
            mine[count:] = 0

    def freeze(self) -> None:
        """Never write the pages again."""
        self._share(len(self.keys))

    def _share(self, count: int) -> None:
        for page in (*self.keys[self._shared : count], *self.values[self._shared : count]):
            page.flags.writeable = False  # of NumPy; kernels go by addresses, and `reserve` keeps them off
        self._shared = max(self._shared, count)

    def clear(self) -> None:
        """Let go of all pages."""
        self.keys, self.values, self._shared = [], [], 0
        self.k_table[:] = self.v_table[:] = 0

    def arrays(self) -> Iterator[np.ndarray]:
        """All memory it holds: pages and tables."""
        yield from (*self.keys, *self.values, self.k_table, self.v_table)


def _longer(table: np.ndarray, size: int) -> np.ndarray:
    longer = np.zeros(size, table.dtype)
    longer[: len(table)] = table
    return longer


@dataclass
class HybridState:
    """State of all layers after `position` tokens; `layers[i]` is a DeltaState or KVPages by the layer's type.

    `program` is the decoder's: kernel calls recorded over exactly these arrays, dropped when one of them moves.
    `open_chunks` is what GPU prefill carries beside them; it counts at its own position only.
    """

    position: int
    layers: list[DeltaState | KVPages]
    program: Any = field(default=None, repr=False, compare=False)
    open_chunks: OpenChunks | None = field(default=None, repr=False, compare=False)

    @classmethod
    def fresh(cls, config: ModelConfig, kv_block: int, kv_format: str = "f32") -> HybridState:
        """The state before the first token. ConfigError where keys do not fit `kv_format`."""
        delta = iter(empty_deltas(config, np.empty))
        heads, size = config.num_key_value_heads, config.head_dim
        state = cls(0, [KVPages(heads, kv_block, size, kv_format) if kind == "full_attention" else next(delta)
                        for kind in config.layer_types])
        for base in state._deltas():
            base[...] = 0  # the system gives the memory now, not page by page to the first token
        return state

    @staticmethod
    def least_bytes(c: ModelConfig, kv_block: int, kv_format: str = "f32") -> int:
        """Bytes of a copy of a state after one token, without allocating it."""
        attention = c.layer_types.count("full_attention")
        values = c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim
        delta = 4 * ((c.linear_conv_kernel_dim - 1) * c.conv_dim + values)
        page = KVPages(c.num_key_value_heads, kv_block, c.head_dim, kv_format).page_bytes + np.dtype(np.uintp).itemsize
        return (len(c.layer_types) - attention) * delta + 2 * attention * page

    @property
    def kv_format(self) -> str:
        """Of its keys and values; 'f32' where a model has none."""
        return next((layer.format for layer in self.layers if isinstance(layer, KVPages)), "f32")

    def reserve(self, end: int) -> None:
        """Have room for the keys and values of all positions before `end`, those from `position` on to be written."""
        for layer in self.layers:
            if isinstance(layer, KVPages) and layer.reserve(end, self.position):
                self.program = None

    def copy(self, is_live: bool = False) -> HybridState:
        """An independent one that shares pages of keys and values, never to be written while they are shared. is_live: to be
        worked on, not to be kept."""
        deltas = [layer for layer in self.layers if isinstance(layer, DeltaState)]
        states = iter(_like_deltas(deltas, np.empty if is_live else kept_memory.allocate))
        layers = [next(states) if isinstance(layer, DeltaState) else layer.copy(self.position) for layer in self.layers]
        other = HybridState(self.position, layers, open_chunks=self.current_chunks())
        for target, source in zip(other._deltas(), self._deltas(), strict=True):
            np.copyto(target, source)  # by one thread: in new memory several would wait for pages
        return other

    def page_tokens(self) -> set[int]:
        """Positions of a page, in all layers."""
        return {layer.page_tokens for layer in self.layers if isinstance(layer, KVPages)}

    def restore(self, source: HybridState) -> None:
        """Become what `source.copy()` would be, in the memory that is there; both are of one model, format and page size."""
        for mine, its in zip(self.layers, source.layers, strict=True):
            if isinstance(mine, KVPages) and mine.restore(its, source.position):
                self.program = None
        self.position, self.open_chunks = source.position, source.current_chunks()
        copy_arrays(zip(self._deltas(), source._deltas(), strict=True))

    def clear(self) -> None:
        """Become the state before the first token, in the memory that is there."""
        for layer in self.layers:
            if isinstance(layer, KVPages):
                layer.clear()
        for array in self._deltas():
            array[...] = 0
        self.position, self.open_chunks = 0, None

    def freeze(self) -> None:
        """Have NumPy refuse to write it from now on, and its pages counted as shared."""
        for layer in self.layers:
            if isinstance(layer, KVPages):
                layer.freeze()
        for array in self._deltas():
            array.flags.writeable = False

    def current_chunks(self) -> OpenChunks | None:
        """The open chunks, unless tokens have passed since."""
        chunks = self.open_chunks
        return chunks if chunks is not None and chunks.position == self.position else None

    def _deltas(self) -> Iterator[np.ndarray]:
        """The arrays of all DeltaStates in order."""
        for layer in self.layers:
            if isinstance(layer, DeltaState):
                yield from (layer.conv, layer.recurrent)

    def copy_cost(self) -> tuple[int, dict[int, int]]:
        """Bytes that a copy would allocate, and the memory that it would share, as `memory` has it."""
        own, shared = sum(array.nbytes for array in self._deltas()), []
        for layer in self.layers:
            if isinstance(layer, KVPages):
                count = min(len(layer.keys), layer.pages_for(self.position))
                own += 2 * count * layer.k_table.itemsize
                shared += [*layer.keys[:count], *layer.values[:count]]
        return own, memory_of([*shared, *_chunk_arrays(self.current_chunks())])

    def size_at(self, length: int) -> tuple[int, int]:
        """Bytes of a state after `length` tokens: what every copy has of its own, and the pages that copies share."""
        caches = [layer for layer in self.layers if isinstance(layer, KVPages)]
        pages = [2 * layer.pages_for(length) for layer in caches]
        own = sum(array.nbytes for array in self._deltas()) + sum(np.dtype(np.uintp).itemsize * count for count in pages)
        return own, sum(count * layer.page_bytes for count, layer in zip(pages, caches, strict=True))

    def memory(self) -> dict[int, int]:
        """Bytes of every piece of memory that it holds, by identity: what two states share has the same."""
        pages = (array for layer in self.layers if isinstance(layer, KVPages) for array in layer.arrays())
        return memory_of([*self._deltas(), *pages, *_chunk_arrays(self.open_chunks)])

    def arrays(self) -> dict[str, np.ndarray]:
        """Every value of the state by name, page size forgotten; equal states give equal bytes."""
        named: dict[str, np.ndarray] = {"position": np.array([self.position])}
        for i, layer in enumerate(self.layers):
            if isinstance(layer, DeltaState):
                named[f"layers.{i}.conv"], named[f"layers.{i}.recurrent"] = layer.conv, layer.recurrent
            else:
                named[f"layers.{i}.k"], named[f"layers.{i}.v"] = layer.filled(self.position)
        return named


def empty_deltas(c: ModelConfig, make: Allocate) -> list[DeltaState]:
    """States of all Gated DeltaNet layers with undefined content. One allocation for all layers: NumPy asks for huge pages from
    4 MB on, and the state of a layer is smaller."""
    layers = c.layer_types.count("linear_attention")
    conv = make((layers, c.linear_conv_kernel_dim - 1, c.conv_dim), np.float32)
    recurrent = make((layers, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim), np.float32)
    return [DeltaState(*parts) for parts in zip(conv, recurrent, strict=True)]


def _like_deltas(states: list[DeltaState], make: Allocate) -> list[DeltaState]:
    if not states:
        return []
    conv, recurrent = (make((len(states), *array.shape), np.float32) for array in (states[0].conv, states[0].recurrent))
    return [DeltaState(*parts) for parts in zip(conv, recurrent, strict=True)]


def _chunk_arrays(chunks: OpenChunks | None) -> list[np.ndarray]:
    return [array for arrays in chunks.layers.values() for array in arrays.values()] if chunks else []
