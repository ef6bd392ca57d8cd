"""States at positions inside a GPU prefill, on their way to the host while later layers compute.

The recurrence of a layer is cut there, which changes no bit: a part ends with the state that the next one begins with. Where a
chunk of 64 tokens ends, that state is all there is; elsewhere the chunk's own beginning and its rows so far belong to it
(state.OpenChunks). Keys and values need nothing: they lie in the cache of the whole prompt.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fermi_engine import kept_memory
from fermi_engine.config import ModelConfig
from fermi_engine.kernels.gpu import Device, DeviceBuffer, Stream
from fermi_engine.kernels.gpu_kernels import CHUNK
from fermi_engine.model.gpu_layers import DeltaOnDevice, StopsOnDevice
from fermi_engine.model.gpu_weights import Layout
from fermi_engine.state import HybridState, OpenChunks, empty_deltas

RING = 4  # layers whose states are on their way at a time
LAG = 3  # a slot is emptied when so many layers have been given, its own among them
CHUNK_PARTS = ("state", "k", "v", "g", "beta")
BUFFER = "states at boundaries"


class Stops(Protocol):
    """Who wants states of a prefill, and where. See taking.Taking."""

    def wanted(self) -> list[int]:
        """Positions inside the prefill, those that matter most first."""

    def reserve(self, own: dict[int, int], state: HybridState) -> list[int]:
        """Asked before anything is allocated: own: bytes that the state at each position takes beside its pages. Returns the
        positions for which there is room, in rising order."""

    def made(self, states: list[HybridState], seconds: float) -> None:
        """The states at these positions, and how long the host was busy with them."""


@dataclass(frozen=True)
class Place:
    """A position, and how many tokens its chunk has up to there (0: it ends there)."""

    position: int
    opened: int


def places_of(positions: Sequence[int], state: HybridState) -> list[Place]:
    """In rising order, for a prefill that goes on from `state`."""
    chunks = state.current_chunks()
    base = state.position - (chunks.tokens if chunks else 0)
    return [Place(position, (position - base) % CHUNK) for position in sorted(positions)]


def _shapes(c: ModelConfig, place: Place) -> dict[str, tuple[int, ...]]:
    """What a layer's state at a place consists of."""
    shapes = DeltaOnDevice.shapes(c)
    names = ("conv", "final", "state") if place.opened else ("conv", "final")
    rows = {name: (place.opened, *shapes[name][1:]) for name in ("k", "v", "g", "beta")} if place.opened else {}
    return {**{name: shapes[name] for name in names}, **rows}


def _layout(c: ModelConfig, places: Sequence[Place]) -> Layout:
    return Layout({f"{i}.{name}": shape for i, place in enumerate(places) for name, shape in _shapes(c, place).items()})


def device_bytes(c: ModelConfig, places: Sequence[Place]) -> int:
    """Bytes of device memory, and of staging memory, for states at these places; 0 for models that have none."""
    return RING * _layout(c, places).end if places and "linear_attention" in c.layer_types else 0


def host_bytes(c: ModelConfig, place: Place) -> int:
    """Bytes of a state's recurrent parts on the host."""
    shapes, layers = DeltaOnDevice.shapes(c), c.layer_types.count("linear_attention")
    delta = 4 * layers * (math.prod(shapes["conv"]) + math.prod(shapes["final"]))
    return delta + (_chunk_layout(c, place).end if place.opened else 0)


def _chunk_layout(c: ModelConfig, place: Place) -> Layout:
    return Layout({f"{layer}.{name}": shape for layer, kind in enumerate(c.layer_types) if kind != "full_attention"
                   for name, shape in _shapes(c, place).items() if name in CHUNK_PARTS})


def _chunk_arrays(c: ModelConfig, place: Place) -> dict[str, np.ndarray]:
    layout = _chunk_layout(c, place)
    return layout.over(_later((layout.end,), np.uint8)) if place.opened else {}


