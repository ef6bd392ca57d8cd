"""The image half of generated checkpoints: configuration and tensor shapes of a tiny tower of either family."""

from __future__ import annotations

from typing import Any

from tools.random_weights import Shape

QWEN: dict[str, Any] = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "in_channels": 3, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16}
# Three layers with the window merger behind the second; 40 units of the MLPs are no whole blocks of 32.
MINICPM: dict[str, Any] = {
    "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 2, "num_channels": 3,
    "patch_size": 4, "image_size": 280, "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh",
    "model_type": "minicpmv4_6_vision"}
MINICPM_INSERT = 1
MINICPM_IMAGES = {"image_processor_type": "MiniCPMV4_6ImageProcessor", "patch_size": 4, "scale_resolution": 32,
                  "max_slice_nums": 4}
QWEN_IMAGES = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2,
               "size": {"shortest_edge": 256, "longest_edge": 4096}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def qwen_shapes(out: int) -> dict[str, Shape]:
    """Tensors under their full names; `out` is the text model's width."""
    v, inner = QWEN["hidden_size"], QWEN["intermediate_size"]
    wide = v * QWEN["spatial_merge_size"] ** 2
    patch = (v, QWEN["in_channels"], QWEN["temporal_patch_size"], QWEN["patch_size"], QWEN["patch_size"])
    linears = {"patch_embed.proj": patch, "merger.linear_fc1": (wide, wide), "merger.linear_fc2": (out, wide)}
    norms = {"merger.norm": v}
    for b in range(QWEN["depth"]):
        linears |= {f"blocks.{b}.attn.qkv": (3 * v, v), f"blocks.{b}.attn.proj": (v, v),
                    f"blocks.{b}.mlp.linear_fc1": (inner, v), f"blocks.{b}.mlp.linear_fc2": (v, inner)}
        norms |= {f"blocks.{b}.norm1": v, f"blocks.{b}.norm2": v}
    table = {"model.visual.pos_embed.weight": (QWEN["num_position_embeddings"], v)}
    return table | _with_biases("model.visual.", linears, norms)


def minicpm_shapes(out: int) -> dict[str, Shape]:
    """Tensors under their full names; `out` is the text model's width."""
    v, inner, patch = MINICPM["hidden_size"], MINICPM["intermediate_size"], MINICPM["patch_size"]
    wide, merger, tower = 4 * v, "merger.mlp.0", "vision_tower"
    linears: dict[str, Shape] = {
        f"{tower}.embeddings.patch_embedding": (v, MINICPM["num_channels"], patch, patch),
        f"{tower}.vit_merger.linear_1": (4 * inner, wide), f"{tower}.vit_merger.linear_2": (v, 4 * inner),
        f"{merger}.linear_1": (wide, wide), f"{merger}.linear_2": (out, wide)}
    norms = {f"{tower}.post_layernorm": v, f"{tower}.vit_merger.layer_norm1": v, f"{tower}.vit_merger.pre_norm": wide,
             f"{merger}.pre_norm": wide}
    attentions = [f"{tower}.vit_merger"]
    for i in range(MINICPM["num_hidden_layers"]):
        layer = f"{tower}.encoder.layers.{i}"
        linears |= {f"{layer}.mlp.fc1": (inner, v), f"{layer}.mlp.fc2": (v, inner)}
        norms |= {f"{layer}.layer_norm1": v, f"{layer}.layer_norm2": v}
        attentions.append(layer)
    linears |= {f"{name}.self_attn.{part}_proj": (v, v) for name in attentions for part in ("q", "k", "v", "out")}
    side = MINICPM["image_size"] // patch
    table = {f"model.{tower}.embeddings.position_embedding.weight": (side**2, v)}
    return table | _with_biases("model.", linears, norms)


def _with_biases(prefix: str, linears: dict[str, Shape], norms: dict[str, int]) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for name, shape in [*linears.items(), *((name, (n,)) for name, n in norms.items())]:
        shapes |= {f"{prefix}{name}.weight": shape, f"{prefix}{name}.bias": shape[:1]}
    return shapes
