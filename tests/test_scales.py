"""Scales of least error: what they gain and never lose, second moments against the reference, budgets for sensitive tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fermi_engine.checkpoint import Checkpoint, expected_shapes
from fermi_engine.cli import app as cli
from fermi_engine.compression import calibrate as calibrate_module
from fermi_engine.compression import calibration, scales, sensitivity
from fermi_engine.compression.calibrate import Request, calibrate
from fermi_engine.compression.moments import COUNTS, Input, Moments, input_of, inputs
from fermi_engine.compression.rules import Rule, assign
from fermi_engine.compression.scales import Scales, fitted_q4_0, mse_q4_0, pack_q4_0, unpack_q4_0, values_q4_0
from fermi_engine.compression.sensitivity import resolve, sensitive
from fermi_engine.config import EngineConfig
from fermi_engine.convert import convert
from fermi_engine.engine import Engine
from fermi_engine.errors import ConfigError, FermiError, FormatError, RequestError
from fermi_engine.formats import FORMATS
from fermi_engine.pack import Pack, blob_name
from fermi_engine.quality import evaluate
from fermi_engine.quality.evaluate import Model
from fermi_engine.quality.measures import summary
from fermi_engine.quality.resume import Resume
from fermi_engine.safetensors_header import read_header
from reference.moe import route
from reference.quant import linear
from tools import oracle, tiny_text
from tools.make_checkpoint import make_checkpoint
from tools.tiny_tasks import Encoder

TINY = Path(__file__).resolve().parent.parent / "golden" / "tiny"
F32 = EngineConfig(activations="f32", threads=1)
Q4 = FORMATS["q4_0"]
SMALL = {"layers": 4, "experts": 4, "experts_per_tok": 2, "hidden": 96}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("scales") / "checkpoint", 5, **SMALL)


@pytest.fixture(scope="module")
def pack(source: Path) -> Path:
    return convert(source, source.parent / "f32.pack", "f32")


@pytest.fixture(scope="module")
def text(source: Path) -> Path:
    rng = np.random.default_rng(3)
    path = source.parent / "text.jsonl"
    path.write_text("".join(json.dumps({"ids": rng.integers(0, 250, n).tolist()}) + "\n" for n in (70, 33, 90)))
    return path


@pytest.fixture(scope="module")
def moments(source: Path, pack: Path, text: Path) -> Path:
    calibrate(Request(pack, [text], source.parent / "moments", options=F32))
    return source.parent / "moments"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FERMI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def refusal(kind: type[FermiError], action: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def documents(path: Path) -> list[list[int]]:
    return [json.loads(line)["ids"] for line in path.read_text().splitlines()]


def drawn(seed: int, rows: int, n: int, heavy: bool = False) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_t(3, (rows, n)) if heavy else rng.normal(0, 1, (rows, n))).astype(np.float32)


def correlated(seed: int, n: int, rows: int = 4000) -> np.ndarray:
    """Second moments of inputs of unequal size that depend on each other."""
    rng = np.random.default_rng(seed)
    u = rng.normal(0, 1, (rows, n)) @ rng.normal(0, 1, (n, n)) * rng.uniform(0.1, 3, n) ** 2
    return u.T @ u / rows


def errors(plain: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Squared error of each block, in float64."""
    rest = Q4.dequantize(plain).astype(np.float64) - x
    return np.square(rest).reshape(len(x), -1, 32).sum(axis=-1)


def product_error(plain: np.ndarray, x: np.ndarray, m: np.ndarray) -> float:
    rest = Q4.dequantize(plain).astype(np.float64) - x
    return float(np.einsum("ij,jk,ik->", rest, m, rest))


# exact scales (that they are the best of all halves: the stage q4_0_mse)


@given(st.integers(0, 2**32 - 1), st.booleans(), st.floats(-20, 4))
def test_no_block_is_worse_than_plain(seed, heavy, exponent) -> None:
    x = drawn(seed, 3, 64, heavy) * np.float32(10.0**exponent)
    found, plain = mse_q4_0(x, threads=1), Q4.quantize(x)
    assert found.shape == plain.shape
    assert found.dtype == np.uint8
    # codes are chosen under the scale as it is stored; plain's under the one before its rounding. Sums of 32 squares in
    # two orders: 64 roundings
    assert (errors(found, x) <= errors(plain, x) * (1 + 64 * 2.0**-53)).all()