def _later(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Memory that the threads which write it get from the system, while the device works."""
    return kept_memory.allocate(shape, dtype, False)


class Boundaries:
    """States at `places` of one prefill. `at` and `sent` enclose the launches of a layer's mixer; `finish` waits for all.

    A slot of the ring goes from the device into staging memory, then by threads of the host's to where it is kept. `seconds`
    is how long the caller had to wait for those threads.
    """

    def __init__(self, device: Device, c: ModelConfig, places: Sequence[Place], blocks: Sequence[tuple[int, int]],
                 compute: Stream, results: Stream) -> None:
        """blocks: positions (begin, end) that go through all layers together."""
        self._device, self._compute, self._results, self._next, self.seconds = device, compute, results, 0, 0.0
        self._places = [[place for place in places if begin < place.position <= end] for begin, end in blocks]
        self._begins = [begin for begin, _ in blocks]
        self._layouts = [_layout(c, inside) for inside in self._places]
        self._size = max((layout.end for layout in self._layouts), default=0)  # of a slot
        self._ready, self._copied = ([device.event() for _ in range(RING)] for _ in "12")
        self._pending: list[tuple[int, int] | None] = [None] * RING  # block and layer of what a slot holds
        self._moving: list[Future[None] | None] = [None] * RING
        delta = [layer for layer, kind in enumerate(c.layer_types) if kind != "full_attention"]
        self._delta = {layer: i for i, layer in enumerate(delta)}
        self._kept = {place: (empty_deltas(c, _later) if delta else [], _chunk_arrays(c, place)) for place in places}

    @property
    def staging_bytes(self) -> int:
        """Bytes of host memory that copies go through."""
        return RING * self._size

    def begin(self, buffer: DeviceBuffer | None, staging: np.ndarray) -> None:
        """buffer: of device_bytes; staging: uint8 [>= staging_bytes], page-locked if that can be had."""
        self._buffer = buffer
        self._staging = [staging[slot * self._size : (slot + 1) * self._size] for slot in range(RING)]

    def at(self, block: int, layer: int) -> StopsOnDevice | None:
        """Where the layer's mixer is to leave its states; None where it need not."""
        if layer not in self._delta or not self._places[block]:
            return None
        slot = self._next % RING
        self._wait(slot)
        arrays = self._layouts[block].within(self._buffer, slot * self._size)
        cuts = [place.position - self._begins[block] for place in self._places[block]]
        return StopsOnDevice(cuts, [place.opened for place in self._places[block]], arrays)

    def sent(self, block: int, layer: int) -> None:
        """The launches that `at` was asked for are given: copy what they leave behind when it is there."""
        slot, size = self._next % RING, self._layouts[block].end
        self._ready[slot].record(self._compute)
        self._results.wait(self._ready[slot])
        self._device.d2h(self._staging[slot][:size], self._buffer, self._results, slot * self._size, f"boundaries {layer}")
        self._copied[slot].record(self._results)
        self._pending[slot] = block, layer
        self._next += 1
        self._take((self._next - LAG) % RING)  # which has long been there, while the device stays busy with what is queued

    def _take(self, slot: int) -> None:
        """Have what a slot holds moved to where it is kept."""
        if self._pending[slot] is None:
            return
        (block, layer), self._pending[slot] = self._pending[slot], None
        self._copied[slot].synchronize()
        self._moving[slot] = kept_memory.copiers().submit(kept_memory.copy_some, self._pairs(block, layer, self._staging[slot]))

    def _pairs(self, block: int, layer: int, staging: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        arrays, pairs = self._layouts[block].over(staging), []
        for i, place in enumerate(self._places[block]):
            deltas, chunks = self._kept[place]
            delta = deltas[self._delta[layer]]
            pairs += [(delta.conv, arrays[f"{i}.conv"]), (delta.recurrent, arrays[f"{i}.final"])]
            pairs += [(chunks[f"{layer}.{name}"], arrays[f"{i}.{name}"]) for name in CHUNK_PARTS if place.opened]
        return pairs

    def _wait(self, slot: int) -> None:
        start = time.perf_counter()
        if self._moving[slot] is not None:
            self._moving[slot].result()
            self._moving[slot] = None
        self.seconds += time.perf_counter() - start

    def finish(self) -> None:
        """Take all that is still on its way."""
        for turn in range(RING):
            self._take((self._next + turn) % RING)
        self.abandon()

    def abandon(self) -> None:
        """Let go of staging memory, whatever is still on its way to it."""
        for slot in range(RING):
            self._wait(slot)

    def states(self, end: HybridState) -> list[HybridState]:
        """The whole states, which share pages with `end`, the state that the prefill left."""
        return [self._state(place, end) for place in self._kept]

    def _state(self, place: Place, end: HybridState) -> HybridState:
        deltas, chunks = self._kept[place]
        layers = [deltas[self._delta[i]] if i in self._delta else layer.copy(place.position)
                  for i, layer in enumerate(end.layers)]
        found: dict[int, dict[str, np.ndarray]] = {}
        for name, array in chunks.items():
            layer, _, part = name.partition(".")
            found.setdefault(int(layer), {})[part] = array
        opened = OpenChunks(place.position, place.opened, found) if found else None
        return HybridState(place.position, layers, open_chunks=opened)


