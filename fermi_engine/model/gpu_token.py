"""One token through all layers on the GPU: the arrays it needs, and its launches, recorded once and replayed for every token.

Everything that differs from token to token lies on the device: the token's id, its position, the state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fermi_engine.config import ModelConfig
from fermi_engine.kernels.device_arrays import DeviceArray
from fermi_engine.kernels.gpu import Device, DeviceBuffer, Recording, Stream
from fermi_engine.kernels.gpu_kernels import GpuKernels
from fermi_engine.kernels.sm20_attention import DeviceCache
from fermi_engine.kernels.sm20_token import MAX_HEAD_DIM, MOST_COLUMNS, TokenKernels, argmax_work, attention_work
from fermi_engine.model.gated_delta_net import L2_EPS
from fermi_engine.model.gpu_layers import DeltaOnDevice, DeviceWeights
from fermi_engine.model.gpu_weights import Layout

STEP = 5  # integers that the host gives for a token: id, place in the cache, position on three axes


class TokenArrays:
    """Arrays for one token beside a cache with room for `capacity` positions."""

    def __init__(self, c: ModelConfig, capacity: int) -> None:
        half = c.rotary_dim // 2
        shapes = {"step": (STEP,), "x": (c.hidden_size,), "hidden": (c.intermediate_size,), "logits": (c.vocab_size,),
                  "cos": (1, half), "sin": (1, half), "inv_freq": (half,), "axis": (half,), **argmax_work(), "index": (1,)}
        if "linear_attention" in c.layer_types:
            shapes |= {"qkv": (c.conv_dim,), "z": (c.linear_value_dim,), "a": (c.linear_num_value_heads,),
                       "b": (c.linear_num_value_heads,), "delta": (c.linear_value_dim,)}
        if "full_attention" in c.layer_types:
            heads, key = c.num_attention_heads, (c.num_key_value_heads, c.head_dim)
            shapes |= {"query_gate": (heads, 2 * c.head_dim), "key": key, "value": key, "attention": (heads, c.head_dim),
                       **attention_work(heads, c.head_dim, capacity)}
        self._layout = Layout(shapes, dict.fromkeys(("step", "axis", "part_index", "index"), np.int32))

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer they lie in."""
        return self._layout.end

    def within(self, buffer: DeviceBuffer) -> dict[str, DeviceArray]:
        """The arrays by name."""
        return self._layout.within(buffer)


class TokenOnDevice:
    """The launches of a token over one set of weights, states and arrays: `layers` from the id in `step` to the hidden row x,
    `head` from there to the logits, `choice` to the id of the largest."""

    def __init__(self, c: ModelConfig, device: Device, stream: Stream, arrays: dict[str, DeviceArray],
                 layers: Sequence[DeviceWeights], ends: DeviceWeights, states: Sequence[DeltaOnDevice | DeviceCache]) -> None:
        """arrays: of TokenArrays, inv_freq and axis filled. ends: of gpu_weights.EndWeights."""
        self._c, self._arrays, self._k, self._t = c, arrays, GpuKernels(device, stream), TokenKernels(device, stream)
        with device.record() as self.layers:
            self._begin(ends)
            for w, state in zip(layers, states, strict=True):
                self._layer(w, state)
        with device.record() as self.head:
            self._t.gemv(self["x"], [(ends["lm_head"], self["logits"])], ends["norm"], c.rms_norm_eps)
        with device.record() as self.choice:
            self._t.argmax(self["logits"], arrays, self["index"])

    layers: Recording
    head: Recording
    choice: Recording

    def __getitem__(self, name: str) -> DeviceArray:
        return self._arrays[name]

    def _begin(self, ends: DeviceWeights) -> None:
        """x from the embedding, cos and sin of the position."""
        step, half = self["step"], self["inv_freq"].size
        self._k.rows(ends["embed_tokens"], self["x"].reshape(1, self["x"].size), ids=step.rows(0, 1))
        if half:
            self._k.rope_tables(step.rows(2, 3).reshape(3, 1), self["inv_freq"], self["axis"], self["cos"], self["sin"])

    def _layer(self, w: DeviceWeights, state: DeltaOnDevice | DeviceCache) -> None:
        """x + mixer(norm(x)), then x + ffn(norm(x)); the state moves on by this token."""
        if isinstance(state, DeltaOnDevice):
            self._delta(w, state)
        else:
            self._attention(w, state)
        x, hidden, eps = self["x"], self["hidden"], self._c.rms_norm_eps
        self._t.gemv_swiglu(x, w["gate_proj"], w["up_proj"], hidden, w["post_attention_layernorm"], eps)
        self._t.gemv(hidden, [(w["down_proj"], x)], add=True)

    def _delta(self, w: DeviceWeights, state: DeltaOnDevice) -> None:
        c, t = self._c, self._t
        parts = [(w[matrix], self[out]) for matrix, out in (("in_proj_qkv", "qkv"), ("in_proj_z", "z"), ("in_proj_a", "a"),
                                                            ("in_proj_b", "b"))]
        t.gemv(self["x"], parts, w["input_layernorm"], c.rms_norm_eps)
        t.gdn_token(self["qkv"], self["z"], self["a"], self["b"], w["conv1d"], w["A_log"], w["dt_bias"], w["norm"], state.conv,
                    state.final, self["delta"], c.linear_num_key_heads, L2_EPS, c.rms_norm_eps,
                    1.0 / math.sqrt(c.linear_key_head_dim))
        t.gemv(self["delta"], [(w["out_proj"], self["x"])], add=True)

    def _attention(self, w: DeviceWeights, cache: DeviceCache) -> None:
        c, t = self._c, self._t
        parts = [(w[matrix], self[out]) for matrix, out in (("q_proj", "query_gate"), ("k_proj", "key"), ("v_proj", "value"))]
        t.gemv(self["x"], parts, w["input_layernorm"], c.rms_norm_eps)
        tables = tuple(self[name].reshape(self[name].size) for name in ("cos", "sin"))
        t.attention(self["query_gate"], self["key"], self["value"], w["q_norm"], w["k_norm"], tables, self["step"].rows(1, 1),
                    cache, self._arrays, self["attention"], c.rms_norm_eps, 1.0 / math.sqrt(c.head_dim))
        t.gemv(self["attention"].reshape(self["attention"].size), [(w["o_proj"], self["x"])], add=True)


def unfit_for_tokens(c: ModelConfig, columns: int) -> str | None:
    """Why these kernels cannot run a model that the kernels for many tokens can; None when they can. columns: of its widest
    matrix."""
    rules = [
        (not c.num_experts, f"it has {c.num_experts} experts a layer"),
        (columns <= MOST_COLUMNS, f"rows of {columns} weights, at most {MOST_COLUMNS}"),
        ("full_attention" not in c.layer_types or c.head_dim <= MAX_HEAD_DIM,
         f"heads of {c.head_dim}, at most {MAX_HEAD_DIM}"),
    ]
    return next((text for holds, text in rules if not holds), None)