def test_what_is_gained_on_normal_weights() -> None:
    x = drawn(0, 64, 2048)
    gained = errors(mse_q4_0(x), x).mean() / errors(Q4.quantize(x), x).mean()
    assert 0.85 < gained < 0.91  # 0.885


def test_every_byte_is_read_by_the_definition() -> None:
    x = drawn(1, 9, 96, heavy=True)
    for plain in (mse_q4_0(x), fitted_q4_0(x, correlated(1, 96))):
        d, codes = unpack_q4_0(plain)
        np.testing.assert_array_equal(Q4.dequantize(plain), values_q4_0(d, codes).astype(np.float32))
        assert set(np.unique(codes)) <= set(range(-8, 8))
        assert np.isfinite(d).all()
        np.testing.assert_array_equal(pack_q4_0(d, codes), plain)
        np.testing.assert_array_equal(Q4.deinterleave(Q4.interleave(plain), 9), plain)


def test_blocks_of_zeros_and_of_what_halves_cannot_hold() -> None:
    x = np.zeros((2, 96), np.float32)
    x[0, 40], x[1, 70] = 3.0, 1e-30
    found = mse_q4_0(x)
    zero = np.array([0x00, 0x80, *[0x88] * 16], np.uint8)
    np.testing.assert_array_equal(found.reshape(2, 3, 18)[[0, 0, 1, 1], [0, 2, 0, 2]], np.tile(zero, (4, 1)))
    assert Q4.dequantize(found)[0, 40] == 3.0
    np.testing.assert_array_equal(fitted_q4_0(x, np.eye(96)).reshape(2, 3, 18)[0, 0], zero)
    for bad, words in ((np.nan, "NaN or infinity"), (1e6, "beyond what q4_0 can hold")):
        x[1, 5] = bad
        for quantise in (mse_q4_0, lambda x: fitted_q4_0(x, np.eye(96))):
            said = refusal(FormatError, lambda quantise=quantise: quantise(x))
            assert words in said
            assert "row 1" in said


def test_threads_change_no_bit() -> None:
    x, weight = drawn(2, 67, 96), np.linspace(0, 4, 96, dtype=np.float32)
    for w in (None, weight):
        np.testing.assert_array_equal(mse_q4_0(x, w, 1), mse_q4_0(x, w, 5))
    x, m = drawn(2, 300, 64), correlated(2, 64)
    np.testing.assert_array_equal(fitted_q4_0(x, m, 1), fitted_q4_0(x, m, 3))
    np.testing.assert_array_equal(fitted_q4_0(x[128:256], m, 1), fitted_q4_0(x, m, 3)[128:256])


def test_weights_move_the_scale_towards_what_counts() -> None:
    x = drawn(3, 8, 32)
    weight = np.where(np.arange(32) % 2, 1, 1e-3).astype(np.float32)
    odd = [np.square(Q4.dequantize(plain) - x)[:, 1::2].sum() for plain in (mse_q4_0(x, weight), mse_q4_0(x))]
    assert odd[0] < odd[1]
    for bad in (weight[:-1], -weight, weight * np.nan):
        with pytest.raises(ValueError, match="expected as many, finite and at least 0"):
            mse_q4_0(x, bad)


# scales fitted to second moments


@pytest.mark.parametrize("seed", range(3))
def test_the_products_error_only_falls(seed, monkeypatch) -> None:
    x, m = drawn(seed, 24, 128), correlated(seed, 128)
    damped = scales._damped(m)
    found = []
    for passes in range(6):
        monkeypatch.setattr(scales, "PASSES", passes)
        found.append(product_error(fitted_q4_0(x, m), x, damped))
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(found))
    plain, exact = (product_error(q, x, damped) for q in (Q4.quantize(x), mse_q4_0(x)))
    assert found[4] < 0.6 * min(plain, exact)


