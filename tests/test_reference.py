"""The PyTorch reference against transformers, gguf and hand-written definitions.

The float64 reference is the truth. Errors are relative L2 norms unless a test says otherwise.
"""

from __future__ import annotations

import functools
import itertools
import math

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from reference import attention, moe, norms, quant, rope
from reference import gated_delta_rule as gdn
from reference.decoder import Decoder
from reference.quant import QuantMatrix
from tests import hf

LENGTHS = (1, 2, 3, 4, 63, 64, 65, 129)
# Whole models in float64: at most a few hundred roundings of 2**-53 stand between embedding and logits
# (measured 4e-16).
DOUBLE = 1000 * 2.0**-53
LOGITS_CEILING = 1e-4

# (mixture of experts, value heads per key head, tied head, image-and-text class)
CASES = [(is_moe, *rest) for is_moe in (True, False)
         for rest in ((1, True, True), (2, False, True), (3, False, False))]
IDS = [f"{('dense', 'moe')[is_moe]}-{ratio}x{'-tied' * tied}{'' if wrapped else '-text'}"
       for is_moe, ratio, tied, wrapped in CASES]
cases = pytest.mark.parametrize("case", CASES, ids=IDS)


@pytest.fixture(autouse=True)
def _one_thread_without_gradients():
    with hf.threads(1), torch.no_grad():
        yield


@functools.cache
def model_of(case: tuple, attn: str = "eager"):
    is_moe, ratio, tied, wrapped = case
    return hf.build(is_moe, ratio, tied=tied, wrapped=wrapped, seed=ratio, attention=attn)


@functools.cache
def truth_of(case: tuple) -> Decoder:
    model = model_of(case)
    return Decoder(hf.text_config(model), hf.canonical_params(model, torch.float64))


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, hf.VOCAB, (length,), generator=generator).tolist()


def error(x: Tensor, truth: Tensor) -> float:
    """||x - truth|| / ||truth||."""
    return ((x.double() - truth.double()).norm() / truth.double().norm()).item()


