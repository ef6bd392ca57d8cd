"""Tiny random vision towers of transformers, and their weights under the reference's names.

Every parameter is redrawn. Position tables have the released sides (48 and 70): on other sides transformers' float32
buckets may differ from the integers that define them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, vision_utils
from transformers.models.minicpmv4_6 import modeling_minicpmv4_6 as minicpm
from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as moe

from reference.vision_minicpm import MiniCpmVision
from reference.vision_qwen import QwenVision
from tests import hf

Grids = Sequence[tuple[int, int]]
HIDDEN, HEADS, MLP, OUT = 24, 2, 50, 28
IMAGE_TOKEN = 290
_TEXT = {"vocab_size": 40, "hidden_size": OUT, "intermediate_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 8, "linear_num_key_heads": 1, "linear_num_value_heads": 1,
         "linear_key_head_dim": 4, "linear_value_head_dim": 4}


def qwen(is_moe: bool, depth: int = 3, seed: int = 0, attention: str = "eager", hidden: int = HIDDEN, mlp: int = MLP,
         heads: int = HEADS) -> PreTrainedModel:
    """A float32 tower: hidden 24, 2 heads of 12, MLP 50, patches of 3 * 2 * 4 * 4, out 28."""
    config_class = transformers.Qwen3_5MoeConfig if is_moe else transformers.Qwen3_5Config
    config = config_class(text_config={}, vision_config={
        "depth": depth, "hidden_size": hidden, "intermediate_size": mlp, "num_heads": heads, "out_hidden_size": OUT,
        "patch_size": 4, "num_position_embeddings": 2304}).vision_config
    config._attn_implementation = attention
    model = (moe.Qwen3_5MoeVisionModel if is_moe else dense.Qwen3_5VisionModel)(config).eval()
    redraw(model, seed)
    return model


def minicpm_model(depth: int = 9, seed: int = 0, attention: str = "eager", insert: int = 6, hidden: int = HIDDEN,
                  mlp: int = MLP, heads: int = HEADS) -> PreTrainedModel:
    """The image half of a float32 model: hidden 24, 2 heads of 12, MLP 50, patches of 3 * 2 * 2, out 28."""
    config = transformers.MiniCPMV4_6Config(text_config={"model_type": "qwen3_5_text", **_TEXT}, vision_config={
        "num_hidden_layers": depth, "hidden_size": hidden, "intermediate_size": mlp, "num_attention_heads": heads,
        "image_size": 140, "patch_size": 2}, insert_layer_id=insert)
    config._attn_implementation = config.vision_config._attn_implementation = attention
    model = minicpm.MiniCPMV4_6Model(config).eval()
    redraw(model, seed)
    return model


def with_text(family: str, seed: int = 0, attention: str = "eager") -> PreTrainedModel:
    """A float32 image-and-text model, "qwen3_5", "qwen3_5_moe" or "minicpmv4_6": the text half of tests.hf (tied and dense
    in the last), the image half as above with 64 out."""
    is_moe = family == "qwen3_5_moe"
    text = hf.text_fields(is_moe, 2, tied=family == "minicpmv4_6")
    if family == "minicpmv4_6":
        config = transformers.MiniCPMV4_6Config(
            text_config={"model_type": "qwen3_5_text", **text}, insert_layer_id=1, image_token_id=IMAGE_TOKEN,
            tie_word_embeddings=True, vision_config={
                "num_hidden_layers": 3, "hidden_size": HIDDEN, "intermediate_size": MLP, "num_attention_heads": HEADS,
                "image_size": 140, "patch_size": 2})
        model_class = transformers.MiniCPMV4_6ForConditionalGeneration
    else:
        name = "Qwen3_5Moe" if is_moe else "Qwen3_5"
        config = getattr(transformers, f"{name}Config")(text_config=text, image_token_id=IMAGE_TOKEN, vision_config={
            "depth": 2, "hidden_size": HIDDEN, "intermediate_size": MLP, "num_heads": HEADS, "out_hidden_size": 64,
            "patch_size": 4, "num_position_embeddings": 2304})
        model_class = getattr(transformers, f"{name}ForConditionalGeneration")
    config._attn_implementation, config._experts_implementation = attention, "eager"
    model = model_class(config).eval()
    hf.redraw(model, seed)
    for name, module in model.model.named_children():
        if name != "language_model":
            redraw(module, seed)
    return model


def redraw(model: torch.nn.Module, seed: int) -> None:
    """Draw every parameter anew, in the model's order, from one generator: norm weights of both signs, biases that count,
    position rows as large as the patches' own."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            fan_in = parameter[0].numel()
            if "pos_embed" in name or "position_embedding" in name:
                fan_in = 1
            elif parameter.ndim == 1:
                drawn = drawn.sign() * (0.5 + drawn.abs() / 2) if "norm" in name and "weight" in name else 0.3 * drawn
                fan_in = 1
            parameter.copy_(drawn / fan_in**0.5)


