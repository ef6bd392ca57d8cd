"""Gated full attention with partial, interleaved multi-axis RoPE (Qwen3.5: query and gate interleaved per head)."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import numpy as np

from fermi_engine.config import ModelConfig
from fermi_engine.kernels.cpu import Activations, CpuKernels
from fermi_engine.model.weights import Trace, Weights
from fermi_engine.state import KVPages


class GatedAttention:
    """One full-attention layer's mixer."""

    def __init__(self, weights: Weights, layer: int) -> None:
        prefix = f"layers.{layer}.self_attn."
        self.config = weights.config
        self.q_proj = weights.matrix(prefix + "q_proj.weight")
        self.k_proj = weights.matrix(prefix + "k_proj.weight")
        self.v_proj = weights.matrix(prefix + "v_proj.weight")
        self.o_proj = weights.matrix(prefix + "o_proj.weight")
        self.q_norm = weights.vector(prefix + "q_norm.weight")
        self.k_norm = weights.vector(prefix + "k_norm.weight")

    def forward(
        self,
        k: CpuKernels,
        u: Activations,
        cache: KVPages,
        start: np.ndarray,
        rope: tuple[np.ndarray, np.ndarray],
        mode: str,
        trace: Trace,
    ) -> np.ndarray:
        """u: normed hidden rows [T, H] at positions start[0].. (int64 [1]), for which the cache has pages; rope: cos, sin
        [T, rotary/2]; returns [T, H]."""
        c = self.config
        tokens, heads, head_dim = u.x.shape[0], c.num_attention_heads, c.head_dim
        query_gate = k.linear(u, self.q_proj, mode).reshape(tokens * heads, 2 * head_dim)
        key = k.linear(u, self.k_proj, mode).reshape(tokens * c.num_key_value_heads, head_dim)
        value = k.linear(u, self.v_proj, mode).reshape(tokens, c.num_key_value_heads, head_dim)
        query = k.rms_norm(query_gate, self.q_norm, c.rms_norm_eps).reshape(tokens, heads, head_dim)
        key = k.rms_norm(key, self.k_norm, c.rms_norm_eps).reshape(value.shape)
        k.rope(query, *rope)
        k.rope(key, *rope)
        trace("q", query)
        trace("k", key)
        k.kv_append(cache, start, key, value)
        out = k.attention(query, cache, start, 1.0 / math.sqrt(head_dim))
        trace("attention", out)
        gated = k.sigmoid_mul(out.reshape(tokens * heads, head_dim), query_gate, head_dim)
        gated = gated.reshape(tokens, heads * head_dim)
        trace("gated", gated)
        return k.linear(k.activations(gated), self.o_proj, mode)


class RotaryTables:
    """Frequencies and axes of a model's RoPE; cos and sin for any positions."""

    def __init__(self, config: ModelConfig) -> None:
        self.inv_freq = inv_freq(config.rotary_dim, config.rope_theta)
        self.axis = axis_of_frequency(config.rotary_dim // 2, config.mrope_section)

    def at(self, k: CpuKernels, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """positions int32 [3, T] (time, height, width) -> cos, sin [T, rotary/2]."""
        return k.rope_tables(positions, self.inv_freq, self.axis)


def inv_freq(rotary_dim: int, theta: float) -> np.ndarray:
    """1 / theta^(2j/d) as float32 [d/2], with the roundings of the published code: exponent, power and quotient to float32.

    The power is taken in decimal arithmetic, because pow of the C library changes its bits with the CPU.
    """
    with localcontext() as context:
        context.prec = 40
        powers = [
            Decimal(theta) ** Decimal(float(np.float32(2 * j) / np.float32(rotary_dim))) for j in range(rotary_dim // 2)
        ]
    return np.float32(1.0) / np.array([float(p) for p in powers], np.float32)


def axis_of_frequency(half: int, section: tuple[int, int, int]) -> np.ndarray:
    """Which position axis turns frequency j: height at j % 3 == 1, width at j % 3 == 2, within their sections; else time."""
    axis = np.zeros(half, np.int32)
    for which in (1, 2):
        axis[which : 3 * section[which] : 3] = which
    return axis