def normals(seed: int, *shapes: tuple, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


# Whole models


@cases
def test_double_reference_is_transformers_in_double(case):
    model, truth = model_of(case), truth_of(case)
    for length in LENGTHS:
        with hf.double_precision(model):
            theirs = hf.logits(model, prompt(length))
        assert theirs.dtype == torch.float64
        assert error(truth.forward(prompt(length))[0], theirs) < DOUBLE


@cases
def test_single_reference_is_within_the_spread_of_transformers(case):
    """Per prompt: at most twice the largest difference between two settings of transformers, over all
    prompts.

    One prompt's own spread would not do: at one token the settings share every operation (softmax over one
    key is 1) and differ by 1e-8, a hundredth of float32's rounding error.
    """
    truth, single = truth_of(case), truth_of(case).to(torch.float32)
    eager, sdpa = model_of(case), model_of(case, "sdpa")
    spread, theirs, ours, apart = [], [], [], []
    for length in LENGTHS:
        ids = prompt(length)
        runs = [hf.logits(eager, ids), hf.logits(sdpa, ids)]
        if length == max(LENGTHS):  # torch splits nothing of the shorter ones among threads
            with hf.threads(2):
                runs.append(hf.logits(eager, ids))
        exact, mine = truth.forward(ids)[0], single.forward(ids)[0]
        assert mine.dtype == torch.float32
        spread.append(max(error(a, b) for a, b in itertools.combinations(runs, 2)))
        theirs.append(error(runs[0], exact))
        ours.append(error(mine, exact))
        apart.append(error(mine, runs[0]))
        print(f"T {length:3d}: transformers with itself {spread[-1]:.1e}, reference to transformers "
              f"{apart[-1]:.1e}; error in float32: transformers {theirs[-1]:.1e}, reference {ours[-1]:.1e}")
    assert max(apart) <= min(2 * max(spread), LOGITS_CEILING)
    assert max(ours) <= 2 * max(theirs)


@pytest.mark.parametrize("case", CASES[1::3], ids=IDS[1::3])
def test_three_different_position_rows(case):
    model, truth = model_of(case), truth_of(case)
    ids, positions = prompt(20), torch.tensor(np.random.default_rng(0).integers(0, 900, (3, 20)))
    with hf.double_precision(model):
        theirs = model(input_ids=torch.tensor([ids]), position_ids=positions[:, None]).logits[0]
    assert error(truth.forward(ids, positions=positions)[0], theirs) < DOUBLE
    assert error(truth.forward(ids)[0], theirs) > 1e-6


@cases
def test_greedy_tokens(case):
    """Equal up to the first position whose float64 margin is within twice the largest float32 logit error."""
    model, truth = model_of(case), truth_of(case)
    ids = prompt(5)
    theirs = hf.greedy(model, ids, 64)
    exact = truth.forward(ids + theirs)[0][len(ids) - 1 : -1]
    noise = 2 * (hf.logits(model, ids + theirs)[len(ids) - 1 : -1] - exact).abs().max()
    best = exact.topk(2).values
    unsure = (best[:, 0] - best[:, 1] <= noise).nonzero()
    compared = int(unsure[0]) if len(unsure) else 64
    print(f"compared {compared}, distinct {len(set(theirs))}, smallest margin / noise "
          f"{((best[:, 0] - best[:, 1]) / noise).min():.0f}")
    assert compared >= 60
    assert truth.greedy(ids, compared) == theirs[:compared]
    assert truth.to(torch.float32).greedy(ids, compared) == theirs[:compared]
    assert len(set(theirs)) > 8


def assert_same_run(decoder: Decoder, ids: list[int], cuts: list[int], limit: float) -> None:
    """Logits and every state tensor of a run in pieces against one pass; max |difference| over max
    |value|."""
    whole, whole_state = decoder.forward(ids)
    state, pieces = None, []
    for start, end in itertools.pairwise([0, *cuts, len(ids)]):
        logits, state = decoder.forward(ids[start:end], state)
        pieces.append(logits)
    pairs = [(torch.cat(pieces), whole)]
    pairs += [(a[name], b[name]) for a, b in zip(state, whole_state, strict=True) for name in b]
    for got, expected in pairs:
        assert got.shape == expected.shape
        assert (got - expected).abs().max() <= limit * expected.abs().max()


@cases
def test_cached_decode_is_prefill(case):
    for cuts in ([1], [2], [3], [7, 8], [5, 64], list(range(1, 70)), list(range(40, 70))):
        assert_same_run(truth_of(case), prompt(70), cuts, 1e-10)


def test_forward_leaves_the_given_state_alone():
    decoder = truth_of(CASES[1])
    _, state = decoder.forward(prompt(6))
    kept = [{name: value.clone() for name, value in layer.items()} for layer in state]
    first, _ = decoder.forward([5, 6], state)
    second, _ = decoder.forward([5, 6], state)
    assert torch.equal(first, second)
    assert all(torch.equal(a[name], b[name]) for a, b in zip(state, kept, strict=True) for name in a)


def assert_traced_layer_is_consistent(decoder: Decoder, i: int, kind: str, seen: dict[str, Tensor]) -> None:
    """Each name carries the value it says: later ones follow from earlier ones."""
    def weight(name: str) -> Tensor:
        return decoder.params[f"layers.{i}.{name}"]

    eps, after_mixer = decoder.config.rms_norm_eps, seen["input"] + seen["mixer"]
    pairs = {
        "mixer_norm": norms.rms_norm(seen["input"], weight("input_layernorm.weight"), eps),
        "ffn_norm": norms.rms_norm(after_mixer, weight("post_attention_layernorm.weight"), eps),
        "output": after_mixer + seen["ffn"],
    }
    if kind == "linear_attention":
        taps = weight("linear_attn.conv1d.weight")[:, 0]
        pairs["conv"] = gdn.causal_conv_silu(seen["qkv"], taps, torch.zeros_like(seen["qkv"][:3]))[0]
        pairs["g"] = gdn.gates(seen["mixer_norm"] @ weight("linear_attn.in_proj_a.weight").T, seen["beta"],
                               weight("linear_attn.A_log"), weight("linear_attn.dt_bias"))[0]
        pairs["beta"] = torch.sigmoid(seen["mixer_norm"] @ weight("linear_attn.in_proj_b.weight").T)
        z = seen["z"].reshape(seen["delta"].shape)
        norm = norms.gated_rms_norm(seen["delta"], z, weight("linear_attn.norm.weight"), eps)
        pairs["gated_norm"] = norm.flatten(1)
        pairs["mixer"] = seen["gated_norm"] @ weight("linear_attn.out_proj.weight").T
    else:
        assert seen["q"].shape == seen["attention"].shape == (4, 4, 32)
        v = (seen["mixer_norm"] @ weight("self_attn.v_proj.weight").T).reshape(seen["k"].shape)
        pairs["attention"] = attention.attend(seen["q"], seen["k"], v)
        pairs["mixer"] = seen["gated"] @ weight("self_attn.o_proj.weight").T
    if "router_logits" in seen:
        pairs["router_logits"] = seen["ffn_norm"] @ weight("mlp.gate.weight").T
        pairs["router_ids"], pairs["router_weights"] = moe.route(seen["router_logits"], 2)
    for name, expected in pairs.items():
        assert torch.equal(seen[name], expected), name


@pytest.mark.parametrize("case", CASES[1::3], ids=IDS[1::3])
def test_trace_names_every_stage(case):
    decoder, seen = truth_of(case), {}
    logits, _ = decoder.forward(prompt(4), trace=seen.__setitem__)
    delta = {"qkv", "z", "conv", "g", "beta", "delta", "gated_norm"}
    both = {"input", "mixer_norm", "mixer", "ffn_norm", "ffn", "output"}
    routed = {"router_logits", "router_ids", "router_weights"} if case[0] else set()
    expected = {"embed", "norm", "logits"}
    for i, kind in enumerate(decoder.config.layer_types):
        own = delta if kind == "linear_attention" else {"q", "k", "attention", "gated"}
        expected |= {f"layers.{i}.{name}" for name in own | both | routed}
    assert set(seen) == expected
    assert torch.equal(seen["logits"], logits)
    for i, kind in enumerate(decoder.config.layer_types):
        prefix = f"layers.{i}."
        layer = {name.removeprefix(prefix): seen[name] for name in seen if name.startswith(prefix)}
        assert_traced_layer_is_consistent(decoder, i, kind, layer)
        assert i == 7 or torch.equal(layer["output"], seen[f"layers.{i + 1}.input"])
    assert torch.equal(seen["embed"], seen["layers.0.input"])
    last, eps = seen["layers.7.output"], decoder.config.rms_norm_eps
    assert torch.equal(seen["norm"], norms.rms_norm(last, decoder.params["norm.weight"], eps))
    cos, sin = decoder.rope_tables(torch.arange(4).expand(3, -1))
    alone, _ = decoder.forward_layer(3, seen["layers.3.input"], decoder.initial_state()[3], cos, sin)
    assert torch.equal(alone, seen["layers.3.output"])


def quantised(case: tuple, kind: str) -> Decoder:
    """Every matrix that a pack stores in `kind`: projections, experts, embedding and head."""
    params = {}
    for name, value in truth_of(case).params.items():
        keeps = value.ndim == 1 or any(part in name for part in ("conv1d", "mlp.gate.", "shared_expert_gate"))
        if value.ndim == 3 and not keeps:
            params[name] = [QuantMatrix.quantize(expert.float(), kind) for expert in value]
        else:
            params[name] = value if keeps else QuantMatrix.quantize(value.float(), kind)
    return Decoder(truth_of(case).config, params)


@pytest.mark.parametrize("kind", ["q4_0", "q8_0"])
@pytest.mark.parametrize("case", CASES[1::3], ids=IDS[1::3])
def test_quantised_decoder(case, kind):
    """Cached decode included, it is the model of its dequantised weights but for 8-bit activations. A code is
    off by at most half a quantum, amax / 254: a block of 32 by at most 2.3 % of its norm. The head's input
    counts once, and those of the branches (a tenth of the residual stream each, two a layer) once
    together."""
    decoder = quantised(case, kind)
    plain = {name: torch.stack([m.dequantize(torch.float64) for m in w]) if isinstance(w, list)
             else w.dequantize(torch.float64) if isinstance(w, QuantMatrix) else w
             for name, w in decoder.params.items()}
    got, expected = decoder.forward(prompt(12))[0], Decoder(decoder.config, plain).forward(prompt(12))[0]
    block = math.sqrt(32) / 254
    assert 1e-4 < error(got, expected) < 2 * block
    assert decoder.to(torch.float32).forward(prompt(12))[0].dtype == torch.float32
    assert_same_run(decoder, prompt(12), [1, 2, 7], 1e-10)


# Gated delta rule


def delta_operands(length: int, value_heads: int) -> list[Tensor]:
    """q, k, v, g, beta, initial state in float32; log-decay from -1e-4 to -20, as the model's gates give."""
    k_dim, v_dim, seed = 16, 32, 100 * length + value_heads
    q, k, v, state = normals(seed, (length, 2, k_dim), (length, 2, k_dim), (length, value_heads, v_dim),
                             (value_heads, k_dim, v_dim), dtype=torch.float32)
    u, beta = torch.rand((2, length, value_heads), generator=torch.Generator().manual_seed(seed))
    return [q, k, v, -1e-4 * 2e5**u, beta, state]


def run_ours(rule, q, k, v, g, beta, state, **kwargs):
    return rule(norms.l2_norm(q), norms.l2_norm(k), v, g, beta, state, q.shape[-1] ** -0.5, **kwargs)


def run_theirs(rule, q, k, v, g, beta, state):
    o, final = rule(q[None], k[None], v[None], g=g[None], beta=beta[None], initial_state=state[None],
                    output_final_state=True, use_qk_l2norm_in_kernel=True)
    return o[0], final[0]


@pytest.mark.parametrize("value_heads", [2, 4, 6])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 63, 64, 65, 129])
def test_delta_rule_forms(length, value_heads):
    """Output and final state: float64 forms agree; float32 at most doubles the error of transformers' same
    form."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

    single = delta_operands(length, value_heads)
    double = [x.double() for x in single]
    truth = run_ours(gdn.recurrent, *double)
    with hf.double_module(theirs):
        others = [run_theirs(theirs.torch_chunk_gated_delta_rule, *double),
                  run_theirs(theirs.torch_recurrent_gated_delta_rule, *double)]
    others.append(run_ours(gdn.chunked, *double))
    for other in others:
        assert all(error(a, b) < DOUBLE for a, b in zip(other, truth, strict=True))
    for ours, torchs in ((gdn.recurrent, theirs.torch_recurrent_gated_delta_rule),
                         (gdn.chunked, theirs.torch_chunk_gated_delta_rule)):
        both = zip(run_ours(ours, *single), run_theirs(torchs, *single), truth, strict=True)
        for got, other, exact in both:
            assert got.dtype == torch.float32
            assert error(got, exact) <= 2 * error(other, exact)


@pytest.mark.parametrize("form", ["recurrent", "chunked"])
def test_delta_rule_every_split(form):
    rule = gdn.recurrent if form == "recurrent" else functools.partial(gdn.chunked, chunk=4)
    q, k, v, g, beta, state = (x.double() for x in delta_operands(9, 4))
    whole = run_ours(rule, q, k, v, g, beta, state)
    for cut in range(1, 9):
        first, carried = run_ours(rule, *(x[:cut] for x in (q, k, v, g, beta)), state)
        second, final = run_ours(rule, *(x[cut:] for x in (q, k, v, g, beta)), carried)
        assert error(torch.cat([first, second]), whole[0]) < DOUBLE
        assert error(final, whole[1]) < DOUBLE


def test_delta_rule_survives_total_decay():
    """g = -inf forgets everything before it; cumulative sums would give inf - inf."""
    q, k, v, g, beta, state = (x.double() for x in delta_operands(9, 4))
    g[[0, 4, 5]] = -torch.inf
    truth = run_ours(gdn.recurrent, q, k, v, g, beta, state)
    for chunk in (3, 64):
        got = run_ours(gdn.chunked, q, k, v, g, beta, state, chunk=chunk)
        assert all(error(a, b) < DOUBLE for a, b in zip(got, truth, strict=True))
    after = run_ours(gdn.recurrent, *(x[5:] for x in (q, k, v, g, beta)), torch.zeros_like(state))
    assert error(after[1], truth[1]) < DOUBLE


def test_gates_in_the_corners():
    for dtype, overflow in ((torch.float32, 89.0), (torch.float64, 710.0)):
        A_log = torch.tensor([overflow, overflow, 0.5, -2.0, 1.0], dtype=dtype)
        a = torch.tensor([-1e4, 3.0, 25.0, -1.0, 0.0], dtype=dtype)
        g, beta = gdn.gates(a[None], a[None], A_log, torch.zeros(5, dtype=dtype))
        assert g[0, 0] == 0
        assert g[0, 1] <= -torch.finfo(dtype).max
        expected = [-math.exp(0.5) * 25, -math.exp(-2) * math.log1p(math.exp(-1)), -math.e * math.log(2)]
        torch.testing.assert_close(g[0, 2:].tolist(), expected, rtol=8 * torch.finfo(dtype).eps, atol=0)
        assert beta[0, 0] == 0
        assert beta[0, 4] == 0.5


# Convolution


@pytest.mark.parametrize("length", [1, 2, 3, 4, 9])
def test_conv_definition_and_tail(length):
    x, weight, tail = normals(length, (length, 6), (6, 4), (3, 6))
    y, new_tail = gdn.causal_conv_silu(x, weight, tail)
    known = torch.cat([tail, x]).tolist()
    for t, c in itertools.product(range(length), range(6)):
        total = math.fsum(weight[c, j].item() * known[t + j][c] for j in range(4))
        # Four products and three sums round 7 times on terms of magnitude below 16, silu a few times more.
        assert abs(y[t, c].item() - total / (1 + math.exp(-total))) < 16 * 16 * 2.0**-53
    assert new_tail.tolist() == known[-3:]


def test_conv_every_split():
    """The tail to the bit; y within a unit in the last place, since torch's silu may round by position in the
    tensor."""
    x, weight, tail = normals(0, (9, 6), (6, 4), (3, 6))
    whole, whole_tail = gdn.causal_conv_silu(x, weight, tail)
    for cut in range(1, 9):
        first, carried = gdn.causal_conv_silu(x[:cut], weight, tail)
        second, final = gdn.causal_conv_silu(x[cut:], weight, carried)
        torch.testing.assert_close(torch.cat([first, second]), whole, rtol=4 * 2.0**-53, atol=0)
        assert torch.equal(final, whole_tail)


def test_conv_tail_of_a_short_prompt_keeps_its_left_zeros():
    x, weight = normals(1, (2, 6), (6, 4))
    _, tail = gdn.causal_conv_silu(x, weight, torch.zeros(3, 6, dtype=torch.float64))
    assert torch.equal(tail, torch.cat([torch.zeros(1, 6, dtype=torch.float64), x]))


# Norms, rope, attention, router


def test_norms_by_hand():
    x, z, w = normals(0, (3, 8), (3, 8), (8,))
    for row in range(3):
        values = x[row].tolist()
        rms = math.sqrt(math.fsum(v * v for v in values) / 8 + 1e-6)
        l2 = math.sqrt(math.fsum(v * v for v in values) + 1e-6)
        for i, (v, gate, weight) in enumerate(zip(values, z[row].tolist(), w.tolist(), strict=True)):
            silu = gate / (1 + math.exp(-gate))
            got = [y[row, i].item() for y in
                   (norms.rms_norm(x, w, 1e-6), norms.gated_rms_norm(x, z, w, 1e-6), norms.l2_norm(x))]
            assert got == pytest.approx([v / rms * (1 + weight), v / rms * weight * silu, v / l2], rel=1e-14)


def test_axes_of_the_released_sections():
    axes = rope.axis_of_frequency(32, (11, 11, 10))
    assert axes == [0, 1, 2] * 10 + [0, 1]
    assert rope.axis_of_frequency(4, (2, 1, 1)) == [0, 1, 2, 0]
    assert rope.axis_of_frequency(8, (4, 2, 2)) == [0, 1, 2, 0, 1, 2, 0, 0]


@pytest.mark.parametrize("dim", [8, 64])
def test_inverse_frequencies(dim):
    got = rope.inv_freq(dim, 1e7)
    assert got.dtype == torch.float32
    # float32 rounding of the exponent moves ln(power) by at most 2**-25 * ln(1e7); power and reciprocal round
    # once each.
    limit = 2.0**-25 * math.log(1e7) + 2 * 2.0**-24
    for j, value in enumerate(got.tolist()):
        assert value == pytest.approx(1e7 ** (-2 * j / dim), rel=limit)
    usual = 1.0 / (1e7 ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
    assert (got.view(torch.int32) - usual.view(torch.int32)).abs().max() <= 1


def test_rotation_turns_the_leading_pairs_only():
    (x,) = normals(0, (5, 2, 32))
    positions = torch.tensor([[0, 1, 2, 500, 7], [0, 1, 3, 9, 4], [0, 2, 2, 80, 1]])
    frequencies, axes = rope.inv_freq(8, 1e7), rope.axis_of_frequency(4, (2, 1, 1))
    got = rope.rotate(x, *rope.tables(positions, frequencies, axes, torch.float64))
    assert torch.equal(got[..., 8:], x[..., 8:])
    assert torch.equal(got[0], x[0])
    for t, j in itertools.product(range(5), range(4)):
        angle = positions[axes[j], t].item() * frequencies[j].item()
        turned = complex(*x[t, 1, [j, j + 4]]) * complex(math.cos(angle), math.sin(angle))
        np.testing.assert_allclose(got[t, 1, [j, j + 4]].numpy(), [turned.real, turned.imag], atol=1e-15)


def test_float32_angles_are_rounded_once():
    positions, frequencies = torch.tensor([[4095]] * 3), rope.inv_freq(8, 1e7)
    cos, _ = rope.tables(positions, frequencies, [0] * 4, torch.float32)
    angles = torch.from_numpy(np.float32(4095) * frequencies.numpy())
    assert torch.equal(cos[0], angles.cos())


def test_attention_sees_the_past_and_no_future():
    q, k, v = normals(3, (3, 4, 8), (5, 2, 8), (5, 2, 8))
    got = attention.attend(q, k, v)
    for t, h in itertools.product(range(3), range(4)):
        seen = t + 3
        weights = (k[:seen, h // 2] @ q[t, h] / math.sqrt(8)).softmax(0)
        torch.testing.assert_close(got[t, h], weights @ v[:seen, h // 2], rtol=1e-13, atol=1e-15)


def test_router_ties_go_to_the_lower_id():
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0], [0.0] * 5, [-0.0, 0.0, -1.0, -0.0, 2.0]])
    ids, weights = moe.route(logits, 3)
    assert ids.tolist() == [[1, 2, 4], [0, 1, 2], [4, 0, 1]]
    torch.testing.assert_close(weights[:2], torch.full((2, 3), 1 / 3))
    assert weights[2].sum().item() == pytest.approx(1, abs=1e-6)
    drawn = torch.randint(0, 4, (50, 16), generator=torch.Generator().manual_seed(0)).float()
    for k in (1, 2, 16):
        ids, _ = moe.route(drawn, k)
        for row, chosen in zip(drawn.tolist(), ids.tolist(), strict=True):
            assert chosen == sorted(range(16), key=lambda e, row=row: (-row[e], e))[:k]


def test_router_weights_are_the_renormalised_softmax():
    (logits,) = normals(0, (40, 16))
    ids, weights = moe.route(logits, 4)
    probabilities = logits.softmax(-1).gather(1, ids)
    expected = probabilities / probabilities.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, expected, rtol=1e-13, atol=0)


def test_experts_of_quantised_matrices():
    gate_up, down, x, logits = normals(0, (5, 64, 64), (5, 64, 32), (7, 64), (7, 5))
    gate_ups = [QuantMatrix.quantize(w.float(), "q4_0") for w in gate_up]
    downs = [QuantMatrix.quantize(w.float(), "q8_0") for w in down]
    ids, weights = moe.route(logits, 3)
    got = moe.experts(x, gate_ups, downs, ids, weights)
    for t in range(7):
        total = torch.zeros(64, dtype=torch.float64)
        for expert, weight in zip(ids[t].tolist(), weights[t], strict=True):
            gate, up = quant.linear(x[t : t + 1], gate_ups[expert]).split(32, dim=-1)
            total += weight * quant.linear(gate * torch.sigmoid(gate) * up, downs[expert])[0]
        torch.testing.assert_close(got[t], total, rtol=1e-12, atol=1e-12)


# Quantisation


def source_rows(case: str) -> np.ndarray:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((40, 96)).astype(np.float32)
    if case == "bf16":
        x = torch.from_numpy(x).bfloat16().float().numpy()
    elif case == "few values":  # ties for the largest magnitude, of both signs
        x = rng.integers(-3, 4, x.shape).astype(np.float32)
        x[x == 0] = 0.0
    elif case == "zero blocks":
        x[::3, 32:64] = 0
        x[1] = 0
    elif case == "huge":
        x *= 65504 * 8 / np.abs(x).max()
    elif case == "tiny":  # float16 scales that are subnormal or zero; float32 scales just above 2**-126
        x *= np.float32(2.0) ** rng.integers(-120, -10, (40, 1)).astype(np.float32)
    elif case == "outlier":
        x[::2, 5] = 3e4
        x[1::2, 70] = -3e4
    return x


FORMATS = {
    "q4_0": (Kind.Q4_0, quant.quantize_q4_0,
             quant.pack_q4_0, quant.unpack_q4_0, quant.dequantize_q4_0),
    "q8_0": (Kind.Q8_0, quant.quantize_q8_0_weight,
             quant.pack_q8_0, quant.unpack_q8_0, quant.dequantize_q8_0),
}
formats = pytest.mark.parametrize("name", FORMATS)


@formats
@pytest.mark.parametrize("case", ["normal", "bf16", "few values", "zero blocks", "huge", "tiny", "outlier"])
def test_weight_bytes_are_ggufs(name, case):
    kind, quantize, pack, unpack, dequantize = FORMATS[name]
    x = source_rows(case)
    codes, d = quantize(torch.from_numpy(x))
    data = pack(codes, d)
    theirs = gguf.quants.quantize(x, kind)
    np.testing.assert_array_equal(data.numpy(), theirs)
    again = unpack(data)
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1].view(torch.int16), d.view(torch.int16))
    np.testing.assert_array_equal(dequantize(codes, d).numpy(), gguf.quants.dequantize(theirs, kind))


@formats
def test_many_weight_bytes_are_ggufs(name):
    """bf16-valued rows, where one fused multiply-add would change about one code in 13,000."""
    kind, quantize, pack, _, _ = FORMATS[name]
    (x,) = normals(1, (2048, 512), dtype=torch.bfloat16)
    x = x.float()
    np.testing.assert_array_equal(pack(*quantize(x)).numpy(), gguf.quants.quantize(x.numpy(), kind))


def test_blocks_below_the_normal_range_are_zero_blocks():
    tiny = torch.full((1, 32), 7.9 * 2.0**-126)
    for x in (torch.zeros(1, 32), -torch.zeros(1, 32), tiny, -tiny):
        codes, d = quant.quantize_q4_0(x)
        assert codes.unique().tolist() == [8]
        assert d.view(torch.int16).tolist() == [[-32768]]
        codes, d = quant.quantize_q8_0_weight(x)
        assert codes.unique().tolist() == [0]
        assert d.view(torch.int16).tolist() == [[0]]
    codes, _ = quant.quantize_q4_0(torch.full((1, 32), 8 * 2.0**-126))
    assert codes.unique().tolist() == [0]


@formats
@pytest.mark.parametrize("value", [65520.0 * 127, math.inf, -math.inf, math.nan])
def test_scales_out_of_range_name_row_and_block(name, value):
    x = torch.ones(3, 64)
    x[2, 40] = value
    with pytest.raises(ValueError, match="row 2, block 1"):
        FORMATS[name][1](x)


@formats
def test_row_length_off_the_block_is_refused(name):
    with pytest.raises(ValueError, match="48"):
        FORMATS[name][1](torch.ones(2, 48))


def activation_rows() -> np.ndarray:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((400, 64)).astype(np.float32)
    x[:100] *= np.float32(10.0) ** rng.integers(-30, 30, (100, 1)).astype(np.float32)
    x[0], x[1], x[2] = 0, 1e-38, 3e4
    x[3], x[4] = 2.0**-110, np.nextafter(np.float32(2.0**-110), np.float32(0))
    x[5, :32] = np.arange(32) - 0.5
    x[5, 0] = 127
    x[6, 9] = -3e4
    # Largest 254 m, others odd multiples of m: codes at halves, where the last bit of 127 / (254 m) decides.
    x[100:, :32] = np.arange(1, 301)[:, None] * (4 * np.arange(32) + 1)
    x[100:, 0] = 254 * np.arange(1, 301)
    return x


def test_activation_codes_are_float32_arithmetic():
    x = activation_rows()
    codes, d = quant.quantize_activation(torch.from_numpy(x))
    assert (codes.dtype, d.dtype) == (torch.int8, torch.float32)
    for row, block in itertools.product(range(len(x)), range(2)):
        values = x[row, 32 * block : 32 * block + 32]
        amax = np.abs(values).max()
        live = amax >= np.float32(2.0**-110)
        inverse = np.float32(127) / amax if live else np.float32(0)
        assert d[row, block].item() == (amax / np.float32(127) if live else 0)
        got = codes[row, 32 * block : 32 * block + 32].numpy()
        np.testing.assert_array_equal(got, np.rint(values * inverse))
    assert codes[0].unique().tolist() == codes[1].unique().tolist() == codes[4].unique().tolist() == [0]
    assert codes[2].unique().tolist() == codes[3].unique().tolist() == [127]
    assert codes[5, 1:6].tolist() == [0, 2, 2, 4, 4]
    wide = quant.quantize_activation(torch.from_numpy(x).double() * (1 + 2.0**-40))
    assert torch.equal(wide[0], codes)
    assert torch.equal(wide[1], d)


@pytest.mark.parametrize("kind", ["q4_0", "q8_0"])
def test_dot_is_exact_in_integers_and_is_the_dequantised_product(kind):
    (x, w), extreme = normals(5, (4, 96), (6, 96), dtype=torch.float32), torch.full((1, 96), -1.0)
    x, w = torch.cat([x, -extreme]), torch.cat([w, extreme])
    m = QuantMatrix.quantize(w, kind)
    acodes, ad = quant.quantize_activation(x)
    dot = quant.dot_q4_0_q8_0 if kind == "q4_0" else quant.dot_q8_0_q8_0
    sums, scaled = dot(m.codes, m.d, acodes, ad)
    signed = m.codes.numpy().astype(np.int64) - (8 if kind == "q4_0" else 0)
    expected = np.einsum("rbi,tbi->trb", signed, acodes.numpy().astype(np.int64).reshape(5, 3, 32))
    assert sums.dtype == torch.int32
    np.testing.assert_array_equal(sums.numpy(), expected)
    assert abs(sums[-1, -1]).max() == 127 * (8 if kind == "q4_0" else 127) * 32
    a64 = acodes.double().reshape(5, 3, 32) * ad.double()[..., None]
    w64 = m.dequantize(torch.float64)
    # 96 products and sums in double on each side.
    bound = 2 * 97 * 2.0**-53 * (a64.flatten(1).abs() @ w64.abs().T)
    assert scaled.dtype == torch.float64
    assert ((scaled - a64.flatten(1) @ w64.T).abs() <= bound).all()
    assert torch.equal(quant.linear(x.double(), m), scaled)
    single = quant.linear(x, m)
    assert single.dtype == torch.float32
    # Per block the sum is converted exactly (below 2**24), two products round, three additions follow.
    terms = (sums.double().abs() * m.d.double().abs() * ad.double()[:, None]).sum(-1)
    assert ((single - scaled).abs() <= 5 * 2.0**-24 * 1.001 * terms).all()
