"""Small random models for the stages above kernels: configurations by sizes, and their weights as arrays by name."""

from __future__ import annotations

import math

import numpy as np

from fermi_engine.compare import Arrays
from fermi_engine.config import ModelConfig
from fermi_engine.formats import FORMATS
from fermi_engine.stages.array_weights import CONFIG, config_array
from tests.strategies import Draws, scalar


def tiny_config(
    layers: str = "lf", hidden: int = 32, key_heads: int = 2, ratio: int = 2, dk: int = 8, dv: int = 16, taps: int = 4,
    kv_heads: int = 1, group: int = 2, head_dim: int = 16, rotary: int = 8, experts: int = 5, top_k: int = 2,
    intermediate: int = 16, vocab: int = 45, tied: bool = False,
) -> ModelConfig:
    """A configuration by sizes that differ from each other. layers: l linear attention, f full; experts 0: dense."""
    moe = {"model_type": "qwen3_5_moe_text", "num_experts": experts, "num_experts_per_tok": min(top_k, experts),
           "moe_intermediate_size": intermediate, "shared_expert_intermediate_size": 2 * intermediate}
    half = rotary // 2
    section = (half - 2 * (half // 3), half // 3, half // 3)
    return ModelConfig(
        **(moe if experts else {"model_type": "qwen3_5_text", "intermediate_size": intermediate}),
        vocab_size=vocab, hidden_size=hidden, num_hidden_layers=len(layers),
        layer_types=tuple({"l": "linear_attention", "f": "full_attention"}[kind] for kind in layers),
        num_attention_heads=kv_heads * group, num_key_value_heads=kv_heads, head_dim=head_dim, rotary_dim=rotary,
        rope_theta=1e7, mrope_section=section, rms_norm_eps=1e-6, linear_num_key_heads=key_heads,
        linear_num_value_heads=key_heads * ratio, linear_key_head_dim=dk, linear_value_head_dim=dv,
        linear_conv_kernel_dim=taps, tie_word_embeddings=tied)


def layer_shapes(c: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Canonical names of one layer's tensors, in the checkpoint's shapes."""
    H, full = c.hidden_size, c.layer_types[layer] == "full_attention"
    mixer = {
        "self_attn.q_proj.weight": (2 * c.num_attention_heads * c.head_dim, H),
        "self_attn.k_proj.weight": (c.num_key_value_heads * c.head_dim, H),
        "self_attn.v_proj.weight": (c.num_key_value_heads * c.head_dim, H),
        "self_attn.o_proj.weight": (H, c.num_attention_heads * c.head_dim),
        "self_attn.q_norm.weight": (c.head_dim,), "self_attn.k_norm.weight": (c.head_dim,),
    } if full else {
        "linear_attn.in_proj_qkv.weight": (c.conv_dim, H), "linear_attn.in_proj_z.weight": (c.linear_value_dim, H),
        "linear_attn.in_proj_a.weight": (c.linear_num_value_heads, H),
        "linear_attn.in_proj_b.weight": (c.linear_num_value_heads, H),
        "linear_attn.conv1d.weight": (c.conv_dim, 1, c.linear_conv_kernel_dim),
        "linear_attn.A_log": (c.linear_num_value_heads,), "linear_attn.dt_bias": (c.linear_num_value_heads,),
        "linear_attn.norm.weight": (c.linear_value_head_dim,),
        "linear_attn.out_proj.weight": (H, c.linear_value_dim),
    }
    norms = {"input_layernorm.weight": (H,), "post_attention_layernorm.weight": (H,)}
    return {f"layers.{layer}.{name}": shape for name, shape in {**mixer, **norms, **_ffn_shapes(c)}.items()}


def _ffn_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    def swiglu(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
        H = c.hidden_size
        return {f"{prefix}gate_proj.weight": (width, H), f"{prefix}up_proj.weight": (width, H),
                f"{prefix}down_proj.weight": (H, width)}

    if not c.num_experts:
        return swiglu("mlp.", c.intermediate_size)
    E, I, H = c.num_experts, c.moe_intermediate_size, c.hidden_size  # noqa: E741
    return {"mlp.gate.weight": (E, H), "mlp.experts.gate_up_proj": (E, 2 * I, H), "mlp.experts.down_proj": (E, H, I),
            **swiglu("mlp.shared_expert.", c.shared_expert_intermediate_size), "mlp.shared_expert_gate.weight": (1, H)}


def draw_weight(d: Draws, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A calm model: small branch outputs, a decided router; no weight of a norm is 0 or 1."""
    if name.endswith("A_log"):
        return d.uniform(0, 2.5, *shape)
    if name.endswith("dt_bias"):
        return d.uniform(-7, -2, *shape)
    if name.endswith("linear_attn.norm.weight"):
        return d.uniform(0.5, 1.5, *shape)
    if len(shape) == 1:
        return d.normal(*shape, scale=0.3)
    gains = {"out_proj": 0.1, "o_proj": 0.1, "down_proj": 0.1, "mlp.gate.": 8.0}
    gain = next((gain for part, gain in gains.items() if part in name), 1.0)
    return d.normal(*shape, scale=1.0 if "embed_tokens" in name else gain / math.sqrt(shape[-1]))


def model_weights(d: Draws, c: ModelConfig) -> Arrays:
    """Configuration and every float32 tensor of a text model."""
    shapes = {"embed_tokens.weight": (c.vocab_size, c.hidden_size), "norm.weight": (c.hidden_size,)}
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    for layer in range(c.num_hidden_layers):
        shapes |= layer_shapes(c, layer)
    return {CONFIG: config_array(c), **{name: draw_weight(d, name, shape) for name, shape in shapes.items()}}


def one_layer(d: Draws, c: ModelConfig, part: str) -> Arrays:
    """Configuration and the tensors of layer 0 whose names hold `part`."""
    shapes = {name: shape for name, shape in layer_shapes(c, 0).items() if part in name}
    return {CONFIG: config_array(c), **{name: draw_weight(d, name, shape) for name, shape in shapes.items()}}


def delta_net_layer(d: Draws, tokens: int, **sizes: int) -> Arrays:
    c = tiny_config("l", **sizes)
    state = c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
    return {**one_layer(d, c, "linear_attn."), "x": d.normal(tokens, c.hidden_size),
            "conv": d.normal(c.linear_conv_kernel_dim - 1, c.conv_dim), "recurrent": d.normal(*state, scale=0.3)}


def attention_layer(d: Draws, past: int, tokens: int, page_tokens: int, **sizes: int) -> Arrays:
    c = tiny_config("f", **sizes)
    cached = past, c.num_key_value_heads, c.head_dim
    return {**one_layer(d, c, "self_attn."), "x": d.normal(tokens, c.hidden_size), "past_k": d.normal(*cached),
            "past_v": d.normal(*cached), "positions": d.integers(0, 900, 3, tokens).astype(np.int32),
            "page_tokens": scalar(page_tokens)}


def feed_forward_layer(d: Draws, tokens: int, **sizes: int) -> Arrays:
    c = tiny_config("l", **sizes)
    return {**one_layer(d, c, ".mlp."), "x": d.normal(tokens, c.hidden_size)}


def delta_net_block(d: Draws, tokens: int, format: str, **sizes: int) -> Arrays:
    """A whole layer, whose other half is not used, with matrices as plain bytes."""
    c = tiny_config("l", experts=0, intermediate=32, **sizes)
    state = c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
    return {**_stored_layer(d, c, format), "x": d.normal(tokens, c.hidden_size),
            "conv": d.normal(c.linear_conv_kernel_dim - 1, c.conv_dim), "recurrent": d.normal(*state, scale=0.3)}


def attention_block(d: Draws, past: int, tokens: int, page_tokens: int, format: str, **sizes: int) -> Arrays:
    c = tiny_config("f", experts=0, intermediate=32, **sizes)
    operands = attention_layer(d, past, tokens, page_tokens, **sizes)
    kept = ("x", "past_k", "past_v", "positions", "page_tokens")
    return {**_stored_layer(d, c, format), **{name: operands[name] for name in kept}}


def feed_forward_block(d: Draws, tokens: int, format: str, **sizes: int) -> Arrays:
    c = tiny_config("l", key_heads=1, ratio=1, dk=32, dv=32, **sizes)
    return {**_stored_layer(d, c, format), "x": d.normal(tokens, c.hidden_size)}


def _stored_layer(d: Draws, c: ModelConfig, format: str) -> Arrays:
    return dict(_quantised(name, array, format) for name, array in one_layer(d, c, "").items())


def cut_prompt(d: Draws, tokens: int, cuts: tuple[int, ...], **sizes: object) -> Arrays:
    """A quantised model and a prompt in pieces; cuts beyond its end are left out."""
    arrays = quantised_model(d, tokens, 0, **sizes)
    return {**arrays, "cuts": np.array([cut for cut in cuts if cut < tokens], np.int64)}


def whole_model(d: Draws, tokens: int, cut: int, page_tokens: int, **sizes: object) -> Arrays:
    c = tiny_config(**sizes)
    return {**model_weights(d, c), "ids": d.integers(0, c.vocab_size, tokens).astype(np.int32),
            "cut": scalar(min(cut, tokens)), "page_tokens": scalar(page_tokens)}


def quantised_model(d: Draws, tokens: int, cut: int, page_tokens: int, format: str, **sizes: object) -> Arrays:
    """The same with the tensors that packs quantise as plain bytes; row lengths must be multiples of 32."""
    arrays = whole_model(d, tokens, cut, page_tokens, **sizes)
    return dict(_quantised(name, array, format) for name, array in arrays.items())


def _quantised(name: str, array: np.ndarray, format: str) -> tuple[str, np.ndarray]:
    kept = ("norm", "conv1d", "in_proj_a", "in_proj_b", "mlp.gate.", "shared_expert_gate")
    if array.dtype != np.float32 or array.ndim < 2 or any(part in name for part in kept):
        return name, array
    plain = FORMATS[format].quantize(array.reshape(-1, array.shape[-1]))
    return f"{name}.{format}", plain.reshape(*array.shape[:-1], -1)


def greedy_prompt(d: Draws, tokens: int, count: int, **sizes: object) -> Arrays:
    arrays = whole_model(d, tokens, 0, 4, **sizes)
    return {**arrays, "count": scalar(count)}
