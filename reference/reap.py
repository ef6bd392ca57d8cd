"""REAP expert pruning (Lasby et al., arXiv 2510.13999): saliency of experts, the choice, and a model without the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from reference.moe import ExpertWeights, route
from reference.quant import linear


def saliency(x: Tensor, router: Tensor, gate_up_proj: ExpertWeights, down_proj: ExpertWeights, k: int) -> tuple[Tensor, Tensor]:
    """Scores [E] and how many tokens are routed to each expert [E], for feed-forward inputs x [T, H].

    score_j = mean over the tokens t that choose j of g_j(x_t) * ||f_j(x_t)||_2, and 0 without any; g is the softmax over all
    experts, renormalised over the k chosen; f_j the expert's output.
    """
    ids, weights = route(linear(x, router), k)
    experts = router.shape[0]
    scores, counts = x.new_zeros(experts), torch.zeros(experts, dtype=torch.int64)
    for j in range(experts):
        token, slot = (ids == j).nonzero(as_tuple=True)
        if len(token):
            gate, up = linear(x[token], gate_up_proj[j]).chunk(2, dim=-1)
            output = linear(silu(gate) * up, down_proj[j])
            scores[j] = (weights[token, slot] * output.norm(dim=-1)).mean()
            counts[j] = len(token)
    return scores, counts


def choose(scores: Tensor, keep: int) -> Tensor:
    """Rising ids of the `keep` highest of scores [E]; of equal ones the lower id stays."""
    return scores.sort(descending=True, stable=True).indices[:keep].sort().values


def prune(params: Mapping[str, Any], kept: Sequence[Tensor]) -> dict[str, Any]:
    """Weights of a Decoder (canonical names) with the experts kept[layer] alone, in their order; nothing is rescaled."""
    found = {}
    for name, w in params.items():
        if name.endswith((".mlp.gate.weight", ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")):
            ids = kept[int(name.split(".")[1])].tolist()
            w = w[ids] if isinstance(w, Tensor) else [w[i] for i in ids]
        found[name] = w
    return found
