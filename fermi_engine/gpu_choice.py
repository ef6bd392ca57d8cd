"""Which prefills go to the GPU: all, or those that it is measured to do faster. Opens the device when it is first wanted."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from fermi_engine.config import EngineConfig
from fermi_engine.errors import DeviceError
from fermi_engine.gpu_prefill import HybridPrefill, Progress
from fermi_engine.kernels.gpu import open_device
from fermi_engine.model.decoder import Decoder
from fermi_engine.model.weights import Weights
from fermi_engine.report import note as say
from fermi_engine.state import HybridState

SAMPLE_TOKENS = 32  # that the CPU is timed with; no shorter prompt is worth a decision


class GpuChoice:
    """The GPU side of an engine with `prefill` 'gpu' or 'auto'. With 'auto' a device that fails is reported once and not used
    again; with 'gpu' its error goes up, and the session can go on with another engine or a later call."""

    def __init__(self, weights: Weights, decoder: Decoder, options: EngineConfig, note: Callable[[str], None] = say) -> None:
        self._weights, self._decoder, self._options, self._note = weights, decoder, options, note
        self._is_off = False
        self.prefill: HybridPrefill | None = None
        self.timing = False  # whether the next prefills keep a timeline
        self.threshold: float | None = None  # tokens from which 'auto' takes the GPU, once measured

    def hidden(self, ids: np.ndarray, state: HybridState, progress: Progress | None = None) -> np.ndarray | None:
        """HybridPrefill.run, or None where the CPU is to do it: single tokens, and what 'auto' leaves to it."""
        is_auto = self._options.prefill == "auto"
        if self._is_off or len(ids) < (SAMPLE_TOKENS if is_auto else 2):
            return None
        try:
            prefill = self._opened()
            if is_auto and len(ids) < self._threshold(prefill, ids):
                return None
            prefill.timing = self.timing
            return prefill.run(ids, state, progress)
        except DeviceError as err:
            if not is_auto:
                raise
            self._is_off = True
            self._note(f"warning: {err}; the CPU does all prefill from here on")
            return None

    def _opened(self) -> HybridPrefill:
        if self.prefill is None:
            options = self._options
            self.prefill = HybridPrefill(open_device(options.device), self._weights, self._decoder, options.vram,
                                         options.expert_slots, note=self._note)
        return self.prefill

    def _threshold(self, prefill: HybridPrefill, ids: np.ndarray) -> float:
        """Tokens that the CPU evaluates while the GPU's weights are copied once: below that the copies alone take longer."""
        if self.threshold is None:
            copying_s = prefill.copying_s()
            state = HybridState.fresh(self._weights.config, self._options.kv_block, self._options.kv_format)
            sample = ids[:SAMPLE_TOKENS]
            self._decoder.hidden(sample[:1], state)  # the first touch of the weights is not the CPU's speed
            start = time.perf_counter()
            self._decoder.hidden(sample, state)
            self.threshold = copying_s / (time.perf_counter() - start) * len(sample)
        return self.threshold
