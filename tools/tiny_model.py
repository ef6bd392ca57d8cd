"""The small model in training form: batched, differentiable, equal to reference.decoder.Decoder on the same weights.

Weights are a dict of canonical names, so that a checkpoint, the reference and training share them. Shapes add a batch
B to the reference's letters; N chunks of C tokens; R value heads per key head. Matrix products with weights run in a
chosen dtype, everything else in float32 (float64 for float64 weights).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fermi_engine.config import ModelConfig
from fermi_engine.vision.config import VisionConfig
from reference import gated_delta_rule as gdn
from reference import rope
from reference.moe import route
from reference.norms import gated_rms_norm, l2_norm
from tools.tiny_tower import Pictures, Tower

CHUNK = 32
Params = dict[str, Tensor]


def shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor, experts fused."""
    h = c.hidden_size
    found: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (c.vocab_size, h)}
    for i, kind in enumerate(c.layer_types):
        mixer = _attention_shapes(c) if kind == "full_attention" else _delta_net_shapes(c)
        layer = {"input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,), **mixer, **_moe_shapes(c)}
        found |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return found | {"norm.weight": (h,), "lm_head.weight": (c.vocab_size, h)}


def _attention_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    h, d, q, kv = c.hidden_size, c.head_dim, c.num_attention_heads, c.num_key_value_heads
    return {"self_attn.q_proj.weight": (2 * q * d, h), "self_attn.k_proj.weight": (kv * d, h),
            "self_attn.v_proj.weight": (kv * d, h), "self_attn.o_proj.weight": (h, q * d),
            "self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,)}


def _delta_net_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    h, heads, value = c.hidden_size, c.linear_num_value_heads, c.linear_value_dim
    stem = "linear_attn."
    return {f"{stem}in_proj_qkv.weight": (c.conv_dim, h), f"{stem}in_proj_z.weight": (value, h),
            f"{stem}in_proj_b.weight": (heads, h), f"{stem}in_proj_a.weight": (heads, h),
            f"{stem}conv1d.weight": (c.conv_dim, 1, c.linear_conv_kernel_dim), f"{stem}A_log": (heads,),
            f"{stem}dt_bias": (heads,), f"{stem}norm.weight": (c.linear_value_head_dim,),
            f"{stem}out_proj.weight": (h, value)}


def _moe_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    h, e, inner, shared = c.hidden_size, c.num_experts, c.moe_intermediate_size, c.shared_expert_intermediate_size
    return {"mlp.gate.weight": (e, h), "mlp.shared_expert_gate.weight": (1, h),
            "mlp.shared_expert.gate_proj.weight": (shared, h), "mlp.shared_expert.up_proj.weight": (shared, h),
            "mlp.shared_expert.down_proj.weight": (h, shared),
            "mlp.experts.gate_up_proj": (e, 2 * inner, h), "mlp.experts.down_proj": (e, h, inner)}


def initial(c: ModelConfig, seed: int) -> Params:
    """Fresh float32 weights: residual branches start small, decays and steps as the family draws them."""
    generator = torch.Generator().manual_seed(seed)
    branch = (2 * c.num_hidden_layers) ** -0.5
    return {name: _drawn(name, shape, branch, generator) for name, shape in shapes(c).items()}


def _drawn(name: str, shape: tuple[int, ...], branch: float, generator: torch.Generator) -> Tensor:
    uniform = torch.rand(shape, generator=generator)
    if name.endswith("A_log"):
        return torch.log(1 + 15 * uniform)
    if name.endswith("dt_bias"):
        step = 1e-3 * 100**uniform
        return step + torch.log(-torch.expm1(-step))
    if name.endswith("conv1d.weight"):
        return uniform - 0.5
    if name.endswith("linear_attn.norm.weight"):
        return torch.ones(shape)
    if len(shape) == 1:
        return torch.zeros(shape)
    scales = {"embed_tokens.weight": 0.5, "lm_head.weight": 0.02}
    if name.endswith(("in_proj_a.weight", "shared_expert_gate.weight")):
        scale = 0.02
    else:
        small = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj"))
        scale = scales.get(name, shape[-1] ** -0.5 * (branch if small else 1.0))
    return scale * torch.randn(shape, generator=generator)


class UnitLowerInverse(torch.autograd.Function):
    """(I + L)^-1 for strictly lower triangular L [..., C, C], C a power of two times 8.

    Blocks of 8 by the finite Neumann product, whose intermediate powers stay small at that size, then merged two by
    two: inv([[A, 0], [X, B]]) = [[A', 0], [-B' X A', B']].
    """

    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        size = lower.shape[-1]
        block = min(8, size)
        inverse = _neumann(_diagonal_blocks(lower, block))
        while block < size:
            a, b = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
            x = _diagonal_blocks(lower, 2 * block)[..., block:, :block]
            corner = -(b @ (x @ a))
            top = torch.cat([a, torch.zeros_like(a)], -1)
            inverse = torch.cat([top, torch.cat([corner, b], -1)], -2)
            block *= 2
        inverse = inverse.squeeze(-3)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grad @ inverse.mT).tril(-1)


def _diagonal_blocks(x: Tensor, block: int) -> Tensor:
    """[..., C, C] -> [..., C / block, block, block]."""
    count = x.shape[-1] // block
    tiles = x.unflatten(-2, (count, block)).unflatten(-1, (count, block))
    return tiles.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _neumann(lower: Tensor) -> Tensor:
    """(I + L)^-1 = (I - L)(I + L^2)(I + L^4) for L [..., n, n] with n at most 8."""
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    square = lower @ lower
    return (eye - lower) @ (eye + square) @ (eye + square @ square)


class Scan(torch.autograd.Function):
    """States before each of N steps of S <- M[n] S + B[n] from S = 0: M [N, X, K, K], B [N, X, K, V] -> [N, X, K, V]."""

    @staticmethod
    def forward(ctx: Any, m: Tensor, b: Tensor) -> Tensor:
        states = torch.empty_like(b)
        states[0] = 0
        each = states.unbind()
        for before, after, step, added in zip(each, each[1:], m.unbind(), b.unbind(), strict=False):
            torch.baddbmm(added, step, before, out=after)
        ctx.save_for_backward(m, states)
        return states

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        m, states = ctx.saved_tensors
        grad = grad.contiguous()
        into = torch.empty_like(states)
        into[-1] = 0
        each, steps, own = into.unbind(), m.mT.unbind(), grad.unbind()
        for n in range(len(m) - 1, 0, -1):
            torch.baddbmm(own[n], steps[n], each[n], out=each[n - 1])
        return into @ states.mT, into


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float) -> Tensor:
    """The gated delta rule from an empty state, all chunks at once but for the state that passes between them.

    q, k [B, T, HK, K], v [B, T, HV, V], g, beta [B, T, HV] -> o [B, T, HV, V], as reference chunked().
    """
    tokens, ratio = v.shape[1], v.shape[2] // k.shape[2]
    q, k, v, g, beta = (_chunks(x, x.shape[2] // (1 if i < 2 else ratio)) for i, x in enumerate((q * scale, k, v, g, beta)))
    total = g.squeeze(-1).cumsum(-1)
    since_start, to_end = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
    row = torch.arange(CHUNK, device=v.device)
    future = row[:, None] < row[None, :]
    within = (total[..., :, None] - total[..., None, :]).masked_fill(future, -math.inf).exp()
    inverse = UnitLowerInverse.apply((beta * (k @ k.mT) * within).tril(-1))
    u, w = inverse @ (beta * v), inverse @ (beta * since_start * k)
    closing = (k * to_end).mT
    decay = since_start[..., -1:, :] * torch.eye(k.shape[-1], dtype=v.dtype, device=v.device)
    m, b = decay - closing @ w, closing @ u
    state = Scan.apply(m.flatten(1, 3), b.flatten(1, 3)).view(b.shape)
    o = (q * since_start) @ state + ((q @ k.mT) * within) @ (u - w @ state)
    return o.permute(1, 0, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)[:, :tokens]


def _chunks(x: Tensor, heads: int) -> Tensor:
    """[B, T, heads * r, ...] -> [N, B, heads, r, C, ...], zeros appended to whole chunks, a last axis of at least 1."""
    x = x.unsqueeze(-1) if x.ndim == 3 else x
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % CHUNK))
    return x.unflatten(1, (-1, CHUNK)).unflatten(3, (heads, -1)).permute(1, 0, 3, 4, 2, 5).contiguous()


