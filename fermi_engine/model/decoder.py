"""The text model: embedding, layers (mixer, then feed-forward, each behind a norm and a residual), final norm, head."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fermi_engine.formats import Experts, Matrix
from fermi_engine.kernels.cpu import CpuKernels
from fermi_engine.model.attention import GatedAttention, RotaryTables
from fermi_engine.model.gated_delta_net import GatedDeltaNet
from fermi_engine.model.moe import DenseMLP, SparseMoE
from fermi_engine.model.weights import Trace, Weights, silent
from fermi_engine.state import DeltaState, HybridState, KVPages


class ImageTokens(NamedTuple):
    """What images do to a run of T tokens: its positions int32 [3, T] (time, height, width), which of the tokens stand for
    images, int64 [n], and the embeddings of those [n, H]."""

    axes: np.ndarray
    slots: np.ndarray
    rows: np.ndarray


class Positions:
    """Where a run of tokens stands: `start` int64 [1] in the cache, and cos, sin [T, rotary/2] of its positions."""

    def __init__(self, axes: np.ndarray, start: np.ndarray, rope: tuple[np.ndarray, np.ndarray]) -> None:
        self._axes, self.start, self.rope = axes, start, rope

    @classmethod
    def of(cls, decoder: Decoder, start: int, count: int, shift: int = 0) -> Positions:
        """Of text from `start` on; its positions are `shift` further, on all three axes."""
        axes = np.empty((3, count), np.int32)
        axes[:] = np.arange(start + shift, start + shift + count)
        return cls.at(decoder, start, axes)

    @classmethod
    def at(cls, decoder: Decoder, start: int, axes: np.ndarray) -> Positions:
        """Of tokens from `start` on with positions int32 [3, T]."""
        return cls(axes, np.array([start], np.int64), decoder.rotary.at(decoder.kernels, axes))

    def move(self, start: int, shift: int = 0) -> None:
        """Other places for calls that were recorded with these: the tables follow when they run."""
        self._axes[:] = np.arange(start + shift, start + shift + self._axes.shape[1])
        self.start[0] = start


class Layer:
    """One decoder layer."""

    def __init__(self, weights: Weights, index: int) -> None:
        c = weights.config
        self.index, self.eps = index, c.rms_norm_eps
        self.is_attention = c.layer_types[index] == "full_attention"
        self.input_layernorm = weights.vector(f"layers.{index}.input_layernorm.weight")
        self.post_attention_layernorm = weights.vector(f"layers.{index}.post_attention_layernorm.weight")
        self.mixer = GatedAttention(weights, index) if self.is_attention else GatedDeltaNet(weights, index)
        self.ffn = SparseMoE(weights, index) if c.num_experts else DenseMLP(weights, f"layers.{index}.mlp.")

    def formats(self) -> set[str]:
        """Formats of its matrices."""
        parts = [self.mixer, self.ffn, getattr(self.ffn, "shared_expert", None)]
        found = [value for part in parts if part for value in vars(part).values()]
        return {value.format for value in found if isinstance(value, (Matrix, Experts))}

    def forward(
        self,
        k: CpuKernels,
        x: np.ndarray,
        state: DeltaState | KVPages,
        at: Positions,
        mode: str,
        trace: Trace,
    ) -> np.ndarray:
        """x [T, H] at the given positions -> [T, H]; this layer's `state` moves on by T tokens."""

        def report(name: str, array: np.ndarray) -> None:
            trace(f"layers.{self.index}.{name}", array)

        report("input", x)
        u = k.activations(k.rms_norm(x, self.input_layernorm, self.eps))
        report("mixer_norm", u.x)
        if self.is_attention:
            mixed = self.mixer.forward(k, u, state, at.start, at.rope, mode, report)
        else:
            mixed = self.mixer.forward(k, u, state, mode, report)
        report("mixer", mixed)
        x = k.add(x, mixed)
        u = k.activations(k.rms_norm(x, self.post_attention_layernorm, self.eps))
        report("ffn_norm", u.x)
        fed = self.ffn.forward(k, u, mode, report)
        report("ffn", fed)
        x = k.add(x, fed)
        report("output", x)
        return x


