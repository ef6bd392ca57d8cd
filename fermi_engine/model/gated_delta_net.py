"""Gated DeltaNet mixer: projections, causal convolution, gated delta rule, gated norm (Yang et al., arXiv 2412.06464)."""

from __future__ import annotations

import math

import numpy as np

from fermi_engine.kernels.cpu import Activations, CpuKernels
from fermi_engine.model.weights import Trace, Weights
from fermi_engine.state import DeltaState

L2_EPS = 1e-6  # inside the root of the q and k norms; fixed in the architecture, not read from the configuration


class GatedDeltaNet:
    """One linear-attention layer's mixer."""

    def __init__(self, weights: Weights, layer: int) -> None:
        prefix = f"layers.{layer}.linear_attn."
        self.config = weights.config
        self.in_proj_qkv = weights.matrix(prefix + "in_proj_qkv.weight")
        self.in_proj_z = weights.matrix(prefix + "in_proj_z.weight")
        self.in_proj_a = weights.vector(prefix + "in_proj_a.weight")
        self.in_proj_b = weights.vector(prefix + "in_proj_b.weight")
        self.conv1d = weights.vector(prefix + "conv1d.weight")
        self.A_log = weights.vector(prefix + "A_log")
        self.dt_bias = weights.vector(prefix + "dt_bias")
        self.norm = weights.vector(prefix + "norm.weight")
        self.out_proj = weights.matrix(prefix + "out_proj.weight")

    def forward(self, k: CpuKernels, u: Activations, state: DeltaState, mode: str, trace: Trace) -> np.ndarray:
        """u: normed hidden rows [T, H]; state moves on by T tokens; returns the mixer's output [T, H]."""
        c = self.config
        tokens = u.x.shape[0]
        qkv = k.linear(u, self.in_proj_qkv, mode)
        z = k.linear(u, self.in_proj_z, mode)
        trace("qkv", qkv)
        trace("z", z)
        g, beta = k.gdn_gates(
            k.gemm_f32(u.x, self.in_proj_a), k.gemm_f32(u.x, self.in_proj_b), self.A_log, self.dt_bias
        )
        trace("g", g)
        trace("beta", beta)
        mixed = k.conv1d_silu(qkv, self.conv1d, state.conv)
        trace("conv", mixed)
        delta = self._recurrence(k, mixed, g, beta, state)
        trace("delta", delta)
        rows = (tokens * c.linear_num_value_heads, c.linear_value_head_dim)
        gated = k.gated_rms_norm(delta.reshape(rows), z.reshape(rows), self.norm, c.rms_norm_eps)
        gated = gated.reshape(tokens, c.linear_value_dim)
        trace("gated_norm", gated)
        return k.linear(k.activations(gated), self.out_proj, mode)

    def _recurrence(
        self, k: CpuKernels, mixed: np.ndarray, g: np.ndarray, beta: np.ndarray, state: DeltaState
    ) -> np.ndarray:
        """q, k and v sit side by side in `mixed` [T, C]; returns o [T, HV, V]."""
        c = self.config
        heads, dk = c.linear_num_key_heads, c.linear_key_head_dim
        query = k.l2_norm(mixed, 0, heads, dk, L2_EPS, 1.0 / math.sqrt(dk))
        key = k.l2_norm(mixed, c.linear_key_dim, heads, dk, L2_EPS, 1.0)
        return k.gdn_recurrent(query, key, mixed, 2 * c.linear_key_dim, g, beta, state.recurrent)
