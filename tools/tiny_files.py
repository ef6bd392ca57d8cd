"""What training leaves behind: a state to resume from, in parts small enough to send, and the released checkpoint."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from fermi_engine.vision.config import is_vision
from tools.tiny_tokenizer import IMAGES, VOCAB_SIZE, token_id

PART_BYTES = 15_000_000
PREFIX, VISION_PREFIX = "model.language_model.", "model."
GENERATION = {"bos_token_id": token_id("<|endoftext|>"), "do_sample": False, "pad_token_id": token_id("<|endoftext|>"),
              "eos_token_id": [token_id("<|im_end|>"), token_id("<|endoftext|>")]}
TOWER = {"depth": 4, "hidden_size": 96, "intermediate_size": 192, "num_heads": 3, "in_channels": 3,
         "patch_size": IMAGES.patch_size, "spatial_merge_size": IMAGES.merge_size,
         "temporal_patch_size": IMAGES.temporal_patch_size, "num_position_embeddings": 64}
PREPROCESSOR = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": IMAGES.patch_size,
                "temporal_patch_size": IMAGES.temporal_patch_size, "merge_size": IMAGES.merge_size,
                "size": {"shortest_edge": IMAGES.min_pixels, "longest_edge": IMAGES.max_pixels},
                "image_mean": list(IMAGES.image_mean), "image_std": list(IMAGES.image_std)}


class StateError(ValueError):
    """A state directory that cannot be resumed from; the text is one line."""


def config_json(**changes: Any) -> dict[str, Any]:
    """config.json of the model, nested as in the release; `changes` replace fields of the text model."""
    text = {
        "model_type": "qwen3_5_moe_text", "vocab_size": VOCAB_SIZE, "hidden_size": 192, "hidden_act": "silu",
        "num_hidden_layers": 8, "full_attention_interval": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
        "head_dim": 64, "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True,
        "rms_norm_eps": 1e-6, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32,
        "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "num_experts": 16, "num_experts_per_tok": 4,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "output_router_logits": False,
        "router_aux_loss_coef": 0.001, "max_position_embeddings": 16384, "tie_word_embeddings": False,
        "dtype": "bfloat16", "eos_token_id": token_id("<|endoftext|>"), "initializer_range": 0.02, "use_cache": True,
        **changes,
    }
    layers = range(text["num_hidden_layers"])
    text["layer_types"] = ["full_attention" if i % 4 == 3 else "linear_attention" for i in layers]
    pairs = text["head_dim"] // 8
    third = pairs // 3
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
                               "mrope_interleaved": True, "mrope_section": [pairs - 2 * third, third, third]}
    ids = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
           "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    vision = {**TOWER, "model_type": "qwen3_5_moe_vision", "hidden_act": "gelu_pytorch_tanh",
              "out_hidden_size": text["hidden_size"], "dtype": "bfloat16", "initializer_range": 0.02}
    return {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "dtype": "bfloat16",
            "tie_word_embeddings": False, "transformers_version": "5.24.0",
            **{field: token_id(token) for field, token in ids.items()}, "text_config": text, "vision_config": vision}


def export(path: Path, raw: dict[str, Any], params: dict[str, torch.Tensor], files: dict[str, bytes]) -> None:
    """Write a checkpoint directory in the released layout: bfloat16 weights, text files.

    raw: config.json; params: canonical name -> tensor, those of the tower among them; files: tokenizer files by name.
    """
    path.mkdir(parents=True, exist_ok=True)
    stored = {_stored_name(name): w.detach().to("cpu", torch.bfloat16).contiguous() for name, w in params.items()}
    (path / "model.safetensors").write_bytes(save(stored, {"format": "pt"}))
    settings = {"config.json": raw, "generation_config.json": GENERATION, "preprocessor_config.json": PREPROCESSOR}
    for name, value in settings.items():
        (path / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    for name, data in files.items():
        (path / name).write_bytes(data)


def _stored_name(name: str) -> str:
    prefix = "" if name == "lm_head.weight" else VISION_PREFIX if is_vision(name) else PREFIX
    return prefix + name


def weights(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Tensors of these shapes by canonical names, float32, of a checkpoint that `export` wrote. Raises StateError where it has
    others."""
    stored = _stored(path)
    for name, shape in shapes.items():
        found = stored.get(_stored_name(name))
        if found is None or tuple(found.shape) != shape:
            raise StateError(f"{path}: {_stored_name(name)} is {'missing' if found is None else list(found.shape)}, expected "
                             f"{list(shape)}; give a folder that --export of this version wrote")
    return {name: stored[_stored_name(name)].float() for name in shapes}


def mean(first: Path, second: Path, out: Path) -> None:
    """Write the checkpoint half-way between two that `export` wrote: what a short last run gave, without what it forgot.

    Wortsman et al., "Robust fine-tuning of zero-shot models" (arXiv 2109.01903), section 3. Raises StateError where they have
    other tensors.
    """
    one, other = (_stored(path) for path in (first, second))
    if {name: w.shape for name, w in one.items()} != {name: w.shape for name, w in other.items()}:
        raise StateError(f"{first} and {second} hold different tensors; give two checkpoints of one model")
    out.mkdir(parents=True, exist_ok=True)
    for file in first.iterdir():
        if file.suffix in (".json", ".jinja"):
            (out / file.name).write_bytes(file.read_bytes())
    halves = {name: ((w.float() + other[name].float()) / 2).to(torch.bfloat16) for name, w in one.items()}
    (out / "model.safetensors").write_bytes(save(halves, {"format": "pt"}))


def _stored(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path / "model.safetensors")
    except (OSError, ValueError, SafetensorError) as err:
        raise StateError(f"{path} holds no model ({err}); give a folder that --export wrote") from None


def save_state(path: Path, tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
    """Write tensors and JSON facts; a state that was there stays whole until the new one is.

    state.json names the parts and their hash; it is replaced last.
    """
    path.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save({name: w.to("cpu") for name, w in tensors.items()}, buffer)
    data = buffer.getvalue()
    count = math.ceil(len(data) / PART_BYTES)
    names = [f"state-{facts['step']}-{i}.bin" for i in range(count)]
    for i, name in enumerate(names):
        (path / name).write_bytes(data[i * PART_BYTES : (i + 1) * PART_BYTES])
    record = {**facts, "parts": names, "sha256": hashlib.sha256(data).hexdigest()}
    (path / "state.json.part").write_text(json.dumps(record), encoding="utf-8")
    os.replace(path / "state.json.part", path / "state.json")
    for old in path.glob("state-*.bin"):
        if old.name not in names:
            old.unlink()


def load_state(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What save_state wrote. Raises StateError when it is missing, incomplete or damaged."""
    try:
        facts = json.loads((path / "state.json").read_text(encoding="utf-8"))
        data = b"".join((path / name).read_bytes() for name in facts["parts"])
    except (OSError, ValueError, KeyError) as err:
        raise StateError(f"{path} holds no whole training state ({err}); start anew without --resume") from None
    if hashlib.sha256(data).hexdigest() != facts["sha256"]:
        raise StateError(f"{path}: the parts of the training state do not belong together; copy them again")
    return torch.load(io.BytesIO(data), weights_only=True), facts