def test_without_correlations_it_is_the_exact_scale() -> None:
    """Nothing to gain from other blocks or codes: the start is the optimum already."""
    x = drawn(5, 16, 96)
    np.testing.assert_array_equal(fitted_q4_0(x, np.eye(96)), mse_q4_0(x))
    np.testing.assert_array_equal(fitted_q4_0(x, np.zeros((96, 96))), mse_q4_0(x))  # an input nobody has seen


def test_a_block_that_no_input_reached_keeps_its_own_best_scale() -> None:
    """Directions without any input keep the weight of the damping, the same for all of them."""
    x, m = drawn(6, 8, 64), correlated(6, 64)
    m[:, 32:] = m[32:] = 0
    fitted, exact = fitted_q4_0(x, m), mse_q4_0(x)
    np.testing.assert_array_equal(fitted.reshape(8, 2, 18)[:, 1], exact.reshape(8, 2, 18)[:, 1])
    assert product_error(fitted, x, m) < 0.7 * product_error(exact, x, m)


# conversion


def test_a_pack_of_exact_scales(source, tmp_path) -> None:
    rules = "*.down_proj=q8_0"
    path = convert(source, tmp_path / "mse", rules=rules, scales=Scales("mse"))
    plain = convert(source, tmp_path / "plain", rules=rules)
    checkpoint = Checkpoint.open(source)
    with Pack.open(path) as pack, Pack.open(plain) as other:
        pack.check()
        assert pack.info()["scales"] == "mse"
        assert other.info()["scales"] is None
        different = 0
        for name in pack.matrix_names:
            a, b = pack.matrix(name), other.matrix(name)
            assert a.format == b.format
            if a.format == "q4_0":
                assert a.plain().tobytes() == mse_q4_0(checkpoint.read(name)).tobytes()
                different += a.data.tobytes() != b.data.tobytes()
            else:
                assert a.data.tobytes() == b.data.tobytes()
        assert different > 5
        for e in range(4):
            gate_up, down = pack.expert(1, e)
            assert gate_up.plain().tobytes() == mse_q4_0(checkpoint.expert_rows(1, "gate_up", e, 0, gate_up.rows)).tobytes()
            assert down.data.tobytes() == other.expert(1, e)[1].data.tobytes()
        assert path.stat().st_size == plain.stat().st_size


def test_a_pack_of_fitted_scales(source, moments, tmp_path) -> None:
    held, checkpoint = Moments(moments), Checkpoint.open(source)
    c = checkpoint.config
    path = convert(source, tmp_path / "fit", scales=Scales("mse", lambda name, e: held.of(name, c, e), "these"))
    with Pack.open(path) as pack:
        assert pack.info()["scales"] == "mse, these"
        for name, key in (("layers.1.linear_attn.out_proj.weight", "layers.1.gated_norm"), ("lm_head.weight", "norm"),
                          ("layers.3.self_attn.k_proj.weight", "layers.3.mixer_norm"),
                          ("layers.2.mlp.shared_expert.down_proj.weight", "layers.2.dense_hidden")):
            truth = fitted_q4_0(checkpoint.read(name), held._read(key)[0])
            assert pack.matrix(name).plain().tobytes() == truth.tobytes(), name
        embedding = pack.matrix("embed_tokens.weight").plain().tobytes()
        assert embedding == mse_q4_0(checkpoint.read("embed_tokens.weight")).tobytes()
        for e in (0, 3):
            down = pack.expert(2, e)[1]
            assert down.plain().tobytes() == fitted_q4_0(checkpoint.expert_rows(2, "down", e, 0, down.rows),
                                                         held._read("layers.2.expert_hidden")[e]).tobytes()


def test_rows_in_pieces_give_the_same_bytes(source, tmp_path, monkeypatch) -> None:
    whole = convert(source, tmp_path / "whole", scales=Scales("mse")).read_bytes()
    monkeypatch.setattr("fermi_engine.convert.BLOCK_BYTES", 8 * 4 * 96)
    assert convert(source, tmp_path / "pieces", scales=Scales("mse")).read_bytes() == whole


