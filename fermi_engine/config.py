"""ModelConfig: what a checkpoint says about itself, in Hugging Face names. EngineConfig: what the user asks of the engine."""

from __future__ import annotations

import dataclasses
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fermi_engine.config_fields import MAX_WHOLE, Fields, is_number, is_whole, refusing
from fermi_engine.errors import ConfigError

MOE_TYPES = ("qwen3_5_moe_text",)
DENSE_TYPES = ("qwen3_5_text",)
WRAPPER_TYPES = {"qwen3_5_moe": "qwen3_5_moe_text", "qwen3_5": "qwen3_5_text", "minicpmv4_6": "qwen3_5_text"}
LAYER_TYPES = ("linear_attention", "full_attention")
MOST_THREADS = 256  # the caller and the 255 workers of csrc/pool.c
MAX_LAYERS = 4096  # far above any model: a nonsense count must not fill the memory with layer_types
MAX_TAPS = 16  # of the causal convolution: csrc/kernels.h


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
        """Inverse of `to_dict`. Raises ConfigError for fields that are unknown, missing, of another kind or nonsense."""
        with refusing("model configuration", "convert the checkpoint again"):
            fields = dict(fields)
            known = {f.name for f in dataclasses.fields(cls)}
            required = {f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING}
            if set(fields) - known:
                raise ConfigError(
                    f"model configuration has unknown fields {sorted(set(fields) - known)}: "
                    "it comes from another version; convert the checkpoint again"
                )
            if required - set(fields):
                raise ConfigError(
                    f"model configuration is incomplete (it lacks {', '.join(sorted(required - set(fields)))}); "
                    "convert the checkpoint again"
                )
            return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> ModelConfig:
        """Read a checkpoint's config.json, wrapped (`text_config`) or text-only.

        Raises ConfigError for an unknown architecture, a missing field, a value of another kind, or values that
        contradict each other.
        """
        with refusing("config.json", "fetch the file again"):
            return cls(**_hf_fields(raw))


def _hf_fields(raw: dict[str, Any]) -> dict[str, Any]:
    text, model_type = _text_config(raw)
    need = Fields(text, model_type)
    _check_activation(need)
    layers = need.integer("num_hidden_layers", most=MAX_LAYERS)
    heads, hidden = need.integer("num_attention_heads"), need.integer("hidden_size")
    head_dim = need.integer("head_dim", default=hidden // heads)
    rope = _rope(need)
    counts = ["linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
              "num_key_value_heads", "vocab_size"]
    if model_type in MOE_TYPES:
        counts += ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"]
    else:
        counts += ["intermediate_size"]
    tied = [Fields(fields, model_type).boolean("tie_word_embeddings", None) for fields in (raw, text)]
    return {
        **{name: need.integer(name) for name in counts},
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "layer_types": _layer_types(need, layers),
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "rotary_dim": int(head_dim * rope.number("partial_rotary_factor", default=0.25)),
        "rope_theta": rope.number("rope_theta"),
        "mrope_section": rope.integers("mrope_section", default=(11, 11, 10)),
        "rms_norm_eps": need.number("rms_norm_eps", default=1e-6),
        "linear_conv_kernel_dim": need.integer("linear_conv_kernel_dim", default=4),
        "tie_word_embeddings": next((value for value in tied if value is not None), False),
        "max_position_embeddings": need.integer("max_position_embeddings", default=32768),
        "eos_token_ids": tuple(sorted(eos_ids(raw) | eos_ids(text))),
    }


def eos_ids(fields: dict[str, Any]) -> set[int]:
    """End-of-turn ids named by one configuration dictionary: `eos_token_id` may be absent, one id or a list.

    ValueError for anything but whole numbers of at least 0.
    """
    value = fields.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, (list, tuple)) else [value]
    if not all(is_whole(v) for v in ids):
        raise ValueError(f"eos_token_id is {reprlib.repr(value)}, expected a token id or a list of them")
    return set(ids)


def _text_config(raw: dict[str, Any]) -> tuple[dict[str, Any], str]:
    declared = raw.get("model_type")
    if isinstance(declared, str) and declared in WRAPPER_TYPES:
        expected = WRAPPER_TYPES[declared]
        nested = Fields(raw, declared).optional("text_config", dict)
        inner = expected if nested is None else nested.get("model_type", expected)
        if inner != expected:
            raise ConfigError(f"config.json: text_config has model_type={inner!r}, that of a {declared} model is "
                              f"{expected!r}; the file mixes two models, fetch it again")
        return raw if nested is None else nested, expected
    if declared in MOE_TYPES + DENSE_TYPES:
        return raw, declared
    known = sorted(WRAPPER_TYPES) + sorted(MOE_TYPES + DENSE_TYPES)
    raise ConfigError(f"config.json: unknown architecture model_type={declared!r}; this engine runs {', '.join(known)}")


