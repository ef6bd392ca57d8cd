"""Synthetic packs are real packs; the benchmark's figures follow from each other and from the model's shape."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch

from fermi_engine import Engine, EngineConfig, bench, kernels, pack_writer, roofline
from fermi_engine.against import against, first_failure
from fermi_engine.cli import app as cli
from fermi_engine.compression.rules import assign
from fermi_engine.convert import plan_pack
from fermi_engine.errors import ConfigError, PackError, RequestError
from fermi_engine.formats import FORMATS, LANES
from fermi_engine.kernels.cpu import CpuKernels
from fermi_engine.pack import Pack
from fermi_engine.pack_layout import Part
from fermi_engine.shapes import expected_shapes
from fermi_engine.state import KVPages
from fermi_engine.tokenizer import Tokenizer
from fermi_engine.vision.encoder import Vision
from tests import hf
from tests.model_stages import decided
from tools import dump_reference, oracle
from tools.bench import make_pack as maker
from tools.bench import scaling, synthetic_tokenizer
from tools.byte_tokenizer import SPECIALS
from tools.random_weights import values

# The small geometry by hand. Rows of n weights take n/32 * 18 bytes; 517 rows of the head are stored as 520.
ROW64, ROW128, ROW32 = 36, 72, 18
DELTA_NET = (256 + 128) * ROW64 + 64 * ROW128 + 2 * 4 * 64 * 4 + 256 * 4 * 4 + 2 * 4 * 4 + 32 * 4
ATTENTION = (256 + 64 + 64) * ROW64 + 64 * ROW128 + 2 * 32 * 4
SPARSE = 16 * 64 * 4 + 64 * 4 + (64 + 64) * ROW64 + 64 * ROW64 + 4 * (64 * ROW64 + 64 * ROW32)
WEIGHTS = ROW64 + 520 * ROW64 + 6 * DELTA_NET + 2 * ATTENTION + 8 * (SPARSE + 2 * 64 * 4) + 64 * 4
RECURRENT, CONV = 6 * 2 * 4 * 32 * 32 * 4, 6 * 2 * 3 * 256 * 4
KV_ROWS = {"f32": 32 * 4, "f16": 32 * 2, "q8_0": 32 + 2}  # bytes of one head's key or value
LAYER_MACS = (6 * ((256 + 128) * 64 + 64 * 128 + 8 * 64 + 256 * 4 + 2 * 4 + 32) + 2 * ((256 + 128) * 64 + 64 * 128 + 2 * 32)
              + 8 * (16 * 64 + 64 + 3 * 64 * 64 + 4 * (64 * 64 + 64 * 32)))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The small pack, with a tokenizer."""
    return maker.make_pack(tmp_path_factory.mktemp("bench") / "small.pack", "small", seed=1, tokenizer="synthetic")


def run(capsys, *args) -> tuple[int, str, str]:
    status = cli.run([str(arg) for arg in args])
    return status, *capsys.readouterr()


# synthetic packs


@pytest.mark.parametrize("format", FORMATS)
def test_a_synthetic_pack_is_a_sound_pack(tmp_path, format):
    path = maker.make_pack(tmp_path / "a", "small", seed=3, format=format)
    with Pack.open(path) as pack:
        pack.check()
        assert pack.default_format == format
        assert pack.source == {"synthetic": {"geometry": "small", "seed": 3}}
    assert maker.make_pack(tmp_path / "b", "small", seed=3, format=format).read_bytes() == path.read_bytes()
    other = maker.make_pack(tmp_path / "c", "small", seed=4, format=format)
    with Pack.open(path) as a, Pack.open(other) as b:
        for name in a.matrix_names:
            assert not np.array_equal(a.matrix(name).data, b.matrix(name).data), name
        assert not np.array_equal(a.expert(0, 0)[0].data, a.expert(0, 1)[0].data)


@pytest.mark.parametrize("vision", ["f32", "q8_0"])
def test_a_synthetic_pack_may_have_a_tower(tmp_path, vision):
    path = maker.make_pack(tmp_path / "a", "small-dense", format="q8_0", vision=vision)
    with Pack.open(path) as pack:
        pack.check()
        tower = [name for name in pack.matrix_names if ".encoder.layers." in name and pack.matrix(name).cols % 32 == 0]
        assert {pack.matrix(name).format for name in tower} == {vision}
        images = Vision(pack, kernels.get())
        pixels = np.random.default_rng(0).integers(0, 256, (2, 300, 200, 3), np.uint8)
        rows = [images.encode(images.prepare(each)) for each in pixels]
    assert rows[0].shape == (70, 64)
    assert 0.1 < np.abs(rows[0]).mean() < 10
    assert not np.array_equal(*rows)


