"""The layers of the text model over GPU kernels: the maths of decoder.py, gated_delta_net.py, attention.py and moe.py with
float32 activations, in arrays that were planned beforehand. Launches only; nothing here waits or allocates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from fermi_engine.config import ModelConfig
from fermi_engine.kernels.device_arrays import DeviceArray, DeviceExperts
from fermi_engine.kernels.gpu import Device, DeviceBuffer, Stream
from fermi_engine.kernels.gpu_kernels import CHUNK, LARGE_TILE, SMALL_TILE, GpuKernels, OpenChunk, gdn_chunk_scratch
from fermi_engine.kernels.sm20_attention import AttentionKernels, DeviceCache, DeviceExpertRows
from fermi_engine.model.gated_delta_net import L2_EPS
from fermi_engine.model.gpu_weights import Layout

LARGE_ROWS, SMALL_ROWS = LARGE_TILE[0], SMALL_TILE[0]
DeviceWeights = dict[str, Any]  # DeviceMatrix or DeviceArray by name: gpu_weights.DenseWeights


class Kernels:
    """Both families of kernels on one stream."""

    def __init__(self, device: Device, stream: Stream, rows: GpuKernels | None = None) -> None:
        """rows: in place of the engine's own."""
        self.rows = rows or GpuKernels(device, stream)
        self.tokens = AttentionKernels(device, stream)


