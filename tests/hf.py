"""Tiny random transformers models of both families, and their weights under canonical names.

Every parameter is redrawn: the library's own initialisation leaves norms and biases at values that hide
faults.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
import transformers
from transformers import PreTrainedModel

from fermi_engine.config import ModelConfig

PREFIXES = ("model.language_model.", "language_model.model.", "model.")
IMAGE_HALVES = ("model.visual.", "model.vision_tower.", "model.merger.")
VOCAB = 299
LAYERS = 8


def text_fields(moe: bool, value_head_ratio: int, tied: bool) -> dict:
    """Sizes that unmask faults: head_dim != hidden / heads, K != V, two kv heads, widths that differ from
    each other."""
    ffn = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
           "shared_expert_intermediate_size": 64} if moe else {"intermediate_size": 96}
    return ffn | {
        "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2,
        "linear_num_value_heads": 2 * value_head_ratio, "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4, "max_position_embeddings": 4096, "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                            "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    }


def build(
    moe: bool, value_head_ratio: int = 2, tied: bool = False, wrapped: bool = True, seed: int = 0,
    attention: str = "eager", experts: str = "eager",
) -> PreTrainedModel:
    """A float32 model in eval mode: hidden 64, 8 layers (3 linear, 1 full, twice), vocabulary 299.

    moe: 16 experts, 2 a token, and a shared expert; else dense. value_head_ratio: value heads per key head of
    the linear layers. wrapped: the image-and-text class (released tensor prefix, tiny vision tower) or the
    text-only one. The same arguments give the same weights; `attention` and `experts` choose transformers'
    implementations only.
    """
    family = "Qwen3_5Moe" if moe else "Qwen3_5"
    fields = text_fields(moe, value_head_ratio, tied)
    if wrapped:
        vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
                  "out_hidden_size": 64, "num_position_embeddings": 16}
        config = getattr(transformers, f"{family}Config")(
            text_config=fields, vision_config=vision, tie_word_embeddings=tied)
    else:
        config = getattr(transformers, f"{family}TextConfig")(**fields)
    config._attn_implementation, config._experts_implementation = attention, experts
    model_class = getattr(transformers, f"{family}{'ForConditionalGeneration' if wrapped else 'ForCausalLM'}")
    model = model_class(config).eval()
    redraw(model, seed)
    return model


def redraw(model: PreTrainedModel, seed: int) -> None:
    """Draw every parameter anew, in the model's order, from one generator.

    A tied model drawn like the others repeats its last token for ever, because an embedding is its own
    nearest neighbour, and makes a comparison of tokens empty. It gets 1 + final norm weight with both signs,
    and a last layer that outweighs the embedding. A small embedding would do as well, but then the rounding
    of the first layers, which is common to all settings of transformers, outgrows the differences between
    settings that limits are taken from.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = _draw(name, parameter.shape, generator)
            if model.config.tie_word_embeddings:
                drawn = _untangle(name, drawn)
            parameter.copy_(drawn)


def _untangle(name: str, drawn: torch.Tensor) -> torch.Tensor:
    if name.endswith(("model.norm.weight", "language_model.norm.weight")):
        return drawn - 1
    last = f"layers.{LAYERS - 1}." in name and ("o_proj" in name or "down_proj" in name)
    return 20 * drawn if last else drawn


def _draw(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Realistic ranges, and a calm model: small branch outputs, a decided router (rounding seldom changes a
    choice)."""
    uniform = torch.rand(shape, generator=generator)
    normal = torch.randn(shape, generator=generator)
    if name.endswith("A_log"):
        return torch.log(1 + 15 * uniform)
    if name.endswith("dt_bias"):
        step = 1e-3 * 100**uniform
        return step + torch.log(-torch.expm1(-step))
    if name.endswith("linear_attn.norm.weight"):
        return 0.5 + uniform
    if len(shape) == 1:
        return 0.3 * normal
    if name.endswith("embed_tokens.weight"):
        return normal
    scale = 1.0
    if any(part in name for part in ("out_proj", "o_proj", "down_proj")):
        scale = 0.1
    elif name.endswith("mlp.gate.weight"):
        scale = 8.0
    return scale * normal / shape[-1] ** 0.5


def save(model: PreTrainedModel, path: Path, fused: bool) -> None:
    """Write a checkpoint directory; fused: experts as the released 3-D tensors, else one 2-D tensor per
    expert."""
    model.save_pretrained(path, save_original_format=not fused)


def canonical_params(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Copies of the text weights by canonical name, without the image half and without a head tied to the embedding."""
    tied = model.config.tie_word_embeddings
    params = {}
    for name, value in model.state_dict().items():
        if name.startswith(IMAGE_HALVES) or (tied and name == "lm_head.weight"):
            continue
        prefix = next((p for p in PREFIXES if name.startswith(p)), "")
        params[name[len(prefix):]] = value.detach().to(dtype, copy=True)
    return params


def text_config(model: PreTrainedModel) -> ModelConfig:
    """The model's configuration as the engine reads it from config.json."""
    return ModelConfig.from_hf(model.config.to_dict())


def logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """One uncached pass: ids [T] -> logits [T, vocab]."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def greedy(model: PreTrainedModel, ids: list[int], n: int) -> list[int]:
    """The n ids that transformers' own cached greedy generation appends."""
    prompt = torch.tensor([ids])
    with torch.no_grad():
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                             max_new_tokens=n, min_new_tokens=n, pad_token_id=0)
    return out[0, len(ids):].tolist()


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """torch with `count` threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _DoubleTorch(types.ModuleType):
    """torch, except that asking for float32 gives float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


@contextlib.contextmanager
def double_module(module: types.ModuleType) -> Iterator[None]:
    """A modelling module whose float32 is float64: what its code forces to float32 (norms, gates, softmax,
    router, delta rule, rotary angles) runs in double inside the block."""
    with mock.patch.object(module, "torch", _DoubleTorch("torch")), \
            mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield


@contextlib.contextmanager
def double_precision(model: PreTrainedModel) -> Iterator[None]:
    """Run `model` in float64 throughout; afterwards it is float32 again, with the weights it had."""
    model.double()
    try:
        with double_module(sys.modules[type(model).__module__]):
            yield
    finally:
        model.float()