@pytest.mark.parametrize("format", ["q4_0", "q8_0"])
def test_stored_bytes_are_those_of_plain_rows(format):
    """517 rows: the last group is padded with zeros, and the values have the deviation they should have."""
    part = Part(format, 517, 256)
    pieces = np.concatenate(list(maker.stored(part, "layers.0.mlp.down_proj.weight", 0)))
    row = FORMATS[format]
    plain = row.deinterleave(pieces, 517)
    assert np.array_equal(row.interleave(plain), pieces)
    found = row.dequantize(plain)
    # 132,352 draws under 4,136 scales: the deviation of the sample lies within half a percent of its expectation, and its
    # mean, to which a block adds its scale's sign times half a code, within 5 standard deviations of zero
    assert found.std() == pytest.approx(0.3 / math.sqrt(256), rel=0.02)
    assert abs(found.mean()) < 5 * found.std() * math.sqrt((1 + 32 * 0.25 / 21.5) / found.size)
    scales = pieces.reshape(-1, LANES * row.block_bytes)[:, : 2 * LANES].copy().view(np.float16)[:-8]
    assert (scales > 0).any()
    assert (scales < 0).any()
    assert np.abs(scales).min() > 2.0**-14  # no subnormal scale, which would be slower on some CPUs
    if format == "q8_0":
        assert pieces.reshape(-1, LANES * row.block_bytes)[:, 2 * LANES :].view(np.int8).min() == -127


def test_float_tensors_are_those_of_a_generated_checkpoint(small):
    with Pack.open(small) as pack:
        for name in ("conv1d.weight", "A_log", "in_proj_a.weight"):
            name = f"layers.1.linear_attn.{name}"
            shape = expected_shapes(pack.config)[name]
            drawn = np.concatenate(list(values(1, name, shape))).reshape(shape)
            assert np.array_equal(pack.vector(name), drawn[:, 0].T if drawn.ndim == 3 else drawn)


def test_large_geometries_have_the_published_sizes():
    for name, parameters in (("qwen3.6-35b-a3b", 34.66e9), ("qwen3.6-35b-a3b-reap128", 18.54e9), ("minicpm-v-4.6", 0.75e9)):
        shapes = expected_shapes(maker.geometry(name))
        assert sum(map(math.prod, shapes.values())) == pytest.approx(parameters, rel=0.005), name
    source = maker.Source("qwen3.6-35b-a3b-reap128", 0, "q4_0")
    plan = plan_pack(source, assign(expected_shapes(source.config), "q4_0"), "q4_0")
    blobs = [slot for slot in plan.slots if slot.name.endswith("experts.blob")]
    assert [slot.shape for slot in blobs] == [(128, 1_769_472)] * 40
    assert plan.total_bytes == pytest.approx(10.5e9, rel=0.01)


def test_the_small_pack_computes_what_its_values_say(small, tmp_path):
    """f32 activations against the reference on the dequantised weights: layer by layer, limits by dump_reference; then the
    whole model against float64, allowed twice the largest error of the reference in float32, with every router decided."""
    with Pack.open(small) as pack, hf.threads(1), torch.no_grad():
        truth, single = (oracle.decoder(pack, "f32", dtype) for dtype in (torch.float64, torch.float32))
        for seed in range(100):
            ids = np.random.default_rng(seed).integers(0, pack.config.vocab_size, 12).tolist()
            seen: dict[str, torch.Tensor] = {}
            logits = truth.forward(torch.tensor(ids), trace=seen.__setitem__)[0].numpy()
            if decided(seen, pack.config.num_experts_per_tok):
                break
        limit = 2 * np.abs(single.forward(torch.tensor(ids))[0].numpy() - logits).max()
        dump = dump_reference.write(tmp_path / "dump.safetensors", pack, ids, "f32")
    engine = Engine.load(small, config=EngineConfig(activations="f32"))
    assert decided(seen, pack.config.num_experts_per_tok)
    assert first_failure(against(engine, dump)) is None
    error = np.abs(engine.session().logits(ids) - logits).max()
    assert 0 < limit < 1e-3 * np.abs(logits).max()
    assert error <= limit


