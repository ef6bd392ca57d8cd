"""Prefill on a GPU for a model whose experts do not fit on it: all tokens pass a layer while the next layer's weights are copied.

The prompt goes through in one pass, or in blocks of absolute positions where memory demands it; then the state goes to the host
and the CPU decodes. Activations are float32: the CPU path's equal is EngineConfig(activations='f32').
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from fermi_engine import placement
from fermi_engine.errors import DeviceError
from fermi_engine.gpu_state import DeviceState, Fetch
from fermi_engine.gpu_stream import HostMemory, Slots
from fermi_engine.kernels.gpu import Device, DeviceBuffer, Event, Span
from fermi_engine.model.decoder import Decoder
from fermi_engine.model.gpu_layers import Activations, BlockOnDevice, Kernels
from fermi_engine.model.gpu_weights import DenseWeights, ExpertWeights, unfit
from fermi_engine.model.weights import Weights
from fermi_engine.placement import Demand, Ledger, Plan
from fermi_engine.report import note as say
from fermi_engine.report import size
from fermi_engine.state import HybridState

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Report:
    """What the last prefill did: its plan, bytes of weights copied, and with `timing` every operation on the device's clock."""

    plan: Plan
    copied_bytes: int
    peak_bytes: int
    spans: tuple[Span, ...] = ()

    def line(self) -> str:
        """Tokens, memory, bytes copied, and where a timeline was kept how long copies and kernels took, and both at once."""
        blocks, tokens = self.plan.blocks, self.plan.blocks[-1][1] - self.plan.blocks[0][0]
        text = (f"GPU prefill of {tokens} tokens in {len(blocks)} block{'s' if len(blocks) > 1 else ''}, {self.plan.resident} "
                f"layers resident, {size(self.copied_bytes)} of weights copied, peak {size(self.peak_bytes)} of "
                f"{size(self.plan.limit)}")
        if not self.spans:
            return text
        copies, kernels = (busy(self.spans, engine) for engine in ("h2d", "compute"))
        both = _length(copies) + _length(kernels) - _length(_union([*copies, *kernels]))
        return (f"{text} | copies {_length(copies):.3f} s, kernels {_length(kernels):.3f} s, {both:.3f} s of it at once, "
                f"in all {max(span.end_s for span in self.spans):.3f} s")


def busy(spans: Sequence[Span], engine: str) -> list[tuple[float, float]]:
    """Times (begin, end) in seconds, apart and in order, in which an engine (h2d, d2h, compute) was busy."""
    return _union([(span.begin_s, span.end_s) for span in spans if span.engine == engine])


