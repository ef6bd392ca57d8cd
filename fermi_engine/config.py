"""ModelConfig: what a checkpoint says about itself, in Hugging Face names. EngineConfig: what the user asks of the engine."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from fermi_engine.errors import ConfigError

MOE_TYPES = ("qwen3_5_moe_text",)
DENSE_TYPES = ("qwen3_5_text",)
WRAPPER_TYPES = {"qwen3_5_moe": "qwen3_5_moe_text", "qwen3_5": "qwen3_5_text"}
LAYER_TYPES = ("linear_attention", "full_attention")


@dataclass(frozen=True)
class ModelConfig:
    """Text model of the Qwen3.5/3.6 family. Counts are in elements, ids in tokens.

    `num_experts == 0` marks a dense model (`intermediate_size` counts then); otherwise the `moe_*` fields count.
    `rotary_dim` is the number of leading head dimensions that RoPE turns; `mrope_section` splits its
    `rotary_dim / 2` frequencies among the time, height and width axes.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    mrope_section: tuple[int, int, int]
    rms_norm_eps: float
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    intermediate_size: int = 0
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32768
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check(self)

    @property
    def linear_key_dim(self) -> int:
        """Width of q (and of k) in a Gated DeltaNet layer."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_dim(self) -> int:
        """Width of v in a Gated DeltaNet layer."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: q, k and v side by side."""
        return 2 * self.linear_key_dim + self.linear_value_dim

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; `from_dict` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> ModelConfig:
        """Inverse of `to_dict`. Raises ConfigError for unknown or missing fields."""
        known = {f.name for f in dataclasses.fields(cls)}
        if set(fields) - known:
            raise ConfigError(
                f"model configuration has unknown fields {sorted(set(fields) - known)}: "
                "it comes from another version; convert the checkpoint again"
            )
        tupled = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        try:
            return cls(**tupled)
        except TypeError as err:
            raise ConfigError(f"model configuration is incomplete ({err}); convert the checkpoint again") from None

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> ModelConfig:
        """Read a checkpoint's config.json, wrapped (`text_config`) or text-only.

        Raises ConfigError for an unknown architecture, a missing field, or values that contradict each other.
        """
        text, model_type = _text_config(raw)
        need = _Fields(text, model_type)
        layers = need.integer("num_hidden_layers")
        head_dim = need.integer("head_dim", default=need.integer("hidden_size") // need.integer("num_attention_heads"))
        rope = _rope(text)
        moe = model_type in MOE_TYPES
        return cls(
            model_type=model_type,
            vocab_size=need.integer("vocab_size"),
            hidden_size=need.integer("hidden_size"),
            num_hidden_layers=layers,
            layer_types=_layer_types(text, layers),
            num_attention_heads=need.integer("num_attention_heads"),
            num_key_value_heads=need.integer("num_key_value_heads"),
            head_dim=head_dim,
            rotary_dim=int(head_dim * rope["partial_rotary_factor"]),
            rope_theta=float(rope["rope_theta"]),
            mrope_section=tuple(rope["mrope_section"]),
            rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
            linear_num_key_heads=need.integer("linear_num_key_heads"),
            linear_num_value_heads=need.integer("linear_num_value_heads"),
            linear_key_head_dim=need.integer("linear_key_head_dim"),
            linear_value_head_dim=need.integer("linear_value_head_dim"),
            linear_conv_kernel_dim=need.integer("linear_conv_kernel_dim", default=4),
            num_experts=need.integer("num_experts") if moe else 0,
            num_experts_per_tok=need.integer("num_experts_per_tok") if moe else 0,
            moe_intermediate_size=need.integer("moe_intermediate_size") if moe else 0,
            shared_expert_intermediate_size=need.integer("shared_expert_intermediate_size") if moe else 0,
            intermediate_size=0 if moe else need.integer("intermediate_size"),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            max_position_embeddings=need.integer("max_position_embeddings", default=32768),
            eos_token_ids=tuple(sorted(eos_ids(raw) | eos_ids(text))),
        )


def eos_ids(fields: dict[str, Any]) -> set[int]:
    """End-of-turn ids named by one configuration dictionary: `eos_token_id` may be absent, one id or a list."""
    value = fields.get("eos_token_id")
    if value is None:
        return set()
    return {int(v) for v in value} if isinstance(value, (list, tuple)) else {int(value)}


class _Fields:
    """Typed access to a config dictionary, with errors that name the field."""

    def __init__(self, fields: dict[str, Any], model_type: str) -> None:
        self.fields, self.model_type = fields, model_type

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.fields.get(name, default)
        if value is None:
            raise ConfigError(f"config.json of a {self.model_type} model lacks '{name}'; the file is incomplete")
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"config.json: '{name}' is {value!r}, expected a whole number")
        return value


def _text_config(raw: dict[str, Any]) -> tuple[dict[str, Any], str]:
    declared = raw.get("model_type")
    nested = raw.get("text_config")
    if declared in WRAPPER_TYPES and isinstance(nested, dict):
        return nested, WRAPPER_TYPES[declared]
    if declared in WRAPPER_TYPES:
        return raw, WRAPPER_TYPES[declared]
    if declared in MOE_TYPES + DENSE_TYPES:
        return raw, declared
    known = sorted(WRAPPER_TYPES) + sorted(MOE_TYPES + DENSE_TYPES)
    raise ConfigError(f"config.json: unknown architecture model_type={declared!r}; this engine runs {', '.join(known)}")


