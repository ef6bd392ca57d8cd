"""A dense model wholly on the GPU: weights, states, prefill and decode.

The device holds one timeline at a time, that of the HybridState it last worked for. The host's arrays of that state stand where
they were when the two last agreed; `fetch` brings them up to date before a snapshot, and before another state takes the place.
Activations are float32: the CPU path's equal is EngineConfig(activations='f32').
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from fermi_engine import placement
from fermi_engine.errors import DeviceError, DeviceMemoryError
from fermi_engine.gpu import boundaries as gpu_boundaries
from fermi_engine.gpu.boundaries import Boundaries, Place, Stops
from fermi_engine.gpu.state import DeviceState, Fetch
from fermi_engine.gpu.stream import HostMemory
from fermi_engine.kernels.device_arrays import DeviceArray
from fermi_engine.kernels.gpu import Device, DeviceBuffer, Event
from fermi_engine.kernels.sm20_vendor import VendorKernels
from fermi_engine.model.decoder import Decoder
from fermi_engine.model.gpu_inputs import TEXT, Inputs, splice
from fermi_engine.model.gpu_layers import Activations, BlockOnDevice, DeltaOnDevice, DeviceWeights, Kernels
from fermi_engine.model.gpu_token import STEP, TokenArrays, TokenOnDevice, unfit_for_tokens
from fermi_engine.model.gpu_weights import DenseWeights, EndWeights, WeightBlock, unfit
from fermi_engine.model.weights import Weights
from fermi_engine.placement import BLOCK_STEP, MOST_TOKENS, Ledger, blocks_of, rounded
from fermi_engine.report import note as say
from fermi_engine.report import size
from fermi_engine.state import HybridState

Progress = Callable[[int, int], None]
CAPACITY_STEP = 1024  # positions by which the cache grows at least
STEP_BYTES = 256  # at the front of staging memory: what the host gives for a token
OFFER = "raise --vram, or run with --decode cpu"


class Resident:
    """One model on one device. Calls for a state: `admit`, which may refuse and changes nothing then but what is in memory, and
    `prefill` or `decode`. After one of those has failed, or was interrupted, the device has lost the state: the host's arrays
    still are those of its last `fetch`, and the next state can come."""

    def __init__(self, device: Device, weights: Weights, decoder: Decoder, vram: int | None = None, gemm: str = "vendor",
                 context: int | None = None, token_block: int | None = None, note: Callable[[str], None] = say) -> None:
        """vram: bytes of device memory at most, None for what is free. gemm: prefill's products by our kernels (`own`) or the
        vendor's sgemm (`vendor`). context: most positions there will be. token_block: tokens of a block of prefill, in place of
        as many as there is memory for. Raises DeviceError when the model does not run or does not fit."""
        c = self.config = weights.config
        self.device, self.decoder, self.token_block = device, decoder, token_block
        self.context = context or c.max_position_embeddings
        dense = [DenseWeights(weights, layer) for layer in range(0 if c.num_experts else c.num_hidden_layers)]
        ends = EndWeights(weights)
        columns = max(block.most_columns for block in (*dense, ends))
        reason = unfit_for_tokens(c, columns) or unfit(c, ends.formats.union(*(block.formats for block in dense)), set())
        if reason:
            raise DeviceError(f"the model cannot live on the GPU: {reason}; run with --decode cpu")
        self.gemm = gemm if gemm == "own" else device.vendor()
        self.ledger = Ledger(device, vram)
        self.host = HostMemory(device, note)
        self.compute, self.results = device.stream("compute"), device.stream("results")
        self._activations: DeviceBuffer | None = None
        self._kv: list[DeviceBuffer] = []  # whose size grows with the context
        self._capacity = 0
        self.make_room: Callable[[], None] | None = None  # what else the ledger holds gives back what it can
        self._owner: weakref.ref[HybridState] | None = None
        self._position = self._fetched = 0  # of the device's timeline, and of its owner's arrays
        self._is_open = False  # whether chunks are carried up to its position
        with self.ledger.scope(only_after_errors=True):
            self._weights = [self._load(block, placement.resident_name(layer)) for layer, block in enumerate(dense)]
            self._ends = self._load(ends, "embedding and head")
            self._states = self._alloc(DeviceState.nbytes(c, 1)[0], "states")
            expanded = max(block.expanded_bytes for block in dense)
            self._vendor = self._vendor_kernels(None if gemm == "own" else self._alloc(expanded, "expanded weights"))
            device.synchronize()
        self.kernels = Kernels(device, self.compute, self._vendor)

    # memory

    def _alloc(self, nbytes: int, name: str) -> DeviceBuffer | None:
        """A buffer, None for no bytes. DeviceMemoryError offers the CPU."""
        if not nbytes:
            return None
        if self.ledger.used + rounded(nbytes) > self.ledger.limit:
            raise DeviceMemoryError(f"{name} take {nbytes} bytes of device memory, {self.ledger.limit - self.ledger.used} of the "
                                    f"{self.ledger.limit} allowed are left: {OFFER}")
        return self.ledger.alloc(nbytes, name)

    def _load(self, block: WeightBlock, name: str) -> DeviceWeights:
        buffer = self._alloc(block.nbytes, name)
        for offset, piece in block.pieces():
            self.host.copy(buffer, offset, piece, self.compute, name, piece)
        return block.within(buffer)

    def _vendor_kernels(self, scratch: DeviceBuffer | None) -> VendorKernels | None:
        if self.gemm == "own":
            return None
        return VendorKernels(self.device, self.compute, scratch and DeviceArray.within(scratch, (scratch.nbytes // 4,)))

    def admit(self, state: HybridState, tokens: int, is_prefill: bool) -> None:
        """Have memory for `tokens` more. DeviceMemoryError, before any work, when there is none; `state` is whole then."""
        end = self.position(state) + tokens
        if end > self._capacity:
            least = rounded(Activations(self.config, min(tokens, BLOCK_STEP)).nbytes) if is_prefill else 0
            self._grow(self._affordable(end, least))
        if is_prefill:
            self._block_tokens(tokens, end)

    def _affordable(self, end: int, beside: int) -> int:
        """Positions to have room for: twice what there was, and less where memory is short, `beside` other bytes counted."""
        least = _stepped(end, BLOCK_STEP)
        wanted = max(_stepped(end, CAPACITY_STEP), min(2 * self._capacity, self.context))
        mine = (*self._kv, *([self._activations] if self._activations else []))
        for make_room in (None, self.make_room):
            if make_room is not None:
                make_room()
            left = self.ledger.limit - self.ledger.used + sum(rounded(buffer.nbytes) for buffer in mine)
            for capacity in (wanted, least):
                if sum(map(rounded, self._growing(capacity).values())) + beside <= left:
                    return capacity
        return least

    def _grow(self, capacity: int) -> None:
        """Room for so many positions, more or fewer than there was."""
        self._evict()
        for buffer in (*self._kv, *([self._activations] if self._activations else [])):
            self.ledger.free(buffer)
        self._kv, self._activations, self._capacity = [], None, 0
        with self.ledger.scope(only_after_errors=True):
            self._kv = [buffer for name, nbytes in self._growing(capacity).items() if (buffer := self._alloc(nbytes, name))]
        self._settle(capacity)

    def _growing(self, capacity: int) -> dict[str, int]:
        kv, token = DeviceState.nbytes(self.config, capacity)[1], TokenArrays(self.config, capacity).nbytes
        return {"keys and values": kv, "one token": token}

    def _settle(self, capacity: int) -> None:
        """The arrays in the buffers there now are, and the launches of a token over them."""
        kv = self._kv[0] if len(self._kv) > 1 else None
        self._device_state = DeviceState(self.config, capacity, self._states, kv)
        arrays = TokenArrays(self.config, capacity).within(self._kv[-1])
        rotary = self.decoder.rotary
        for name, host in (("inv_freq", rotary.inv_freq), ("axis", rotary.axis)):
            arrays[name].upload(self.device, host, self.compute, name)
        self.token = TokenOnDevice(self.config, self.device, self.compute, arrays, self._weights, self._ends,
                                   self._device_state.layers)
        self._capacity = capacity

    def _block_tokens(self, tokens: int, end: int | None = None) -> int:
        """Tokens of a block of a prefill of so many: all, or what there is memory for; that memory is there then. end: the
        position behind them, where the device need not hold a timeline yet: a cache with room for more gives it up."""
        wanted = min(self.token_block or MOST_TOKENS, tokens)
        if self._activations is not None and Activations(self.config, wanted).nbytes <= self._activations.nbytes:
            return wanted
        self.spare()
        block = self._most_tokens(wanted)
        if not block and self.make_room is not None:
            self.make_room()
            block = self._most_tokens(wanted)
        if not block and end is not None and self._capacity > _stepped(end, BLOCK_STEP):
            self._grow(_stepped(end, BLOCK_STEP))
            block = self._most_tokens(wanted)
        if not block:
            least, left = Activations(self.config, min(tokens, BLOCK_STEP)).nbytes, self.ledger.limit - self.ledger.used
            raise DeviceMemoryError(f"prefill takes at least {least} bytes of device memory beside weights, keys and values of "
                                    f"{self._capacity} positions; {left} of the {self.ledger.limit} allowed are left: {OFFER}")
        self._activations = self._alloc(Activations(self.config, block).nbytes, "activations")
        return block

    def _most_tokens(self, wanted: int) -> int:
        """Of a block for whose activations there is room; 0 where there is none for the smallest."""
        left = self.ledger.limit - self.ledger.used
        return next((most for most in _sizes(wanted) if rounded(Activations(self.config, most).nbytes) <= left), 0)

    def spare(self) -> None:
        """Give back what only a prefill uses; none may be under way. The next one takes what there is then."""
        if self._activations is not None:
            self.device.synchronize()
            self.ledger.free(self._activations)
            self._activations = None

    # the timeline on the device

    def position(self, state: HybridState) -> int:
        """How many tokens of `state` have passed, on the device if it is there."""
        return self._position if self._owns(state) else state.position

    def _owns(self, state: HybridState) -> bool:
        return self._owner is not None and self._owner() is state and state.position == self._fetched

    def fetch(self, state: HybridState) -> None:
        """Bring the host's arrays up to date, to the bit, if the device has newer ones."""
        if not self._owns(state) or self._position == self._fetched:
            return
        c, layers = self.config, self._device_state.layers
        deltas = [layer for layer in layers if isinstance(layer, DeltaOnDevice)]
        opened = deltas[0].carried.tokens if deltas and self._is_open else 0
        fetch = Fetch(self.device, c, self._device_state, state, self.results, self._position, opened)
        fetch.begin(self._staging(fetch.nbytes))
        done = self._mark()
        for layer in range(len(layers)):
            fetch.layer(layer, done)
        fetch.finish(self.decoder.kernels)()
        self._fetched = self._position

    def forget(self, state: HybridState) -> None:
        """Somebody has put another content into `state`."""
        if self._owner is not None and self._owner() is state:
            self._owner = None

    def _evict(self) -> None:
        """Let go of the device's timeline; its owner, if it is alive, gets what it lacks."""
        owner = self._owner and self._owner()
        if owner is not None:
            self.fetch(owner)
        self._owner = None

    def _adopt(self, state: HybridState) -> None:
        """Have the device's timeline be that of `state`."""
        if self._owns(state):
            return
        self._evict()
        on_device = self._device_state
        on_device.upload(self.device, self.compute, state)
        for mine, host in zip(on_device.layers, state.layers, strict=True):
            if isinstance(mine, DeltaOnDevice):
                if state.position == 0:
                    mine.carried.tokens = 0
                else:
                    mine.final.upload(self.device, host.recurrent, self.compute)
        self._owner, self._position, self._fetched = weakref.ref(state), state.position, state.position
        self._is_open = True

    @contextmanager
    def _lost_after_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._owner = None
            with suppress(DeviceError):  # the first error tells more
                self.device.synchronize()
            raise

    # tokens

    def prefill(self, ids: np.ndarray, state: HybridState, progress: Progress | None = None,
                stops: Stops | None = None, inputs: Inputs = TEXT) -> np.ndarray:
        """ids int32 [T] after `state` -> logits float32 [vocab] of the last, a new array. progress(done, total) after each block
        but what is still queued. stops: who wants states of positions inside; as many as fit beside what there is, and `state`
        is up to date then. inputs: positions and images of the tokens. Raises DeviceError, one line."""
        return self._prefill(ids, state, inputs, progress, stops)[0]

    def rows(self, ids: np.ndarray, state: HybridState, inputs: Inputs = TEXT) -> np.ndarray:
        """The same, but logits of every token, [T, vocab]."""
        return np.stack(self._prefill(ids, state, inputs, is_every=True))

    def _prefill(self, ids: np.ndarray, state: HybridState, inputs: Inputs, progress: Progress | None = None,
                 stops: Stops | None = None, is_every: bool = False) -> list[np.ndarray]:
        self.admit(state, len(ids), True)
        with self._lost_after_errors():
            self._adopt(state)
            if stops is not None:
                self.fetch(state)
            self._open_chunks()
            start, most = self._position, self._block_tokens(len(ids))
            cuts = blocks_of(start, start + len(ids), most) if most < len(ids) else ((start, start + len(ids)),)
            rows: list[np.ndarray] = []
            queued: list[tuple[Event, int]] = []
            with self._boundaries(state, cuts, stops) as boundaries:
                for number, (begin, end) in enumerate(cuts):
                    block = self._block(ids[begin - start : end - start], begin, inputs)
                    self._layers(block, number, boundaries)
                    rows += [self._logits(block, token) for token in range(block.tokens)] if is_every else []
                    queued.append((self._mark(), end - start))
                    if progress is not None and len(queued) > 1:
                        event, done = queued.pop(0)
                        event.synchronize()
                        progress(done, len(ids))
            rows = rows or [self._logits(block, block.tokens - 1)]
            self._position += len(ids)
            if stops is not None:
                self.fetch(state)
        if stops is not None:
            stops.made(boundaries.states(state), boundaries.seconds)
        if progress is not None:
            progress(len(ids), len(ids))
        return rows

    def _layers(self, block: BlockOnDevice, number: int, boundaries: Boundaries) -> None:
        """Give all layers of a block."""
        for layer, (w, mine) in enumerate(zip(self._weights, self._device_state.layers, strict=True)):
            stops = boundaries.at(number, layer)
            block.mixer(w, mine, stops)
            if stops is not None:
                boundaries.sent(number, layer)
            block.route(w)
            block.shared(w)
            block.finish()

    @contextmanager
    def _boundaries(self, state: HybridState, blocks: Sequence[tuple[int, int]], stops: Stops | None) -> Iterator[Boundaries]:
        """States inside a prefill that goes on from `state`; staging memory is theirs until they are all there."""
        places = self._places(state, stops)
        with self.ledger.scope():
            buffer = self._alloc(gpu_boundaries.device_bytes(self.config, places), gpu_boundaries.BUFFER)
            found = Boundaries(self.device, self.config, places, blocks, self.compute, self.results)
            found.begin(buffer, self._staging(found.staging_bytes))
            try:
                yield found
                found.finish()
            finally:
                found.abandon()

    def _places(self, state: HybridState, stops: Stops | None) -> list[Place]:
        """Where states are left, those that matter most if there is not memory for all."""
        wanted, left = stops.wanted() if stops is not None else [], self.ledger.limit - self.ledger.used
        while wanted:
            places = gpu_boundaries.places_of(wanted, state)
            if rounded(gpu_boundaries.device_bytes(self.config, places)) <= left:
                room = stops.reserve({p.position: gpu_boundaries.host_bytes(self.config, p) for p in places}, state)
                return [place for place in places if place.position in room]
            wanted = wanted[: len(wanted) // 2]
        return []

    def _logits(self, block: BlockOnDevice, token: int) -> np.ndarray:
        """Those of a token of a block that has passed all layers."""
        row, x = block["x"].rows(token, 1), self.token["x"]
        self.device.d2d(x.buffer, row.buffer, x.nbytes, self.compute, x.offset, row.offset, "last row")
        return self._head()

    def decode(self, token: int, state: HybridState, shift: int = 0) -> np.ndarray:
        """One token of text after `state` -> its logits float32 [vocab], a new array; the host waits once. shift: how far its
        position is ahead of the count of tokens. Raises DeviceError."""
        self.admit(state, 1, False)
        with self._lost_after_errors():
            self._step(token, state, shift)
            return self._head()

    def greedy(self, token: int, state: HybridState, shift: int = 0) -> int:
        """One token after `state` -> the likeliest next one, the lowest of equals; -1 where all logits are NaN. The host waits
        once, for its id."""
        index = np.empty(1, np.int32)
        self.admit(state, 1, False)
        with self._lost_after_errors():
            self._step(token, state, shift)
            self.device.replay(self.token.head, self.compute)
            self.device.replay(self.token.choice, self.compute)
            self.token["index"].download(self.device, index, self.compute)
        return int(index[0])

    def _step(self, token: int, state: HybridState, shift: int) -> None:
        """Give the layers of one token: its place in the cache is its number, its position on each axis `shift` further."""
        self._adopt(state)
        given = self.host.staging(STEP_BYTES)[: 4 * STEP].view(np.int32)
        given[:] = token, self._position, *[self._position + shift] * (STEP - 2)
        self.token["step"].upload(self.device, given, self.compute, "step")
        self.device.replay(self.token.layers, self.compute)
        self._position, self._is_open = self._position + 1, False

    def _head(self) -> np.ndarray:
        """Logits of the hidden row that stands in the token's x."""
        self.device.replay(self.token.head, self.compute)
        vocab = self.config.vocab_size
        logits = self._staging(4 * vocab)[: 4 * vocab].view(np.float32)
        self.token["logits"].download(self.device, logits, self.compute)
        self.compute.synchronize()
        return logits.copy()

    def _block(self, ids: np.ndarray, begin: int, inputs: Inputs) -> BlockOnDevice:
        """The embeddings of a block and its tables, on the device."""
        arrays = Activations(self.config, len(ids)).within(self._activations)
        positions = inputs.positions(begin, begin + len(ids))
        rows = DeviceArray.within(self._activations, ids.shape, np.int32, arrays["u"].offset)  # u is not in use yet
        rotary = self.decoder.rotary
        for array, host in ((rows, ids), (arrays["positions"], positions), (arrays["inv_freq"], rotary.inv_freq),
                            (arrays["axis"], rotary.axis)):
            array.upload(self.device, np.ascontiguousarray(host), self.compute)
        self.kernels.rows.rows(self._ends["embed_tokens"], arrays["x"], rows)
        splice(self.device, self.compute, arrays["x"], inputs.embeddings(begin, begin + len(ids)))
        block = BlockOnDevice(self.config, self.kernels, arrays, len(ids), begin)
        block.tables()
        return block

    def _open_chunks(self) -> None:
        """Where decoded tokens have passed since the last prefill, chunks begin anew at the present state."""
        if self._is_open:
            return
        for layer in self._device_state.layers:
            if isinstance(layer, DeltaOnDevice):
                final, state = layer.final, layer.carried.state
                self.device.d2d(state.buffer, final.buffer, state.nbytes, self.compute, state.offset, final.offset, "state")
                layer.carried.tokens = 0
        self._is_open = True

    def _staging(self, nbytes: int) -> np.ndarray:
        """Host memory for what comes back, behind what was given for the last token."""
        return self.host.staging(STEP_BYTES + nbytes)[STEP_BYTES:]

    def _mark(self) -> Event:
        event = self.device.event()
        event.record(self.compute)
        return event

    def line(self) -> str:
        """Where the model is, whose products there are, and the memory that took."""
        return (f"the model is on the GPU, products of prefill by {'own kernels' if self.gemm == 'own' else self.gemm}, room for "
                f"{self._capacity} tokens, peak {size(self.ledger.peak)} of {size(self.ledger.limit)}")

    def close(self) -> None:
        """Free everything; the device stays open."""
        self.device.synchronize()
        self._owner = None
        self.ledger.settle({})
        self.host.close()


def _stepped(count: int, step: int) -> int:
    """The next multiple."""
    return -(-count // step) * step


def _sizes(tokens: int) -> Iterator[int]:
    """Blocks to try for so many tokens, the largest first."""
    yield tokens
    for parts in range(1, 65):
        yield max(BLOCK_STEP, tokens // parts // BLOCK_STEP * BLOCK_STEP)
