"""`fermi-engine eval`: the measures against torch, the small trained model against the reference, interruptions, bad input."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div

from fermi_engine.cli import app as cli
from fermi_engine.cli import evaluate as cli_eval
from fermi_engine.config import EngineConfig
from fermi_engine.convert import convert
from fermi_engine.engine import Engine
from fermi_engine.errors import FermiError, ImageError, RequestError, TokenizerError
from fermi_engine.info import part_of
from fermi_engine.model.decoder import Decoder
from fermi_engine.quality import evaluate
from fermi_engine.quality import measures as quality
from fermi_engine.quality.documents import Document, ImageFile, Reader, texts, windows
from fermi_engine.quality.evaluate import Mixed, Model
from fermi_engine.quality.measures import Records, by_position, log_softmax, mean_error, score, summary
from fermi_engine.quality.resume import Resume, digest_of
from fermi_engine.state import HybridState
from fermi_engine.vision import prompt as image_prompt
from tools import oracle, tiny_text
from tools.make_checkpoint import make_checkpoint
from tools.tiny_tasks import Encoder

TINY = Path(__file__).resolve().parent.parent / "golden" / "tiny"
U64 = 2.0**-53
F32 = EngineConfig(activations="f32", threads=1)


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("quality")
    return {format: convert(TINY, folder / f"{format}.pack", format) for format in ("f32", "q4_0")}


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six chats of held-out tasks."""
    return tiny_text.write(tmp_path_factory.mktemp("text") / "held.jsonl", Encoder.from_directory(TINY), "held", 31, 1)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FERMI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def model(path: Path, options: EngineConfig = F32) -> Model:
    return Model.of(Engine.load(path, config=options))


def pieces_of(path: Path, length: int = 2048) -> list[np.ndarray]:
    read = [Document(np.array(json.loads(line)["ids"], np.int32)) for line in path.read_text().splitlines()]
    return [piece.ids for piece in windows(read, length, str(path))]


def figures(records: Records) -> str:
    return json.dumps([summary(records), by_position(records)])