def _layer_types(text: dict[str, Any], layers: int) -> tuple[str, ...]:
    declared = text.get("layer_types")
    if declared is not None:
        return tuple(declared)
    interval = text.get("full_attention_interval", 4)
    return tuple(LAYER_TYPES[(i + 1) % interval == 0] for i in range(layers))


def _rope(text: dict[str, Any]) -> dict[str, Any]:
    """RoPE settings from `rope_parameters` (new files) or `rope_theta`/`rope_scaling` (older ones)."""
    merged = {**(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
    kind = merged.get("rope_type", merged.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise ConfigError(f"config.json: rope_type {kind!r} is not supported; only 'default' (with mrope sections) is")
    theta = merged.get("rope_theta", text.get("rope_theta"))
    if theta is None:
        raise ConfigError("config.json lacks 'rope_theta' (also looked in rope_parameters); the file is incomplete")
    factor = merged.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
    return {
        "rope_theta": theta,
        "partial_rotary_factor": factor,
        "mrope_section": merged.get("mrope_section") or [11, 11, 10],
    }


def _check(c: ModelConfig) -> None:
    positive = [
        f.name
        for f in dataclasses.fields(c)
        if f.type == "int" and f.default is dataclasses.MISSING and getattr(c, f.name) < 1
    ]
    problems = [f"{name} = {getattr(c, name)} must be positive" for name in positive]
    if not positive:
        problems += _contradictions(c)
    if problems:
        raise ConfigError(f"model configuration: {problems[0]}")


def _contradictions(c: ModelConfig) -> list[str]:
    rules = [
        (
            len(c.layer_types) == c.num_hidden_layers,
            f"layer_types has {len(c.layer_types)} entries for num_hidden_layers = {c.num_hidden_layers}",
        ),
        (
            set(c.layer_types) <= set(LAYER_TYPES),
            f"layer_types has unknown kinds {sorted(set(c.layer_types) - set(LAYER_TYPES))}",
        ),
        (
            c.num_attention_heads % c.num_key_value_heads == 0,
            f"num_attention_heads = {c.num_attention_heads} is not a multiple of num_key_value_heads = {c.num_key_value_heads}",
        ),
        (
            c.linear_num_value_heads % c.linear_num_key_heads == 0,
            f"linear_num_value_heads = {c.linear_num_value_heads} is not a multiple of "
            f"linear_num_key_heads = {c.linear_num_key_heads}",
        ),
        (
            0 < c.rotary_dim <= c.head_dim and c.rotary_dim % 2 == 0,
            f"rotary part of a head is {c.rotary_dim} of {c.head_dim}; it must be even, positive and no more than the head",
        ),
        (len(c.mrope_section) == 3, f"mrope_section {c.mrope_section} needs three entries"),
        (math.isfinite(c.rms_norm_eps) and c.rms_norm_eps > 0, f"rms_norm_eps = {c.rms_norm_eps} must be positive"),
        (math.isfinite(c.rope_theta) and c.rope_theta > 0, f"rope_theta = {c.rope_theta} must be positive"),
        (c.num_experts > 0 or c.intermediate_size > 0, "intermediate_size must be positive in a dense model"),
        (
            c.num_experts == 0 or 0 < c.num_experts_per_tok <= c.num_experts,
            f"num_experts_per_tok = {c.num_experts_per_tok} must lie in 1..{c.num_experts} (num_experts)",
        ),
        (
            c.num_experts == 0 or (c.moe_intermediate_size > 0 and c.shared_expert_intermediate_size > 0),
            "moe_intermediate_size and shared_expert_intermediate_size must be positive",
        ),
    ]
    return [text for holds, text in rules if not holds]


@dataclass(frozen=True)
class EngineConfig:
    """How to run a model.

    activations: 'q8_0' quantises the input of every quantised weight to 8 bits (the fast integer path); 'f32'
        dequantises weights and accumulates in float32 (format loss without kernel error; the oracle of GPU prefill).
    backend: 'scalar', 'ssse3', ... forces it (raises where it cannot run); None takes the best the CPU supports.
    threads: None takes the physical cores within affinity mask and CPU quota.
    kv_block: tokens in a page of the key/value cache; results do not depend on it.
    token_block: tokens that go through a layer together in prefill; bounds memory, results do not depend on it.
    ctx_size: longest sequence a session accepts; None takes the model's max_position_embeddings.
    """

    activations: str = "q8_0"
    backend: str | None = None
    threads: int | None = None
    kv_block: int = 64
    token_block: int = 256
    ctx_size: int | None = None

    def __post_init__(self) -> None:
        if self.activations not in ("q8_0", "f32"):
            raise ConfigError(f"activations = {self.activations!r}; choose 'q8_0' or 'f32'")
        for name in ("threads", "kv_block", "token_block", "ctx_size"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} = {value!r} must be a whole number of at least 1")
