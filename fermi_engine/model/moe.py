"""Feed-forward halves of a layer: routed experts with a gated shared expert, or one dense SwiGLU."""

from __future__ import annotations

import numpy as np

from fermi_engine.kernels.cpu import Activations, CpuKernels, ExpertRows
from fermi_engine.model.weights import Trace, Weights


class DenseMLP:
    """down(silu(gate) * up); also the shape of the shared expert."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self.gate_proj = weights.matrix(prefix + "gate_proj.weight")
        self.up_proj = weights.matrix(prefix + "up_proj.weight")
        self.down_proj = weights.matrix(prefix + "down_proj.weight")

    def forward(self, k: CpuKernels, u: Activations, mode: str, trace: Trace) -> np.ndarray:
        """u: normed hidden rows [T, H] -> [T, H]."""
        gate_up = k.empty((u.x.shape[0], self.gate_proj.rows + self.up_proj.rows))
        k.linear(u, self.gate_proj, mode, out=gate_up)
        k.linear(u, self.up_proj, mode, out=gate_up, column=self.gate_proj.rows)
        hidden = k.swiglu(gate_up)
        trace("dense_hidden", hidden)
        return k.linear(k.activations(hidden), self.down_proj, mode)


class SparseMoE:
    """Top-k experts by router, weights renormalised over the chosen, plus sigmoid-gated shared expert."""

    def __init__(self, weights: Weights, layer: int) -> None:
        prefix = f"layers.{layer}.mlp."
        self.top_k = weights.config.num_experts_per_tok
        self.gate = weights.vector(prefix + "gate.weight")
        self.gate_up, self.down = weights.experts(layer)
        self.shared_expert = DenseMLP(weights, prefix + "shared_expert.")
        self.shared_expert_gate = weights.vector(prefix + "shared_expert_gate.weight")

    def forward(self, k: CpuKernels, u: Activations, mode: str, trace: Trace) -> np.ndarray:
        """u: normed hidden rows [T, H] -> [T, H]."""
        logits = k.gemm_f32(u.x, self.gate)
        ids, weights = k.router_topk(logits, self.top_k)
        trace("router_logits", logits)
        trace("router_ids", ids)
        trace("router_weights", weights)
        work = k.expert_rows(ids, self.gate_up.count)
        trace("expert_rows", work.row_of)
        expert_out = self._experts(k, u, work, mode, trace)
        trace("expert_out", expert_out)
        shared = self.shared_expert.forward(k, u, mode, trace)
        shared_gate = k.gemm_f32(u.x, self.shared_expert_gate)
        return k.moe_combine(expert_out, work.row_of, weights, shared, shared_gate)

    def _experts(self, k: CpuKernels, u: Activations, work: ExpertRows, mode: str, trace: Trace) -> np.ndarray:
        """Each hit expert once over all its rows -> [T * k, H] in the order of the work list."""
        if mode == "f32" or not (self.gate_up.is_quantised and self.down.is_quantised):
            return self._one_by_one(k, u, work, mode, trace)
        hidden = k.swiglu(k.grouped_gemm(u.q8, self.gate_up, work, gathered=False))
        trace("expert_hidden", hidden)
        return k.grouped_gemm(k.quantize_q8_0(hidden), self.down, work, gathered=True)

    def _one_by_one(self, k: CpuKernels, u: Activations, work: ExpertRows, mode: str, trace: Trace) -> np.ndarray:
        """The same for weights that are not multiplied as 8-bit codes."""
        hidden, out = k.empty((work.source.size, self.down.cols)), k.empty((work.source.size, self.down.rows))
        for i in range(int(work.hits[0])):
            begin, end = work.first[i], work.first[i + 1]
            mine = k.activations(u.x[work.source[begin:end]])
            hidden[begin:end] = k.swiglu(k.linear(mine, self.gate_up.matrix(int(work.hit[i])), mode))
            out[begin:end] = k.linear(k.activations(hidden[begin:end]), self.down.matrix(int(work.hit[i])), mode)
        trace("expert_hidden", hidden)
        return out
