"""What prefill of a model takes on the GPU, from one layer of each kind that is really run, and what it takes on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from fermi_engine.config import EngineConfig
from fermi_engine.errors import DeviceError
from fermi_engine.gpu.prefill import HybridPrefill
from fermi_engine.gpu.report import busy
from fermi_engine.kernels.gpu import Device, Span
from fermi_engine.model.decoder import Decoder
from fermi_engine.model.weights import SomeLayers, Weights
from fermi_engine.state import HybridState

GPU_TOKENS = 256  # of a trial: enough to fill tiles, and to have all experts copied
CPU_TOKENS = 32


@dataclass(frozen=True)
class Cost:
    """Seconds a byte of weights on its way to the device, a token in the kernels of all layers, and a token on the CPU."""

    byte_s: float
    token_s: float
    cpu_token_s: float

    def favours_gpu(self, tokens: int, streamed_bytes: int) -> bool:
        """Whether the GPU takes less time for so many tokens: the longer of copies and kernels, which run side by side."""
        return max(streamed_bytes * self.byte_s, tokens * self.token_s) < tokens * self.cpu_token_s


def measure(device: Device, weights: Weights, decoder: Decoder, options: EngineConfig, ids: np.ndarray,
            note: Callable[[str], None]) -> Cost:
    """One layer of each kind over a sample made of `ids`, on an otherwise unused device, which is left as it was, and all of
    them on the CPU. Raises DeviceError."""
    kinds, sample = weights.config.layer_types, np.resize(ids, GPU_TOKENS)
    rates, token_s = [], 0.0
    for kind in dict.fromkeys(kinds):
        layer = SomeLayers(weights, (kinds.index(kind),))
        trial = HybridPrefill(device, layer, decoder, options.vram, options.expert_slots, timing=True, note=note,
                              gemm=options.gemm)
        try:
            for _ in range(2):  # the first time pages are locked and kernels compiled; dense weights are copied then only
                trial.run(sample, HybridState.fresh(layer.config, options.kv_block))
                rates += _byte_s(trial.last.spans)
            token_s += kinds.count(kind) * sum(end - begin for begin, end in busy(trial.last.spans, "compute")) / GPU_TOKENS
        finally:
            with suppress(DeviceError):  # the first error tells more
                trial.close()
    return Cost(min(rates), token_s, _cpu_token_s(weights, decoder, options, ids[:CPU_TOKENS]))


def _cpu_token_s(weights: Weights, decoder: Decoder, options: EngineConfig, sample: np.ndarray) -> float:
    state = HybridState.fresh(weights.config, options.kv_block, options.kv_format)
    decoder.hidden(sample[:1], state)  # the first touch of the weights is not the CPU's speed
    start = time.perf_counter()
    decoder.hidden(sample, state)
    return (time.perf_counter() - start) / len(sample)


def _byte_s(spans: Sequence[Span]) -> list[float]:
    """Seconds a byte from the first to the last copy of weights; nothing where there was none."""
    copies = [span for span in spans if span.label.startswith(("dense", "experts"))]
    if not copies:
        return []
    return [(max(s.end_s for s in copies) - min(s.begin_s for s in copies)) / sum(s.nbytes for s in copies)]
