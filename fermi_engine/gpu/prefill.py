"""Prefill on a GPU for a model whose experts do not fit on it: all tokens pass a layer while the next layer's weights are copied.

The prompt goes through in one pass, or in blocks of absolute positions where memory demands it; then the state goes to the host
and the CPU decodes. Activations are float32: the CPU path's equal is EngineConfig(activations='f32').
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from fermi_engine import placement
from fermi_engine.errors import DeviceError, DeviceMemoryError
from fermi_engine.gpu import boundaries as gpu_boundaries
from fermi_engine.gpu.boundaries import Boundaries, Place, Stops
from fermi_engine.gpu.report import Report
from fermi_engine.gpu.state import DeviceState, Fetch
from fermi_engine.gpu.stream import HostMemory, Slots
from fermi_engine.kernels.device_arrays import DeviceArray
from fermi_engine.kernels.gpu import Device, DeviceBuffer, Event, Span
from fermi_engine.kernels.sm20_vendor import VendorKernels
from fermi_engine.model.decoder import Decoder
from fermi_engine.model.gpu_inputs import TEXT, Inputs, splice
from fermi_engine.model.gpu_layers import Activations, BlockOnDevice, DeviceWeights, Kernels
from fermi_engine.model.gpu_weights import DenseWeights, ExpertWeights, Layout, unfit
from fermi_engine.model.weights import Weights
from fermi_engine.placement import Demand, Ledger, Plan
from fermi_engine.report import note as say
from fermi_engine.state import HybridState

Progress = Callable[[int, int], None]


class HybridPrefill:
    """Prefill for one model on one device. Its memory there stays from call to call as far as the next one has use for it. A
    call that fails leaves the host's state as it was."""

    def __init__(self, device: Device, weights: Weights, decoder: Decoder, vram: int | None = None, slots: int = 2,
                 token_block: int | None = None, timing: bool = False, note: Callable[[str], None] = say,
                 gemm: str = "own") -> None:
        """vram: bytes of device memory at most, None for what is free. slots: of a layer's experts each. token_block: cut the
        prompt there instead of as memory demands. gemm: dense products by our kernels (`own`) or by the vendor's sgemm
        (`vendor`), whose bits are its own affair.
        Raises DeviceError when the kernels cannot run this model, or there is no vendor's library that works."""
        c = self.config = weights.config
        self.device, self.decoder, self.slots, self.token_block = device, decoder, slots, token_block
        self.timing, self.last = timing, None
        layers = range(c.num_hidden_layers)
        self.dense = [DenseWeights(weights, layer) for layer in layers]
        self.experts = [ExpertWeights(weights, layer) for layer in layers] if c.num_experts else []
        reason = unfit(c, set().union(*(w.formats for w in self.dense)), set().union(*(w.formats for w in self.experts)))
        if reason:
            raise DeviceError(f"the GPU cannot run this model: {reason}, or run with --prefill cpu")
        self.gemm = gemm if gemm == "own" else device.vendor()
        self.ledger = Ledger(device, vram)
        self.host = HostMemory(device, note)
        self.copies, self.compute, self.results = map(device.stream, ("copies", "compute", "results"))
        self._resident: dict[int, tuple[DeviceBuffer, DeviceWeights]] = {}  # layer -> buffer that holds its dense weights

    def plan(self, start: int, end: int, stops: Sequence[Place] = ()) -> Plan:
        """How positions start..end would be run, leaving states at `stops`. Raises DeviceMemoryError when they do not fit."""
        c = self.config
        demand = Demand(tuple(w.nbytes for w in self.dense), tuple(w.nbytes for w in self.experts) or (0,) * len(self.dense),
                        *DeviceState.nbytes(c, end), lambda tokens: Activations(c, tokens).nbytes,
                        0 if self.gemm == "own" else max(w.expanded_bytes for w in self.dense),
                        gpu_boundaries.device_bytes(c, stops))
        return placement.plan(demand, start, end, self.ledger.limit, self.slots, self.token_block)

    def run(self, ids: np.ndarray, state: HybridState, progress: Progress | None = None,
            stops: Stops | None = None, inputs: Inputs = TEXT) -> np.ndarray:
        """ids int32 [T] appended to `state` -> hidden row [1, H] of the last token, before the final norm; `state` moves on.

        progress(done, total) counts tokens, in steps of a layer. stops: who wants states of positions inside; as many as fit on
        the device without costing the prefill more copies. inputs: positions and images of the tokens. Raises DeviceError, one
        line; `state` is as before then.
        """
        plan, places = self._with_stops(state, state.position + len(ids), stops)
        before = self.host.copied_bytes
        with self._traced() as spans, self._idle_after_errors():
            buffers = self.ledger.settle(plan.sizes)
            run = _Run(self, plan, buffers, self._load(plan, buffers), state, places, inputs)
            try:
                hidden, commit = run.through(ids, progress)
            finally:
                run.boundaries.abandon()
        commit()
        if stops is not None:
            stops.made(run.boundaries.states(state), run.boundaries.seconds)
        self.last = Report(plan, self.host.copied_bytes - before, self.ledger.peak, self.gemm, tuple(spans))
        return hidden

    def _with_stops(self, state: HybridState, end: int, stops: Stops | None) -> tuple[Plan, list[Place]]:
        """The plan, and at which places states are left."""
        plain = self.plan(state.position, end)
        wanted = stops.wanted() if stops else []
        while wanted:
            places = gpu_boundaries.places_of(wanted, state)
            with suppress(DeviceMemoryError):
                plan = self.plan(state.position, end, places)
                if (plan.streamed_bytes, len(plan.blocks)) == (plain.streamed_bytes, len(plain.blocks)):
                    room = stops.reserve({p.position: gpu_boundaries.host_bytes(self.config, p) for p in places}, state)
                    return plan, [place for place in places if place.position in room]
            wanted = wanted[: len(wanted) // 2]
        return plain, []

    @contextmanager
    def _traced(self) -> Iterator[list[Span]]:
        """The operations within, once it has ended, if they are asked for."""
        spans: list[Span] = []
        if not self.timing:
            yield spans
            return
        self.device.start_trace()
        try:
            yield spans
        except BaseException:
            with suppress(DeviceError):
                self.device.end_trace()
            raise
        spans += self.device.end_trace()

    @contextmanager
    def _idle_after_errors(self) -> Iterator[None]:
        """What was given before an error may still use buffers and host memory that the next call has other plans for."""
        try:
            yield
        except BaseException:
            with suppress(DeviceError):  # the first error tells more
                self.device.synchronize()
            raise

    def _load(self, plan: Plan, buffers: dict[str, DeviceBuffer]) -> list[DeviceWeights]:
        """The dense weights of the resident layers, copied where they are not there from an earlier call."""
        found = {}
        for layer in range(plan.resident):
            buffer = buffers[placement.resident_name(layer)]
            if layer in self._resident and self._resident[layer][0] is buffer:
                found[layer] = self._resident[layer]
                continue
            for offset, piece in self.dense[layer].pieces():
                self.host.copy(buffer, offset, piece, self.compute, f"dense {layer}", piece)
            found[layer] = buffer, self.dense[layer].within(buffer)
        self._resident = found
        return [weights for _, weights in found.values()]

    def evict(self) -> None:
        """Give all memory back; the next call copies anew."""
        self.device.synchronize()
        self.ledger.settle({})

    def close(self) -> None:
        """Free the weights; the device stays open."""
        self.device.synchronize()
        self.ledger.settle({})
        self.host.close()


class _Run:
    """One call: its buffers, and the steps of its schedule. Step i is layer i % L of block i // L."""

    def __init__(self, owner: HybridPrefill, plan: Plan, buffers: dict[str, DeviceBuffer], resident: list[DeviceWeights],
                 state: HybridState, places: Sequence[Place] = (), inputs: Inputs = TEXT) -> None:
        """buffers: of plan.sizes; resident: the weights of the first layers; places: where states are left."""
        self.inputs = inputs
        self.owner, self.plan, self.buffers, self.resident, self.state = owner, plan, buffers, resident, state
        self.layers = len(owner.dense)
        self.steps = self.layers * len(plan.blocks)
        self.device_state = DeviceState(owner.config, plan.blocks[-1][1], buffers.get("states"), buffers.get("keys and values"))
        self.slots = Slots(owner.device, owner.host, owner.copies, owner.compute, plan.slots)
        for slot in range(plan.slots):
            self.slots.give(slot, buffers.get(f"dense weights, slot {slot}"), buffers.get(f"experts, slot {slot}"))
        self.activations = buffers["activations"]
        self.kernels = Kernels(owner.device, owner.compute, self._vendor(buffers.get("expanded weights")))
        self.fetch = Fetch(owner.device, owner.config, self.device_state, state, owner.results)
        self.boundaries = Boundaries(owner.device, owner.config, places, plan.blocks, owner.compute, owner.results)
        self.passed: deque[Event] = deque()
        self.staging, self.uploaded = self._staging(), owner.device.event()

    def _vendor(self, scratch: DeviceBuffer | None) -> VendorKernels | None:
        """The vendor's products in place of the own ones, where they were asked for."""
        if self.owner.gemm == "own":
            return None
        floats = scratch and DeviceArray.within(scratch, (scratch.nbytes // 4,))
        return VendorKernels(self.owner.device, self.owner.compute, floats)

    def _staging(self) -> dict[str, np.ndarray]:
        """Host memory, page-locked where the system lets us, for all that goes to and fro beside the weights."""
        tokens, hidden = self.plan.most_tokens, self.owner.config.hidden_size
        passing = Layout({"x": (tokens, hidden), "positions": (3, tokens), "hidden": (1, hidden)}, {"positions": np.int32})
        first = passing.end + self.fetch.nbytes
        memory = self.owner.host.staging(first + self.boundaries.staging_bytes)
        self.fetch.begin(memory[passing.end :])
        self.boundaries.begin(self.buffers.get(gpu_boundaries.BUFFER), memory[first:])
        return passing.over(memory)

    def through(self, ids: np.ndarray, progress: Progress | None) -> tuple[np.ndarray, Callable[[], None]]:
        """All steps. The last token's hidden row [1, H], and the function that moves the host's state on."""
        owner = self.owner
        self.device_state.upload(owner.device, owner.compute, self.state)
        for number, (begin, end) in enumerate(self.plan.blocks):
            block = self._block(ids[begin - self.state.position : end - self.state.position], begin)
            for step in range(min(self.slots.ahead, self.steps)) if number == 0 else ():
                self._fill(step)
            for layer in range(self.layers):
                step = number * self.layers + layer
                done = self._layer(step, number, layer, block)
                if step + self.slots.ahead < self.steps:
                    self._fill(step + self.slots.ahead)
                if number == len(self.plan.blocks) - 1:
                    self.fetch.layer(layer, done)
                if progress is not None:
                    self._tell(step, len(ids), progress)
        return self._finish(block, progress)

    def _finish(self, block: BlockOnDevice, progress: Progress | None) -> tuple[np.ndarray, Callable[[], None]]:
        """Wait for the device, taking each layer's state as it comes."""
        owner = self.owner
        block["x"].rows(block.tokens - 1, 1).download(owner.device, self.staging["hidden"], owner.compute)
        commit = self.fetch.finish(owner.decoder.kernels)
        self.boundaries.finish()
        owner.compute.synchronize()
        if progress is not None:
            tokens = self.plan.blocks[-1][1] - self.plan.blocks[0][0]
            progress(tokens, tokens)
        return self.staging["hidden"].copy(), commit

    def _block(self, ids: np.ndarray, begin: int) -> BlockOnDevice:
        """The embeddings of a block, those of words gathered by the CPU, and its positions, on the device."""
        owner, tokens = self.owner, len(ids)
        arrays = Activations(owner.config, tokens).within(self.activations)
        self.uploaded.synchronize()  # the block before is out of the staging memory
        x, positions = self.staging["x"][:tokens], self.staging["positions"].reshape(-1)[: 3 * tokens].reshape(3, tokens)
        x[:] = owner.decoder.kernels.rows(owner.decoder.embed_tokens, ids)
        positions[:] = self.inputs.positions(begin, begin + tokens)
        rotary = owner.decoder.rotary
        for name, host in (("x", x), ("positions", positions), ("inv_freq", rotary.inv_freq), ("axis", rotary.axis)):
            arrays[name].upload(owner.device, host, owner.compute, name)
        splice(owner.device, owner.compute, arrays["x"], self.inputs.embeddings(begin, begin + tokens))
        self.uploaded.record(owner.compute)
        block = BlockOnDevice(owner.config, self.kernels, arrays, tokens, begin, self.state.kv_format)
        block.tables()
        return block

    def _layer(self, step: int, number: int, layer: int, block: BlockOnDevice) -> Event:
        """One layer of one block, given to the compute stream, and the event of its end."""
        owner = self.owner
        w = self.resident[layer] if layer < self.plan.resident else self.slots.dense(step, owner.dense[layer])
        stops = self.boundaries.at(number, layer)
        block.mixer(w, self.device_state.layers[layer], stops)
        if stops is not None:
            self.boundaries.sent(number, layer)
        block.route(w)
        block.shared(w)
        if owner.experts:
            if self._only_hit(step):
                self.slots.fill_experts(step, owner.experts[layer], f"experts {layer}", self._hit(block))
            block.routed(*self.slots.experts(step, owner.experts[layer]))
        block.finish()
        return self.slots.done(step)

    def _fill(self, step: int) -> None:
        """Give the copies that can be given before the step's router has run."""
        layer = step % self.layers
        if layer >= self.plan.resident:
            self.slots.fill_dense(step, self.owner.dense[layer], f"dense {layer}")
        if self.owner.experts and not self._only_hit(step):
            self.slots.fill_experts(step, self.owner.experts[layer], f"experts {layer}")

    def _only_hit(self, step: int) -> bool:
        begin, end = self.plan.blocks[step // self.layers]
        return few_are_hit(self.owner.config.num_experts, self.owner.config.num_experts_per_tok, end - begin)

    def _hit(self, block: BlockOnDevice) -> np.ndarray:
        """Ids of the experts that a block's router has chosen; waits for it."""
        owner, work = self.owner, block.work
        count, hit = np.empty(1, np.int32), np.empty(work.hit.shape, np.int32)
        work.hits.download(owner.device, count, owner.compute)
        work.hit.download(owner.device, hit, owner.compute)
        return hit[: count[0]]

    def _tell(self, step: int, tokens: int, progress: Progress) -> None:
        """Report the step before the last: while its successors are queued the device stays busy."""
        self.passed.append(self.owner.device.event())
        self.passed[-1].record(self.owner.compute)
        if len(self.passed) > 2:
            self.passed.popleft().synchronize()
            progress(tokens * (step - 1) // self.steps, tokens)


def few_are_hit(experts: int, top_k: int, tokens: int) -> bool:
    """Whether only the experts that are hit are copied, after the router has chosen them, and not all of them ahead of it: where
    evenly routed tokens would hit at most half. Other routing hits fewer, because 1 - (1 - p)^tokens is concave in p."""
    return experts * (1.0 - (1.0 - top_k / experts) ** tokens) <= experts / 2
