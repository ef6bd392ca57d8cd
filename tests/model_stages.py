"""References of the stages above kernels: mixers, feed-forward parts, and small models.

Router choices are compared exactly, so inputs are refused where float32 noise could change one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from fermi_engine import kernels
from fermi_engine.compare import Arrays, divergence
from fermi_engine.config import ModelConfig
from fermi_engine.stages import runs
from fermi_engine.stages.array_weights import CONFIG
from reference import attention, moe, norms, rope
from reference.decoder import Decoder
from reference.quant import QuantMatrix, unpack_q4_0, unpack_q8_0
from tests import tiny_models as draw
from tests.oracle import Oracle, Tensors, floats
from tests.strategies import few

# Router logits of these models reach 10 and come from sums whose float32 errors stay below 1e-5; two of them may meet.
ROUTER_NOISE = 1e-4
# Runs of the quantised reference with moved inputs: flipped codes are rare, so one run may show none.
RUNS = 16


def config_of(a: Tensors) -> ModelConfig:
    return ModelConfig.from_dict(json.loads(bytes(a[CONFIG].tolist())))


def params(a: Tensors) -> dict[str, Any]:
    """Canonical name -> float32 tensor, QuantMatrix, or a list of QuantMatrix for experts."""
    named = {name: value for name, value in a.items() if name.endswith((".weight", "_proj", ".A_log", ".dt_bias"))}
    for name, value in a.items():
        stem, _, format = name.rpartition(".")
        if format in ("q4_0", "q8_0"):
            named[stem] = [_unpacked(v, format) for v in value] if value.ndim == 3 else _unpacked(value, format)
    return named


def _unpacked(plain: Tensor, format: str) -> QuantMatrix:
    return QuantMatrix(*(unpack_q4_0 if format == "q4_0" else unpack_q8_0)(plain), format)


def decoder_of(a: Tensors, dtype: torch.dtype) -> Decoder:
    """The reference model of the arrays. A part of a model lacks the final norm, whose dtype would tell."""
    named = {"norm.weight": torch.zeros(1), **params(a)}
    return Decoder(config_of(a), named).to(dtype)


def expanded(a: Tensors, dtype: torch.dtype) -> Decoder:
    """The same over the values that quantised weights stand for: activations stay as they are."""
    named = {"norm.weight": torch.zeros(1), **{name: _values(value) for name, value in params(a).items()}}
    return Decoder(config_of(a), named).to(dtype)


def _values(weight: Any) -> Tensor:
    if isinstance(weight, list):
        return torch.stack([_values(one) for one in weight])
    return weight.dequantize(torch.float32) if isinstance(weight, QuantMatrix) else weight


# Parts of a layer


def _delta_net(a: Tensors, dtype: torch.dtype) -> Tensors:
    x, conv, recurrent = floats(a, dtype, "x", "conv", "recurrent")
    y, state = decoder_of(a, dtype)._delta_net(0, x, {"conv": conv, "recurrent": recurrent}, _silent)
    return {"y": y, **state}


def _attention(a: Tensors, dtype: torch.dtype) -> Tensors:
    c, weights = config_of(a), params(a)
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    matrices = [weights[f"layers.0.self_attn.{name}.weight"].to(dtype) for name in names]
    axes = rope.axis_of_frequency(c.rotary_dim // 2, c.mrope_section)
    tables = rope.tables(a["positions"], rope.inv_freq(c.rotary_dim, c.rope_theta), axes, dtype)
    past = floats(a, dtype, "past_k", "past_v")
    y, k, v = attention.gated_attention(a["x"].to(dtype), *matrices, *past, *tables, c.rms_norm_eps)
    return {"y": y, "k": k, "v": v}


def _silent(name: str, value: Tensor) -> None:
    pass


def _feed_forward(a: Tensors, dtype: torch.dtype, note: Callable[[str, Tensor], None] = _silent) -> Tensor:
    return decoder_of(a, dtype)._ffn(0, a["x"].to(dtype), note)


def _dense(a: Tensors, dtype: torch.dtype) -> Tensors:
    return {"y": _feed_forward(a, dtype)}


def _sparse(a: Tensors, dtype: torch.dtype) -> Tensors:
    seen: Tensors = {}
    y = _feed_forward(a, dtype, seen.__setitem__)
    return {"ids": seen["router_ids"].int(), "weights": seen["router_weights"], "y": y}


def _decided_layer(a: Tensors) -> bool:
    seen: Tensors = {}
    _feed_forward(a, torch.float64, seen.__setitem__)
    return decided(seen, config_of(a).num_experts_per_tok)


def decided(seen: Tensors, k: int) -> bool:
    """True when every router prefers its k chosen experts, and each to the next, by more than noise."""
    for name, logits in seen.items():
        if name.endswith("router_logits"):
            best = moe.route(logits, min(k + 1, logits.shape[1]))[0]
            ordered = logits.gather(1, best)
            if (ordered[:, :-1] - ordered[:, 1:] <= ROUTER_NOISE).any():
                return False
    return True


# Halves of a layer, with the norm before and the residual after


def _normed(a: Tensors, model: Decoder, which: str) -> Tensor:
    weight = model.params[f"layers.0.{which}.weight"]
    return norms.rms_norm(a["x"].to(model.dtype), weight, model.config.rms_norm_eps)


def _delta_net_block(a: Tensors, dtype: torch.dtype) -> Tensors:
    model = expanded(a, dtype)
    conv, recurrent = floats(a, dtype, "conv", "recurrent")
    u = _normed(a, model, "input_layernorm")
    y, state = model._delta_net(0, u, {"conv": conv, "recurrent": recurrent}, _silent)
    return {"y": a["x"].to(dtype) + y, **state}


def _attention_block(a: Tensors, dtype: torch.dtype) -> Tensors:
    model = expanded(a, dtype)
    past = dict(zip("kv", floats(a, dtype, "past_k", "past_v"), strict=True))
    u = _normed(a, model, "input_layernorm")
    y, cache = model._attention(0, u, past, *model.rope_tables(a["positions"]), _silent)
    return {"y": a["x"].to(dtype) + y, **cache}


def _feed_forward_block(a: Tensors, dtype: torch.dtype) -> Tensors:
    seen: Tensors = {}
    y = _fed(a, dtype, seen.__setitem__)
    chosen = {"ids": seen["router_ids"].int(), "weights": seen["router_weights"]} if seen else {}
    return {**chosen, "y": a["x"].to(dtype) + y}


def _fed(a: Tensors, dtype: torch.dtype, note: Callable[[str, Tensor], None]) -> Tensor:
    model = expanded(a, dtype)
    return model._ffn(0, _normed(a, model, "post_attention_layernorm"), note)


def _decided_block(a: Tensors) -> bool:
    seen: Tensors = {}
    _fed(a, torch.float64, seen.__setitem__)
    return decided(seen, config_of(a).num_experts_per_tok)


# Whole models


def _forward(a: Tensors, dtype: torch.dtype) -> Tensors:
    logits, state = decoder_of(a, dtype).forward(a["ids"].long())
    return {"logits": logits, **_named(state)}


def _prefill(a: Tensors, dtype: torch.dtype) -> Tensors:
    """The cuts are no business of the reference."""
    seen: Tensors = {}
    model = expanded(a, dtype)
    _, state = model.forward(a["ids"].long(), trace=seen.__setitem__)
    last = seen[f"layers.{model.config.num_hidden_layers - 1}.output"]
    return {"hidden": last[-1:], **_named(state)}


def _decode(a: Tensors, dtype: torch.dtype) -> Tensors:
    logits, state = expanded(a, dtype).forward(a["ids"].long())
    return {"logits": logits[int(a["cut"]) - 1 :], **_named(state)}


def _named(state: list[Tensors]) -> Tensors:
    return {f"state.layers.{i}.{name}": value for i, layer in enumerate(state) for name, value in layer.items()}


def _decided_model(a: Tensors, build: Callable[[Tensors, torch.dtype], Decoder] = decoder_of) -> bool:
    seen: Tensors = {}
    build(a, torch.float64).forward(a["ids"].long(), trace=seen.__setitem__)
    return decided(seen, config_of(a).num_experts_per_tok)


def _logits(a: Tensors, dtype: torch.dtype) -> Tensors:
    return {"logits": decoder_of(a, dtype).forward(a["ids"].long())[0]}


def _divergence_noise(a: Tensors) -> Arrays:
    """Largest mean KL of RUNS float32 runs from the truth, layer inputs moved by at most one unit in the last place.
    In every second run one element of one layer moves by a quantum: a flipped code is legal and may happen in none.
    """
    truth = _logits(a, torch.float64)["logits"].numpy()
    model, generator = decoder_of(a, torch.float32), torch.Generator().manual_seed(0)
    found = [divergence(truth, _moved_run(model, a["ids"].long(), generator, flip=run % 2 == 1).numpy()).mean()
             for run in range(RUNS)]
    return {"logits": np.array(max(found))}


def _moved_run(model: Decoder, ids: Tensor, generator: torch.Generator, flip: bool) -> Tensor:
    cos, sin = model.rope_tables(torch.arange(len(ids)).expand(3, -1))
    x, states = model.embed(ids), model.initial_state()
    flipped = int(torch.randint(len(states), (), generator=generator)) if flip else None
    for i, state in enumerate(states):
        x = _moved(x, generator)
        if i == flipped:
            x.view(-1)[torch.randint(x.numel(), (), generator=generator)] += x.abs().max() / 127
        x, _ = model.forward_layer(i, x, state, cos, sin)
    return model.head(_moved(x, generator))


def _moved(x: Tensor, generator: torch.Generator) -> Tensor:
    step = torch.randint(-1, 2, x.shape, generator=generator)
    return torch.where(step == 0, x, torch.nextafter(x, step * torch.inf))


def _uninterrupted(a: Tensors, dtype: torch.dtype) -> Tensors:
    """Not the reference but the engine itself, scalar and without a break."""
    outputs = runs.uninterrupted(kernels.get("scalar", 1), {name: value.numpy() for name, value in a.items()})
    return {name: torch.from_numpy(np.array(value)) for name, value in outputs.items()}


def _greedy(a: Tensors, dtype: torch.dtype) -> Tensors:
    made = decoder_of(a, dtype).greedy(a["ids"].tolist(), int(a["count"]))
    return {"ids": torch.tensor(made, dtype=torch.int32)}


def _noise_by_margin(a: Tensors) -> Arrays:
    """Noise over the margin of the best logit. Noise: twice the largest float32 logit error on the same ids, because
    the two best may move towards each other."""
    made = _greedy(a, torch.float64)["ids"]
    ids = torch.cat([a["ids"], made]).long()[:-1]
    truth, single = (decoder_of(a, dtype).forward(ids)[0][-len(made):] for dtype in (torch.float64, torch.float32))
    best = truth.topk(2).values
    return {"ids": (2 * (single - truth).abs().max() / (best[:, 0] - best[:, 1])).numpy()}


def _choices(**values: tuple) -> dict[str, st.SearchStrategy]:
    return {name: st.sampled_from(choice) for name, choice in values.items()}


def _model_sizes(rows_of_32: bool) -> dict[str, st.SearchStrategy]:
    widths = {"hidden": (32, 64), "dv": (32,), "head_dim": (32,), "intermediate": (32,)} if rows_of_32 else \
        {"hidden": (24, 40), "dv": (5, 16), "head_dim": (12, 20), "intermediate": (9, 16)}
    return _choices(**widths, key_heads=(1, 2), ratio=(1, 2, 3), dk=(4, 11), taps=(2, 4), kv_heads=(1, 2), group=(1, 3),
                    rotary=(4, 8), experts=(0, 1, 6), top_k=(1, 2, 6), vocab=(33, 50), tied=(False, True))


_DELTA_NET = _choices(hidden=(8, 33), key_heads=(1, 2), ratio=(1, 2, 3), dk=(4, 16, 19), dv=(3, 16), taps=(2, 4))
_FULL = _choices(hidden=(8, 33), kv_heads=(1, 2), group=(1, 3), head_dim=(12, 33), rotary=(2, 8))
_LAYERS = st.sampled_from(("l", "f", "lf", "fl", "llf"))
_RUN = {"tokens": st.integers(1, 9), "cut": st.integers(0, 9), "page_tokens": st.sampled_from((1, 4, 64))}
_SMALL = {"layers": "llf", "key_heads": 2, "ratio": 3, "dk": 12, "kv_heads": 1, "group": 3, "rotary": 8, "experts": 4,
          "top_k": 2, "vocab": 45}
_ODD_WIDTHS = {"hidden": 40, "dv": 20, "head_dim": 20, "intermediate": 12}
# Sizes that sm_20 takes: heads and rows of multiples of 32.
_FORMAT = st.sampled_from(("q4_0", "q8_0"))
_DELTA_BLOCK = _choices(hidden=(32, 96), key_heads=(1, 2), ratio=(1, 2, 3), dk=(32, 64), dv=(32, 96), taps=(2, 4))
_FULL_BLOCK = _choices(hidden=(32, 96), kv_heads=(1, 2), group=(1, 3), head_dim=(32, 64), rotary=(4, 8))
_HEADS = {"dk": st.just(32), "dv": st.sampled_from((32, 64)), "head_dim": st.sampled_from((32, 64))}
_BLOCK_WIDTHS = {"hidden": 64, "dv": 32, "head_dim": 32, "intermediate": 32}

MODEL_ORACLES: dict[str, Oracle] = {
    "gated_delta_net": Oracle(
        draw.delta_net_layer, {"tokens": st.integers(1, 9), **_DELTA_NET},
        {"tokens": 6, "hidden": 40, "key_heads": 2, "ratio": 3, "dk": 12, "dv": 20, "taps": 4}, _delta_net),
    "gated_attention": Oracle(
        draw.attention_layer, {"past": st.integers(0, 9) | st.sampled_from((63, 64)), "tokens": few,
                               "page_tokens": st.sampled_from((1, 4, 64)), **_FULL},
        {"past": 62, "tokens": 5, "page_tokens": 7, "hidden": 40, "kv_heads": 2, "group": 3, "head_dim": 20,
         "rotary": 8}, _attention),
    "dense_mlp": Oracle(
        draw.feed_forward_layer, {"tokens": few, **_choices(experts=(0,), hidden=(8, 33), intermediate=(5, 48))},
        {"tokens": 5, "experts": 0, "hidden": 40, "intermediate": 52}, _dense),
    "sparse_moe": Oracle(
        draw.feed_forward_layer,
        {"tokens": few, **_choices(hidden=(8, 33), intermediate=(5, 16), experts=(1, 2, 9), top_k=(1, 2, 9))},
        {"tokens": 7, "hidden": 40, "intermediate": 12, "experts": 9, "top_k": 3}, _sparse, usable=_decided_layer),
    "delta_net_block": Oracle(
        draw.delta_net_block, {"tokens": st.sampled_from((1, 3, 63, 65)), "format": _FORMAT, **_DELTA_BLOCK},
        {"tokens": 66, "format": "q4_0", "hidden": 32, "key_heads": 1, "ratio": 2, "dk": 32, "dv": 32, "taps": 4},
        _delta_net_block),
    "attention_block": Oracle(
        draw.attention_block, {"past": st.integers(0, 9) | st.sampled_from((63, 127)), "tokens": few, "format": _FORMAT,
                               "page_tokens": st.sampled_from((1, 4, 64)), **_FULL_BLOCK},
        {"past": 6, "tokens": 5, "page_tokens": 64, "format": "q8_0", "hidden": 32, "kv_heads": 2, "group": 2,
         "head_dim": 32, "rotary": 8}, _attention_block),
    "mlp_block": Oracle(
        draw.feed_forward_block,
        {"tokens": few, "format": _FORMAT, **_choices(experts=(0,), hidden=(32, 64), intermediate=(32, 96))},
        {"tokens": 5, "format": "q8_0", "experts": 0, "hidden": 32, "intermediate": 64}, _feed_forward_block),
    "moe_block": Oracle(
        draw.feed_forward_block,
        {"tokens": st.sampled_from((1, 2, 40)), "format": _FORMAT,
         **_choices(hidden=(32, 64), intermediate=(32, 64), experts=(1, 2, 9), top_k=(1, 2, 9))},
        {"tokens": 40, "format": "q4_0", "hidden": 32, "intermediate": 32, "experts": 9, "top_k": 3}, _feed_forward_block,
        usable=_decided_block),
    "decoder": Oracle(
        draw.whole_model, {"layers": _LAYERS, **_RUN, **_model_sizes(False)},
        {"tokens": 11, "cut": 4, "page_tokens": 4, **_SMALL, **_ODD_WIDTHS}, _forward, usable=_decided_model),
    "prefill": Oracle(
        draw.cut_prompt,
        {"layers": _LAYERS, "page_tokens": st.sampled_from((1, 4, 64)), "tokens": st.sampled_from((1, 9, 70)),
         "cuts": st.sampled_from(((), (1,), (3, 4), (63, 65))), "format": _FORMAT, **_model_sizes(True), **_HEADS},
        {"tokens": 70, "cuts": (30, 66), "page_tokens": 64, "format": "q4_0", **_SMALL, **_BLOCK_WIDTHS, "hidden": 32,
         "layers": "lf", "key_heads": 1, "ratio": 2, "dk": 32},
        _prefill, usable=lambda a: _decided_model(a, expanded)),
    "decode": Oracle(
        draw.quantised_model,
        {"layers": _LAYERS, "page_tokens": st.sampled_from((1, 4, 64)), "tokens": st.sampled_from((5, 70)),
         "cut": st.sampled_from((1, 3, 4)), "format": _FORMAT, **_model_sizes(True), "experts": st.just(0), **_HEADS},
        {"tokens": 9, "cut": 5, "page_tokens": 4, "format": "q8_0", **_SMALL, **_BLOCK_WIDTHS, "layers": "lf", "hidden": 32,
         "key_heads": 1, "ratio": 2, "dk": 32, "experts": 0},
        _decode),
    "decoder_q4_0": Oracle(
        draw.quantised_model, {"layers": _LAYERS, **_RUN, "format": st.just("q4_0"), **_model_sizes(True)},
        {"tokens": 40, "cut": 17, "page_tokens": 4, "format": "q4_0", **_SMALL, **_BLOCK_WIDTHS},
        _logits, _divergence_noise, pinned=("digest",)),
    "snapshot_resume": Oracle(
        draw.quantised_model, {"layers": _LAYERS, **_RUN, "tokens": st.integers(2, 6), "format": st.just("q8_0"),
                               **_model_sizes(True)},
        {"tokens": 7, "cut": 0, "page_tokens": 4, "format": "q8_0", **_SMALL, **_BLOCK_WIDTHS}, _uninterrupted),
    "generate": Oracle(
        draw.greedy_prompt,
        {"layers": _LAYERS, "tokens": st.integers(1, 5), "count": st.integers(1, 9), **_model_sizes(False)},
        {"tokens": 5, "count": 64, **_SMALL, **_ODD_WIDTHS}, _greedy, _noise_by_margin, usable=_decided_model),
}
