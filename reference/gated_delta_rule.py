"""Gated DeltaNet: causal convolution, gates, and the delta rule in recurrent and chunked form.

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464); gates as in transformers'
modeling_qwen3_5. `g` is the log of the decay (g <= 0), the state is [HV, K, V]. Callers L2-normalise q and k
first (norms.l2_norm).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus


def causal_conv_silu(x: Tensor, weight: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution, then silu.

    x [T, C], weight [C, K], tail [K-1, C] -> y [T, C], new tail [K-1, C]. The tail holds the K-1 inputs
    before x (zeros at the start of a sequence); the last tap meets the current token.
    """
    taps = weight.shape[1]
    known = torch.cat([tail, x])
    y = sum(weight[:, j] * known[j : j + len(x)] for j in range(taps))
    return silu(y), known[len(known) - (taps - 1) :]


def gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """g = -exp(A_log) * softplus(a + dt_bias), beta = sigmoid(b).

    a, b [T, HV], A_log, dt_bias [HV] -> g, beta [T, HV]. exp(A_log) stops at the largest finite number, so
    that overflow times softplus = 0 stays 0. softplus is linear above 20, as torch defines it.
    """
    rate = torch.exp(A_log).clamp(max=torch.finfo(A_log.dtype).max)
    return -rate * softplus(a + dt_bias), torch.sigmoid(b)


def _per_value_head(x: Tensor, value_heads: int) -> Tensor:
    """[T, HK, K] -> [T, HV, K]: value head h uses key head h // (HV // HK)."""
    return x.repeat_interleave(value_heads // x.shape[1], dim=1)


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One token after the other: S = exp(g) S; delta = beta (v - k^T S); S = S + k delta^T; o = scale q^T S.

    q, k [T, HK, K], v [T, HV, V], g, beta [T, HV], initial_state [HV, K, V] -> o [T, HV, V], final state.
    """
    q, k = (_per_value_head(x, v.shape[1]) for x in (q * scale, k))
    state, outputs = initial_state, []
    for t in range(len(v)):
        state = torch.exp(g[t])[:, None, None] * state
        predicted = torch.einsum("hk,hkv->hv", k[t], state)
        delta = beta[t][:, None] * (v[t] - predicted)
        state = state + k[t][:, :, None] * delta[:, None, :]
        outputs.append(torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(outputs), state


def decay_matrix(g: Tensor) -> Tensor:
    """g [HV, C] -> D [HV, C, C]: D[i, j] = exp(g[j+1] + ... + g[i]) for j <= i, else 0.

    Each exponent is its own sum, not a difference of two cumulative ones: no cancellation, and g = -inf stays
    harmless. Masked before exp, which would overflow above the diagonal.
    """
    size = g.shape[-1]
    row, column = torch.arange(size)[:, None], torch.arange(size)[None, :]
    steps = g[:, :, None].expand(-1, size, size).masked_fill(row <= column, 0.0)
    return torch.exp(steps.cumsum(dim=1).masked_fill(row < column, -torch.inf))


def _chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk, heads first: q, k [HV, C, K], v [HV, C, V], g, beta [HV, C], S [HV, K, V] -> o, S."""
    within, since_start = decay_matrix(g), torch.exp(g.cumsum(dim=1))[..., None]
    to_end = within[:, -1, :, None]
    system = torch.eye(g.shape[1], dtype=g.dtype) + (beta[..., None] * (k @ k.mT) * within).tril(-1)
    solution = torch.linalg.solve_triangular(
        system, torch.cat([beta[..., None] * v, beta[..., None] * since_start * k], dim=-1),
        upper=False, unitriangular=True,
    )
    u, w = solution.split([v.shape[-1], k.shape[-1]], dim=-1)
    delta = u - w @ state
    o = (q * since_start) @ state + ((q @ k.mT) * within) @ delta
    return o, since_start[:, -1:] * state + (k * to_end).mT @ delta


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, scale: float,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """The same function as `recurrent`, `chunk` tokens at a time.

    Within a chunk the deltas of all tokens solve one unit lower triangular system.
    """
    q, k = (_per_value_head(x, v.shape[1]) for x in (q * scale, k))
    state, outputs = initial_state, []
    for start in range(0, len(v), chunk):
        part = [x[start : start + chunk].transpose(0, 1) for x in (q, k, v, g, beta)]
        o, state = _chunk(*part, state)
        outputs.append(o.transpose(0, 1))
    return torch.cat(outputs), state