def test_an_interrupted_conversion_is_not_finished_with_other_scales(source, tmp_path) -> None:
    def stop(done: int, total: int, name: str) -> None:
        if name == blob_name(1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "p", progress=stop)
    truth = convert(source, tmp_path / "truth", scales=Scales("mse")).read_bytes()
    assert convert(source, tmp_path / "p", scales=Scales("mse")).read_bytes() == truth


def test_unknown_scales_are_refused() -> None:
    assert "choose one of plain, mse" in refusal(ConfigError, lambda: Scales("best"))
    assert "ask for mse scales" in refusal(ConfigError, lambda: Scales("plain", lambda name, e: None))


# second moments


def test_moments_are_those_of_the_reference(pack, text, moments) -> None:
    """Of what every kind of matrix reads; float32 sums over a few hundred rows of numbers of size 1."""
    opened = Pack.open(pack)
    c, model, held = opened.config, oracle.decoder(opened, "f32", torch.float64), Moments(moments)
    seen: dict[str, list[torch.Tensor]] = {}
    with torch.no_grad():
        for ids in documents(text):
            model.forward(ids, trace=lambda name, value: seen.setdefault(name, []).append(value))
    rows = {name: torch.cat(parts).reshape(sum(map(len, documents(text))), -1).double() for name, parts in seen.items()
            if parts[0].is_floating_point()}
    for key in ("layers.0.mixer_norm", "layers.3.gated", "layers.1.gated_norm", "layers.2.ffn_norm", "norm"):
        truth = (rows[key].T @ rows[key] / len(rows[key])).numpy()
        np.testing.assert_allclose(held._read(key)[0], truth, rtol=0, atol=1e-4 * np.abs(truth).max(), err_msg=key)
        assert held._read(COUNTS + key).tolist() == [193]
    u, stem = rows["layers.2.ffn_norm"], "layers.2.mlp."
    ids, _ = route(linear(u, model.params[stem + "gate.weight"]), 2)
    for e in range(4):
        mine = u[(ids == e).any(dim=1)]
        gate, up = linear(mine, model.params[stem + "experts.gate_up_proj"][e]).chunk(2, dim=-1)
        hidden = torch.nn.functional.silu(gate) * up
        truth = (hidden.T @ hidden / len(hidden)).numpy()
        np.testing.assert_allclose(held._read("layers.2.expert_hidden")[e], truth, rtol=0, atol=1e-4 * np.abs(truth).max())
        assert held._read(COUNTS + "layers.2.expert_hidden")[e] == len(mine)
    gate, up = (linear(u, model.params[f"{stem}shared_expert.{part}_proj.weight"]) for part in ("gate", "up"))
    hidden = torch.nn.functional.silu(gate) * up
    truth = (hidden.T @ hidden / len(u)).numpy()
    np.testing.assert_allclose(held._read("layers.2.dense_hidden")[0], truth, rtol=0, atol=1e-4 * np.abs(truth).max())
    assert held.of("embed_tokens.weight", c) is None


@pytest.mark.parametrize("options", [{}, {"family": "dense", "tied": True}], ids=str)
def test_every_matrix_has_an_input_of_its_width(tmp_path, options) -> None:
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path / "c", 1, **{**SMALL, **options}))
    c = checkpoint.config
    widths = {row.name: row for row in inputs(c)}
    used = set()
    for name, row in assign(expected_shapes(c), "q4_0").items():
        key = input_of(name, c)
        if row.format == "q4_0" and (name != "embed_tokens.weight" or options):
            assert widths[key].n == checkpoint.shape(name)[-1], name
            assert widths[key].copies == (4 if "experts.down" in name else 1)
            used.add(key)
    assert used == set(widths)
    assert input_of("embed_tokens.weight", c) == ("norm" if options else None)


