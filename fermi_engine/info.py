"""What a model is made of: sizes by format and by part, bytes a decoded token reads, bytes of state.

For a pack these are the stored sizes; for a checkpoint directory those a pack of it would have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fermi_engine.checkpoint import UNUSED_PARTS, Checkpoint
from fermi_engine.compression.rules import assign
from fermi_engine.config import ModelConfig
from fermi_engine.convert import DOWN, GATE_UP, checkpoint_eos_ids, plan_pack
from fermi_engine.formats import FORMATS
from fermi_engine.pack import Pack
from fermi_engine.shapes import pack_shapes
from fermi_engine.vision.config import VisionConfig

VISION = "vision"
STATE_BYTES = 4  # keys, values, conv tails and recurrent state are float32
PARTS = (  # first match names the part of a tensor
    ("visual.", VISION), ("vision_tower.", VISION), ("merger.mlp.", VISION),
    ("embed_tokens.", "embedding"), ("lm_head.", "head"), (".self_attn.", "attention"), (".linear_attn.", "delta net"),
    (".mlp.experts.", "experts"), (".mlp.shared_expert.", "shared expert"), (".mlp.gate.", "router"),
    (".mlp.shared_expert_gate.", "shared expert"), (".mlp.", "mlp"), ("norm.", "norms"),
)
ESSENTIALS = ("model_type", "num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads",
              "num_key_value_heads", "head_dim", "linear_num_key_heads", "linear_num_value_heads",
              "linear_key_head_dim", "linear_value_head_dim", "max_position_embeddings", "tie_word_embeddings")
MOE_ESSENTIALS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")


class Weight(NamedTuple):
    """One tensor as stored: `count` weights in `bytes`; `read` of them a decoded token touches."""

    name: str
    part: str
    format: str
    count: int
    bytes: int
    read: int


def describe_pack(pack: Pack) -> dict[str, Any]:
    """Everything `info` prints about a pack, ready for JSON; sizes in bytes."""
    said = pack.info()
    return {
        "kind": "pack", **_description(pack.config, pack.vision, _pack_formats(pack)),
        **{key: said[key] for key in ("path", "hash", "engine_version", "files", "eos_ids", "unused",
                                   "scales")},
        "format": said["default_format"], "file_bytes": said["bytes"], "expert_stride_bytes": said["expert_stride"],
    }


def describe_checkpoint(path: str | Path, format: str = "q4_0") -> dict[str, Any]:
    """The same of a checkpoint directory: what a `format` pack of it takes. Raises CheckpointError, ConfigError."""
    checkpoint = Checkpoint.open(path)
    assignments = assign(pack_shapes(checkpoint.config, checkpoint.vision), format)
    formats = {name: assignment.format for name, assignment in assignments.items()}
    return {
        "kind": "checkpoint", **_description(checkpoint.config, checkpoint.vision, formats), "path": str(path), "hash": None,
        "files": {name: file.stat().st_size for name, file in checkpoint.files.items()},
        "eos_ids": checkpoint_eos_ids(checkpoint), "unused": checkpoint.unused, "format": format,
        "scales": None, "file_bytes": plan_pack(checkpoint, assignments, format).total_bytes,
        "source_bytes": sum(shard_bytes for _, shard_bytes, _ in checkpoint.shards.values()),
    }


def part_of(name: str) -> str:
    """What a tensor belongs to: attention, experts, head and so on."""
    return next((part for mark, part in PARTS if mark in name), "norms")


def left_out(unused: Iterable[str]) -> str:
    """Tensors of the source that a pack does not hold, counted by what they belong to: `visual 12, mtp 5`."""
    counts: dict[str, int] = {}
    for name in unused:
        part = next((piece for piece in name.split(".") if piece in UNUSED_PARTS), name)
        counts[part] = counts.get(part, 0) + 1
    return ", ".join(f"{part} {count}" for part, count in counts.items()) or "nothing"


def _description(config: ModelConfig, vision: VisionConfig | None, formats: Mapping[str, str]) -> dict[str, Any]:
    weights = _weights(config, vision, formats)
    attention = config.layer_types.count("full_attention")
    kv = attention * 2 * config.num_key_value_heads * config.head_dim * STATE_BYTES
    heads = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    conv = (config.linear_conv_kernel_dim - 1) * config.conv_dim
    return {
        "model_type": config.model_type, "config": _essentials(config),
        "layers": {"full_attention": attention, "linear_attention": config.num_hidden_layers - attention},
        "parameters": sum(weight.count for weight in weights),
        "formats": _sums(weights, "format"), "parts": _sums(weights, "part"),
        "read_bytes_per_token": sum(weight.read for weight in weights),
        "recurrent_state_bytes": (config.num_hidden_layers - attention) * (heads + conv) * STATE_BYTES,
        "kv_bytes_per_token": kv,
    }


def _essentials(config: ModelConfig) -> dict[str, Any]:
    names = ESSENTIALS + (MOE_ESSENTIALS if config.num_experts else ("intermediate_size",))
    return {name: getattr(config, name) for name in names}


def _weights(config: ModelConfig, vision: VisionConfig | None, formats: Mapping[str, str]) -> list[Weight]:
    weights = []
    for name, shape in pack_shapes(config, vision).items():
        part = part_of(name)
        matrix = len(shape) > 1 and not name.endswith(".conv1d.weight")
        row = FORMATS[formats[name]]
        copies = math.prod(shape[:-2]) if matrix else 1
        stored = copies * math.prod(row.stored_shape(*shape[-2:])) if matrix else math.prod(shape) * STATE_BYTES
        weights.append(Weight(name, part, row.name, math.prod(shape), stored, _read(config, part, stored, row, shape)))
    return weights


def _read(config: ModelConfig, part: str, stored: int, row: Any, shape: tuple[int, ...]) -> int:
    """Bytes one decoded token reads of a tensor: its own embedding row, the experts chosen, nothing of a vision tower, all of
    the rest."""
    if part == "embedding":
        return row.row_bytes(shape[-1]) + (stored if config.tie_word_embeddings else 0)
    if part == VISION:
        return 0
    if part == "experts":
        return stored // config.num_experts * config.num_experts_per_tok
    return stored


def _pack_formats(pack: Pack) -> dict[str, str]:
    formats = {}
    for name, shape in pack_shapes(pack.config, pack.vision).items():
        if name.endswith((GATE_UP, DOWN)):
            formats[name] = pack.expert(int(name.split(".")[1]), 0)[name.endswith(DOWN)].format
        else:
            vector = len(shape) == 1 or name.endswith(".conv1d.weight")
            formats[name] = "f32" if vector else pack.matrix(name).format
    return formats


def _sums(weights: Iterable[Weight], field: str) -> dict[str, dict[str, int]]:
    sums: dict[str, dict[str, int]] = {}
    for weight in weights:
        row = sums.setdefault(getattr(weight, field), {"tensors": 0, "weights": 0, "bytes": 0, "read_per_token": 0})
        row["tensors"] += 1
        row["weights"] += weight.count
        row["bytes"] += weight.bytes
        row["read_per_token"] += weight.read
    return sums
