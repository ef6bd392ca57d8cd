"""The whole text model: embedding, hybrid layers, head, as in transformers' modeling_qwen3_5(_moe)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from reference import gated_delta_rule as gdn
from reference import rope
from reference.attention import gated_attention
from reference.moe import sparse_moe, swiglu
from reference.norms import gated_rms_norm, l2_norm, rms_norm
from reference.quant import QuantMatrix, linear

Trace = Callable[[str, Tensor], None]
LayerState = dict[str, Tensor]


def _silent(name: str, value: Tensor) -> None:
    """The trace of a caller that wants none."""


class Decoder:
    """The text model over named weights.

    config: any object with the attributes of a ModelConfig (Hugging Face field names, plus rotary_dim).
    params: canonical tensor name -> Tensor or QuantMatrix; experts: one tensor [E, rows, n] or E QuantMatrix.
        Without `lm_head.weight` the embedding serves as head. The dtype of `norm.weight` decides float32 or
        float64; every plain tensor must have it (see `to`).
    """

    def __init__(self, config: Any, params: Mapping[str, Any]) -> None:
        self.config, self.params = config, params
        self.dtype: torch.dtype = params["norm.weight"].dtype
        self.inv_freq = rope.inv_freq(config.rotary_dim, config.rope_theta)
        self.axes = rope.axis_of_frequency(config.rotary_dim // 2, config.mrope_section)

    def to(self, dtype: torch.dtype) -> Decoder:
        """A Decoder in another dtype. Quantised weights stay; sums over them take the new dtype."""
        moved = {name: w.to(dtype) if isinstance(w, Tensor) else w for name, w in self.params.items()}
        return Decoder(self.config, moved)

    def initial_state(self) -> list[LayerState]:
        """Per layer zeros `conv` [kernel-1, C], `recurrent` [HV, K, V], or empty `k`, `v` [0, HKV, D]."""
        c = self.config
        key_dim, value_dim = c.linear_key_head_dim, c.linear_value_head_dim
        channels = 2 * c.linear_num_key_heads * key_dim + c.linear_num_value_heads * value_dim
        shapes = {
            "linear_attention": {"conv": (c.linear_conv_kernel_dim - 1, channels),
                                 "recurrent": (c.linear_num_value_heads, key_dim, value_dim)},
            "full_attention": dict.fromkeys("kv", (0, c.num_key_value_heads, c.head_dim)),
        }
        return [{name: torch.zeros(shape, dtype=self.dtype) for name, shape in shapes[kind].items()}
                for kind in c.layer_types]

    def rope_tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions int [3, T] (time, height, width) -> cos, sin [T, rotary_dim / 2]."""
        return rope.tables(positions, self.inv_freq, self.axes, self.dtype)

    def embed(self, ids: Tensor) -> Tensor:
        """ids int [T] -> [T, H]."""
        table = self.params["embed_tokens.weight"]
        return table.rows(ids).dequantize(self.dtype) if isinstance(table, QuantMatrix) else table[ids]

    def head(self, x: Tensor, trace: Trace = _silent) -> Tensor:
        """Hidden after the last layer [T, H] -> logits [T, vocab]."""
        x = rms_norm(x, self.params["norm.weight"], self.config.rms_norm_eps)
        trace("norm", x)
        logits = linear(x, self.params.get("lm_head.weight", self.params["embed_tokens.weight"]))
        trace("logits", logits)
        return logits

    def forward(
        self, ids: Tensor | list[int], state: list[LayerState] | None = None, positions: Tensor | None = None,
        trace: Trace | None = None, embedded: Tensor | None = None,
    ) -> tuple[Tensor, list[LayerState]]:
        """ids [T] after `state` (left as it is) -> logits [T, vocab], new state.

        positions int [3, T]; by default the tokens count on from the cached keys, on all three axes. embedded [T, H]
        stands for the embeddings of ids where some are those of images.
        """
        ids, trace = torch.as_tensor(ids), trace or _silent
        state = self.initial_state() if state is None else state
        if positions is None:
            past = max((len(layer["k"]) for layer in state if "k" in layer), default=0)
            positions = torch.arange(past, past + len(ids)).expand(3, -1)
        cos, sin = self.rope_tables(positions)
        x = self.embed(ids) if embedded is None else embedded
        trace("embed", x)
        new_state = []
        for i, layer_state in enumerate(state):
            x, layer_state = self.forward_layer(i, x, layer_state, cos, sin, trace)
            new_state.append(layer_state)
        return self.head(x, trace), new_state

    def forward_layer(
        self, i: int, x: Tensor, state: LayerState, cos: Tensor, sin: Tensor, trace: Trace | None = None
    ) -> tuple[Tensor, LayerState]:
        """Layer i alone: x [T, H], the layer's own state, RoPE tables [T, half] -> x [T, H], new state."""
        outer = trace or _silent

        def note(name: str, value: Tensor) -> None:
            outer(f"layers.{i}.{name}", value)

        eps = self.config.rms_norm_eps
        note("input", x)
        u = rms_norm(x, self._weight(i, "input_layernorm.weight"), eps)
        note("mixer_norm", u)
        if self.config.layer_types[i] == "linear_attention":
            mixed, state = self._delta_net(i, u, state, note)
        else:
            mixed, state = self._attention(i, u, state, cos, sin, note)
        note("mixer", mixed)
        x = x + mixed
        h = rms_norm(x, self._weight(i, "post_attention_layernorm.weight"), eps)
        note("ffn_norm", h)
        ffn = self._ffn(i, h, note)
        note("ffn", ffn)
        note("output", x + ffn)
        return x + ffn, state

    def greedy(self, ids: list[int], n: int) -> list[int]:
        """The n ids that follow, each the lowest id of the highest logit."""
        logits, state = self.forward(ids)
        chosen: list[int] = []
        while len(chosen) < n:
            chosen.append(int(logits[-1].argmax()))
            if len(chosen) < n:
                logits, state = self.forward(chosen[-1:], state)
        return chosen

    def _weight(self, i: int, name: str) -> Any:
        return self.params[f"layers.{i}.{name}"]

    def _attention(
        self, i: int, u: Tensor, state: LayerState, cos: Tensor, sin: Tensor, note: Trace
    ) -> tuple[Tensor, LayerState]:
        names = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
        weights = [self._weight(i, f"self_attn.{name}.weight") for name in names]
        eps = self.config.rms_norm_eps
        out, k, v = gated_attention(u, *weights, state["k"], state["v"], cos, sin, eps, note)
        return out, {"k": k, "v": v}

    def _delta_net(self, i: int, u: Tensor, state: LayerState, note: Trace) -> tuple[Tensor, LayerState]:
        c = self.config
        names = ("qkv", "z", "b", "a")
        qkv, z, b, a = (linear(u, self._weight(i, f"linear_attn.in_proj_{name}.weight")) for name in names)
        note("qkv", qkv)
        note("z", z)
        conv_weight = self._weight(i, "linear_attn.conv1d.weight").flatten(1)
        conv, tail = gdn.causal_conv_silu(qkv, conv_weight, state["conv"])
        note("conv", conv)
        A_log, dt_bias = (self._weight(i, f"linear_attn.{name}") for name in ("A_log", "dt_bias"))
        g, beta = gdn.gates(a, b, A_log, dt_bias)
        note("g", g)
        note("beta", beta)
        key_dim = c.linear_num_key_heads * c.linear_key_head_dim
        q, k, v = conv.split([key_dim, key_dim, c.linear_num_value_heads * c.linear_value_head_dim], dim=-1)
        q, k = (l2_norm(x.unflatten(-1, (-1, c.linear_key_head_dim))) for x in (q, k))
        v, z = (x.unflatten(-1, (-1, c.linear_value_head_dim)) for x in (v, z))
        o, recurrent = gdn.recurrent(q, k, v, g, beta, state["recurrent"], c.linear_key_head_dim**-0.5)
        note("delta", o)
        o = gated_rms_norm(o, z, self._weight(i, "linear_attn.norm.weight"), c.rms_norm_eps).flatten(1)
        note("gated_norm", o)
        out = linear(o, self._weight(i, "linear_attn.out_proj.weight"))
        return out, {"conv": tail, "recurrent": recurrent}

    def _ffn(self, i: int, h: Tensor, note: Trace) -> Tensor:
        names = ("gate_proj", "up_proj", "down_proj")
        if not self.config.num_experts:
            return swiglu(h, *(self._weight(i, f"mlp.{name}.weight") for name in names))
        shared = tuple(self._weight(i, f"mlp.shared_expert.{name}.weight") for name in names)
        return sparse_moe(
            h, self._weight(i, "mlp.gate.weight"),
            self._weight(i, "mlp.experts.gate_up_proj"), self._weight(i, "mlp.experts.down_proj"),
            shared, self._weight(i, "mlp.shared_expert_gate.weight"), self.config.num_experts_per_tok, note,
        )
