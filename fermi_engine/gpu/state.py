"""The state of a sequence on the device, and its way there and back.

Chunks of the gated delta rule sit at absolute positions, so what a prefill leaves behind is more than the recurrent state: the
state at the last chunk boundary, and k, v, g, beta of the tokens since (OpenChunks). A prefill that goes on from them gives the
bits of one that was never cut. A state without them, because the CPU decoded in between, starts a chunk of its own at its
position: the same mathematics with other roundings.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fermi_engine.config import ModelConfig
from fermi_engine.kernels.cpu import CpuKernels
from fermi_engine.kernels.device_arrays import DeviceArray
from fermi_engine.kernels.gpu import Device, DeviceBuffer, Event, Stream
from fermi_engine.kernels.gpu_kernels import CHUNK
from fermi_engine.kernels.sm20_attention import DeviceCache
from fermi_engine.model.gpu_layers import DeltaOnDevice
from fermi_engine.model.gpu_weights import Layout
from fermi_engine.state import HybridState, KVPages, OpenChunks

_ROWS = ("k", "v", "g", "beta")


class DeviceState:
    """Recurrent states, conv tails and open chunks in one buffer, keys and values of all positions before `end` in another."""

    def __init__(self, c: ModelConfig, end: int, states: DeviceBuffer | None, kv: DeviceBuffer | None) -> None:
        """states, kv: buffers of `nbytes`, None where a model has none of them."""
        self.end, self._states = end, states
        delta, cache = _layouts(c, end)
        rows = {**({} if states is None else delta.within(states)), **({} if kv is None else cache.within(kv))}
        parts: list[dict[str, DeviceArray]] = [{} for _ in c.layer_types]
        for name, array in rows.items():
            layer, _, part = name.partition(".")
            parts[int(layer)][part] = array
        self.layers: list[DeltaOnDevice | DeviceCache] = [
            DeviceCache(**arrays) if kind == "full_attention" else DeltaOnDevice.of(arrays)
            for arrays, kind in zip(parts, c.layer_types, strict=True)]

    @staticmethod
    def nbytes(c: ModelConfig, end: int) -> tuple[int, int]:
        """Bytes of the two buffers."""
        delta, cache = _layouts(c, end)
        return delta.end, cache.end

    def upload(self, device: Device, stream: Stream, state: HybridState) -> None:
        """Put `state` on the device. Keys and values kept as f16 or q8_0 come back as what those stand for."""
        if state.position == 0:  # before the first token everything is zero
            if self._states is not None:
                device.memset(self._states, 0, self._states.nbytes, stream)
            return
        opened = state.current_chunks()
        for layer, (mine, host) in enumerate(zip(self.layers, state.layers, strict=True)):
            if isinstance(mine, DeviceCache):
                for target, rows in zip((mine.k, mine.v), host.heads(state.position), strict=True):
                    _upload_rows(device, stream, target, rows)
                continue
            mine.conv.upload(device, host.conv, stream)
            source = {"state": host.recurrent} if opened is None else opened.layers[layer]
            mine.carried.state.upload(device, np.ascontiguousarray(source["state"]), stream)
            mine.carried.tokens = 0 if opened is None else opened.tokens
            for name in _ROWS if opened is not None else ():
                getattr(mine.carried, name).rows(0, opened.tokens).upload(device, source[name], stream)

def _layouts(c: ModelConfig, end: int) -> tuple[Layout, Layout]:
    kinds = list(enumerate(c.layer_types))
    delta = {f"{i}.{name}": shape for i, kind in kinds if kind != "full_attention"
             for name, shape in DeltaOnDevice.shapes(c).items()}
    cache = {f"{i}.{name}": (c.num_key_value_heads, end, c.head_dim) for i, kind in kinds if kind == "full_attention"
             for name in "kv"}
    return Layout(delta), Layout(cache)


def _head(array: DeviceArray, head: int, first: int, count: int) -> DeviceArray:
    """Positions first.. of one head of [HK, capacity, D]."""
    heads, capacity, dim = array.shape
    return array.reshape(heads * capacity, dim).rows(head * capacity + first, count)


def _upload_rows(device: Device, stream: Stream, target: DeviceArray, rows: np.ndarray) -> None:
    """Host [HK, length, D] into the first positions of [HK, capacity, D]."""
    for head in range(len(rows)):
        _head(target, head, 0, rows.shape[1]).upload(device, rows[head], stream)


class Fetch:
    """What the tokens from `state` to position `end` leave behind, on its way to the host: layer by layer on a stream of its own
    into `staging`, page-locked where the system lets us, while later layers compute. The host's state is touched at the end."""

    def __init__(self, device: Device, c: ModelConfig, on_device: DeviceState, state: HybridState, stream: Stream,
                 end: int | None = None, open_tokens: int | None = None) -> None:
        """end: by default that of `on_device`. open_tokens: how many a chunk has been open for; by default as for a prefill that
        went on from `state`."""
        self._device, self._state, self._stream, self._source = device, state, stream, on_device
        self._end = on_device.end if end is None else end
        self._start, self._tokens = state.position, self._end - state.position
        delta = [i for i, kind in enumerate(c.layer_types) if kind != "full_attention"]
        shapes = DeltaOnDevice.shapes(c)
        if open_tokens is None:
            open_tokens = ((state.open_chunks.tokens if state.current_chunks() else 0) + self._tokens) % CHUNK
        self._open = open_tokens
        rows = {"state": shapes["state"], **{name: (self._open, *shapes[name][1:]) for name in _ROWS}} if self._open else {}
        kept = {f"{i}.{name}": shapes[name] for i in delta for name in ("conv", "final")}
        kept |= {f"{i}.{name}": (c.num_key_value_heads, self._tokens, c.head_dim) for i in range(len(c.layer_types))
                 if i not in delta for name in "kv"}
        self._kept = Layout(kept)
        self._chunks = Layout({f"{i}.{name}": shape for i in delta for name, shape in rows.items()})
        self._events: list[Event] = []

    @property
    def nbytes(self) -> int:
        """Bytes of staging."""
        return self._kept.end + self._chunks.end

    def begin(self, staging: np.ndarray) -> None:
        """staging: uint8 [>= nbytes], not to be used otherwise until `finish` has returned."""
        self._host = self._kept.over(staging), self._chunks.over(staging[self._kept.end :])

    def layer(self, layer: int, done: Event) -> None:
        """Give the copies of a layer that has passed its last block when `done` is reached; layers in order."""
        self._stream.wait(done)
        mine, (kept, chunks) = self._source.layers[layer], self._host
        if isinstance(mine, DeviceCache):
            for name, array in (("k", mine.k), ("v", mine.v)):
                for head, rows in enumerate(kept[f"{layer}.{name}"]):
                    _head(array, head, self._start, self._tokens).download(self._device, rows, self._stream, f"keys {layer}")
        else:
            for name, array in (("conv", mine.conv), ("final", mine.final)):
                array.download(self._device, kept[f"{layer}.{name}"], self._stream, f"state {layer}")
            for name in ("state", *_ROWS) if self._open else ():
                array = getattr(mine.carried, name)
                rows = array if name == "state" else array.rows(0, self._open)
                rows.download(self._device, chunks[f"{layer}.{name}"], self._stream, f"state {layer}")
        self._events.append(self._device.event())
        self._events[-1].record(self._stream)

    def finish(self, kernels: CpuKernels) -> Callable[[], None]:
        """Wait for the copies, layer by layer; the function returned puts all into the host's state and moves it on. Staging
        must stay as it is until that has been called. Keys and values go into place at once, behind the state's position, where
        nobody reads before it moves on."""
        kept, chunks = self._host
        self._state.reserve(self._end)  # here, where the device is still at work
        own = self._chunks.over(np.empty(self._chunks.end, np.uint8))  # in one piece: huge pages
        start, fetched = np.array([self._start], np.int64), []
        for layer, (host, event) in enumerate(zip(self._state.layers, self._events, strict=True)):
            event.synchronize()
            if isinstance(host, KVPages):
                rows = (np.ascontiguousarray(kept[f"{layer}.{name}"].transpose(1, 0, 2)) for name in "kv")
                kernels.kv_append(host, start, *rows)
            else:
                fetched += [(host.conv, kept[f"{layer}.conv"]), (host.recurrent, kept[f"{layer}.final"])]
            for name in [name for name in own if name.startswith(f"{layer}.")]:
                own[name][...] = chunks[name]
        return lambda: self._commit(fetched, own)

    def _commit(self, fetched: list[tuple[np.ndarray, np.ndarray]], own: dict[str, np.ndarray]) -> None:
        state = self._state
        for target, source in fetched:
            target[...] = source
        layers: dict[int, dict[str, np.ndarray]] = {}
        for name, array in own.items():
            layer, _, part = name.partition(".")
            layers.setdefault(int(layer), {})[part] = array
        state.position = self._end
        state.open_chunks = OpenChunks(state.position, self._open, layers) if layers else None
