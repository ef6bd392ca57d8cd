"""Second moments of what goes into each matrix, E[u u^T] over a calibration text: what a rounding error of a weight costs.

A moments file is laid out and sealed as a pack is (pack_writer), one F32 tensor for each input of a layer. Inputs are named
as layers report them; matrices that read the same rows share one. An expert's second matrix has moments of its own, the
first matrices of all experts of a layer share those of the layer's input.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fermi_engine.config import ModelConfig
from fermi_engine.errors import RequestError
from fermi_engine.pack import DIGEST_BYTES, SEAL, seal_digest, tensor_digest
from fermi_engine.pack_writer import PackPlan, Wanted
from fermi_engine.safetensors_header import read_header
from fermi_engine.vision.config import is_vision

KIND, VERSION = "fermi-engine-moments", "1"
COUNTS = "counts."  # before the input's name: how many rows each of its moments is a mean of
_READERS = (  # ends of canonical names, and the input that such a matrix reads
    ((".in_proj_qkv.weight", ".in_proj_z.weight", ".q_proj.weight", ".k_proj.weight", ".v_proj.weight"), "mixer_norm"),
    ((".self_attn.o_proj.weight",), "gated"), ((".linear_attn.out_proj.weight",), "gated_norm"),
    ((".experts.down_proj",), "expert_hidden"), ((".down_proj.weight",), "dense_hidden"),
    ((".gate_up_proj", ".gate_proj.weight", ".up_proj.weight"), "ffn_norm"),
)


class Input(NamedTuple):
    """Rows [*, n] that matrices read: `name` as layers report them, `copies` moments of [n, n] (one for each expert, or 1)."""

    name: str
    n: int
    copies: int = 1

    @property
    def nbytes(self) -> int:
        """Of its moments."""
        return 4 * self.copies * self.n * self.n


def input_of(name: str, config: ModelConfig) -> str | None:
    """The input of the matrix with this canonical name; None for an embedding that no product reads, and for an image tower."""
    if is_vision(name):
        return None
    if name == "lm_head.weight" or (name == "embed_tokens.weight" and config.tie_word_embeddings):
        return "norm"
    found = next((kind for ends, kind in _READERS if name.endswith(ends)), None)
    return found and f"layers.{name.split('.')[1]}.{found}"


def inputs(c: ModelConfig) -> list[Input]:
    """All inputs of a model, layer by layer."""
    found = []
    for i, kind in enumerate(c.layer_types):
        gated = Input("gated", c.num_attention_heads * c.head_dim) if kind == "full_attention" else \
            Input("gated_norm", c.linear_value_dim)
        rows = [Input("mixer_norm", c.hidden_size), gated, Input("ffn_norm", c.hidden_size)]
        if c.num_experts:
            rows += [Input("expert_hidden", c.moe_intermediate_size, c.num_experts),
                     Input("dense_hidden", c.shared_expert_intermediate_size)]
        else:
            rows.append(Input("dense_hidden", c.intermediate_size))
        found += [row._replace(name=f"layers.{i}.{row.name}") for row in rows]
    return [*found, Input("norm", c.hidden_size)]


def plan(config: ModelConfig, about: dict[str, Any]) -> PackPlan:
    """The file's layout; `about` says what was measured on what."""
    wanted = []
    for row in inputs(config):
        wanted += [Wanted(row.name, "F32", (row.copies, row.n, row.n)), Wanted(COUNTS + row.name, "F32", (row.copies,))]
    return PackPlan.build(wanted, {"format": KIND, "version": VERSION, "about": json.dumps(about, sort_keys=True)})


class Moments:
    """An open moments file. Holds one input's moments at a time, read and checked when they are first asked for."""

    def __init__(self, path: Path) -> None:
        """RequestError where the file is none, of another version or damaged."""
        self.path = path
        header = read_header(path, RequestError)
        if (header.metadata.get("format"), header.metadata.get("version")) != (KIND, VERSION):
            raise RequestError(f"{path} holds no second moments of version {VERSION}; give a file of fermi-engine calibrate")
        self._tensors, self._start = header.tensors, header.data_start
        self._digests = self._check_seal()
        self.about: dict[str, Any] = json.loads(header.metadata["about"])
        self._held: tuple[str, np.ndarray, np.ndarray] | None = None

    @property
    def hash(self) -> str:
        """The seal."""
        return self._hash

    def of(self, name: str, config: ModelConfig, expert: int | None = None) -> np.ndarray | None:
        """Moments [n, n] of what the matrix `name` reads (of `expert`, where each has its own); None where nothing does, or
        no token came by. RequestError where the file lacks them or is damaged."""
        key = input_of(name, config)
        if key is None:
            return None
        if self._held is None or self._held[0] != key:
            self._held = key, self._read(key), self._read(COUNTS + key)
        _, moments, counts = self._held
        which = expert if len(moments) > 1 and expert is not None else 0
        return moments[which] if counts[which] > 0 else None

    def _check_seal(self) -> dict[str, bytes]:
        names = list(self._tensors)
        seal = self._bytes(SEAL) if names[-1:] == [SEAL] else b""
        with open(self.path, "rb") as file:
            head = file.read(self._start)
        digests, last = seal[:-DIGEST_BYTES], seal[-DIGEST_BYTES:]
        if len(seal) != DIGEST_BYTES * len(names) or last != seal_digest(head, digests):
            self._damaged("its seal does not match")
        self._hash = last.hex()
        return {name: digests[i * DIGEST_BYTES:(i + 1) * DIGEST_BYTES] for i, name in enumerate(names[:-1])}

    def _bytes(self, name: str) -> bytes:
        entry = self._tensors[name]
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data, at = bytearray(entry.end - entry.begin), 0
            while at < len(data):
                got = os.preadv(fd, [memoryview(data)[at:]], self._start + entry.begin + at)
                if not got:
                    self._damaged(f"it ends inside {name}")
                at += got
            return bytes(data)
        finally:
            os.close(fd)

    def _read(self, name: str) -> np.ndarray:
        if name not in self._tensors:
            raise RequestError(f"{self.path} has no moments of {name}; it was measured on another model")
        data, digest = self._bytes(name), tensor_digest()
        digest.update(data)
        if digest.digest() != self._digests[name]:
            self._damaged(f"tensor {name} does not match its checksum")
        return np.frombuffer(data, np.float32).reshape(self._tensors[name].shape)

    def _damaged(self, what: str) -> None:
        raise RequestError(f"{self.path} is damaged: {what}; measure it again with fermi-engine calibrate")
