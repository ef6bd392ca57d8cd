"""Which tensors a model has, and how large: what a checkpoint and a pack are held against."""

from __future__ import annotations

from fermi_engine.config import ModelConfig
from fermi_engine.vision.config import VisionConfig, stored_shapes


def pack_shapes(c: ModelConfig, vision: VisionConfig | None) -> dict[str, tuple[int, ...]]:
    """Canonical names and shapes of a model with or without images, experts fused, as packs hold them."""
    return expected_shapes(c) | (stored_shapes(vision) if vision else {})


def expected_shapes(c: ModelConfig, fused_layers: frozenset[int] | None = None) -> dict[str, tuple[int, ...]]:
    """Canonical names and shapes of all tensors a text model of this configuration has (HF layout, `[out, in]`).

    `fused_layers`: layers whose experts are stored as two 3-D tensors; None means all. The others hold one 2-D tensor
    per expert and projection. `lm_head.weight` is absent when the head is tied.
    """
    h, value_dim = c.hidden_size, c.linear_value_dim
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (c.vocab_size, h), "norm.weight": (h,)}
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, h)
    heads, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    mixers = {
        "full_attention": {
            "self_attn.q_proj.weight": (2 * heads, h), "self_attn.k_proj.weight": (kv, h),
            "self_attn.v_proj.weight": (kv, h), "self_attn.o_proj.weight": (h, heads),
            "self_attn.q_norm.weight": (c.head_dim,), "self_attn.k_norm.weight": (c.head_dim,),
        },
        "linear_attention": {
            "linear_attn.in_proj_qkv.weight": (c.conv_dim, h), "linear_attn.in_proj_z.weight": (value_dim, h),
            "linear_attn.in_proj_b.weight": (c.linear_num_value_heads, h),
            "linear_attn.in_proj_a.weight": (c.linear_num_value_heads, h),
            "linear_attn.conv1d.weight": (c.conv_dim, 1, c.linear_conv_kernel_dim),
            "linear_attn.A_log": (c.linear_num_value_heads,), "linear_attn.dt_bias": (c.linear_num_value_heads,),
            "linear_attn.norm.weight": (c.linear_value_head_dim,), "linear_attn.out_proj.weight": (h, value_dim),
        },
    }
    for i, kind in enumerate(c.layer_types):
        fused = fused_layers is None or i in fused_layers
        norms = {"input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,)}
        layer = {**norms, **mixers[kind], **_ffn(c, fused)}
        shapes.update({f"layers.{i}.{name}": shape for name, shape in layer.items()})
    return shapes


def _ffn(c: ModelConfig, fused: bool) -> dict[str, tuple[int, ...]]:
    h = c.hidden_size
    if not c.num_experts:
        return _swiglu("mlp", c.intermediate_size, h)
    shapes = {"mlp.gate.weight": (c.num_experts, h), "mlp.shared_expert_gate.weight": (1, h),
              **_swiglu("mlp.shared_expert", c.shared_expert_intermediate_size, h)}
    if fused:
        return {**shapes, "mlp.experts.gate_up_proj": (c.num_experts, 2 * c.moe_intermediate_size, h),
                "mlp.experts.down_proj": (c.num_experts, h, c.moe_intermediate_size)}
    for e in range(c.num_experts):
        shapes.update(_swiglu(f"mlp.experts.{e}", c.moe_intermediate_size, h))
    return shapes


def _swiglu(stem: str, inner: int, h: int) -> dict[str, tuple[int, ...]]:
    return {f"{stem}.gate_proj.weight": (inner, h), f"{stem}.up_proj.weight": (inner, h),
            f"{stem}.down_proj.weight": (h, inner)}