def qwen_reference(model: PreTrainedModel, dtype: torch.dtype) -> QwenVision:
    """The reference over a tower's weights."""
    return QwenVision(model.config, _params(model, dtype))


def minicpm_reference(model: PreTrainedModel, dtype: torch.dtype) -> MiniCpmVision:
    """The reference over a model's weights."""
    return MiniCpmVision(model.config.vision_config, _params(model, dtype))


def logits(model: PreTrainedModel, ids: list[int], patches: Tensor, grids: Grids) -> Tensor:
    """One uncached pass of a model with text: ids [T], patches of all images -> logits [T, vocab]."""
    row = torch.tensor([ids])
    if model.config.model_type == "minicpmv4_6":
        images = {"pixel_values": packed(patches.to(model.dtype), 2), "target_sizes": torch.tensor(grids, dtype=torch.int32)}
    else:
        images = {"pixel_values": patches.to(model.dtype), "image_grid_thw": torch.tensor([(1, *grid) for grid in grids]),
                  "mm_token_type_ids": (row == IMAGE_TOKEN).int()}
    with torch.no_grad():
        return model(input_ids=row, use_cache=False, **images).logits[0]


def _params(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights without those of the language model; the patch convolution as a matrix."""
    return {name: (w.flatten(1) if w.ndim > 2 else w).detach().to(dtype, copy=True)
            for name, w in model.state_dict().items() if not name.startswith("language_model.")}


def qwen_features(model: PreTrainedModel, patches: Tensor, grids: Grids) -> Tensor:
    """transformers' embeddings of images: patches [N, C * 2 * p * p] -> [N / 4, out]."""
    thw = torch.tensor([(1, *grid) for grid in grids])
    with torch.no_grad():
        return model(patches.to(model.dtype), grid_thw=thw).pooler_output


def minicpm_features(model: PreTrainedModel, patches: Tensor, grids: Grids, mode: str) -> Tensor:
    """transformers' embeddings of views: patches [N, C * p * p] -> [N / 16 or N / 4, out]."""
    with torch.no_grad():
        found = model.get_image_features(packed(patches.to(model.dtype), model.config.vision_config.patch_size),
                                         torch.tensor(grids, dtype=torch.int32), downsample_mode=mode)
    return torch.cat(found.pooler_output)


def packed(patches: Tensor, patch: int) -> Tensor:
    """[N, C * p * p] -> transformers' [1, C, p, N * p]: patches side by side."""
    return patches.unflatten(1, (3, patch, patch)).permute(1, 2, 0, 3).flatten(2)[None]


def unpacked(pixel_values: np.ndarray) -> np.ndarray:
    """The inverse."""
    channels, patch, width = pixel_values.shape[1:]
    split = pixel_values[0].reshape(channels, patch, width // patch, patch)
    return split.transpose(2, 0, 1, 3).reshape(width // patch, -1)


@contextlib.contextmanager
def double_precision(model: PreTrainedModel) -> Iterator[None]:
    """Run a tower in float64 throughout, position weights included; afterwards it is float32 again."""
    names = {type(module).__module__ for module in model.modules() if type(module).__module__.startswith("transformers.models")}
    model.double()
    try:
        with contextlib.ExitStack() as stack:
            for module in (vision_utils, *(sys.modules[name] for name in sorted(names))):
                stack.enter_context(hf.double_module(module))
            yield
    finally:
        model.float()


def rope_index(ids: Sequence[int], image_token_id: int, grids: Grids) -> tuple[Tensor, int]:
    """transformers' positions [3, T] of a prompt with images, and the position after it."""
    owner = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)))
    owner.get_vision_position_ids = lambda *args, **kwargs: dense.Qwen3_5Model.get_vision_position_ids(owner, *args, **kwargs)
    row = torch.tensor([list(ids)])
    thw = torch.tensor([(1, *grid) for grid in grids]) if grids else None
    positions, delta = dense.Qwen3_5Model.get_rope_index(owner, row, (row == image_token_id).int(), image_grid_thw=thw)
    return positions[:, 0], int(delta) + len(ids)