@dataclass
class DeltaOnDevice:
    """A Gated DeltaNet layer's state: conv [taps-1, C], what its chunks carry, and `final` [HV, K, V], the state after the last
    token, which gdn_chunk leaves behind."""

    conv: DeviceArray
    carried: OpenChunk
    final: DeviceArray

    @staticmethod
    def shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Shape of each array by name."""
        sizes = c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
        carried = OpenChunk.shapes(*sizes)
        return {"conv": (c.linear_conv_kernel_dim - 1, c.conv_dim), **carried, "final": carried["state"]}

    @classmethod
    def of(cls, arrays: dict[str, DeviceArray]) -> DeltaOnDevice:
        """From the arrays of `shapes`."""
        carried = OpenChunk(**{name: arrays[name] for name in ("state", "k", "v", "g", "beta")})
        return cls(arrays["conv"], carried, arrays["final"])


@dataclass
class StopsOnDevice:
    """Where a Gated DeltaNet layer leaves its state inside a block: after `cuts` tokens (rising, at most the block's), of which
    the last `opened` belong to a chunk that is open there. arrays: by `<number>.<name>`, the names of DeltaOnDevice.shapes; those
    of the chunk where one is open."""

    cuts: list[int]
    opened: list[int]
    arrays: dict[str, DeviceArray]

    def parts(self, tokens: int) -> list[tuple[int, int]]:
        """Tokens (begin, end) between the cuts."""
        return list(pairwise(dict.fromkeys([0, *self.cuts, tokens])))

    def tails(self, k: GpuKernels, x: DeviceArray, tail: DeviceArray) -> None:
        """The convolution's last inputs at each cut, from its input x [T, C] and the tail [taps-1, C] before it."""
        rows = tail.shape[0]
        for number, cut in enumerate(self.cuts):
            target, old = self.arrays[f"{number}.conv"], max(0, rows - cut)
            for source, first, to, count in ((tail, rows - old, 0, old), (x, cut - rows + old, old, rows - old)):
                if count:
                    k.move(source.rows(first, count), target.rows(to, count))

    def final(self, end: int, otherwise: DeviceArray) -> DeviceArray:
        """Where the state after `end` tokens goes."""
        return self.arrays[f"{self.cuts.index(end)}.final"] if end in self.cuts else otherwise

    def chunk(self, k: GpuKernels, end: int, carried: OpenChunk) -> None:
        """What the open chunk carries after `end` tokens."""
        number = self.cuts.index(end) if end in self.cuts else None
        if number is None or not self.opened[number]:
            return
        k.move(carried.state, self.arrays[f"{number}.state"])
        for name in ("k", "v", "g", "beta"):
            k.move(getattr(carried, name).rows(0, self.opened[number]), self.arrays[f"{number}.{name}"])


class Activations:
    """Arrays for a block of `tokens`. What the mixer and the feed-forward half use lies in the same bytes: one is done with
    when the other begins."""

    def __init__(self, c: ModelConfig, tokens: int) -> None:
        self.config, self.tokens = c, tokens
        half = c.rotary_dim // 2
        common = {"x": (tokens, c.hidden_size), "u": (tokens, c.hidden_size), "branch": (tokens, c.hidden_size),
                  "cos": (tokens, half), "sin": (tokens, half), "positions": (3, tokens), "inv_freq": (half,), "axis": (half,)}
        self._parts = [Layout(common, {"positions": np.int32, "axis": np.int32})]
        begin = self._parts[0].end
        integers = dict.fromkeys(("ids", "tiles", *DeviceExpertRows.shapes(1, 1, 1)), np.int32)
        for shapes in (self._delta(), self._attention(), self._feed()):
            self._parts.append(Layout(shapes, integers, begin))

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer they lie in."""
        return max(part.end for part in self._parts)

    def within(self, buffer: DeviceBuffer) -> dict[str, DeviceArray]:
        """The arrays by name."""
        return {name: array for part in self._parts for name, array in part.within(buffer).items()}

    def _delta(self) -> dict[str, tuple[int, ...]]:
        c, tokens = self.config, self.tokens
        if "linear_attention" not in c.layer_types:
            return {}
        keys = tokens, c.linear_num_key_heads, c.linear_key_head_dim
        values = tokens, c.linear_num_value_heads, c.linear_value_head_dim
        gates = dict.fromkeys(("a", "b", "g", "beta"), values[:2])
        return {"qkv": (tokens, c.conv_dim), "z": (tokens, c.linear_value_dim), **gates, "conv": (tokens, c.conv_dim),
                "delta_q": keys, "delta_k": keys, "delta": values,
                "scratch": (gdn_chunk_scratch(tokens, CHUNK - 1, values[1]),)}

    def _attention(self) -> dict[str, tuple[int, ...]]:
        c, tokens = self.config, self.tokens
        if "full_attention" not in c.layer_types:
            return {}
        query, key = (tokens, c.num_attention_heads, c.head_dim), (tokens, c.num_key_value_heads, c.head_dim)
        return {"query_gate": (tokens, 2 * c.num_attention_heads * c.head_dim), "key_raw": key, "value": key, "query": query,
                "key": key, "attention": query, "gated": query}

    def _feed(self) -> dict[str, tuple[int, ...]]:
        c, tokens = self.config, self.tokens
        width = c.shared_expert_intermediate_size if c.num_experts else c.intermediate_size
        dense = {"gate_up": (tokens, 2 * width), "hidden": (tokens, width)}
        if not c.num_experts:
            return dense
        chosen, rows = (tokens, c.num_experts_per_tok), tokens * c.num_experts_per_tok
        bound = min(c.num_experts, rows) + rows // tile_rows(c, tokens)
        return {**dense, "logits": (tokens, c.num_experts), "ids": chosen, "weights": chosen,
                **DeviceExpertRows.shapes(*chosen, c.num_experts), "tiles": (1 + 2 * bound,),
                "expert_gate_up": (rows, 2 * c.moe_intermediate_size), "expert_hidden": (rows, c.moe_intermediate_size),
                "expert_out": (rows, c.hidden_size), "shared": (tokens, c.hidden_size), "shared_gate": (tokens, 1)}


def tile_rows(c: ModelConfig, tokens: int) -> int:
    """Tile height of the experts' products: small tiles where an even share of rows would leave most of a large one empty."""
    return SMALL_ROWS if tokens * c.num_experts_per_tok <= SMALL_ROWS * c.num_experts else LARGE_ROWS


class BlockOnDevice:
    """One block of tokens on its way through the layers: x [T, H] lies in its arrays and is replaced layer by layer."""

    def __init__(self, c: ModelConfig, kernels: Kernels, arrays: dict[str, DeviceArray], tokens: int, start: int,
                 kv_format: str = "f32") -> None:
        """arrays: of Activations for `tokens`; start: position of the first token; kv_format: of the host's cache."""
        self.config, self.tokens, self.start, self.kv_format = c, tokens, start, kv_format
        self._k, self._a, self._arrays = kernels.rows, kernels.tokens, arrays
        self.work: DeviceExpertRows | None = None
        if c.num_experts:
            self.work = DeviceExpertRows(**{name: arrays[name] for name in DeviceExpertRows.shapes(1, 1, 1)})

    def __getitem__(self, name: str) -> DeviceArray:
        return self._arrays[name]

    def tables(self) -> None:
        """cos and sin of the positions, from `positions`, `inv_freq` and `axis`."""
        self._k.rope_tables(self["positions"], self["inv_freq"], self["axis"], self["cos"], self["sin"])

    def mixer(self, w: DeviceWeights, state: DeltaOnDevice | DeviceCache, stops: StopsOnDevice | None = None) -> None:
        """x + mixer(norm(x)); the state moves on by T tokens, and leaves copies at `stops`."""
        self._norm(w["input_layernorm"])
        if isinstance(state, DeltaOnDevice):
            self._delta(w, state, stops)
        else:
            self._attention(w, state)
        self._k.add(self["x"], self["branch"], self["x"])

    def _norm(self, weight: DeviceArray) -> None:
        self._k.rms_norm(self["x"], weight, self.config.rms_norm_eps, self["u"])

    def _delta(self, w: DeviceWeights, state: DeltaOnDevice, stops: StopsOnDevice | None) -> None:
        c, k, u = self.config, self._k, self["u"]
        heads, dk = c.linear_num_key_heads, c.linear_key_head_dim
        for matrix, out in (("in_proj_qkv", "qkv"), ("in_proj_z", "z"), ("in_proj_a", "a"), ("in_proj_b", "b")):
            k.gemm(u, w[matrix], self[out])
        k.gdn_gates(self["a"], self["b"], w["A_log"], w["dt_bias"], self["g"], self["beta"])
        if stops:
            stops.tails(k, self["qkv"], state.conv)  # before the convolution moves the tail on
        k.conv1d_silu(self["qkv"], w["conv1d"], state.conv, self["conv"])
        k.l2_norm(self["conv"], 0, heads, dk, L2_EPS, 1.0 / math.sqrt(dk), self["delta_q"])
        k.l2_norm(self["conv"], c.linear_key_dim, heads, dk, L2_EPS, 1.0, self["delta_k"])
        self._recurrence(state, stops)
        rows = self.tokens * c.linear_num_value_heads, c.linear_value_head_dim
        gated = DeviceArray.within(self["qkv"].buffer, rows, np.float32, self["qkv"].offset)  # which the convolution has read
        k.gated_rms_norm(self["delta"].reshape(*rows), self["z"].reshape(*rows), w["norm"], c.rms_norm_eps, gated)
        k.gemm(gated.reshape(self.tokens, c.linear_value_dim), w["out_proj"], self["branch"])

    def _recurrence(self, state: DeltaOnDevice, stops: StopsOnDevice | None) -> None:
        """The delta rule over all tokens, in parts that end where a state is wanted."""
        c, k = self.config, self._k
        for begin, end in stops.parts(self.tokens) if stops else [(0, self.tokens)]:
            q, key, v, g, beta, out = (self[name].rows(begin, end - begin)
                                       for name in ("delta_q", "delta_k", "conv", "g", "beta", "delta"))
            k.gdn_chunk(q, key, v, 2 * c.linear_key_dim, g, beta, state.carried, out, self["scratch"],
                        stops.final(end, state.final) if stops else state.final)
            if stops:
                stops.chunk(k, end, state.carried)
        if stops and self.tokens in stops.cuts:
            k.move(stops.final(self.tokens, state.final), state.final)

    def _attention(self, w: DeviceWeights, cache: DeviceCache) -> None:
        c, k, u, tokens = self.config, self._k, self["u"], self.tokens
        heads, dim = c.num_attention_heads, c.head_dim
        for matrix, out in (("q_proj", "query_gate"), ("k_proj", "key_raw"), ("v_proj", "value")):
            k.gemm(u, w[matrix], self[out].reshape(tokens, w[matrix].rows))
        query_gate = self["query_gate"].reshape(tokens * heads, 2 * dim)
        k.rms_norm(query_gate, w["q_norm"], c.rms_norm_eps, self["query"].reshape(tokens * heads, dim))
        k.rms_norm(_heads(self["key_raw"]), w["k_norm"], c.rms_norm_eps, _heads(self["key"]))
        for name in ("query", "key"):
            k.rope(self[name], self["cos"], self["sin"])
        self._a.kv_append(cache, self.start, self["key"], self["value"], self.kv_format)
        self._a.attention(self["query"], cache, self.start, 1.0 / math.sqrt(dim), self["attention"],
                          self["gated"])
        k.sigmoid_mul(_heads(self["attention"]), query_gate, dim, _heads(self["gated"]))
        k.gemm(self["gated"].reshape(tokens, heads * dim), w["o_proj"], self["branch"])

    def route(self, w: DeviceWeights) -> None:
        """The norm before the feed-forward half and, with experts, which rows go to which: `work`."""
        self._norm(w["post_attention_layernorm"])
        if self.work is None:
            return
        self._k.gemm(self["u"], w["gate"], self["logits"])
        self._a.router_topk(self["logits"], self["ids"], self["weights"])
        self._a.expert_rows(self["ids"], self.config.num_experts, self.work)
        self._k.grouped_tiles(self.work.first, self.work.hits, self["tiles"], tile_rows(self.config, self.tokens))

    def shared(self, w: DeviceWeights) -> None:
        """The part of the feed-forward half that needs no routed experts; all of it in a dense model."""
        if self.work is None:
            self._swiglu(w, "", "branch")
            return
        self._swiglu(w, "shared_expert.", "shared")
        self._k.gemm(self["u"], w["shared_expert_gate"], self["shared_gate"])

    def _swiglu(self, w: DeviceWeights, prefix: str, out: str) -> None:
        gate = w[prefix + "gate_proj"]
        self._k.gemm(self["u"], gate, self["gate_up"])
        self._k.gemm(self["u"], w[prefix + "up_proj"], self["gate_up"], column=gate.rows)
        self._k.swiglu(self["gate_up"], self["hidden"])
        self._k.gemm(self["hidden"], w[prefix + "down_proj"], self[out])

    def routed(self, gate_up: DeviceExperts, down: DeviceExperts) -> None:
        """The routed experts, each once over all its rows, and their weighted sum with the shared one."""
        work, k = self.work, self._k
        small = tile_rows(self.config, self.tokens) == SMALL_ROWS
        k.grouped_gemm(self["u"], gate_up, work.first, self["tiles"], self["expert_gate_up"], work.source, work.hit, small)
        k.swiglu(self["expert_gate_up"], self["expert_hidden"])
        k.grouped_gemm(self["expert_hidden"], down, work.first, self["tiles"], self["expert_out"], None, work.hit, small)
        self._a.moe_combine(self["expert_out"], work.row_of, self["weights"], self["branch"], self["shared"], self["shared_gate"])

    def finish(self) -> None:
        """The residual of the feed-forward half."""
        self._k.add(self["x"], self["branch"], self["x"])


def _heads(array: DeviceArray) -> DeviceArray:
    """[T, heads, D] as [T * heads, D]."""
    return array.reshape(array.shape[0] * array.shape[1], array.shape[2])
