"""Write a small random checkpoint in the layout of a Qwen3.5/3.6 or MiniCPM-V-4.6 release:
`python tools/make_checkpoint.py DST --seed N`.

NumPy only. A seed gives the same weights whatever the layout, the name prefix, the number of shards and the machine:
each tensor draws from its own integer stream, and no matrix depends on the CPU's transcendental functions. Tensors are
written in blocks, so a gigabyte tensor (`--big`) needs no gigabyte of memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

if not __package__:  # run as a script, which puts this folder on the path instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools import checkpoint_vision
from tools.byte_tokenizer import SIZE as TOKENIZER_SIZE
from tools.byte_tokenizer import VIEW_TAGS, token_id, tokenizer_json
from tools.random_weights import Shape, to_bf16, values

DTYPES = {"bf16": ("BF16", 2, "bfloat16"), "f16": ("F16", 2, "float16"), "f32": ("F32", 4, "float32")}
BIG = {"hidden": 2048, "layers": 1, "experts": 128, "experts_per_tok": 8, "moe_intermediate": 1024, "vocab": 60007,
       "shared_intermediate": 512, "heads": 16, "kv_heads": 2, "head_dim": 256, "key_heads": 16, "value_heads": 32,
       "key_dim": 128, "value_dim": 128}  # experts.gate_up_proj alone is 2^30 bytes, the whole a little over 2 GB


class MakeError(ValueError):
    """Options that do not fit together, or a destination that must not be written; the text is one line."""


@dataclass(frozen=True)
class Options:
    """Shape and form of the checkpoint. `key_heads` to `value_dim` belong to the Gated DeltaNet layers; a `vocab` of
    None is the tokenizer's size plus a little padding; a `prefix` of None is the release's."""

    family: str = "moe"
    layout: str = "fused"
    dtype: str = "bf16"
    prefix: str | None = None
    shards: int = 1
    text_only: bool = False
    tied: bool = False
    tokenizer: bool = True
    layers: int = 8
    hidden: int = 64
    vocab: int | None = None
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 16
    value_dim: int = 32
    conv_kernel: int = 4
    experts: int = 16
    experts_per_tok: int = 4
    moe_intermediate: int = 32
    shared_intermediate: int = 64
    intermediate: int = 128

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise MakeError(f"{field.name} = {value} must be at least 1")
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise MakeError(f"{name} = {getattr(self, name)!r}; choose one of {', '.join(map(str, allowed))}")
        rules = [
            (self.heads % self.kv_heads == 0, f"heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}"),
            (self.value_heads % self.key_heads == 0,
             f"value_heads = {self.value_heads} is not a multiple of key_heads = {self.key_heads}"),
            (self.head_dim % 8 == 0, f"head_dim = {self.head_dim} must be a multiple of 8 (a quarter of it is rotary)"),
            (self.experts_per_tok <= self.experts,
             f"experts_per_tok = {self.experts_per_tok} exceeds experts = {self.experts}"),
            (self.vocab is None or self.vocab >= TOKENIZER_SIZE,
             f"vocab = {self.vocab} is below the tokenizer's {TOKENIZER_SIZE} ids"),
        ]
        for holds, text in rules:
            if not holds:
                raise MakeError(text)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding. Never a multiple of 32 by default, as an output dimension need not be one."""
        padded = TOKENIZER_SIZE + 5 + (len(VIEW_TAGS) if self.family == "minicpm" else 0)
        return self.vocab or padded + (padded % 32 == 0)

    @property
    def full_attention(self) -> list[bool]:
        """Per layer: whether it is a full attention layer; every fourth one is."""
        return [(i + 1) % 4 == 0 for i in range(self.layers)]


PREFIXES = ("model.language_model.", "language_model.model.", "model.")
CHOICES = {"family": ("moe", "dense", "minicpm"), "layout": ("fused", "per-expert"), "dtype": tuple(DTYPES),
           "prefix": (None, *PREFIXES)}


def make_checkpoint(dst: str | os.PathLike[str], seed: int = 0, *, force: bool = False, big: bool = False,
                    **options: Any) -> Path:
    """Write a checkpoint directory at `dst` and return its path; `options` are the fields of Options.

    It appears complete or not at all: everything is written beside `dst` and renamed. Raises MakeError for options that
    do not fit together and for a `dst` that is not empty (unless `force`, which replaces one holding a config.json).
    """
    try:
        o = Options(**{**(BIG if big else {}), **options})
    except TypeError as err:
        raise MakeError(f"unknown option: {err}") from None
    if seed < 0:
        raise MakeError(f"seed = {seed} must not be negative")
    dst = Path(dst).absolute()
    _check_destination(dst, force)
    dst.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{dst.name}.", dir=dst.parent))
    try:
        _write_all(work / "new", seed, o)
        _put(work / "new", dst, work / "old")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return dst


