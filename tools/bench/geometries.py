"""Shapes of the models that benchmarks run on; sizes as in the released configurations."""

from __future__ import annotations

import dataclasses

from fermi_engine.config import ModelConfig
from fermi_engine.vision.config import MINICPM, MINICPM_INSERT, QWEN, QWEN_EPS, VisionConfig
from fermi_engine.vision.plans import MiniCpmImages, QwenImages

_QWEN_ROPE = {"rope_theta": 1e7, "mrope_section": (11, 11, 10), "rms_norm_eps": 1e-6, "linear_conv_kernel_dim": 4}
_QWEN_MOE = {
    "model_type": "qwen3_5_moe_text", "vocab_size": 248_320, "hidden_size": 2048, "num_hidden_layers": 40,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "rotary_dim": 64,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "max_position_embeddings": 262_144, "eos_token_ids": (248_044,),
}
_MINICPM = {
    "model_type": "qwen3_5_text", "vocab_size": 248_094, "hidden_size": 1024, "num_hidden_layers": 24,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "rotary_dim": 64,
    "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "intermediate_size": 3584, "tie_word_embeddings": True, "max_position_embeddings": 262_144,
    "eos_token_ids": (248_044,),
}
# The structure of the large ones at a thousandth of the size: every kind of layer, grouped heads, rows off a multiple of 8.
_SMALL = {
    "model_type": "qwen3_5_moe_text", "vocab_size": 517, "hidden_size": 64, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rotary_dim": 8, "mrope_section": (2, 1, 1),
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
    "max_position_embeddings": 4096, "eos_token_ids": (504,),
}
# Rows long enough that the matrices dominate, small enough to run under an instruction counter.
_MEDIUM = {
    **_SMALL, "vocab_size": 4096, "hidden_size": 512, "num_hidden_layers": 4, "head_dim": 64, "rotary_dim": 16,
    "mrope_section": (3, 3, 2), "linear_key_head_dim": 64, "linear_value_head_dim": 64, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
_SMALL_DENSE = {
    **{name: value for name, value in _SMALL.items() if "expert" not in name and not name.startswith("moe")},
    "model_type": "qwen3_5_text", "num_hidden_layers": 4, "intermediate_size": 96, "tie_word_embeddings": True,
}
GEOMETRIES = {
    "qwen3.6-35b-a3b": _QWEN_MOE,
    "qwen3.6-35b-a3b-reap128": {**_QWEN_MOE, "num_experts": 128},
    "minicpm-v-4.6": _MINICPM,
    "small": _SMALL,
    "small-dense": _SMALL_DENSE,
    "medium": _MEDIUM,
}


def geometry(name: str) -> ModelConfig:
    """The configuration called `name`, every fourth layer full attention. KeyError for an unknown one."""
    fields = {**_QWEN_ROPE, **GEOMETRIES[name]}
    kinds = ("linear_attention", "linear_attention", "linear_attention", "full_attention")
    layers = tuple(kinds[i % 4] for i in range(fields["num_hidden_layers"]))
    return ModelConfig(**fields, layer_types=layers)


_SIGLIP = {"num_hidden_layers": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16,
           "layer_norm_eps": QWEN_EPS}
_QWEN_TOWER = VisionConfig(family=QWEN, **_SIGLIP, patch_size=16, temporal_patch_size=2, out_hidden_size=2048, table_side=48,
                           insert_layer_id=-1, image_token_id=248_056, images=QwenImages())
_MINICPM_TOWER = VisionConfig(family=MINICPM, **_SIGLIP, patch_size=14, temporal_patch_size=1, out_hidden_size=1024,
                              table_side=70, insert_layer_id=MINICPM_INSERT, image_token_id=248_056, images=MiniCpmImages())
# A window merger in its midst, heads whose width is no multiple of 16, an MLP that packs widen.
_SMALL_TOWER = dataclasses.replace(_MINICPM_TOWER, num_hidden_layers=3, hidden_size=48, intermediate_size=80,
                                   num_attention_heads=2, out_hidden_size=64, insert_layer_id=1, image_token_id=500)
TOWERS = {"qwen3.6-35b-a3b": _QWEN_TOWER, "qwen3.6-35b-a3b-reap128": _QWEN_TOWER, "minicpm-v-4.6": _MINICPM_TOWER,
          "small-dense": _SMALL_TOWER}
