"""VisionConfig: the image half of a checkpoint, its tower and how it wants its images. Tensors of a tower, and their shapes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fermi_engine.config_fields import MAX_WHOLE, Fields, refusing
from fermi_engine.errors import ConfigError
from fermi_engine.vision.plans import ImageSettings, MiniCpmImages, QwenImages

QWEN, MINICPM = "qwen3_5", "minicpmv4_6"
FAMILIES = {"qwen3_5": QWEN, "qwen3_5_moe": QWEN, "minicpmv4_6": MINICPM}  # by the model_type of config.json
MODES = ("16x", "4x")
CHANNELS = 3
BLOCK = 32  # weights that share a scale in a quantised row
PREFIXES = ("visual.", "vision_tower.", "merger.")
MAX_LAYERS = 1024
QWEN_EPS = PROJECTOR_EPS = 1e-6  # fixed in transformers' code
QWEN_THETA = 10000.0
MINICPM_INSERT = 6  # transformers' default, which the release relies on


@dataclass(frozen=True)
class VisionConfig:
    """A vision tower. Counts are in elements, `patch_size` in pixels.

    family: QWEN or MINICPM. temporal_patch_size: frames in a patch, 1 for MiniCPM. table_side: the position table has its
    square of rows. insert_layer_id: MiniCPM's window merger follows this layer; -1 for Qwen. images: how pixels are prepared.
    """

    family: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    patch_size: int
    temporal_patch_size: int
    out_hidden_size: int
    table_side: int
    layer_norm_eps: float
    insert_layer_id: int
    image_token_id: int
    images: ImageSettings

    def __post_init__(self) -> None:
        problems = [text for holds, text in _rules(self) if not holds]
        if problems:
            raise ConfigError(f"vision configuration: {problems[0]}")

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def patch_width(self) -> int:
        """Elements of a patch."""
        return CHANNELS * self.temporal_patch_size * self.patch_size**2

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; `from_dict` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> VisionConfig:
        """Inverse of `to_dict`. Raises ConfigError for fields that are unknown, missing or nonsense."""
        with refusing("vision configuration", "convert the checkpoint again"):
            kind = QwenImages if fields["family"] == QWEN else MiniCpmImages
            images = kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in fields["images"].items()})
            return cls(**{**fields, "images": images})

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], text_hidden: int,
                preprocessor: Mapping[str, Any] | None = None) -> VisionConfig | None:
        """The tower of a checkpoint's config.json and preprocessor_config.json; None for a text-only checkpoint.

        text_hidden: width of the text model. Raises ConfigError for a tower of another kind, a missing field or nonsense.
        """
        family = FAMILIES.get(str(raw.get("model_type")))
        with refusing("config.json", "fetch the file again"):
            nested = Fields(dict(raw), "image-and-text").optional("vision_config", dict)
            if family is None or nested is None:
                return None
            read = _qwen_fields if family == QWEN else _minicpm_fields
            fields = read(dict(raw), Fields(nested, f"{family} vision"), text_hidden)
        with refusing("preprocessor_config.json", "fetch the file again"):
            need = Fields({**(preprocessor or {})}, family, "preprocessor_config.json")
            images = _image_settings(family, need, fields, Fields(dict(raw), family).choice("downsample_mode", "16x", MODES))
        return cls(family=family, images=images, **fields)


def _qwen_fields(raw: dict[str, Any], need: Fields, text_hidden: int) -> dict[str, Any]:
    _fixed(need, {"hidden_act": "gelu_pytorch_tanh", "spatial_merge_size": 2, "in_channels": CHANNELS,
                  "deepstack_visual_indexes": []})
    rope = need.optional("rope_parameters", dict) or {}
    _fixed(Fields(rope, need.model_type), {"rope_type": "axial", "rope_theta": QWEN_THETA})
    out, positions = need.integer("out_hidden_size"), need.integer("num_position_embeddings")
    if out != text_hidden:
        raise ConfigError(f"config.json: out_hidden_size of the vision tower is {out}, the text model's hidden_size is "
                          f"{text_hidden}; the file mixes two models, fetch it again")
    if math.isqrt(positions) ** 2 != positions:
        raise ConfigError(f"config.json: num_position_embeddings = {positions} is no square; fetch the file again")
    return {
        "num_hidden_layers": need.integer("depth", most=MAX_LAYERS), "hidden_size": need.integer("hidden_size"),
        "intermediate_size": need.integer("intermediate_size"), "num_attention_heads": need.integer("num_heads"),
        "patch_size": need.integer("patch_size", 16), "temporal_patch_size": need.integer("temporal_patch_size", 2),
        "out_hidden_size": out, "table_side": math.isqrt(positions), "layer_norm_eps": QWEN_EPS, "insert_layer_id": -1,
        "image_token_id": Fields(raw, need.model_type).integer("image_token_id"),
    }


def _minicpm_fields(raw: dict[str, Any], need: Fields, text_hidden: int) -> dict[str, Any]:
    top = Fields(raw, need.model_type)
    _fixed(need, {"hidden_act": "gelu_pytorch_tanh", "window_kernel_size": [2, 2], "num_channels": CHANNELS})
    _fixed(top, {"merge_kernel_size": [2, 2], "merger_times": 1})
    patch = need.integer("patch_size")
    return {
        "num_hidden_layers": need.integer("num_hidden_layers", most=MAX_LAYERS), "hidden_size": need.integer("hidden_size"),
        "intermediate_size": need.integer("intermediate_size"),
        "num_attention_heads": need.integer("num_attention_heads"), "patch_size": patch, "temporal_patch_size": 1,
        "out_hidden_size": text_hidden, "table_side": need.integer("image_size") // patch,
        "layer_norm_eps": need.number("layer_norm_eps", 1e-6),
        "insert_layer_id": raw.get("insert_layer_id", MINICPM_INSERT),
        "image_token_id": top.integer("image_token_id"),
    }


def _fixed(fields: Fields, expected: dict[str, Any]) -> None:
    """Refuse variants of the architecture that this engine does not have."""
    for name, value in expected.items():
        found = fields.fields.get(name, value)
        if found is not None and found != value:
            raise ConfigError(f"config.json: {name} of the vision tower is {found!r}; this engine runs towers with {value!r}")


def _image_settings(family: str, need: Fields, tower: dict[str, Any], downsample_mode: str) -> ImageSettings:
    kind = QwenImages if family == QWEN else MiniCpmImages
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if need.boolean(name, True) is False:
            raise ConfigError(f"preprocessor_config.json: {name} is false; this engine prepares images with it")
    defaults = {f.name: f.default for f in dataclasses.fields(kind)}
    defaults |= {name: tower[name] for name in ("patch_size", "temporal_patch_size")}
    shared = {name: need.numbers(name, defaults[name]) for name in ("image_mean", "image_std")}
    shared["rescale_factor"] = need.number("rescale_factor", 1 / 255)
    if family == QWEN:
        size = Fields(need.optional("size", dict) or {}, family, need.file)
        least = size.integer("shortest_edge", need.integer("min_pixels", defaults["min_pixels"]))
        most = size.integer("longest_edge", need.integer("max_pixels", defaults["max_pixels"]))
        counts = {name: need.integer(name, defaults[name]) for name in ("patch_size", "temporal_patch_size", "merge_size")}
        return QwenImages(min_pixels=least, max_pixels=most, **counts, **shared)
    counts = {name: need.integer(name, defaults[name]) for name in ("patch_size", "scale_resolution", "max_slice_nums")}
    flags = {name: need.boolean(name, True) for name in ("slice_mode", "use_image_id")}
    return MiniCpmImages(downsample_mode=need.choice("downsample_mode", downsample_mode, MODES), **counts, **flags, **shared)


def _rules(c: VisionConfig) -> list[tuple[bool, str]]:
    sizes = [(name, getattr(c, name)) for name in (
        "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "patch_size", "temporal_patch_size",
        "out_hidden_size", "table_side")]
    qwen, images = c.family == QWEN, c.images
    return [
        (c.family in (QWEN, MINICPM), f"family {c.family!r} is unknown"),
        *((isinstance(v, int) and 0 < v <= MAX_WHOLE, f"{name} = {v!r} must be a positive whole number") for name, v in sizes),
        (isinstance(images, QwenImages if qwen else MiniCpmImages), "images are prepared as another family's"),
        (c.hidden_size % c.num_attention_heads == 0 and c.hidden_size % 8 == 0,
         f"hidden_size = {c.hidden_size} is no multiple of 8 and of {c.num_attention_heads} heads"),
        (not qwen or c.head_dim % 4 == 0, f"heads of {c.head_dim} do not divide into rows and columns of rotary pairs"),
        (qwen or (isinstance(c.insert_layer_id, int) and 0 <= c.insert_layer_id < c.num_hidden_layers),
         f"insert_layer_id = {c.insert_layer_id!r} must name one of {c.num_hidden_layers} layers"),
        (images.patch_size == c.patch_size, f"patch_size is {c.patch_size}, preprocessor_config.json has {images.patch_size}"),
        (not qwen or (images.merge_size, images.temporal_patch_size) == (2, c.temporal_patch_size),
         "merge_size or temporal_patch_size of preprocessor_config.json is another"),
        (0 < c.layer_norm_eps < 1, f"layer_norm_eps = {c.layer_norm_eps} must lie between 0 and 1"),
        (all(deviation > 0 for deviation in images.image_std), f"image_std = {list(images.image_std)} must be positive"),
        (isinstance(c.image_token_id, int) and c.image_token_id >= 0, f"image_token_id = {c.image_token_id!r} is no token id"),
    ]


def vision_shapes(c: VisionConfig) -> dict[str, tuple[int, ...]]:
    """Canonical names (without `model.`) and shapes of all tensors of the tower and its projector (HF layout, `[out, in]`)."""
    return _qwen_shapes(c) if c.family == QWEN else _minicpm_shapes(c)


def stored_shapes(c: VisionConfig) -> dict[str, tuple[int, ...]]:
    """The same as packs hold them: the patch convolution as a matrix, and MLPs widened to whole blocks of 32 by units whose
    weights and biases are zero, which change no bit."""
    wide = dataclasses.replace(c, intermediate_size=c.intermediate_size + -c.intermediate_size % BLOCK)
    return {name: (shape[0], math.prod(shape[1:])) if len(shape) > 2 else shape for name, shape in vision_shapes(wide).items()}


def is_vision(name: str) -> bool:
    """Whether a tensor of this canonical name belongs to a tower."""
    return name.startswith(PREFIXES)


def _qwen_shapes(c: VisionConfig) -> dict[str, tuple[int, ...]]:
    h, wide = c.hidden_size, 4 * c.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "visual.patch_embed.proj.weight": (h, CHANNELS, c.temporal_patch_size, c.patch_size, c.patch_size),
        "visual.patch_embed.proj.bias": (h,), "visual.pos_embed.weight": (c.table_side**2, h)}
    for i in range(c.num_hidden_layers):
        stem = f"visual.blocks.{i}"
        shapes |= {**_norm(f"{stem}.norm1", h), **_norm(f"{stem}.norm2", h), **_linear(f"{stem}.attn.qkv", 3 * h, h),
                   **_linear(f"{stem}.attn.proj", h, h), **_linear(f"{stem}.mlp.linear_fc1", c.intermediate_size, h),
                   **_linear(f"{stem}.mlp.linear_fc2", h, c.intermediate_size)}
    return shapes | {**_norm("visual.merger.norm", h), **_linear("visual.merger.linear_fc1", wide, wide),
                     **_linear("visual.merger.linear_fc2", c.out_hidden_size, wide)}


def _minicpm_shapes(c: VisionConfig) -> dict[str, tuple[int, ...]]:
    h, wide, tower = c.hidden_size, 4 * c.hidden_size, "vision_tower"
    shapes: dict[str, tuple[int, ...]] = {
        f"{tower}.embeddings.patch_embedding.weight": (h, CHANNELS, c.patch_size, c.patch_size),
        f"{tower}.embeddings.patch_embedding.bias": (h,),
        f"{tower}.embeddings.position_embedding.weight": (c.table_side**2, h)}
    for i in range(c.num_hidden_layers):
        stem = f"{tower}.encoder.layers.{i}"
        shapes |= {**_norm(f"{stem}.layer_norm1", h), **_norm(f"{stem}.layer_norm2", h), **_attention(f"{stem}.self_attn", h),
                   **_linear(f"{stem}.mlp.fc1", c.intermediate_size, h), **_linear(f"{stem}.mlp.fc2", h, c.intermediate_size)}
    merger, inner = f"{tower}.vit_merger", 4 * c.intermediate_size
    shapes |= {**_norm(f"{merger}.layer_norm1", h), **_attention(f"{merger}.self_attn", h), **_norm(f"{merger}.pre_norm", wide),
               **_linear(f"{merger}.linear_1", inner, wide), **_linear(f"{merger}.linear_2", h, inner)}
    return shapes | {**_norm(f"{tower}.post_layernorm", h), **_norm("merger.mlp.0.pre_norm", wide),
                     **_linear("merger.mlp.0.linear_1", wide, wide), **_linear("merger.mlp.0.linear_2", c.out_hidden_size, wide)}


def _norm(stem: str, n: int) -> dict[str, tuple[int, ...]]:
    return {f"{stem}.weight": (n,), f"{stem}.bias": (n,)}


def _linear(stem: str, rows: int, n: int) -> dict[str, tuple[int, ...]]:
    return {f"{stem}.weight": (rows, n), f"{stem}.bias": (rows,)}


def _attention(stem: str, h: int) -> dict[str, tuple[int, ...]]:
    return {name: shape for part in ("q", "k", "v", "out") for name, shape in _linear(f"{stem}.{part}_proj", h, h).items()}