def _check_destination(dst: Path, force: bool) -> None:
    if dst.exists() and not dst.is_dir():
        raise MakeError(f"{dst} is a file; give a directory to create")
    if dst.is_dir() and any(dst.iterdir()):
        if not force:
            raise MakeError(f"{dst} is not empty; choose another place or pass --force to replace it")
        if not (dst / "config.json").is_file():
            raise MakeError(f"{dst} is not empty and holds no config.json, so it is no checkpoint; remove it yourself")


def _put(new: Path, dst: Path, aside: Path) -> None:
    """Rename `new` to `dst`; what was at `dst` goes `aside`, and comes back if that fails."""
    if dst.exists():
        os.rename(dst, aside)
    try:
        os.rename(new, dst)
    except OSError:
        if aside.exists():
            os.rename(aside, dst)
        raise


def _write_all(dst: Path, seed: int, o: Options) -> None:
    dst.mkdir()
    _write_weights(dst, seed, o)
    _write_json(dst / "config.json", config(o))
    _write_json(dst / "generation_config.json", {
        "bos_token_id": token_id("<|endoftext|>"), "do_sample": True, "pad_token_id": token_id("<|endoftext|>"),
        "eos_token_id": [token_id("<|im_end|>"), token_id("<|endoftext|>")],
        "temperature": 0.6, "top_k": 20, "top_p": 0.95})
    if not o.text_only:
        images = checkpoint_vision.MINICPM_IMAGES if o.family == "minicpm" else checkpoint_vision.QWEN_IMAGES
        _write_json(dst / "preprocessor_config.json", images)
    if o.tokenizer:
        _write_json(dst / "tokenizer.json", tokenizer_json(VIEW_TAGS if o.family == "minicpm" else ()))
        _write_json(dst / "tokenizer_config.json", {
            "add_bos_token": False, "add_prefix_space": False, "bos_token": None, "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>", "errors": "replace", "model_max_length": 262144, "pad_token": "<|endoftext|>",
            "split_special_tokens": False, "tokenizer_class": "Qwen2Tokenizer", "unk_token": None})
        template = Path(__file__).with_name("chat_template.jinja").read_text()
        if o.family == "minicpm":  # whose images bring tags of their own
            template = template.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>")
        (dst / "chat_template.jinja").write_text(template)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def text_shapes(o: Options) -> dict[str, Shape]:
    """Tensors of the text model without prefix, experts one by one, all `[out, in]`."""
    h = o.hidden
    shapes: dict[str, Shape] = {"embed_tokens.weight": (o.vocab_size, h)}
    for i, full in enumerate(o.full_attention):
        mixer = _attention_shapes(o) if full else _delta_net_shapes(o)
        layer = {"input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,), **mixer, **_ffn_shapes(o)}
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["norm.weight"] = (h,)
    if not o.tied:
        shapes["lm_head.weight"] = (o.vocab_size, h)
    return shapes


def _attention_shapes(o: Options) -> dict[str, Shape]:
    h, q, kv = o.hidden, o.heads * o.head_dim, o.kv_heads * o.head_dim
    return {"self_attn.q_proj.weight": (2 * q, h), "self_attn.k_proj.weight": (kv, h),
            "self_attn.v_proj.weight": (kv, h), "self_attn.o_proj.weight": (h, q),
            "self_attn.q_norm.weight": (o.head_dim,), "self_attn.k_norm.weight": (o.head_dim,)}


def _delta_net_shapes(o: Options) -> dict[str, Shape]:
    h, value = o.hidden, o.value_heads * o.value_dim
    qkv = 2 * o.key_heads * o.key_dim + value
    return {"linear_attn.in_proj_qkv.weight": (qkv, h), "linear_attn.in_proj_z.weight": (value, h),
            "linear_attn.in_proj_b.weight": (o.value_heads, h), "linear_attn.in_proj_a.weight": (o.value_heads, h),
            "linear_attn.conv1d.weight": (qkv, 1, o.conv_kernel), "linear_attn.A_log": (o.value_heads,),
            "linear_attn.dt_bias": (o.value_heads,), "linear_attn.norm.weight": (o.value_dim,),
            "linear_attn.out_proj.weight": (h, value)}


def _ffn_shapes(o: Options) -> dict[str, Shape]:
    def swiglu(stem: str, inner: int) -> dict[str, Shape]:
        return {f"{stem}.gate_proj.weight": (inner, o.hidden), f"{stem}.up_proj.weight": (inner, o.hidden),
                f"{stem}.down_proj.weight": (o.hidden, inner)}

    if o.family != "moe":
        return swiglu("mlp", o.intermediate)
    shapes = {"mlp.gate.weight": (o.experts, o.hidden), "mlp.shared_expert_gate.weight": (1, o.hidden)}
    shapes |= swiglu("mlp.shared_expert", o.shared_intermediate)
    for e in range(o.experts):
        shapes |= swiglu(f"mlp.experts.{e}", o.moe_intermediate)
    return shapes


def mtp_shapes(o: Options) -> dict[str, Shape]:
    """Part of a multi-token-prediction head, under full names."""
    h = o.hidden
    return {"mtp.fc.weight": (h, 2 * h), "mtp.pre_fc_norm_embedding.weight": (h,), "mtp.pre_fc_norm_hidden.weight": (h,),
            "mtp.norm.weight": (h,), "mtp.layers.0.input_layernorm.weight": (h,)}


def vision_shapes(o: Options) -> dict[str, Shape]:
    """A complete tiny vision tower, under full names."""
    return (checkpoint_vision.minicpm_shapes if o.family == "minicpm" else checkpoint_vision.qwen_shapes)(o.hidden)


def stored_tensors(o: Options) -> dict[str, tuple[Shape, list[tuple[str, Shape]]]]:
    """Name in the file -> shape and the drawn tensors that fill it one after another (fused experts have many)."""
    prefix = o.prefix or ("model." if o.text_only else PREFIXES[0])
    head = "language_model.lm_head.weight" if prefix == PREFIXES[1] else "lm_head.weight"
    stored: dict[str, tuple[Shape, list[tuple[str, Shape]]]] = {}
    for name, shape in text_shapes(o).items():
        match = re.fullmatch(r"(layers\.\d+\.mlp\.experts)\.\d+\.(gate|up|down)_proj\.weight", name)
        if match and o.layout == "fused":
            fused = f"{prefix}{match[1]}.{'down' if match[2] == 'down' else 'gate_up'}_proj"
            rows = shape[0] * (1 if match[2] == "down" else 2)
            stored.setdefault(fused, ((o.experts, rows, shape[1]), []))[1].append((name, shape))
        else:
            stored[head if name == "lm_head.weight" else prefix + name] = (shape, [(name, shape)])
    if not o.text_only:
        stored |= {name: (shape, [(name, shape)]) for name, shape in (vision_shapes(o) | mtp_shapes(o)).items()}
    return stored


def _write_weights(dst: Path, seed: int, o: Options) -> None:
    stored = stored_tensors(o)
    groups = _shards({name: math.prod(shape) for name, (shape, _) in stored.items()}, o.shards)
    weight_map: dict[str, str] = {}
    for i, names in enumerate(groups, 1):
        file = "model.safetensors" if o.shards == 1 else f"model-{i:05d}-of-{o.shards:05d}.safetensors"
        with open(dst / file, "wb") as out:
            _write_header(out, {name: stored[name][0] for name in names}, o.dtype)
            for name in names:
                for drawn, shape in stored[name][1]:
                    for block in values(seed, drawn, shape, o.tied):
                        out.write(_encode(block, o.dtype).tobytes())
        weight_map |= dict.fromkeys(names, file)
    if o.shards > 1:
        total = sum(math.prod(shape) for shape, _ in stored.values()) * DTYPES[o.dtype][1]
        _write_json(dst / "model.safetensors.index.json",
                    {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def _write_header(out: BinaryIO, shapes: dict[str, Shape], dtype: str) -> None:
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in shapes.items():
        end = position + math.prod(shape) * DTYPES[dtype][1]
        fields[name] = {"dtype": DTYPES[dtype][0], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    out.write(len(text).to_bytes(8, "little") + text)


def _encode(block: np.ndarray, dtype: str) -> np.ndarray:
    return to_bf16(block) if dtype == "bf16" else block.astype({"f16": np.float16, "f32": np.float32}[dtype])


def _shards(sizes: dict[str, int], count: int) -> list[list[str]]:
    """Names cut into `count` runs of about equal size, none of them empty."""
    if count > len(sizes):
        raise MakeError(f"shards = {count} exceeds the number of tensors, {len(sizes)}")
    total, done = sum(sizes.values()), 0
    groups: list[list[str]] = [[]]
    for left, (name, size) in zip(range(len(sizes), 0, -1), sizes.items(), strict=True):
        full = done >= total * len(groups) / count or left == count - len(groups)
        if groups[-1] and full and len(groups) < count:
            groups.append([])
        groups[-1].append(name)
        done += size
    return groups


def config(o: Options) -> dict[str, Any]:
    """config.json, nested as in the release, or the text model's alone."""
    family = "qwen3_5_moe" if o.family == "moe" else "qwen3_5"
    stem = "Qwen3_5Moe" if o.family == "moe" else "Qwen3_5"
    if o.family == "minicpm" and not o.text_only:
        return _minicpm_config(o)
    common = {"dtype": DTYPES[o.dtype][2], "tie_word_embeddings": o.tied, "transformers_version": "5.24.0"}
    text = _text_config(o, f"{family}_text")
    if o.text_only:
        return {"architectures": [f"{stem}ForCausalLM"], **text, **common}
    ids = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
           "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    vision = {**checkpoint_vision.QWEN, "model_type": f"{family}_vision", "hidden_act": "gelu_pytorch_tanh",
              "out_hidden_size": o.hidden, "dtype": common["dtype"], "initializer_range": 0.02}
    return {"architectures": [f"{stem}ForConditionalGeneration"], "model_type": family, **common,
            **{field: token_id(token) for field, token in ids.items()}, "text_config": text, "vision_config": vision}


def _minicpm_config(o: Options) -> dict[str, Any]:
    """As the release writes it: without what transformers' defaults say."""
    text = _text_config(o, "qwen3_5_text")
    del text["rope_parameters"]["mrope_section"], text["rope_parameters"]["mrope_interleaved"]
    return {"architectures": ["MiniCPMV4_6ForConditionalGeneration"], "model_type": "minicpmv4_6",
            "tie_word_embeddings": o.tied, "transformers_version": "5.24.0", "insert_layer_id": checkpoint_vision.MINICPM_INSERT,
            "image_token_id": token_id("<|image_pad|>"), "video_token_id": token_id("<|video_pad|>"), "text_config": text,
            "vision_config": checkpoint_vision.MINICPM}


def _text_config(o: Options, model_type: str) -> dict[str, Any]:
    pairs = o.head_dim // 8
    time = -(-pairs // 3)
    height = -(-(pairs - time) // 2)
    moe = {"num_experts": o.experts, "num_experts_per_tok": o.experts_per_tok,
           "moe_intermediate_size": o.moe_intermediate, "shared_expert_intermediate_size": o.shared_intermediate,
           "output_router_logits": False, "router_aux_loss_coef": 0.001}
    return {
        "model_type": model_type, "vocab_size": o.vocab_size, "hidden_size": o.hidden, "hidden_act": "silu",
        "num_hidden_layers": o.layers, "full_attention_interval": 4,
        "layer_types": ["full_attention" if full else "linear_attention" for full in o.full_attention],
        "num_attention_heads": o.heads, "num_key_value_heads": o.kv_heads, "head_dim": o.head_dim,
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "rms_norm_eps": 1e-6,
        "linear_num_key_heads": o.key_heads, "linear_num_value_heads": o.value_heads,
        "linear_key_head_dim": o.key_dim, "linear_value_head_dim": o.value_dim, "linear_conv_kernel_dim": o.conv_kernel,
        **(moe if o.family == "moe" else {"intermediate_size": o.intermediate}),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
                            "mrope_interleaved": True, "mrope_section": [time, height, pairs - time - height]},
        "max_position_embeddings": 262144, "tie_word_embeddings": o.tied, "dtype": DTYPES[o.dtype][2],
        "eos_token_id": token_id("<|endoftext|>"), "initializer_range": 0.02, "use_cache": True,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Write a small random checkpoint in the Qwen3.5/3.6 release layout.",
                                     argument_default=argparse.SUPPRESS)
    parser.add_argument("dst", metavar="DST", help="directory to create")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--force", action="store_true", help="replace a checkpoint that is there")
    parser.add_argument("--big", action="store_true", help="2 GB, with one fused tensor of 1 GiB")
    for field in dataclasses.fields(Options):
        flag = "--" + field.name.replace("_", "-")
        if field.name == "tokenizer":
            parser.add_argument("--no-tokenizer", dest="tokenizer", action="store_false", help="leave text files out")
        elif isinstance(field.default, bool):
            parser.add_argument(flag, action="store_true")
        elif field.name in CHOICES:
            parser.add_argument(flag, choices=[c for c in CHOICES[field.name] if c], help=f"default {field.default}")
        else:
            parser.add_argument(flag, type=int, metavar="N", help=f"default {field.default}")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Command line; 2 for a mistake or a full disk, told in one line."""
    try:
        path = make_checkpoint(**vars(_parser().parse_args(argv)))
    except (MakeError, OSError) as err:
        print(f"make_checkpoint: {err}", file=sys.stderr)
        return 2
    size = sum(file.stat().st_size for file in path.iterdir())
    print(f"{path}: {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