class CausalConv(torch.autograd.Function):
    """Depthwise causal convolution from an empty tail: x [B, T, C], weight [C, K] -> [B, T, C]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        taps, tokens = weight.shape[1], x.shape[1]
        known = F.pad(x, (0, 0, taps - 1, 0))
        y = known[:, :tokens] * weight[:, 0]
        for j in range(1, taps):
            y.addcmul_(known[:, j : j + tokens], weight[:, j])
        ctx.save_for_backward(known, weight)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        known, weight = ctx.saved_tensors
        taps, tokens = weight.shape[1], grad.shape[1]
        later = F.pad(grad, (0, 0, 0, taps - 1))
        x_grad = grad * weight[:, -1]
        for j in range(taps - 1):
            x_grad.addcmul_(later[:, taps - 1 - j : taps - 1 - j + tokens], weight[:, j])
        per_tap = [(grad * known[:, j : j + tokens]).sum((0, 1)) for j in range(taps)]
        return x_grad, torch.stack(per_tap, 1)


class Model:
    """The forward pass over prepared weights (see Master.seen in tiny_quantise): matrices in `dtype`, the rest float32."""

    def __init__(self, config: ModelConfig, weights: Params, dtype: torch.dtype, vision: VisionConfig | None = None) -> None:
        self.config, self.weights, self.dtype = config, weights, dtype
        self.tower = None if vision is None else Tower(vision, weights, dtype)
        self.balance: list[Tensor] = []

    def hidden(self, ids: Tensor, images: Pictures | None = None) -> Tensor:
        """ids [B, T] from position 0, images of which some are places -> hidden after the final norm [B, T, H]; `balance` gets a
        loss per layer."""
        c, w = self.config, self.weights
        x = F.embedding(ids, w["embed_tokens.weight"]).to(w["norm.weight"].dtype)
        if images is None:
            cos, sin = _rope_tables(c, ids.shape[1], x.dtype, x.device)
        else:
            cos, sin = _turned(c, images.positions, x.dtype)
            x = x.flatten(0, 1).index_copy(0, images.slots, self.tower.forward(images)).view(x.shape)
        self.balance = []
        for i, kind in enumerate(c.layer_types):
            u = self._norm(x, f"layers.{i}.input_layernorm.weight")
            x = x + (self._delta_net(i, u) if kind == "linear_attention" else self._attention(i, u, cos, sin))
            x = x + self._moe(i, self._norm(x, f"layers.{i}.post_attention_layernorm.weight"))
        return self._norm(x, "norm.weight")

    def head(self, hidden: Tensor) -> Tensor:
        """[..., H] -> logits [..., vocab] in the dtype of the norms."""
        return self._linear(hidden, "lm_head.weight").to(hidden.dtype)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], 1 + self.weights[name], self.config.rms_norm_eps)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x.to(self.dtype), self.weights[name])

    def _delta_net(self, i: int, u: Tensor) -> Tensor:
        c, stem = self.config, f"layers.{i}.linear_attn."
        low = u.to(self.dtype)
        qkv = self._linear(low, stem + "in_proj_qkv.weight").to(u.dtype)
        z = self._linear(low, stem + "in_proj_z.weight").to(u.dtype)
        b, a = (F.linear(u, self.weights[f"{stem}in_proj_{name}.weight"]) for name in "ba")
        conv = F.silu(CausalConv.apply(qkv, self.weights[stem + "conv1d.weight"].flatten(1)))
        g, beta = gdn.gates(a, b, self.weights[stem + "A_log"], self.weights[stem + "dt_bias"])
        q, k, v = conv.split([c.linear_key_dim, c.linear_key_dim, c.linear_value_dim], -1)
        q, k = (l2_norm(x.unflatten(-1, (-1, c.linear_key_head_dim))) for x in (q, k))
        v, z = (x.unflatten(-1, (-1, c.linear_value_head_dim)) for x in (v, z))
        o = delta_rule(q, k, v, g, beta, c.linear_key_head_dim**-0.5)
        o = gated_rms_norm(o, z, self.weights[stem + "norm.weight"], c.rms_norm_eps).flatten(2)
        return self._linear(o, stem + "out_proj.weight")

    def _attention(self, i: int, u: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c, stem = self.config, f"layers.{i}.self_attn."
        low = u.to(self.dtype)
        q, gate = self._linear(low, stem + "q_proj.weight").to(u.dtype).unflatten(-1, (-1, 2, c.head_dim)).unbind(3)
        k, v = (self._linear(low, f"{stem}{n}_proj.weight").unflatten(-1, (-1, c.head_dim)) for n in "kv")
        q = _rotated(self._norm(q, stem + "q_norm.weight"), cos, sin)
        k = _rotated(self._norm(k.to(u.dtype), stem + "k_norm.weight"), cos, sin)
        group = c.num_attention_heads // c.num_key_value_heads
        k, v = (x.repeat_interleave(group, 2) for x in (k, v))
        q, k, v = (x.to(self.dtype).transpose(1, 2) for x in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self._linear((o * torch.sigmoid(gate)).flatten(2), stem + "o_proj.weight")

    def _moe(self, i: int, h: Tensor) -> Tensor:
        c, stem = self.config, f"layers.{i}.mlp."
        logits = F.linear(h, self.weights[stem + "gate.weight"])
        ids, chosen = route(logits.flatten(0, 1), c.num_experts_per_tok)
        share = torch.zeros_like(logits.flatten(0, 1)).scatter(1, ids, chosen)
        self.balance.append(_imbalance(logits.flatten(0, 1), share))
        low = h.to(self.dtype)
        inner = F.linear(low, self.weights[stem + "experts.gate_up_proj"].flatten(0, 1))
        gate, up = inner.unflatten(-1, (c.num_experts, 2, -1)).unbind(-2)
        active = F.silu(gate) * up * share.view(*h.shape[:2], -1, 1).to(self.dtype)
        down = self.weights[stem + "experts.down_proj"].transpose(0, 1).flatten(1)
        routed = F.linear(active.flatten(2), down)
        gate, up = (self._linear(low, f"{stem}shared_expert.{n}_proj.weight") for n in ("gate", "up"))
        shared = self._linear(F.silu(gate) * up, stem + "shared_expert.down_proj.weight")
        return routed + torch.sigmoid(F.linear(h, self.weights[stem + "shared_expert_gate.weight"])) * shared


@functools.lru_cache(maxsize=16)
def _rope_tables(c: ModelConfig, tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos, sin [T, half] from position 0: kept, because a copy to a GPU would wait for it in every step."""
    axes = rope.axis_of_frequency(c.rotary_dim // 2, c.mrope_section)
    frequencies = rope.inv_freq(c.rotary_dim, c.rope_theta)
    cos, sin = rope.tables(torch.arange(tokens).expand(3, -1), frequencies, axes, dtype)
    return cos.to(device), sin.to(device)


def _turned(c: ModelConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos, sin [B T, half] of positions [3, B, T]."""
    axes, frequencies = _frequencies(c, positions.device)
    angle = positions.flatten(1).to(dtype).index_select(0, axes).T * frequencies.to(dtype)
    return angle.cos(), angle.sin()


@functools.lru_cache(maxsize=16)
def _frequencies(c: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    axes = torch.tensor(rope.axis_of_frequency(c.rotary_dim // 2, c.mrope_section))
    return axes.to(device), rope.inv_freq(c.rotary_dim, c.rope_theta).to(device)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, heads, D] by tables of T or of B T rows."""
    if len(cos) == x.shape[1]:
        return rope.rotate(x, cos, sin)
    return rope.rotate(x.flatten(0, 1), cos, sin).view(x.shape)


def _imbalance(logits: Tensor, share: Tensor) -> Tensor:
    """E times the sum over experts of (share of choices) x (mean probability): 1 when all are used alike."""
    used = (share > 0).to(logits.dtype).mean(0)
    return logits.shape[-1] * (used / used.sum() * logits.softmax(-1).mean(0)).sum()