def _check_activation(need: Fields) -> None:
    found = need.fields.get("hidden_act", "silu")
    if found != "silu":
        raise ConfigError(f"config.json: hidden_act {found!r} is not supported; this engine runs models with 'silu'")


def _layer_types(need: Fields, layers: int) -> tuple[str, ...]:
    declared = need.optional("layer_types", list)
    if declared is not None:
        return tuple(declared)
    interval = need.integer("full_attention_interval", default=4)
    return tuple(LAYER_TYPES[(i + 1) % interval == 0] for i in range(layers))


def _rope(need: Fields) -> Fields:
    """RoPE settings from `rope_parameters` (new files) or `rope_theta`/`rope_scaling` (older ones)."""
    merged = {name: need.fields[name] for name in ("rope_theta", "partial_rotary_factor") if name in need.fields}
    for name in ("rope_scaling", "rope_parameters"):
        merged |= need.optional(name, dict) or {}
    kind = merged.get("rope_type", merged.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise ConfigError(f"config.json: rope_type {kind!r} is not supported; only 'default' (with mrope sections) is")
    if merged.get("rope_theta") is None:
        raise ConfigError("config.json lacks 'rope_theta' (also looked in rope_parameters); the file is incomplete")
    return Fields(merged, need.model_type)


# Field annotation -> what a value must be, in code and in words.
_KINDS = {
    "str": (lambda v: isinstance(v, str), "text"),
    "int": (is_whole, f"a whole number in 0..{MAX_WHOLE}"),
    "float": (is_number, "a finite number"),
    "bool": (lambda v: isinstance(v, bool), "true or false"),
    "tuple[str, ...]": (lambda v: isinstance(v, tuple) and all(isinstance(x, str) for x in v), "a list of names"),
    "tuple[int, ...]": (lambda v: isinstance(v, tuple) and all(map(is_whole, v)), "whole numbers of at least 0"),
    "tuple[int, int, int]": (lambda v: isinstance(v, tuple) and len(v) == 3 and all(map(is_whole, v)),
                             "three whole numbers of at least 0"),
}


def _check(c: ModelConfig) -> None:
    problems = _other_kinds(c) or _not_positive(c) or _contradictions(c)
    if problems:
        raise ConfigError(f"model configuration: {problems[0]}")


def _other_kinds(c: ModelConfig) -> list[str]:
    values = [(f.name, getattr(c, f.name), *_KINDS[f.type]) for f in dataclasses.fields(c)]
    return [f"{name} is {reprlib.repr(value)}, expected {words}" for name, value, holds, words in values
            if not holds(value)]


def _not_positive(c: ModelConfig) -> list[str]:
    required = [f.name for f in dataclasses.fields(c) if f.type == "int" and f.default is dataclasses.MISSING]
    return [f"{name} = 0 must be positive" for name in (*required, "max_position_embeddings") if getattr(c, name) < 1]


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
        (
            c.linear_conv_kernel_dim <= MAX_TAPS,
            f"linear_conv_kernel_dim = {c.linear_conv_kernel_dim} must lie in 1..{MAX_TAPS}",
        ),
        (c.rms_norm_eps > 0, f"rms_norm_eps = {c.rms_norm_eps} must be positive"),
        (c.rope_theta > 0, f"rope_theta = {c.rope_theta} must be positive"),
        (
            (c.num_experts > 0) == (c.model_type in MOE_TYPES),
            f"num_experts = {c.num_experts} does not fit model_type {c.model_type!r}",
        ),
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
    threads: 1..256; None takes the physical cores within affinity mask and CPU quota.
    kv_block: tokens in a page of the key/value cache; results do not depend on it.
    kv_format: 'f32', or 'f16' or 'q8_0' for a cache of half or 27 % of the size that costs a little accuracy.
    token_block: tokens that go through a layer together in prefill; bounds memory, results do not depend on it.
    ctx_size: longest sequence a session accepts; None takes the model's max_position_embeddings.
    pin: one CPU for each thread.
    hyper_threads: `threads` defaults to all logical CPUs, not to one a core.
    numa: 'interleave', 'local' or 'off': where memory goes on a machine with several nodes; None: see numa.settle.
    load: 'mmap' uses the pack in place, 'resident' copies it into memory of the process.
    huge_pages: insist on 2 MiB pages, reading the file anew where needed. mlock: read everything first and keep it from
        being paged out.
    prefill: 'cpu'; 'gpu' sends every prompt of more than one token through the device; 'auto' those for which it is measured
        to be faster, and none once the device has failed. On the GPU activations are float32.
    device: 'cuda', or 'emulated' for the GPU's kernels run by the CPU. vram: most bytes of its memory, None for what is free.
    expert_slots: places on the device for one layer's experts each; results do not depend on it.
    gemm: the GPU's dense products by our kernels ('own': the same bits on every card) or by the vendor's cuBLAS ('vendor'); None
        is 'vendor' with `decode` 'gpu' and 'own' else.
    decode: 'cpu'; 'gpu' has a dense model wholly on the device, which then does all prefill, too, and keeps the state.
    vision: who encodes images: 'cpu', 'gpu', or 'auto', which is the GPU where `decode` or `prefill` is 'gpu'. On the GPU
        activations are float32 and the tower's memory counts among `vram`.
    snapshot_ram: most bytes of memory for states that later prompts go on from; 0 keeps none, None takes half of what the pack
        leaves, at most 4 GiB. Results do not depend on it where the CPU evaluates prompts, or the GPU all of them.
    snapshot_dir: directory in which they outlive the process; None for none. snapshot_disk: most bytes of the files there.
    """

    activations: str = "q8_0"
    backend: str | None = None
    threads: int | None = None
    kv_block: int = 64
    kv_format: str = "f32"
    token_block: int = 256
    ctx_size: int | None = None
    pin: bool = False
    hyper_threads: bool = False
    numa: str | None = None
    load: str = "mmap"
    huge_pages: bool = False
    mlock: bool = False
    prefill: str = "cpu"
    device: str = "cuda"
    vram: int | None = None
    expert_slots: int = 2
    gemm: str | None = None
    decode: str = "cpu"
    vision: str = "auto"
    snapshot_ram: int | None = None
    snapshot_dir: str | Path | None = None
    snapshot_disk: int = 16 << 30

    def __post_init__(self) -> None:
        if self.gemm is None:
            object.__setattr__(self, "gemm", "vendor" if self.decode == "gpu" else "own")
        if self.decode not in ("cpu", "gpu"):
            raise ConfigError(f"decode = {self.decode!r}; choose 'cpu' or 'gpu'")
        if self.vision not in ("cpu", "gpu", "auto"):
            raise ConfigError(f"vision = {self.vision!r}; choose 'cpu', 'gpu' or 'auto'")
        if self.vision == "gpu" and self.decode == self.prefill == "cpu":
            raise ConfigError("vision = 'gpu' where the GPU neither decodes nor prefills; set decode or prefill, too")
        if self.decode == "gpu" and self.kv_format != "f32":
            raise ConfigError(f"kv_format = {self.kv_format!r} with decode = 'gpu', which keeps keys and values as 'f32'")
        if self.numa not in (None, "interleave", "local", "off"):
            raise ConfigError(f"numa = {self.numa!r}; choose 'interleave', 'local' or 'off'")
        if self.load not in ("mmap", "resident"):
            raise ConfigError(f"load = {self.load!r}; choose 'mmap' or 'resident'")
        if self.activations not in ("q8_0", "f32"):
            raise ConfigError(f"activations = {self.activations!r}; choose 'q8_0' or 'f32'")
        if self.prefill not in ("cpu", "gpu", "auto"):
            raise ConfigError(f"prefill = {self.prefill!r}; choose 'cpu', 'gpu' or 'auto'")
        if self.device not in ("cuda", "emulated"):
            raise ConfigError(f"device = {self.device!r}; choose 'cuda' or 'emulated'")
        if self.gemm not in ("own", "vendor"):
            raise ConfigError(f"gemm = {self.gemm!r}; choose 'own' or 'vendor'")
        if self.kv_format not in ("f32", "f16", "q8_0"):
            raise ConfigError(f"kv_format = {self.kv_format!r}; choose 'f32', 'f16' or 'q8_0'")
        for name, value in (("snapshot_ram", self.snapshot_ram), ("snapshot_disk", self.snapshot_disk)):
            if value is not None and (not isinstance(value, int) or value < 0):
                raise ConfigError(f"{name} = {value!r} must be a number of bytes, 0 for none")
        for name in ("threads", "kv_block", "token_block", "ctx_size", "vram", "expert_slots"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} = {value!r} must be a whole number of at least 1")
        if self.threads is not None and self.threads > MOST_THREADS:
            raise ConfigError(f"threads = {self.threads}; at most {MOST_THREADS} run")

    @property
    def is_vision_on_gpu(self) -> bool:
        """Whether the GPU encodes images."""
        return self.vision == "gpu" or (self.vision == "auto" and "gpu" in (self.decode, self.prefill))
