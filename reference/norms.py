"""Normalisations of the text model as in transformers' modeling_qwen3_5."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu


def _unit_rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * (1 + weight) over the last axis: x [..., n], zero-centred weight [n] -> [..., n]."""
    return _unit_rms(x, eps) * (1 + weight)


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight * silu(z) over the last axis: x, z [..., n], plain weight [n] -> [..., n]."""
    return _unit_rms(x, eps) * weight * silu(z)


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x**2) + eps) over the last axis; eps stands inside the root."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + eps)