def test_passes_and_interruptions_change_nothing(pack, text, moments, tmp_path, monkeypatch) -> None:
    """Little memory: many passes over the text; stopped in the third, between two documents."""
    real, calls = calibration._read, []

    def interrupted(*args):
        calls.append(len(args[1]))
        if len(calls) == 8:
            raise KeyboardInterrupt
        real(*args)

    monkeypatch.setattr(calibration, "_read", interrupted)
    monkeypatch.setattr(Resume, "due", lambda self: True)
    request = Request(pack, [text], tmp_path / "moments", memory=130_000, options=F32)
    with pytest.raises(KeyboardInterrupt):
        calibrate(request)
    assert not (tmp_path / "moments").exists()
    calibrate(request)
    assert (tmp_path / "moments").read_bytes() == moments.read_bytes()
    count = len(calibrate_module._passes(inputs(Pack.open(pack).config), 130_000))
    assert count > 4
    assert calls == [70, 33, 90] * 2 + [70, 33] + [33, 90] + [70, 33, 90] * (count - 3)


def test_own_generations_count(pack, text, moments, tmp_path) -> None:
    calibrate(Request(pack, [text], tmp_path / "m", generate=5, options=F32))
    assert 193 < Moments(tmp_path / "m")._read(COUNTS + "norm")[0] <= 193 + 15


def test_a_layer_that_gives_no_numbers_is_named() -> None:
    watcher = calibrate_module.SecondMoments([Input("layers.0.mixer_norm", 4)])
    assert "layers.0.mixer_norm is NaN" in refusal(
        RequestError, lambda: watcher.trace("layers.0.mixer_norm", np.array([[1, 2, np.nan, 4]], np.float32)))


def test_damaged_and_foreign_files(moments, pack, source, tmp_path) -> None:
    raw = moments.read_bytes()
    header = read_header(moments)
    c = Pack.open(pack).config

    def changed(at: int) -> Path:
        (tmp_path / "m").write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1:])
        return tmp_path / "m"

    at = header.data_start + header.tensors["layers.1.ffn_norm"].begin + 9
    name = "layers.1.mlp.experts.gate_up_proj"
    assert "layers.1.ffn_norm does not match" in refusal(RequestError, lambda: Moments(changed(at)).of(name, c))
    assert "seal does not match" in refusal(RequestError, lambda: Moments(changed(len(raw) - 1)))
    refusal(RequestError, lambda: Moments(changed(40)))
    (tmp_path / "short").write_bytes(raw[:-50])
    refusal(RequestError, lambda: Moments(tmp_path / "short"))
    assert "holds no second moments" in refusal(RequestError, lambda: Moments(pack))
    assert "cannot read" in refusal(RequestError, lambda: Moments(tmp_path / "absent"))


# what it is worth


def loss(path: Path, base: Model, pieces: list[np.ndarray]) -> float:
    found = evaluate.evaluate({"m": Model.of(Engine.load(path, threads=1))}, base, pieces, Resume(None, ""))
    return summary(found["m"])["kl"]["mean"]


def test_fitted_scales_lose_a_quarter_less_on_the_trained_model(tmp_path) -> None:
    """Held-out text, calibrated on the training part; the record is in golden/tiny/README.md."""
    encoder = Encoder.from_directory(TINY)
    train = tiny_text.write(tmp_path / "train.jsonl", encoder, "train", 3, 12)
    pieces = [np.array(ids, np.int32) for ids in documents(tiny_text.write(tmp_path / "held.jsonl", encoder, "held", 7, 8))]
    f32 = convert(TINY, tmp_path / "f32.pack", "f32")
    calibrate(Request(f32, [train], tmp_path / "moments", options=EngineConfig(threads=1)))
    held, c = Moments(tmp_path / "moments"), Checkpoint.open(TINY).config
    fitted = convert(TINY, tmp_path / "fitted", scales=Scales("mse", lambda name, e: held.of(name, c, e)))
    plain, preset = convert(TINY, tmp_path / "plain"), convert(TINY, tmp_path / "preset", rules="sensitive=5%")
    base = Model.of(Engine.load(f32, threads=1))
    losses = {path.name: loss(path, base, pieces) for path in (plain, fitted, preset)}
    print({name: f"{value:.3g}" for name, value in losses.items()})
    assert losses["fitted"] <= 0.75 * losses["plain"]
    assert fitted.stat().st_size == plain.stat().st_size
    assert losses["preset"] <= 0.75 * losses["plain"]
    assert plain.stat().st_size < preset.stat().st_size <= 1.05 * plain.stat().st_size