def refusal(kind: type[FermiError], action: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# measures


def drawn_logits(seed: int, rows: int, vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    a = rng.normal(0, 4, (rows, vocab)).astype(np.float32)
    return a, (a + rng.normal(0, 0.5, a.shape)).astype(np.float32), rng.integers(0, vocab, rows)


def test_measures_are_those_of_torch() -> None:
    base, logits, targets = drawn_logits(0, 40, 300)
    records = score(logits, targets, log_softmax(base), window=3, first=10)
    p, q = (torch.log_softmax(torch.from_numpy(x).double(), -1) for x in (base, logits))
    # sums of 300 terms, each with a handful of roundings, of logarithms up to 40
    limit = 300 * 8 * U64 * 40
    for name, truth in (("kl", kl_div(q, p, log_target=True, reduction="none").sum(-1)),
                        ("kl_back", kl_div(p, q, log_target=True, reduction="none").sum(-1)),
                        ("nll", cross_entropy(torch.from_numpy(logits).double(), torch.from_numpy(targets), reduction="none")),
                        ("base_nll", cross_entropy(torch.from_numpy(base).double(), torch.from_numpy(targets),
                                                   reduction="none"))):
        np.testing.assert_allclose(getattr(records, name), truth.numpy(), rtol=0, atol=limit, err_msg=name)
    np.testing.assert_array_equal(records.same, (p.argmax(-1) == q.argmax(-1)).numpy())
    np.testing.assert_array_equal(records.position, np.arange(11, 51))
    assert set(records.window) == {3}
    assert 0 < records.same.sum() < 40
    assert abs(summary(records)["kl"]["mean"] - summary(records)["kl_back"]["mean"]) > 1e-3


def test_large_logits_do_not_overflow() -> None:
    rows = log_softmax(np.array([[3e38, -3e38, 3e38]], np.float32))
    np.testing.assert_allclose(rows[0, [0, 2]], math.log(0.5))
    assert np.isfinite(rows).all()


def test_a_summary_by_hand() -> None:
    parts = [Records(np.array([1, 2, 3], np.int32), np.full(3, w, np.int32), np.array(nll, float), np.array(base, float),
                     np.array(kl, float), np.array(back, float), np.array([True, False, True]))
             for w, nll, base, kl, back in ((0, [1, 2, 3], [1, 1, 1], [0, 0, 3], [1, 1, 1]),
                                            (7, [2, 2, 2], [1, 2, 3], [0, 1, 2], [2, 2, 2]))]
    said = summary(Records.join(parts))
    assert (said["tokens"], said["windows"]) == (6, 2)
    assert said["ppl"] == pytest.approx(math.exp(2))
    assert said["base_ppl"] == pytest.approx(math.exp(9 / 6))
    assert said["nll_loss"] == pytest.approx(0.5)
    assert said["kl"]["mean"] == pytest.approx(1)
    assert (said["kl"]["median"], said["kl"]["max"]) == (0.5, 3)
    assert said["kl"]["p99"] == pytest.approx(2.95)  # between the two largest of six
    assert said["kl_back"]["mean"] == pytest.approx(1.5)
    assert said["top1"] == pytest.approx(4 / 6)
    # independent tokens: deviations 1, 0, 1, 0, 0, 0; windows: both sum to 0
    assert said["ppl_error"] == pytest.approx(math.exp(2) * math.sqrt(2 / 5 / 6))
    rows = by_position(Records.join(parts))
    assert [(row["from"], row["to"], row["tokens"]) for row in rows] == [(1, 1, 2), (2, 3, 4)]
    assert rows[0]["kl"]["mean"] == 0
    assert rows[1]["kl"]["mean"] == pytest.approx(1.5)


def test_an_error_bar_covers_what_windows_share() -> None:
    """Values that a window shares: the spread of the mean over many draws is the error bar, not that of single tokens."""
    rng = np.random.default_rng(5)
    means, errors = [], []
    for _ in range(400):
        window = np.repeat(np.arange(30), rng.integers(5, 40, 30))
        values = rng.normal(0, 1, 30)[window] + rng.normal(0, 1, len(window))
        mean, error = mean_error(values, window)
        means.append(mean)
        errors.append(error)
    assert 0.85 < np.mean(errors) / np.std(means) < 1.15  # the spread of 400 draws is known to 4 %
    lonely = np.random.default_rng(6).normal(0, 1, 900)
    assert mean_error(lonely, np.zeros(900))[1] == pytest.approx(lonely.std(ddof=1) / 30)
    assert math.isnan(mean_error(np.empty(0), np.empty(0))[0])


def test_logits_that_are_no_numbers_are_refused() -> None:
    for bad in (np.nan, np.inf):
        assert "info --check" in refusal(RequestError, lambda bad=bad: log_softmax(np.array([[0, bad]], np.float32)))


def test_figures_are_printed_to_their_error() -> None:
    assert cli_eval.measured(6.2334, 0.0412) == "6.233 ± 0.041"
    assert cli_eval.measured(0.002491, 0.000193) == "0.00249 ± 0.00019"
    assert cli_eval.measured(0.0000624, 0.0000061) == "(6.24 ± 0.61)e-5"
    assert cli_eval.measured(0.0, 0.0) == "0"
    assert cli_eval.measured(math.nan, math.nan) == "nan"


# the small trained model


def test_perplexity_is_that_of_the_reference_and_f32_against_itself_loses_nothing(packs, held) -> None:
    ours, pieces = model(packs["f32"]), pieces_of(held)
    found = evaluate.evaluate({"same": ours}, model(packs["f32"]), pieces, Resume(None, ""))["same"]
    said = summary(found)
    reference = oracle.decoder(ours_pack(packs["f32"]), "f32", torch.float32)
    with torch.no_grad():
        losses = [cross_entropy(reference.forward(piece[:-1].tolist())[0].double(), torch.from_numpy(piece[1:]).long(),
                                reduction="none") for piece in pieces]
    assert said["ppl"] == pytest.approx(math.exp(torch.cat(losses).mean()), rel=1e-4)
    assert said["tokens"] == sum(len(piece) - 1 for piece in pieces)
    assert said["ppl"] == said["base_ppl"]
    # p sums to 1 within the roundings of 1024 terms, and the logarithms of both are the same numbers
    assert max(np.abs(found.kl).max(), np.abs(found.kl_back).max()) <= 1024 * U64
    assert said["top1"] == 1


def ours_pack(path: Path):
    return Engine.load(path, config=F32).pack


def test_divergence_of_q4_0_is_that_of_the_reference(packs, held) -> None:
    pieces = pieces_of(held)[:3]
    found = evaluate.evaluate({"q4": model(packs["q4_0"])}, model(packs["f32"]), pieces, Resume(None, ""))["q4"]
    kl = []
    with torch.no_grad():
        for piece in pieces:
            p, q = (torch.log_softmax(oracle.decoder(ours_pack(packs[format]), "f32", torch.float64)
                                      .forward(piece[:-1].tolist())[0], -1) for format in ("f32", "q4_0"))
            kl.append(kl_div(q, p, log_target=True, reduction="none").sum(-1))
    truth = float(torch.cat(kl).mean())
    # logits of float32 engines stay within 1e-6 of their size (some 20) of the float64 truth; KL is second order in what the
    # two models differ by, so an error e of a logit moves it by at most e times that difference, below 10 everywhere
    assert summary(found)["kl"]["mean"] == pytest.approx(truth, abs=2 * 1e-6 * 20 * 10)
    assert truth > 1e-3


def test_windows_are_read_from_an_empty_state(packs) -> None:
    ours, ids = model(packs["q4_0"]), np.arange(1, 81, dtype=np.int32)
    found = evaluate.evaluate({"m": ours}, None, [ids[:40], ids[40:]], Resume(None, ""))["m"]
    rows = log_softmax(Engine.load(packs["q4_0"], config=F32).session().logits(ids[40:79]))
    np.testing.assert_array_equal(found.nll[39:], -rows[np.arange(39), ids[41:80]])


def test_logits_are_held_a_few_positions_at_a_time(packs, held, monkeypatch) -> None:
    sizes, real = [], Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda self, x, *rest: (sizes.append(len(x)), real(self, x, *rest))[1])
    pieces = pieces_of(held)
    evaluate.evaluate({"m": model(packs["q4_0"])}, model(packs["f32"]), pieces, Resume(None, ""))
    assert max(sizes) <= quality.HEAD_ROWS < max(map(len, pieces))
    assert sum(sizes) == 2 * sum(len(piece) - 1 for piece in pieces)


def test_a_part_put_into_the_base_is_a_pack_of_mixed_formats(packs, tmp_path) -> None:
    """As if those tensors alone had been converted to q4_0."""
    ids = np.arange(5, 45, dtype=np.int32)
    engines = {name: Engine.load(path, config=F32) for name, path in packs.items()}
    for part, rules in (("head", "lm_head.weight=q4_0"), ("experts", "*.experts.*=q4_0"), ("down", "*.experts.down*=q4_0"),
                        ("qkv", "*qkv*=q4_0")):
        chosen = (lambda name, part=part: part_of(name) == part) if part in ("head", "experts") else \
            (lambda name, part=part: part in name and "shared" not in name)
        weights = Mixed(engines["f32"].pack, engines["q4_0"].pack, chosen)
        decoder = Decoder(weights, engines["f32"].kernels, "f32")
        state = HybridState.fresh(decoder.config, 64, "f32")
        found = decoder.logits(decoder.hidden(ids, state))
        path = convert(TINY, tmp_path / part, "f32", rules)
        np.testing.assert_array_equal(found, Engine.load(path, config=F32).session().logits(ids), err_msg=part)


# interruptions


def test_an_interrupted_run_goes_on_to_the_same_figures(packs, held, tmp_path, monkeypatch) -> None:
    ours, base, pieces = model(packs["q4_0"]), model(packs["f32"]), pieces_of(held, 60)
    whole = evaluate.evaluate({"m": ours}, base, pieces, Resume(None, ""))["m"]
    read, real = [], evaluate._window
    monkeypatch.setattr(evaluate, "_window", lambda *a: (read.append(a[3]), real(*a))[1])

    def stop_at(count: int) -> Callable[[int, int, str], None]:
        seen = []

        def report(done: int, total: int, name: str) -> None:
            seen.append(done)
            if len(seen) == count:
                raise KeyboardInterrupt
        return report

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            evaluate.evaluate({"m": ours}, base, pieces, Resume(tmp_path / "part", "key"), stop_at(3))
    found = evaluate.evaluate({"m": ours}, base, pieces, Resume(tmp_path / "part", "key"))["m"]
    assert read == list(range(len(pieces)))
    assert figures(found) == figures(whole)


def test_power_that_fails_costs_what_came_after_the_last_save(packs, held, tmp_path, monkeypatch) -> None:
    """A process that dies saves nothing more: what is there is whole, and no newer than the interval says."""
    ours, pieces, now = model(packs["q4_0"]), pieces_of(held, 60), [0.0]

    def dies(self: Resume, arrays: dict[str, np.ndarray], real=Resume.save) -> None:
        if now[0] < 1000:
            real(self, arrays)
            raise SystemExit

    monkeypatch.setattr(Resume, "due", lambda self: now[0] >= 4)

    def tick(done: int, total: int, name: str) -> None:
        now[0] += 1

    monkeypatch.setattr(Resume, "save", dies)
    with pytest.raises(SystemExit):
        evaluate.evaluate({"m": ours}, None, pieces, Resume(tmp_path / "part", "key"), tick)
    assert int(Resume(tmp_path / "part", "key").load()["done"]) == 5


def test_progress_of_another_run_or_damaged_counts_for_nothing(tmp_path) -> None:
    path, stored = tmp_path / "deep" / "part", {"x": np.arange(4)}
    Resume(path, "one").save(stored)
    np.testing.assert_array_equal(Resume(path, "one").load()["x"], stored["x"])
    assert Resume(path, "two").load() is None
    whole = path.read_bytes()
    for at in (0, 20, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
        assert Resume(path, "one").load() is None, at
    path.write_bytes(whole[:-3])
    assert Resume(path, "one").load() is None
    path.write_bytes(b"[1]\n")
    assert Resume(path, "one").load() is None
    Resume(path, "one").done()
    assert not list(path.parent.iterdir())
    assert Resume(None, "x").load() is None


def test_progress_that_cannot_be_kept_is_one_line(tmp_path) -> None:
    (tmp_path / "file").touch()
    assert "FERMI_CACHE" in refusal(RequestError, lambda: Resume(tmp_path / "file" / "part", "k").save({}))


def test_what_is_measured_names_the_run() -> None:
    base = digest_of("eval", ["a"], np.arange(3))
    assert base == digest_of("eval", ["a"], np.arange(3))
    assert len({base, digest_of("eval", ["b"], np.arange(3)), digest_of("eval", ["a"], np.arange(4)),
                digest_of("evala", [], np.arange(3))}) == 4


# documents


class tower:
    """As much of a Vision as prompts need."""

    @staticmethod
    def prepare(path: Path) -> None:
        raise ImageError(f"cannot read {path}")

    @staticmethod
    def expand(tokenizer: object, ids: list[int], images: list) -> list[int]:
        return image_prompt.expand(ids, 1016, images)


def reader(tokenizer: Callable[[], object] | None = None) -> Reader:
    files = {path.name: path.read_bytes() for path in TINY.iterdir() if path.suffix in (".json", ".jinja")}
    encoder = Encoder.from_directory(TINY)
    return Reader(tokenizer or (lambda: encoder.tokenizer), files, 1024, lambda: tower)


def test_documents_of_every_kind(tmp_path) -> None:
    encoder = Encoder.from_directory(TINY)
    (tmp_path / "a.txt").write_text("What is 3 + 4?\n<|im_end|>")
    lines = [{"ids": [5, 6, 7]}, {"text": "two"}, {"messages": [{"role": "user", "content": "Hello"}], "enable_thinking": False},
             {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}]
    (tmp_path / "b.jsonl").write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    found = [document.ids for document in reader().read([tmp_path / "a.txt", tmp_path / "b.jsonl"])]
    assert encoder.tokenizer.decode(found[0]) == "What is 3 + 4?\n<|im_end|>"
    assert found[0][-1] == encoder.end
    assert found[1].tolist() == [5, 6, 7]
    assert encoder.tokenizer.decode(found[2]) == "two"
    assert encoder.tokenizer.decode(found[3]).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert encoder.tokenizer.decode(found[4]).rstrip().endswith("Hi<|im_end|>")
    assert all(ids.dtype == np.int32 for ids in found)


BAD_LINES = {
    "no JSON": ("{", "line 2 is no JSON"),
    "no object": ("[1]", "has none of text, ids, messages"),
    "two kinds": ('{"text": "a", "ids": [1]}', "has text and ids of"),
    "ids off the vocabulary": ('{"ids": [1, 1024]}', "token ids in 0..1023"),
    "ids that are none": ('{"ids": [1, true]}', "no list of token ids"),
    "text that is none": ('{"text": 5}', "line 2: text to encode is int"),
    "no message": ('{"messages": []}', "line 2: messages is an empty list"),
    "a video": ('{"messages": [{"role": "user", "content": [{"type": "video"}]}]}', "part of type 'video'"),
    "an image without a path": ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "says not which"),
    "an image that is absent": ('{"messages": [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}]}', "a.png"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named(tmp_path, name) -> None:
    line, words = BAD_LINES[name]
    (tmp_path / "x.jsonl").write_text('{"ids": [1, 2]}\n' + line)
    kind = ImageError if "absent" in name else RequestError
    said = refusal(kind, lambda: reader().read([tmp_path / "x.jsonl"]))
    assert words in said
    assert "x.jsonl, line 2" in said


def test_files_that_are_no_text(tmp_path) -> None:
    (tmp_path / "binary").write_bytes(b"ab\xff")
    assert "no UTF-8 text (byte 2)" in refusal(RequestError, lambda: reader().read([tmp_path / "binary"]))
    assert "cannot read" in refusal(RequestError, lambda: reader().read([tmp_path / "absent"]))

    def missing() -> object:
        raise TokenizerError("no tokenizer")

    (tmp_path / "ids.jsonl").write_text('{"ids": [1, 2]}')
    assert len(reader(missing).read([tmp_path / "ids.jsonl"])) == 1
    (tmp_path / "text.jsonl").write_text('{"text": "a"}')
    refusal(TokenizerError, lambda: reader(missing).read([tmp_path / "text.jsonl"]))


def test_windows_cut_documents_and_never_join_them() -> None:
    documents = [Document(np.arange(n, dtype=np.int32)) for n in (5, 1, 4, 0)]
    assert [piece.ids.tolist() for piece in windows(documents, 4, "x")] == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert [len(piece.ids) for piece in windows(documents, 3, "x")] == [3, 2, 3]
    assert "1 token in 1 documents" in refusal(RequestError, lambda: windows([Document(np.arange(1))], 4, "x"))
    shown = Document(np.arange(5), (ImageFile(Path("a.png"), b""),), "t.jsonl, line 1")
    assert [piece.images for piece in windows([shown], 5, "x")] == [shown.images]
    assert "t.jsonl, line 1: 5 tokens with images" in refusal(RequestError, lambda: windows([shown], 4, "x"))
    assert "t.jsonl, line 1 shows an image; eval reads text only" in refusal(RequestError, lambda: texts([shown], "eval"))
    assert "x holds no usable text" in refusal(RequestError, lambda: windows([], 4, "x"))


# the command


def run(capsys: pytest.CaptureFixture, *args: str | Path) -> tuple[int, str, str]:
    status = cli.run(["eval", *map(str, args)])
    return status, *capsys.readouterr()


def test_the_command_prints_tables_and_json(capsys, packs, held, cache) -> None:
    line = ["-m", packs["q4_0"], "-m", packs["f32"], "--text", held, "--against", packs["f32"], "-t", "1", "--activations",
            "f32"]
    status, out, _ = run(capsys, *line)
    assert status == 0
    assert "of the base from the model" in out
    assert "100.00% ± 0.00%" in out
    status, out, _ = run(capsys, *line, "--json")
    said = json.loads(out)
    assert [row["format"] for row in said["models"]] == ["q4_0", "f32"]
    assert said["models"][0]["kl"]["mean"] > 1e-3 > 1e-12 > abs(said["models"][1]["kl"]["mean"])
    assert said["models"][0]["positions"][0]["from"] == 1
    status, out, _ = run(capsys, "-m", packs["q4_0"], "--text", held, "-t", "1", "--window", "50")
    assert "KL" not in out
    assert "by position" in out
    assert not list(cache.glob("*"))


def test_loss_by_class(capsys, packs, held, cache, tmp_path) -> None:
    chats = held.read_text().splitlines()  # two sums, a call, turns, a copy, a needle
    (tmp_path / "few.jsonl").write_text("\n".join([*chats[:2], chats[4]]))
    line = ["-m", packs["q4_0"], "--text", tmp_path / "few.jsonl", "--against", packs["f32"], "-t", "1", "--window", "100",
            "--by"]
    status, out, _ = run(capsys, *line, "class", "--json")
    said = json.loads(out)
    assert status == 0
    parts = {row["part"]: row for row in said["parts"]}
    assert set(parts) == {"attention", "delta net", "embedding", "experts", "head", "shared expert"}
    assert all(0 < row["kl"]["mean"] < 0.1 for row in parts.values())
    assert "layers.3.mlp.experts.down_proj" in parts["experts"]["tensors"]
    assert parts["head"]["tensors"] == ["lm_head.weight"]
    assert sum(row["weights"] for row in parts.values()) == 4767744
    assert parts["head"]["base_bytes"] / parts["head"]["bytes"] == pytest.approx(4 / (18 / 32))
    kinds = {row["part"]: row for row in json.loads(run(capsys, *line, "kind", "--json")[1])["parts"]}
    assert kinds["lm_head.weight"]["kl"] == parts["head"]["kl"]
    down, first = kinds["layers.*.mlp.experts.down_proj"], kinds["layers.*.mlp.experts.gate_up_proj"]
    assert down["weights"] + first["weights"] == parts["experts"]["weights"]
    assert first["kl"]["mean"] < down["kl"]["mean"]
    status, out, _ = run(capsys, *line, "class")
    largest_first = sorted(parts, key=lambda part: -parts[part]["kl"]["mean"])
    places = [out.index(f"\n {part} ", out.index("by class")) for part in (*largest_first, "all")]
    assert places == sorted(places)


def test_an_interrupted_command_resumes(capsys, packs, held, cache, monkeypatch) -> None:
    line = ["-m", packs["q4_0"], "--text", held, "-t", "1", "--json"]
    whole = run(capsys, *line)
    real, calls = evaluate._window, []

    def interrupted(*args):
        if len(calls) == 2:
            calls.append("stopped")
            raise KeyboardInterrupt
        calls.append(args[3])
        return real(*args)

    monkeypatch.setattr(evaluate, "_window", interrupted)
    assert run(capsys, *line)[0] == cli.INTERRUPTED
    assert len(list(cache.iterdir())) == 1
    assert run(capsys, *line) == whole
    assert calls == [0, 1, "stopped", *range(2, 6)]
    assert not list(cache.iterdir())


MISTAKES = {
    "by without a base": (["--by", "class"], "--by needs one --model and --against"),
    "by something else": (["--against", "{f32}", "--by", "layer"], "choose class, kind or tensor"),
    "another vocabulary": (["--against", "{other}"], "vocabulary of 1024"),
    "empty text": (["--text", "{empty}"], "no usable text"),
    "the same model twice": (["-m", "{q4_0}"], "given twice"),
    "nothing quantised": (["--against", "{q4_0}", "--by", "class"], "holds no quantised tensor"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line(capsys, packs, held, cache, tmp_path, name) -> None:
    other = convert(make_checkpoint(tmp_path / "other", 1, layers=4), tmp_path / "other.pack")
    (tmp_path / "empty").touch()
    words, said = MISTAKES[name]
    names = {**packs, "other": other, "empty": tmp_path / "empty"}
    line = ["-m", packs["f32" if name == "nothing quantised" else "q4_0"], "-t", "1"]
    line += ["--text", held] if "--text" not in words else []
    status, out, err = run(capsys, *line, *(word.format(**names) for word in words))
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err
    assert not cache.exists()
