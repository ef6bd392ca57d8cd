"""Full attention with an output gate, as in transformers' modeling_qwen3_5."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from reference import rope
from reference.norms import rms_norm
from reference.quant import QuantMatrix, linear

Weight = Tensor | QuantMatrix


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention of the last T of P+T positions.

    q [T, HQ, D], k, v [P+T, HKV, D] -> [T, HQ, D].

    Query head h uses key/value head h // (HQ // HKV); the scale is D ** -0.5.
    """
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * q.shape[-1] ** -0.5
    past = len(k) - len(q)
    future = torch.arange(len(k))[None, :] > torch.arange(len(q))[:, None] + past
    return torch.einsum("hts,shd->thd", scores.masked_fill(future, -torch.inf).softmax(-1), v)


def gated_attention(
    u: Tensor, q_proj: Weight, k_proj: Weight, v_proj: Weight, o_proj: Weight, q_norm: Tensor, k_norm: Tensor,
    past_k: Tensor, past_v: Tensor, cos: Tensor, sin: Tensor, eps: float,
    trace: Callable[[str, Tensor], None] = lambda name, value: None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normed hidden u [T, H], past k and v [P, HKV, D], cos, sin [T, half] -> out [T, H], k, v [P+T, HKV, D].

    q_proj [HQ*2D, H] gives each head its D query rows, then its D gate rows. q and k are normed per head,
    then turned; v stays raw. trace sees q [T, HQ, D] and k [T, HKV, D] after RoPE, attention [T, HQ, D],
    gated [T, HQ*D].
    """
    head_dim = q_norm.shape[0]
    q, gate = linear(u, q_proj).unflatten(-1, (-1, 2, head_dim)).unbind(2)
    q = rope.rotate(rms_norm(q, q_norm, eps), cos, sin)
    k = rope.rotate(rms_norm(linear(u, k_proj).unflatten(-1, (-1, head_dim)), k_norm, eps), cos, sin)
    v = linear(u, v_proj).unflatten(-1, (-1, head_dim))
    trace("q", q)
    trace("k", k)
    k, v = torch.cat([past_k, k]), torch.cat([past_v, v])
    attention = attend(q, k, v)
    trace("attention", attention)
    gated = (attention * torch.sigmoid(gate)).flatten(1)
    trace("gated", gated)
    return linear(gated, o_proj), k, v
