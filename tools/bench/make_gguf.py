"""Writes a synthetic GGUF v3 of a named geometry, architecture `qwen35moe`, for timing GGUF engines on random weights.

    python tools/bench/make_gguf.py --geometry qwen3.6-35b-a3b-reap128 --out model.gguf

Matrices are Q4_0; norms, convolution, router, decay and the other small tensors F32: the formats of a q4_0 pack, so
that both engines read the same bytes for a token. The Q4_0 blocks come from one pool of random blocks, read round and
round; its length is odd, so that no two rows or experts of a matrix are equal. Weights are scaled to keep activations
near unit size through all layers, and the router so that tokens choose different experts.

Needs numpy and the `gguf` package. The file appears under its name only when whole.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import gguf
import numpy as np

if not __package__:  # run as a script, which puts this folder on the path instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from fermi_engine.config import ModelConfig
from fermi_engine.errors import FermiError
from tools.bench.geometries import GEOMETRIES, geometry

BLOCK_WEIGHTS, BLOCK_BYTES = 32, 18
POOL_BLOCKS = 2**19 - 1  # odd: a row of 2**k blocks comes back at the same place only after 2**19 - 1 rows
# Root mean square of a weight under a mean scale of 1: a uniform nibble less 8, times a scale uniform in 0.5..1.5.
UNIT_RMS = math.sqrt(((16**2 - 1) / 12 + 0.25) * (1 + 1 / 12))
BRANCH_GAIN = 0.1  # of what a layer adds to the residual stream
ROUTER_GAIN = 4.0  # standard deviation of router logits on a normed input
NAMES = [name for name in GEOMETRIES if geometry(name).num_experts]


@dataclass(frozen=True)
class Tensor:
    """One tensor: name, shape with rows first ([experts,] out, in), and what fills it.

    `fill` is 'q4_0', or for F32 'normal' (deviation `gain` / sqrt(in)), 'one' (1 + 0.1 x normal, a norm's weight) or
    'decay' (minus the rate of a Gated DeltaNet head, between e^-3 and 1).
    """

    name: str
    shape: tuple[int, ...]
    fill: str
    gain: float = 1.0

    @property
    def nbytes(self) -> int:
        """Bytes in the file, without padding."""
        count = math.prod(self.shape)
        return count // BLOCK_WEIGHTS * BLOCK_BYTES if self.fill == "q4_0" else 4 * count


def tensors(c: ModelConfig) -> list[Tensor]:
    """All tensors of the model in file order, under the names llama.cpp's loader asks for."""
    found = [Tensor("token_embd.weight", (c.vocab_size, c.hidden_size), "q4_0", math.sqrt(c.hidden_size))]
    for i, kind in enumerate(c.layer_types):
        mixer = _attention(c) if kind == "full_attention" else _delta_net(c)
        layer = [_norm("attn_norm", c.hidden_size), _norm("post_attention_norm", c.hidden_size), *mixer, *_experts(c)]
        found += [replace(tensor, name=f"blk.{i}.{tensor.name}") for tensor in layer]
    return [*found, _norm("output_norm", c.hidden_size),
            Tensor("output.weight", (c.vocab_size, c.hidden_size), "q4_0")]


def _norm(name: str, width: int) -> Tensor:
    return Tensor(f"{name}.weight", (width,), "one")


def _attention(c: ModelConfig) -> list[Tensor]:
    h, q, kv = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    return [Tensor("attn_q.weight", (2 * q, h), "q4_0"), Tensor("attn_k.weight", (kv, h), "q4_0"),
            Tensor("attn_v.weight", (kv, h), "q4_0"), Tensor("attn_output.weight", (h, q), "q4_0", BRANCH_GAIN),
            _norm("attn_q_norm", c.head_dim), _norm("attn_k_norm", c.head_dim)]


def _delta_net(c: ModelConfig) -> list[Tensor]:
    h, heads, value = c.hidden_size, c.linear_num_value_heads, c.linear_value_dim
    return [Tensor("attn_qkv.weight", (c.conv_dim, h), "q4_0"), Tensor("attn_gate.weight", (value, h), "q4_0"),
            Tensor("ssm_conv1d.weight", (c.conv_dim, c.linear_conv_kernel_dim), "normal"),
            Tensor("ssm_dt.bias", (heads,), "normal"), Tensor("ssm_a", (heads,), "decay"),
            Tensor("ssm_beta.weight", (heads, h), "normal"), Tensor("ssm_alpha.weight", (heads, h), "normal"),
            _norm("ssm_norm", c.linear_value_head_dim), Tensor("ssm_out.weight", (h, value), "q4_0", BRANCH_GAIN)]


def _experts(c: ModelConfig) -> list[Tensor]:
    h, e, inner, shared = c.hidden_size, c.num_experts, c.moe_intermediate_size, c.shared_expert_intermediate_size
    return [Tensor("ffn_gate_inp.weight", (e, h), "normal", ROUTER_GAIN),
            Tensor("ffn_gate_exps.weight", (e, inner, h), "q4_0"), Tensor("ffn_up_exps.weight", (e, inner, h), "q4_0"),
            Tensor("ffn_down_exps.weight", (e, h, inner), "q4_0", BRANCH_GAIN),
            Tensor("ffn_gate_inp_shexp.weight", (h,), "normal"),
            Tensor("ffn_gate_shexp.weight", (shared, h), "q4_0"), Tensor("ffn_up_shexp.weight", (shared, h), "q4_0"),
            Tensor("ffn_down_shexp.weight", (h, shared), "q4_0", BRANCH_GAIN)]


class BlockPool:
    """Random Q4_0 blocks, uint8 [POOL_BLOCKS, 18] a scale, handed out round and round."""

    def __init__(self, rng: np.random.Generator) -> None:
        """Draw nibbles, and scales within 0.5..1.5 of their mean, of either sign: a row's weights have mean 0."""
        self._codes = rng.integers(0, 256, (POOL_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        self._scales = rng.uniform(0.5, 1.5, POOL_BLOCKS) * rng.choice((-1.0, 1.0), POOL_BLOCKS)
        self._bytes: dict[float, memoryview] = {}
        self._next = 0

    def take(self, nbytes: int, std: float) -> Iterator[memoryview]:
        """Pieces of `nbytes` in all, of blocks whose weights have standard deviation `std`."""
        data = self._scaled(std)
        while nbytes:
            piece = data[self._next:self._next + nbytes]
            yield piece
            nbytes -= len(piece)
            self._next = (self._next + len(piece)) % len(data)

    def _scaled(self, std: float) -> memoryview:
        if std not in self._bytes:
            blocks = self._codes.copy()
            blocks[:, :2] = (self._scales * (std / UNIT_RMS)).astype("<f2").view(np.uint8).reshape(-1, 2)
            self._bytes[std] = memoryview(blocks.reshape(-1))
        return self._bytes[std]


def _f32(tensor: Tensor, rng: np.random.Generator) -> np.ndarray:
    if tensor.fill == "decay":
        values = -np.exp(rng.uniform(-3.0, 0.0, tensor.shape))
    elif tensor.fill == "one":
        values = 1.0 + 0.1 * rng.standard_normal(tensor.shape)
    else:
        values = rng.standard_normal(tensor.shape) * (tensor.gain / math.sqrt(tensor.shape[-1]))
    return values.astype("<f4")


def _pieces(tensor: Tensor, pool: BlockPool, rng: np.random.Generator) -> Iterator[memoryview]:
    if tensor.fill == "q4_0":
        return pool.take(tensor.nbytes, tensor.gain / math.sqrt(tensor.shape[-1]))
    return iter([memoryview(_f32(tensor, rng).reshape(-1).view(np.uint8))])


def _metadata(writer: gguf.GGUFWriter, name: str, c: ModelConfig) -> None:
    writer.add_name(f"synthetic {name}")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_full_attention_interval(c.layer_types.index("full_attention") + 1)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    _attention_metadata(writer, c)
    writer.add_expert_count(c.num_experts)
    writer.add_expert_used_count(c.num_experts_per_tok)
    writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(c.shared_expert_intermediate_size)
    writer.add_ssm_conv_kernel(c.linear_conv_kernel_dim)
    writer.add_ssm_state_size(c.linear_key_head_dim)
    writer.add_ssm_group_count(c.linear_num_key_heads)
    writer.add_ssm_time_step_rank(c.linear_num_value_heads)
    writer.add_ssm_inner_size(c.linear_value_dim)


def _attention_metadata(writer: gguf.GGUFWriter, c: ModelConfig) -> None:
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_dimension_count(c.rotary_dim)
    writer.add_rope_dimension_sections([*c.mrope_section, 0])
    writer.add_rope_freq_base(c.rope_theta)


def _tokenizer(writer: gguf.GGUFWriter, vocab: int) -> None:
    """A placeholder that loads: made-up tokens and one merge; text cannot be tokenised with it."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list([f"t{i}" for i in range(vocab)])
    writer.add_token_types([gguf.TokenType.NORMAL] * vocab)
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(vocab - 1)


def _header(writer: gguf.GGUFWriter, name: str, wanted: list[Tensor]) -> BinaryIO:
    """Everything before the tensor data, up to its aligned start; the open file."""
    config = geometry(name)
    _metadata(writer, name, config)
    _tokenizer(writer, config.vocab_size)
    for tensor in wanted:
        kind = gguf.GGMLQuantizationType.Q4_0 if tensor.fill == "q4_0" else gguf.GGMLQuantizationType.F32
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    file = writer.fout[0]
    writer.write_padding(file, file.tell())
    return file


def make_gguf(path: Path, name: str, seed: int = 0) -> int:
    """Write the model of `geometry(name)` to `path`; its bytes. The same seed gives the same file.

    Raises FermiError for an unknown or dense geometry, a missing folder or a disk without room.
    """
    if name not in NAMES:
        raise FermiError(f"geometry {name!r} is not one with experts; choose {' or '.join(NAMES)}")
    if not path.parent.is_dir():
        raise FermiError(f"{path.parent} is no folder; create it, or name another --out")
    wanted = tensors(geometry(name))
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        _write(part, name, wanted, np.random.default_rng(seed))
        size = part.stat().st_size
        os.replace(part, path)
    except OSError as err:
        need = sum(t.nbytes for t in wanted)
        raise FermiError(f"{path} not written ({err.strerror}); it needs {need / 1e9:.1f} GB and write access") from err
    finally:
        part.unlink(missing_ok=True)
    return size


def _write(part: Path, name: str, wanted: list[Tensor], rng: np.random.Generator) -> None:
    writer = gguf.GGUFWriter(part, "qwen35moe")
    try:
        file, pool = _header(writer, name, wanted), BlockPool(rng)
        for tensor in wanted:
            for piece in _pieces(tensor, pool, rng):
                file.write(piece)
            writer.write_padding(file, tensor.nbytes)
    finally:
        writer.close()


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometry", required=True, choices=NAMES, help="which model")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the GGUF file to write")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default 0)")
    arguments = parser.parse_args(argv)
    start = time.monotonic()
    try:
        size = make_gguf(arguments.out, arguments.geometry, arguments.seed)
    except FermiError as err:
        print(f"make_gguf: {err}", file=sys.stderr)
        return 2
    print(f"{arguments.out}: {size / 1e9:.2f} GB in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