class Decoder:
    """All layers over one set of weights; immutable once built."""

    def __init__(self, weights: Weights, kernels: CpuKernels, activations: str = "q8_0") -> None:
        c = self.config = weights.config
        self.kernels, self.mode = kernels, activations
        self.embed_tokens = weights.matrix("embed_tokens.weight")
        self.lm_head = self.embed_tokens if c.tie_word_embeddings else weights.matrix("lm_head.weight")
        self.norm = weights.vector("norm.weight")
        self.rotary = RotaryTables(c)
        self.layers = [Layer(weights, i) for i in range(c.num_hidden_layers)]
        formats = {self.embed_tokens.format, self.lm_head.format}.union(*(layer.formats() for layer in self.layers))
        # Other formats are expanded to float32 tile by tile: a recording would have to keep every tile.
        self.is_recordable = activations == "q8_0" and formats <= {"q4_0", "q8_0"}

    def hidden(self, ids: np.ndarray, state: HybridState, trace: Trace = silent, images: ImageTokens | None = None,
               shift: int = 0) -> np.ndarray:
        """ids int32 [T] appended to `state` -> hidden rows [T, H] before the final norm; the state moves on by T.

        images: those among the tokens; without any, positions are counts of tokens plus `shift`, what earlier images left.
        """
        state.reserve(state.position + len(ids))
        if images is None:
            at = Positions.of(self, state.position, len(ids), shift)
        else:
            at = Positions.at(self, state.position, images.axes)
        x = self._layers(ids, state, at, trace, images)
        state.position += len(ids)
        return x

    def logits(self, x: np.ndarray, trace: Trace = silent) -> np.ndarray:
        """Hidden rows [T, H] -> logits [T, vocab]."""
        normed = self.kernels.rms_norm(x, self.norm, self.config.rms_norm_eps)
        trace("norm", normed)
        out = self.kernels.linear(self.kernels.activations(normed), self.lm_head, self.mode)
        trace("logits", out)
        return out

    def step(self, token: int, state: HybridState, shift: int = 0) -> np.ndarray:
        """One token of text appended to `state` -> its logits [vocab], the bits of `logits(hidden(...))` in one call into C
        where every weight is quantised; the state moves on by one. shift: as in `hidden`."""
        if not self.is_recordable:
            return self.logits(self.hidden(np.array([token], np.int32), state, shift=shift))[0]
        state.reserve(state.position + 1)
        if state.program is None or state.program.decoder is not self:
            state.program = Step(self, state)
        logits = state.program.run(token, state.position, shift)
        state.position += 1
        return logits

    def _layers(self, ids: np.ndarray, state: HybridState, at: Positions, trace: Trace,
                images: ImageTokens | None = None) -> np.ndarray:
        x = self.kernels.rows(self.embed_tokens, ids)
        if images is not None:
            x[images.slots] = images.rows
        trace("embed", x)
        for layer, part in zip(self.layers, state.layers, strict=True):
            x = layer.forward(self.kernels, x, part, at, self.mode, trace)
        return x


class Step:
    """A decoder's forward pass of one token over the arrays of one state, recorded."""

    def __init__(self, decoder: Decoder, state: HybridState) -> None:
        self.decoder = decoder
        self._id = np.zeros(1, np.int32)
        with decoder.kernels.record() as self._program:
            self._at = Positions.of(decoder, 0, 1)
            hidden = decoder._layers(self._id, state, self._at, silent)
            self._logits = decoder.logits(hidden)

    def run(self, token: int, position: int, shift: int = 0) -> np.ndarray:
        """Logits [vocab], a new array; the state's arrays move on by one token, its `position` does not."""
        self._id[0] = token
        self._at.move(position, shift)
        self._program.run()
        return self._logits[0].copy()
