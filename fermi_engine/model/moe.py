"""Feed-forward halves of a layer: routed experts with a gated shared expert, or one dense SwiGLU."""

from __future__ import annotations

import numpy as np

from fermi_engine.kernels.cpu import Activations, CpuKernels
from fermi_engine.model.weights import Trace, Weights


class DenseMLP:
    """down(silu(gate) * up); also the shape of the shared expert."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self.gate_proj = weights.matrix(prefix + "gate_proj.weight")
        self.up_proj = weights.matrix(prefix + "up_proj.weight")
        self.down_proj = weights.matrix(prefix + "down_proj.weight")

    def forward(self, k: CpuKernels, u: Activations, mode: str, trace: Trace) -> np.ndarray:
        """u: normed hidden rows [T, H] -> [T, H]."""
        gate_up = np.concatenate([k.linear(u, self.gate_proj, mode), k.linear(u, self.up_proj, mode)], axis=1)
        return k.linear(k.activations(k.swiglu(gate_up)), self.down_proj, mode)


class SparseMoE:
    """Top-k experts by router, weights renormalised over the chosen, plus sigmoid-gated shared expert."""

    def __init__(self, weights: Weights, layer: int) -> None:
        prefix = f"layers.{layer}.mlp."
        self.top_k = weights.config.num_experts_per_tok
        self.gate = weights.vector(prefix + "gate.weight")
        self.experts = [weights.expert(layer, e) for e in range(weights.config.num_experts)]
        self.shared_expert = DenseMLP(weights, prefix + "shared_expert.")
        self.shared_expert_gate = weights.vector(prefix + "shared_expert_gate.weight")

    def forward(self, k: CpuKernels, u: Activations, mode: str, trace: Trace) -> np.ndarray:
        """u: normed hidden rows [T, H] -> [T, H]."""
        logits = k.gemm_f32(u.x, self.gate)
        ids, weights = k.router_topk(logits, self.top_k)
        trace("router_logits", logits)
        trace("router_ids", ids)
        trace("router_weights", weights)
        expert_out, row_of = self._routed(k, u, ids, mode)
        shared = self.shared_expert.forward(k, u, mode, trace)
        shared_gate = k.gemm_f32(u.x, self.shared_expert_gate)
        return k.moe_combine(expert_out, row_of, weights, shared, shared_gate)

    def _routed(self, k: CpuKernels, u: Activations, ids: np.ndarray, mode: str) -> tuple[np.ndarray, np.ndarray]:
        """Each hit expert once over all its tokens -> rows [T * k, H] grouped by expert, and where (token, slot) sits."""
        order = np.argsort(ids, axis=None, kind="stable")
        row_of = np.empty(ids.size, np.int32)
        row_of[order] = np.arange(ids.size, dtype=np.int32)
        hit, first = np.unique(ids.ravel()[order], return_index=True)
        ends = np.append(first[1:], ids.size)
        if mode == "q8_0" and self.experts[0][0].format in ("q4_0", "q8_0"):
            _ = u.q8  # quantise all tokens once; the experts gather codes
        out = k.empty((ids.size, u.x.shape[1]))
        for expert, begin, end in zip(hit, first, ends, strict=True):
            gate_up, down = self.experts[expert]
            mine = u.take(order[begin:end] // self.top_k)
            hidden = k.swiglu(k.linear(mine, gate_up, mode))
            out[begin:end] = k.linear(k.activations(hidden), down, mode)
        return out, row_of.reshape(ids.shape)
