"""Which prefills go to the GPU: all, or those that it is measured to do faster. Opens the device when it is first wanted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from fermi_engine.config import EngineConfig
from fermi_engine.errors import DeviceError, offering
from fermi_engine.gpu import cost as gpu_cost
from fermi_engine.gpu.boundaries import Stops
from fermi_engine.gpu.prefill import HybridPrefill, Progress
from fermi_engine.kernels.gpu import Device, open_device
from fermi_engine.model.decoder import Decoder
from fermi_engine.model.gpu_inputs import TEXT, Inputs
from fermi_engine.model.weights import Weights
from fermi_engine.report import note as say
from fermi_engine.state import HybridState

SHORTEST = 32  # tokens: no shorter prompt is worth a decision
OFFER = "--prefill cpu", "does without the GPU"


class GpuChoice:
    """The GPU side of an engine with `prefill` 'gpu' or 'auto'. With 'auto' a device that fails is reported once and not used
    again; with 'gpu' its error goes up and offers the CPU, and the session can go on with another engine or a later call."""

    def __init__(self, weights: Weights, decoder: Decoder, options: EngineConfig, note: Callable[[str], None] = say) -> None:
        self._weights, self._decoder, self._options, self._note = weights, decoder, options, note
        self._is_off = False
        self._device: Device | None = None
        self.prefill: HybridPrefill | None = None
        self.timing = False  # whether the next prefills keep a timeline
        self.cost: gpu_cost.Cost | None = None  # what 'auto' decides by, once measured

    def hidden(self, ids: np.ndarray, state: HybridState, progress: Progress | None = None, stops: Stops | None = None,
               is_rest: bool = False, inputs: Inputs = TEXT) -> np.ndarray | None:
        """HybridPrefill.run, or None where the CPU is to do it: single tokens, and what 'auto' leaves to it. is_rest: the tokens
        are the rest of a longer prompt, of which a single one goes the way of the others, too."""
        is_auto = self._options.prefill == "auto"
        if self._is_off or len(ids) < (SHORTEST if is_auto else 1 if is_rest else 2):
            return None
        try:
            prefill = self.owner()
            if is_auto and not self._is_faster(prefill, ids, state.position):
                return None
            prefill.timing = self.timing
            with self._offering():
                return prefill.run(ids, state, progress, stops, inputs)
        except DeviceError as err:
            if not is_auto:
                raise
            self._is_off = True
            self._note(f"warning: {err}; the CPU does all prefill from here on")
            return None

    def owner(self) -> HybridPrefill:
        """The prefill on its device, opened where it is not yet. Raises DeviceError, which with 'gpu' offers the CPU."""
        with self._offering():
            return self._opened()

    def _offering(self) -> AbstractContextManager[None]:
        return offering(*OFFER) if self._options.prefill == "gpu" else nullcontext()

    def _opened(self) -> HybridPrefill:
        options = self._options
        if self._device is None:
            self._device = open_device(options.device)
        if self.prefill is None:
            self.prefill = HybridPrefill(self._device, self._weights, self._decoder, options.vram, options.expert_slots,
                                         note=self._note, gemm=options.gemm)
        return self.prefill

    def _is_faster(self, prefill: HybridPrefill, ids: np.ndarray, start: int) -> bool:
        """Whether the GPU takes less time than the CPU, by what was measured here before the first prompt."""
        streamed = prefill.plan(start, start + len(ids)).streamed_bytes
        if self.cost is None:
            self.cost = gpu_cost.measure(prefill.device, self._weights, self._decoder, self._options, ids, self._note)
        return self.cost.favours_gpu(len(ids), streamed)