def test_experts_are_chosen_in_variety(small):
    chosen = {}
    engine = Engine.load(small)

    def note(name, array):
        if name.endswith("router_ids"):
            chosen[name] = set(array.ravel().tolist())

    engine.session().logits(np.random.default_rng(0).integers(0, 517, 64).tolist(), note)
    assert len(chosen) == 8
    assert all(len(experts) == 16 for experts in chosen.values())


def test_mistakes_are_told_in_one_line(tmp_path, monkeypatch, capsys):
    with pytest.raises(ConfigError, match="unknown geometry 'huge'; choose one of qwen3"):
        maker.make_pack(tmp_path / "x", "huge")
    with pytest.raises(ConfigError, match="unknown format 'q2'"):
        maker.make_pack(tmp_path / "x", "small", format="q2")
    with pytest.raises(ConfigError, match="unknown tokenizer 'real'"):
        maker.make_pack(tmp_path / "x", "small", tokenizer="real")
    with pytest.raises(ConfigError, match="geometry 'small' has no vision tower; choose one of qwen3"):
        maker.make_pack(tmp_path / "x", "small", vision="f32")
    (tmp_path / "taken").write_bytes(b"mine")
    assert maker.main(["--geometry", "small", "-o", str(tmp_path / "taken")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert (tmp_path / "taken").read_bytes() == b"mine"
    assert maker.main(["--geometry", "small", "-o", str(tmp_path / "taken"), "--force"]) == 0
    Pack.open(tmp_path / "taken").close()
    monkeypatch.setattr(pack_writer, "_free_bytes", lambda path: 1000)
    with pytest.raises(PackError, match="more bytes are needed, 1000 are free"):
        maker.make_pack(tmp_path / "y", "small")


def test_the_tokenizer_has_the_released_size(tmp_path):
    files = {name: path.read_bytes() for name, path in synthetic_tokenizer.write(tmp_path, 248_320, 0).items()}
    model = json.loads(files["tokenizer.json"])["model"]
    assert len(model["vocab"]) == 248_044
    assert len(model["merges"]) == 248_044 - 256
    assert len(files["tokenizer.json"]) > 10e6
    tokenizer = Tokenizer.from_bytes(files, 248_320)
    ids = tokenizer.encode(bench.FIRST_TEXT)
    assert tokenizer.decode(ids) == bench.FIRST_TEXT
    assert 0 < len(ids) < len(bench.FIRST_TEXT)
    assert tokenizer.eos_ids() == {248_044 + SPECIALS.index("<|im_end|>")}
    with pytest.raises(ValueError, match="a vocabulary of 200 holds no byte-level tokenizer"):
        synthetic_tokenizer.write(tmp_path, 200, 0)


# rooflines


@pytest.mark.parametrize("threads", [1, 3])
def test_every_pattern_reads_what_it_says(threads):
    """The xor of the words seen: a loop that skipped or was optimised away leaves another."""
    space = np.random.default_rng(0).integers(0, 256, (5 << 18) + 768 + 64, np.uint8)
    data = space[-space.ctypes.data % 64 :][: (5 << 18) + 768]
    words = data.view(np.uint64)
    expected = {True: int(np.bitwise_xor.reduce(words[::8])), False: int(np.bitwise_xor.reduce(words))}
    known = roofline.patterns()
    assert len({name.rsplit(",", 1)[0] for name, _, _ in known}) >= 7
    for name, function, chunk in known:
        assert roofline.run_pattern(function, data, chunk, threads) == expected["touch" in function], name


def test_the_fastest_pattern_counts(small):
    with Pack.open(small) as pack:
        reads = roofline.streaming_read(pack.mapped, 1, repeats=1)
    assert reads.read_bytes == small.stat().st_size // 256 * 256
    assert reads.bytes_per_s == max(reads.all.values()) == reads.all[reads.pattern] > 0
    assert len(reads.all) == len(roofline.patterns())


def test_integer_peaks_are_of_loops_that_ran(monkeypatch):
    peaks = roofline.integer_peak(1, repeats=1)
    assert "ssse3" in peaks
    assert min(peaks.values()) > 1e8
    monkeypatch.setattr(roofline, "DOTS", (("ssse3", 128, 289),))
    with pytest.raises(RuntimeError, match="did not do its multiply-adds"):
        roofline.integer_peak(1, repeats=1)


# the benchmark


@pytest.mark.parametrize("kv_format", KV_ROWS)
def test_bytes_and_multiply_adds_of_a_token(small, kv_format):
    engine = Engine.load(small, config=EngineConfig(kv_format=kv_format))
    session = engine.session()
    bench.synthetic_context(session, 100, np.random.default_rng(0))
    sizes = bench.bytes_per_token(engine.pack, session.state, 100)
    assert sizes == {"weights": WEIGHTS, "recurrent": RECURRENT, "conv": CONV, "kv": 2 * 2 * 2 * KV_ROWS[kv_format] * 101}
    assert bench.weight_macs(engine.pack) == (LAYER_MACS, 517 * 64)


@pytest.mark.parametrize("kv_format", KV_ROWS)
def test_a_synthetic_context_can_be_continued(small, kv_format):
    engine = Engine.load(small, config=EngineConfig(kv_format=kv_format, kv_block=16))
    session = engine.session()
    bench.synthetic_context(session, 100, np.random.default_rng(0))
    assert session.position == session.state.position == 100
    for layer in session.state.layers:
        if isinstance(layer, KVPages):
            keys, values = layer.filled(112)
            for rows in (keys, values):
                assert rows[:100].std() == pytest.approx(1, rel=0.05)
                assert (rows[100:] == 0).all()
        else:
            assert (layer.recurrent != 0).all()
    assert np.isfinite(session.decode(5)).all()
    assert session.position == 101
    with pytest.raises(RequestError, match="a context of 5000 tokens exceeds the model's 4096"):
        bench.synthetic_context(engine.session(), 5000, np.random.default_rng(0))


def test_the_figures_follow_from_each_other(small, capsys):
    status, out, _ = run(capsys, "bench", "-m", small, "-t", "1,2", "--prefill", "9", "--prefill", "24", "--decode", "5",
                         "--context", "0,70", "--repeat", "2", "--timing", "--json")
    assert status == 0
    said = json.loads(out)
    assert "generate" in said["verified"]
    assert said["pack_bytes"] == small.stat().st_size
    assert any("smaller than 2.15 GB" in note for note in said["notes"])
    assert [one["threads"] for one in said["runs"]] == [1, 2]
    for one in said["runs"]:
        best = max(read["bytes_per_s"] for read in one["roofline"].values())
        assert [row["context"] for row in one["decode"]] == [[0, 12], [70, 82]]
        assert [row["tokens"] for row in one["prefill"]] == [9, 24]
        for row in one["decode"]:
            assert row["tokens"] == 10
            assert row["tokens_per_s"] * row["median_s"] == pytest.approx(1)
            assert row["min_s"] <= row["median_s"] <= row["max_s"]
            assert row["bytes_per_token"]["weights"] == WEIGHTS
            mean = row["context"][0] + 2 + (10 - 1) / 2  # before each of ten tokens that follow two
            assert row["bytes_per_token"]["kv"] == 2 * 2 * 2 * KV_ROWS["f32"] * (mean + 1)
            assert row["bytes_per_s"] == pytest.approx(sum(row["bytes_per_token"].values()) / row["median_s"])
            assert row["share_of_roofline"] == pytest.approx(row["bytes_per_s"] / best)
            assert row["macs_per_s"] == pytest.approx((LAYER_MACS + 517 * 64) / row["median_s"])
            held = row["memory"]
            assert held["resident"] >= held["anonymous"] >= held["state_and_kv"] > 0
        for row in one["prefill"]:
            assert row["macs_per_s"] == pytest.approx((row["tokens"] * LAYER_MACS + 517 * 64) / row["median_s"])
            peaks = one["integer_peak_macs_per_s"]
            assert row["share_of_integer_peak"] == pytest.approx(row["macs_per_s"] / max(peaks.values()))
        for row in (*one["decode"], *one["prefill"]):
            parts = row["timing"]["parts_s"]
            assert sum(parts.values()) == pytest.approx(row["timing"]["total_s"])
            assert min(parts.values()) >= 0  # what the ops took is no more than the total
            assert {"attention", "gdn_recurrent", bench.OTHER} <= set(parts)
        assert one["first_token_s"] > 0


def test_tables_show_all_of_it(small, capsys):
    status, out, _ = run(capsys, "bench", "-m", small, "-t", "1", "--prefill", "8", "--decode", "2", "--repeat", "1", "--timing",
                         "--kv-format", "q8_0")
    assert status == 0
    for text in ("verified before timing: ", "tok/s", "of roofline", "of integer peak", "roofline before", "roofline after",
                 "resident memory", "first token", bench.OTHER, "1 thread: a token after 132", "1 thread: a prefill of 8"):
        assert text in out


@pytest.mark.parametrize(("after", "quiet"), [(0.96, True), (0.94, False)])
def test_a_machine_in_use_is_noticed(small, capsys, monkeypatch, after, quiet):
    rates = iter([1e9, after * 1e9])
    monkeypatch.setattr(roofline, "streaming_read",
                        lambda *args, **options: roofline.Reads(next(rates), "made up", 256, {"made up": 1e9}))
    status, out, _ = run(capsys, "bench", "-m", small, "-t", "1", "--prefill", "0", "--decode", "1", "--repeat", "1")
    assert status == 0
    assert ("not quiet: the rooflines before and after differ by 6%" in out) is not quiet


def test_parts_can_be_left_out(small, capsys):
    status, out, _ = run(capsys, "bench", "-m", small, "-t", "1", "--prefill", "0", "--decode", "0", "--json")
    assert status == 0
    assert json.loads(out)["runs"][0]["prefill"] == json.loads(out)["runs"][0]["decode"] == []


def test_a_red_stage_refuses(small, capsys, monkeypatch):
    """A kernel that is really wrong: nothing is measured, one line says which stage."""
    sound = CpuKernels.swiglu
    monkeypatch.setattr(CpuKernels, "swiglu", lambda self, x: sound(self, x) * np.float32(1.001))
    monkeypatch.setattr(bench, "measure", lambda *args: pytest.fail("measured all the same"))
    status, out, err = run(capsys, "bench", "-m", small, "-t", "1", "--backend", "scalar")
    assert (status, out) == (2, "")
    assert err.startswith("error: stage swiglu is red on scalar (")
    assert err.count("\n") == 1


def test_a_first_token_that_does_not_come_is_told(small, monkeypatch):
    monkeypatch.setattr(bench.sys, "executable", "/bin/false")
    with pytest.raises(RequestError, match="generating a first token failed: no output"):
        bench.first_token(Engine.load(small))


def test_scarce_memory_is_said_and_the_pack_not_read_ahead(small, capsys, monkeypatch):
    monkeypatch.setattr(bench, "available_bytes", lambda: 1000)
    status, out, _ = run(capsys, "bench", "-m", small, "-t", "1", "--prefill", "0", "--decode", "1", "--json")
    assert status == 0
    assert any(note.startswith("memory is scarce: 1.00 kB available for a pack of") for note in json.loads(out)["notes"])


@pytest.mark.parametrize(("args", "text"), [
    (("--prefill", "12,x"), "--prefill: 'x' is not a whole number up to 1048576; give one, or several"),
    (("--context", "-1"), "--context: '-1' is not a whole number"),
    (("--context", "99999"), "a context of 99999 tokens exceeds the model's 4096"),
    (("--prefill", "5000"), "5000 tokens exceed the context of 4096"),
    (("--threads", "300"), "threads = 300; at most 256 run"),
    (("--threads", "0"), "threads = 0 must be a whole number of at least 1"),
    (("--kv-format", "q2"), "kv_format = 'q2'"),
    (("--repeat", "0"), "Invalid value for '--repeat'"),
    (("--no-verify",), "No such option: --no-verify"),
])
def test_wrong_options(small, capsys, args, text):
    status, out, err = run(capsys, "bench", "-m", small, *args)
    assert (status, out) == (2, "")
    assert text in err
    assert err.count("\n") == 1


def test_scaling_measures_and_draws(small, tmp_path, capsys):
    stem = tmp_path / "curve"
    args = [str(small), "-o", str(stem), "--contexts", "16,64,256", "--prompts", "8,32", "--decode", "2", "--threads", "1"]
    assert scaling.main(args) == 0
    figures = json.loads(stem.with_suffix(".json").read_text())
    assert len(figures["decode"]) == 3
    first = stem.with_suffix(".svg").read_bytes()
    svg = ET.fromstring(first)
    assert len(svg.findall("{*}circle")) == 5
    assert len(svg.findall("{*}polyline")) == 3
    for circle in svg.findall("{*}circle"):
        assert 0 <= float(circle.get("cx")) <= scaling.WIDTH
        assert scaling.TOP <= float(circle.get("cy")) <= scaling.TOP + scaling.PLOT_HEIGHT
    assert scaling.main([str(stem.with_suffix(".json"))]) == 0
    assert stem.with_suffix(".svg").read_bytes() == first
    capsys.readouterr()
    assert scaling.main([str(tmp_path / "none.pack")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