# a budget for sensitive tensors


def shapes() -> dict[str, tuple[int, ...]]:
    return expected_shapes(Checkpoint.open(TINY).config)


def stored_bytes(rules: tuple[Rule, ...]) -> int:
    table = shapes()
    return sum(sensitivity._stored(table[name], row.format) for name, row in assign(table, "q4_0", rules).items())


def test_the_preset_spends_no_more_than_its_budget() -> None:
    plain, before = stored_bytes(()), set()
    for share in (0.5, 3, 6, 20, 50, 99):
        rules = resolve(f"sensitive={share}%", shapes(), "q4_0")
        taken = {name for name, row in assign(shapes(), "q4_0", rules).items() if row.format == "q8_0"}
        assert stored_bytes(rules) <= plain * (1 + share / 100)
        assert len(taken) >= len(before) - 1
        before = taken
    assert len(before) == sum(row.format == "q4_0" for row in assign(shapes(), "q4_0").values())
    assert resolve("sensitive=4%", shapes(), "q4_0")[0] == Rule("lm_head.weight", "q8_0")
    assert resolve("sensitive=100B", shapes(), "q4_0") == ()
    head = 1024 * 192 // 32 * 16
    assert resolve(f"sensitive={head}", shapes(), "q4_0") == (Rule("lm_head.weight", "q8_0"),)
    assert Rule("lm_head.weight", "q8_0") not in resolve(f"sensitive={head - 1}", shapes(), "q4_0")


def test_bytes_go_where_they_buy_most() -> None:
    table = {"a.weight": (32, 32), "layers.0.b.weight": (64, 32), "layers.1.b.weight": (64, 32), "c.weight": (8, 32),
             "norm.weight": (32,)}
    measured = {"a.weight": 1e-6, "layers.*.b.weight": 3e-6, "c.weight": 0.0}
    cost = {name: shape[0] * 16 for name, shape in table.items()}
    both = cost["layers.0.b.weight"] * 2
    assert sensitive(table, (), both, measured) == (Rule("layers.*.b.weight", "q8_0"),)
    assert sensitive(table, (), both - 1, measured) == (Rule("a.weight", "q8_0"), Rule("layers.0.b.weight", "q8_0"))
    assert sensitive(table, (), both - 1, {**measured, "layers.1.b.weight": 4e-6})[-1] == Rule("layers.1.b.weight", "q8_0")
    assert sensitive(table, (Rule("*.b.weight", "q4_0"),), 10**6, measured) == (Rule("a.weight", "q8_0"),)


def test_rules_of_the_user_come_first() -> None:
    rules = resolve("lm_head.weight=f16, sensitive=30%, *.down_proj=q4_0", shapes(), "q4_0")
    assert rules[:2] == (Rule("lm_head.weight", "f16"), Rule("*.down_proj", "q4_0"))
    formats = {name: row.format for name, row in assign(shapes(), "q4_0", rules).items()}
    assert formats["lm_head.weight"] == "f16"
    assert formats["layers.0.mlp.experts.down_proj"] == "q4_0"
    assert formats["layers.3.self_attn.v_proj.weight"] == "q8_0"


def test_measured_losses_of_the_model_itself(tmp_path) -> None:
    rows = [{"tensors": ["layers.5.mlp.experts.gate_up_proj"], "weights": 1000, "kl": {"mean": 1.0}}]
    (tmp_path / "kind.json").write_text(json.dumps({"by": "tensor", "parts": rows}))
    rules = resolve(f"sensitive=50%@{tmp_path / 'kind.json'}", shapes(), "q4_0")
    assert rules == (Rule("layers.5.mlp.experts.gate_up_proj", "q8_0"),)