def _union(times: list[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(times):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def _length(times: list[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in times)


class HybridPrefill:
    """Prefill for one model on one device. Resident weights stay on the device between calls; everything else is allocated for
    a call and freed after it. A call that fails leaves the host's state as it was.
    """

    def __init__(self, device: Device, weights: Weights, decoder: Decoder, vram: int | None = None, slots: int = 2,
                 token_block: int | None = None, timing: bool = False, note: Callable[[str], None] = say) -> None:
        """vram: bytes of device memory at most, None for what is free. slots: of a layer's experts each. token_block: cut the
        prompt there instead of as memory demands. Raises DeviceError when the kernels cannot run this model."""
        c = self.config = weights.config
        self.device, self.decoder, self.slots, self.token_block = device, decoder, slots, token_block
        self.timing, self.last = timing, None
        layers = range(c.num_hidden_layers)
        self.dense = [DenseWeights(weights, layer) for layer in layers]
        self.experts = [ExpertWeights(weights, layer) for layer in layers] if c.num_experts else []
        reason = unfit(c, set().union(*(w.formats for w in self.dense)), set().union(*(w.formats for w in self.experts)))
        if reason:
            raise DeviceError(f"the GPU cannot run this model: {reason}, or run with --prefill cpu")
        self.ledger = Ledger(device, vram)
        self.host = HostMemory(device, note)
        self.copies, self.compute, self.results = map(device.stream, ("copies", "compute", "results"))
        self.resident: list[DeviceBuffer] = []

    def plan(self, start: int, end: int) -> Plan:
        """How positions start..end would be run. Raises DeviceMemoryError when they do not fit."""
        c = self.config
        demand = Demand(tuple(w.nbytes for w in self.dense), tuple(w.nbytes for w in self.experts) or (0,) * len(self.dense),
                        *DeviceState.nbytes(c, end), lambda tokens: Activations(c, tokens).nbytes)
        return placement.plan(demand, start, end, self.ledger.limit, self.slots, self.token_block)

    def run(self, ids: np.ndarray, state: HybridState, progress: Progress | None = None) -> np.ndarray:
        """ids int32 [T] appended to `state` -> hidden row [1, H] of the last token, before the final norm; `state` moves on.

        progress(done, total) counts tokens, in steps of a layer. Raises DeviceError, one line; `state` is as before then.
        """
        plan = self.plan(state.position, state.position + len(ids))
        before = self.host.copied_bytes
        with self._traced() as spans:
            self._settle(plan.resident)
            with self.ledger.scope():
                hidden, commit = _Run(self, plan, state).through(ids, progress)
        commit()
        self.last = Report(plan, self.host.copied_bytes - before, self.ledger.peak, tuple(spans))
        return hidden

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

    def _settle(self, layers: int) -> None:
        """Have the dense weights of exactly so many layers resident."""
        while len(self.resident) > layers:
            self.ledger.free(self.resident.pop())
        while len(self.resident) < layers:
            layer = len(self.resident)
            with self.ledger.scope(only_after_errors=True):
                buffer = self.ledger.alloc(self.dense[layer].nbytes, placement.resident_name(layer))
                for offset, piece in self.dense[layer].pieces():
                    self.host.copy(buffer, offset, piece, self.compute, f"dense {layer}", piece)
            self.resident.append(buffer)

    def copying_s(self) -> float:
        """Seconds that copying every layer's streamed weights takes, from one layer's, which is really copied."""
        streamed = self.experts or self.dense
        with self.ledger.scope():
            buffer = self.ledger.alloc(streamed[0].nbytes, "trial copy")
            for _ in range(2):  # the first time pages are locked or read from disk
                start = time.perf_counter()
                if self.experts:
                    self.host.lock(self.experts[0].host)
                    self.host.copy(buffer, 0, self.experts[0].host, self.copies, "trial copy", self.experts[0].host)
                else:
                    for offset, piece in self.dense[0].pieces():
                        self.host.copy(buffer, offset, piece, self.copies, "trial copy", piece)
                self.copies.synchronize()
                seconds = time.perf_counter() - start
        return seconds * sum(w.nbytes for w in streamed) / streamed[0].nbytes

    def close(self) -> None:
        """Free the weights; the device stays open."""
        self.device.synchronize()
        while self.resident:
            self.ledger.free(self.resident.pop())
        self.host.close()


class _Run:
    """One call: its buffers, and the steps of its schedule. Step i is layer i % L of block i // L."""

    def __init__(self, owner: HybridPrefill, plan: Plan, state: HybridState) -> None:
        self.owner, self.plan, self.state = owner, plan, state
        self.layers = len(owner.dense)
        self.steps = self.layers * len(plan.blocks)
        kept = {placement.resident_name(layer) for layer in range(plan.resident)}
        buffers = {name: owner.ledger.alloc(nbytes, name) for name, nbytes in plan.sizes.items() if name not in kept}
        self.device_state = DeviceState(owner.config, plan.blocks[-1][1], buffers.get("states"), buffers.get("keys and values"))
        self.slots = Slots(owner.device, owner.host, owner.copies, owner.compute, plan.slots)
        for slot in range(plan.slots):
            self.slots.give(slot, buffers.get(f"dense weights, slot {slot}"), buffers.get(f"experts, slot {slot}"))
        self.resident = [w.within(buffer) for w, buffer in zip(owner.dense, owner.resident, strict=False)]
        self.activations = buffers["activations"]
        self.kernels = Kernels(owner.device, owner.compute)
        self.fetch = Fetch(owner.device, owner.config, self.device_state, state, owner.results)
        self.passed: deque[Event] = deque()

    def through(self, ids: np.ndarray, progress: Progress | None) -> tuple[np.ndarray, Callable[[], None]]:
        """All steps. The last token's hidden row [1, H], and the function that moves the host's state on."""
        owner = self.owner
        self.device_state.upload(owner.device, owner.compute, self.state)
        self.fetch.begin(owner.host.staging(self.fetch.nbytes))
        for step in range(min(self.slots.ahead, self.steps)):
            self._fill(step)
        for number, (begin, end) in enumerate(self.plan.blocks):
            block = self._block(ids[begin - self.state.position : end - self.state.position], begin)
            for layer in range(self.layers):
                step = number * self.layers + layer
                done = self._layer(step, layer, block)
                if step + self.slots.ahead < self.steps:
                    self._fill(step + self.slots.ahead)
                if number == len(self.plan.blocks) - 1:
                    self.fetch.layer(layer, done)
                if progress is not None:
                    self._tell(step, len(ids), progress)
        hidden = np.empty((1, owner.config.hidden_size), np.float32)
        block["x"].rows(block.tokens - 1, 1).download(owner.device, hidden, owner.compute)
        commit = self.fetch.finish(owner.decoder.kernels)
        if progress is not None:
            progress(len(ids), len(ids))
        return hidden, commit

    def _block(self, ids: np.ndarray, begin: int) -> BlockOnDevice:
        """The embedding rows of a block, gathered by the CPU, and its positions, on the device."""
        owner, tokens = self.owner, len(ids)
        arrays = Activations(owner.config, tokens).within(self.activations)
        positions = np.empty((3, tokens), np.int32)
        positions[:] = np.arange(begin, begin + tokens)
        rotary = owner.decoder.rotary
        for name, host in (("x", owner.decoder.kernels.rows(owner.decoder.embed_tokens, ids)), ("positions", positions),
                           ("inv_freq", rotary.inv_freq), ("axis", rotary.axis)):
            arrays[name].upload(owner.device, host, owner.compute, name)
        block = BlockOnDevice(owner.config, self.kernels, arrays, tokens, begin)
        block.tables()
        return block

    def _layer(self, step: int, layer: int, block: BlockOnDevice) -> Event:
        """One layer of one block, given to the compute stream, and the event of its end."""
        owner = self.owner
        w = self.resident[layer] if layer < self.plan.resident else self.slots.dense(step, owner.dense[layer])
        block.mixer(w, self.device_state.layers[layer])
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
