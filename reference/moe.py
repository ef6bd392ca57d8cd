"""Feed-forward parts: router, experts, shared expert, dense SwiGLU, as in modeling_qwen3_5_moe."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

from reference.quant import QuantMatrix, linear

Weight = Tensor | QuantMatrix
ExpertWeights = Tensor | Sequence[QuantMatrix]


def swiglu(x: Tensor, gate_proj: Weight, up_proj: Weight, down_proj: Weight) -> Tensor:
    """(silu(x gate^T) * (x up^T)) down^T: x [T, H], gate_proj, up_proj [I, H], down_proj [H, I] -> [T, H]."""
    return linear(silu(linear(x, gate_proj)) * linear(x, up_proj), down_proj)


def route(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> ids int64 [T, k], weights [T, k], best first; of equal logits the lower id wins.

    The weights are the softmax over the chosen logits: the same as softmax over all, choice, renormalisation.
    """
    order = logits.sort(dim=-1, descending=True, stable=True)
    return order.indices[:, :k], order.values[:, :k].softmax(-1)


def expert_rows(ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The (token, slot) pairs of ids [T, k] ordered by expert, then token, then slot.

    -> hit [n], the experts that have any, rising; first [n + 1], where each one's rows begin and the last one's end; source
    [T * k], the token of each row; row_of [T, k], the row of each pair.
    """
    order = ids.flatten().sort(stable=True).indices
    hit, counts = ids.unique(return_counts=True)
    row_of = torch.empty_like(order)
    row_of[order] = torch.arange(len(order))
    return hit, torch.cat([torch.zeros(1, dtype=counts.dtype), counts.cumsum(0)]), order // ids.shape[1], row_of.view(ids.shape)


def experts(
    x: Tensor, gate_up_proj: ExpertWeights, down_proj: ExpertWeights, ids: Tensor, weights: Tensor
) -> Tensor:
    """Weighted sum of the chosen experts, added in ascending id: x [T, H], ids, weights [T, k] -> [T, H].

    gate_up_proj [E, 2I, H] (I gate rows, then I up), down_proj [E, H, I]: tensors, or E QuantMatrix each.
    """
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = linear(x[token], gate_up_proj[expert]).chunk(2, dim=-1)
        out[token] += weights[token, slot, None] * linear(silu(gate) * up, down_proj[expert])
    return out


def sparse_moe(
    x: Tensor, router: Tensor, gate_up_proj: ExpertWeights, down_proj: ExpertWeights,
    shared: tuple[Weight, Weight, Weight], shared_gate: Weight, k: int,
    trace: Callable[[str, Tensor], None] = lambda name, value: None,
) -> Tensor:
    """Routed experts plus sigmoid(x shared_gate^T) times the shared expert: x [T, H] -> [T, H].

    router [E, H], shared = (gate, up, down) of the shared SwiGLU, shared_gate [1, H]. trace sees
    router_logits [T, E], router_ids and router_weights [T, k].
    """
    logits = linear(x, router)
    ids, weights = route(logits, k)
    trace("router_logits", logits)
    trace("router_ids", ids)
    trace("router_weights", weights)
    routed = experts(x, gate_up_proj, down_proj, ids, weights)
    return routed + torch.sigmoid(linear(x, shared_gate)) * swiglu(x, *shared)