@pytest.mark.parametrize(("text", "kind", "words"), [
    ("sensitive=", RequestError, "is not a size"), ("sensitive=5%%", RequestError, "is not a size"),
    ("sensitive=0", RequestError, "is not a size"), ("sensitive=1%,sensitive=2%", ConfigError, "given twice"),
    ("sensitive=5%@{none}", RequestError, "cannot read"), ("sensitive=5%@{text}", RequestError, "holds no losses"),
    ("sensitive=5%,lm=q4_0", ConfigError, "matches no tensor"), ("x", ConfigError, "pattern=format"),
])
def test_budgets_that_are_none(text, kind, words, tmp_path) -> None:
    (tmp_path / "text").write_text('{"by": "class", "parts": []}')
    line = text.format(none=tmp_path / "none", text=tmp_path / "text")
    assert words in refusal(kind, lambda: assign(shapes(), "q4_0", resolve(line, shapes(), "q4_0")))
    assert "default format is q8_0" in refusal(ConfigError, lambda: resolve("sensitive=5%", shapes(), "q8_0"))


def test_the_table_of_the_trained_model_names_its_tensors() -> None:
    kinds = {sensitivity.LAYER.sub("layers.*.", name) for name, row in assign(shapes(), "q4_0").items() if row.format == "q4_0"}
    assert set(sensitivity.MEASURED) == kinds


# the commands


def run(capsys: pytest.CaptureFixture, *args: object) -> tuple[int, str, str]:
    status = cli.run([str(arg) for arg in args])
    return status, *capsys.readouterr()


def test_calibrate_then_convert(capsys, source, pack, text, moments, tmp_path) -> None:
    line = ["calibrate", "-m", pack, "--calibration", text, "-o", tmp_path / "m", "-t", "1", "--activations", "f32"]
    status, out, _ = run(capsys, *line)
    assert (status, "second moments over 193 tokens of 3 documents" in out) == (0, True)
    assert (tmp_path / "m").read_bytes() == moments.read_bytes()
    status, out, err = run(capsys, *line)
    assert (status, "exists; remove it" in err) == (2, True)
    assert run(capsys, *line, "--overwrite")[0] == 0
    convert_line = ["convert", source, tmp_path / "p", "--scales", "mse", "--moments", tmp_path / "m"]
    assert run(capsys, *convert_line)[0] == 0
    status, out, _ = run(capsys, "info", tmp_path / "p")
    assert f"mse, moments {Moments(moments).hash[:16]}" in out
    status, out, _ = run(capsys, "convert", source, "--show-rules", "--rules", "sensitive=10%")
    assert "rule lm_head.weight=q8_0" in out


MISTAKES = {
    "unknown scales": (["--scales", "best"], "choose one of plain, mse"),
    "moments for plain scales": (["--moments", "{moments}"], "ask for mse scales"),
    "moments that are none": (["--scales", "mse", "--moments", "{pack}"], "holds no second moments"),
    "moments of another model": (["--scales", "mse", "--moments", "{other}"], "was measured on another model"),
    "a budget that is none": (["--rules", "sensitive=much"], "is not a size"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_of_convert_are_one_line(capsys, source, pack, text, moments, tmp_path, name) -> None:
    words, said = MISTAKES[name]
    if "{other}" in words:
        other = convert(make_checkpoint(tmp_path / "other", 6, **SMALL), tmp_path / "other.pack", "f32")
        calibrate(Request(other, [text], tmp_path / "other.moments", options=F32))
    names = {"moments": moments, "pack": pack, "other": tmp_path / "other.moments"}
    status, out, err = run(capsys, "convert", source, tmp_path / "dst", *(word.format(**names) for word in words))
    assert (status, out) == (2, ""), err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err
    assert not list(tmp_path.glob("dst*"))


def test_mistakes_of_calibrate_are_one_line(capsys, pack, tmp_path) -> None:
    (tmp_path / "empty").touch()
    for words, said in ((["--calibration", tmp_path / "empty"], "holds no usable text"),
                        (["--calibration", tmp_path / "none"], "cannot read"),
                        (["--calibration", tmp_path / "empty", "--memory", "lots"], "--memory 'lots' is not a size"),
                        (["--calibration", tmp_path / "empty", "-m", tmp_path / "none"], "cannot read")):
        line = ["calibrate", *(["-m", pack] if "-m" not in words else []), "-o", tmp_path / "dst", "-t", "1", *words]
        status, out, err = run(capsys, *line)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert said in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty"]
