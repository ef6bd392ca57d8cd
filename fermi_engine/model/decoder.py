"""The text model: embedding, layers (mixer, then feed-forward, each behind a norm and a residual), final norm, head."""

from __future__ import annotations

import numpy as np

from fermi_engine.kernels.cpu import CpuKernels
from fermi_engine.model.attention import GatedAttention, RotaryTables
from fermi_engine.model.gated_delta_net import GatedDeltaNet
from fermi_engine.model.moe import DenseMLP, SparseMoE
from fermi_engine.model.weights import Trace, Weights, silent
from fermi_engine.state import HybridState


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

    def forward(
        self,
        k: CpuKernels,
        x: np.ndarray,
        state: HybridState,
        rope: tuple[np.ndarray, np.ndarray],
        mode: str,
        trace: Trace,
    ) -> np.ndarray:
        """x [T, H] at positions state.position.. -> [T, H]; this layer's part of the state moves on by T tokens."""

        def report(name: str, array: np.ndarray) -> None:
            trace(f"layers.{self.index}.{name}", array)

        report("input", x)
        u = k.activations(k.rms_norm(x, self.input_layernorm, self.eps))
        report("mixer_norm", u.x)
        if self.is_attention:
            mixed = self.mixer.forward(k, u, state.layers[self.index], state.position, rope, mode, report)
        else:
            mixed = self.mixer.forward(k, u, state.layers[self.index], mode, report)
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

    def hidden(self, ids: np.ndarray, state: HybridState, trace: Trace = silent) -> np.ndarray:
        """ids int32 [T] appended to `state` -> hidden rows [T, H] before the final norm; the state moves on by T."""
        k = self.kernels
        x = k.rows(self.embed_tokens, ids)
        trace("embed", x)
        rope = self.rope(state.position, len(ids))
        for layer in self.layers:
            x = layer.forward(k, x, state, rope, self.mode, trace)
        state.position += len(ids)
        return x

    def rope(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """cos, sin [count, rotary/2] of text positions start.. (equal on all three axes)."""
        positions = np.arange(start, start + count, dtype=np.int32)
        return self.rotary.at(self.kernels, np.ascontiguousarray(np.broadcast_to(positions, (3, count))))

    def logits(self, x: np.ndarray, trace: Trace = silent) -> np.ndarray:
        """Hidden rows [T, H] -> logits [T, vocab]."""
        normed = self.kernels.rms_norm(x, self.norm, self.config.rms_norm_eps)
        trace("norm", normed)
        out = self.kernels.linear(self.kernels.activations(normed), self.lm_head, self.mode)
        trace("logits", out)
        return out
