"""The small trained model's making: generated tasks, their checkers, the training form of the model, and a short run."""

from __future__ import annotations

import dataclasses
import itertools
import json
from random import Random

import numpy as np
import pytest
import torch
import transformers

from fermi_engine import chat
from fermi_engine.checkpoint import Checkpoint
from fermi_engine.compression.rules import assign
from fermi_engine.config import ModelConfig
from fermi_engine.vision.config import is_vision
from reference import gated_delta_rule as gdn
from reference import quant
from reference.decoder import Decoder
from reference.norms import l2_norm
from tests import hf
from tools import (
    tiny_accuracy,
    tiny_batches,
    tiny_calls,
    tiny_curves,
    tiny_files,
    tiny_model,
    tiny_tokenizer,
    train_tiny,
)
from tools import tiny_tasks as tasks
from tools import tiny_words as w
from tools.tiny_optimiser import orthogonal
from tools.tiny_quantise import Master, as_q4_0, quantised_names

SMALL = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2}
BUDGETS = {"needle": 300, "copying": 160, "arithmetic": 64, "turns": 400, "tool_call": 400}
# Sums of a few hundred float64 terms a layer, eight layers, amplified by norms: a million roundings, none near it.
FLOAT64_NOISE = 1e6 * 2.0**-53


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    with hf.threads(1):
        yield


@pytest.fixture(scope="module")
def texts() -> dict[str, bytes]:
    return tiny_tokenizer.tokenizer_files()


@pytest.fixture(scope="module")
def encoder(texts) -> tasks.Encoder:
    return tiny_tokenizer.encoder(texts)


def some(encoder: tasks.Encoder, task: str, split: str = "held", count: int = 30) -> list[tasks.Sample]:
    return [tasks.drawn(task, split, 3, i, encoder.measure, BUDGETS[task]) for i in range(count)]


# Generator


@pytest.mark.parametrize("task", tasks.TASKS)
def test_the_same_arguments_give_the_same_sample(encoder, task):
    first, again = some(encoder, task), some(encoder, task)
    assert first == again
    assert len({json.dumps([s.messages, s.tools]) for s in first}) > 25, "samples repeat"


def test_held_out_names_sums_and_calls_are_apart_from_training(encoder):
    for split in ("train", "held"):
        held = split == "held"
        for sample in some(encoder, "arithmetic", split):
            a, sign, b = sample.messages[0]["content"].replace("?", "").rstrip(".").split()[-3:]
            assert w.held_out(f"{a} {sign} {b}") is held
        for sample in some(encoder, "tool_call", split):
            name, arguments = sample.expected
            assert w.held_out(f"{name} {sorted(arguments.items())}") is held
        for sample in some(encoder, "needle", split):
            asked = sample.messages[-1]["content"].rsplit("\n", 1)[-1]
            names = {"".join(parts) for parts in itertools.product(w.FIRST, w.SECOND, w.THIRD) if "".join(parts) in asked}
            assert [w.held_out(name) for name in names] == [held]


def test_one_in_eight_is_held_out():
    names = ["".join(parts) for parts in itertools.product(w.FIRST, w.SECOND, w.THIRD)]
    share = sum(map(w.held_out, names)) / len(names)
    deviation = (1 / 8 * 7 / 8 / len(names)) ** 0.5
    assert abs(share - 1 / w.HELD_SHARE) < 5 * deviation


@pytest.mark.parametrize("task", tasks.TASKS)
def test_right_answers_pass_and_wrong_ones_do_not(encoder, task):
    for sample in some(encoder, task):
        assert tasks.check(sample, sample.answer)
        for wrong in spoilt(sample):
            assert not tasks.check(sample, wrong), wrong


def spoilt(sample: tasks.Sample) -> list[str]:
    """Answers that must not pass: empty, cut, a digit or letter off, said twice, reasoning never closed."""
    whole, reply = sample.answer, tasks.reply_of(sample, sample.answer)
    if sample.task == "needle":
        name, code = sample.expected
        wrong = [whole.replace(code, code[:-1]), whole.replace(code, code[::-1] if code != code[::-1] else "0" + code),
                 whole.replace(name, "Nobody"), whole + reply]
    else:
        last = whole.rstrip("\n>.")[-1]
        wrong = [whole[:-1], whole.replace(last, chr(ord(last) + 1)), whole + "0", whole + "\n" + reply]
    if sample.task == "tool_call":
        wrong += [whole.replace(f"<function={sample.expected[0]}>", "<function=other>"), "Of course: " + reply]
    return ["", *wrong, *([whole.replace("</think>", "")] if sample.thinking else [])]


def test_a_call_with_another_value_key_or_type_fails(encoder):
    for sample in some(encoder, "tool_call"):
        name, arguments = sample.expected
        key, value = next(iter(arguments.items()))
        other = {bool: not value, int: 7777, str: "other"}[type(value)]
        for changed in ({**arguments, key: other}, {k: v for k, v in arguments.items() if k != key},
                        {**arguments, "extra": 1}):
            text = tiny_calls.call_text(name, changed)
            answer = f"thought\n</think>\n\n{text}" if sample.thinking else text
            assert not tasks.check(sample, answer)
        schema = next(t for t in sample.tools if t["function"]["name"] == name)
        assert tiny_calls.fits_schema(arguments, schema)
        assert not tiny_calls.fits_schema({**arguments, key: [value]}, schema)


def test_written_sums_work_out(encoder):
    """Every line is right by itself, carries pass on, and the digits make the result."""
    rng = Random(1)
    for _ in range(500):
        a, b, plus = rng.randrange(1000), rng.randrange(1000), rng.random() < 0.5
        a, b = (a, b) if plus else (max(a, b), min(a, b))
        steps, result = tasks.worked(a, b, plus)
        carry, digits = 0, []
        for line in steps.split("\n"):
            left, right = line.split("=")
            x, y, c = map(int, left.replace("-", "+").split("+"))
            value = x + y + c if plus else x - y - c
            assert c == carry
            assert value == (int(right) if plus else int(right[1]) - 10 * int(right[0]))
            carry, digits = int(right[0]), [right[1], *digits]
        assert int((str(carry) if plus else "") + "".join(digits)) == int(result) == (a + b if plus else a - b)
        assert plus or carry == 0


def test_needles_stand_at_their_depths(encoder):
    for sample in tasks.drawn_row("held", 2, 0, encoder.measure, 2000):
        text = sample.messages[0]["content"].rsplit("\n\n", 1)[0]
        code = sample.expected[1]
        before = text[: text.index(code)]
        depth = encoder.measure(before) / encoder.measure(text)
        wanted = tasks.DEPTHS[len([c for c in row_codes(text) if text.index(c) < len(before)])]
        longest_sentence = 60
        assert abs(depth - wanted) < longest_sentence / 2000 + 9 * 20 / 2000
        assert text.count(code) == 1
        assert len(encoder.prompt(sample) + encoder.answer(sample)) in range(1900, 2001)


def row_codes(text: str) -> list[str]:
    return [word.rstrip(".。") for word in text.split() if len(word.rstrip(".。")) == 5 and word.rstrip(".。").isdecimal()]


def test_call_text_is_the_templates_own_form(encoder):
    for sample in some(encoder, "tool_call", count=10):
        name, arguments = sample.expected
        told = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}
        whole = chat.render(encoder.template, [*sample.messages, told], tools=sample.tools, add_generation_prompt=False)
        assert whole.endswith(f"<|im_start|>assistant\n{tiny_calls.call_text(name, arguments)}<|im_end|>\n")


@pytest.mark.parametrize("task", tasks.TASKS)
def test_marked_tokens_are_what_assistants_say(encoder, task):
    for sample in some(encoder, task, count=8):
        ids, said = encoder.marked(sample)
        earlier = [m["content"] for m in sample.messages if m["role"] == "assistant"]
        marked = [encoder.tokenizer.decode([i for i, s in group if s])
                  for s, group in ((s, list(g)) for s, g in itertools.groupby(zip(ids, said, strict=True), lambda x: x[1])) if s]
        assert marked == [text + "<|im_end|>" for text in [*earlier, sample.answer]]
        assert ids[: len(encoder.prompt(sample))] == encoder.tokenizer.encode(
            chat.render(encoder.template, sample.messages, tools=sample.tools, enable_thinking=sample.thinking))


# Tokenizer


def test_names_are_three_tokens_and_digits_one_each(encoder):
    for parts in itertools.product(w.FIRST, w.SECOND, w.THIRD):
        assert len(encoder.tokenizer.encode(" " + "".join(parts))) == 3
    assert [encoder.tokenizer.decode([i]) for i in encoder.tokenizer.encode("40917")] == list("40917")


def test_every_script_comes_back_and_ids_fill_the_vocabulary(encoder, texts):
    for language in w.LANGUAGES:
        text = " ".join(w.sentence(Random(i), language) for i in range(20)) + "".join(w.EMOJI) + "한국어 हिन्दी"
        assert encoder.tokenizer.decode(encoder.tokenizer.encode(text)) == text
    ids = json.loads(texts["tokenizer.json"])["model"]["vocab"].values()
    specials = {tiny_tokenizer.token_id(token) for token in tiny_tokenizer.SPECIALS}
    assert sorted({*ids, *specials}) == list(range(tiny_tokenizer.VOCAB_SIZE))


def test_merges_are_the_most_frequent_pairs_first():
    pieces = [list("abab")] * 3 + [list("bc")] * 5
    assert tiny_tokenizer.train(pieces, 3) == [("a", "b"), ("b", "c"), ("ab", "ab")]
    assert tiny_tokenizer.train(pieces, 2, [("b", "c")]) == [("b", "c"), ("a", "b")]
    with pytest.raises(ValueError, match="merges"):
        tiny_tokenizer.train([list("ab")], 2)


# Model


def config(**changes) -> ModelConfig:
    return ModelConfig.from_hf(tiny_files.config_json(**changes))


@pytest.mark.parametrize("changes", [{}, SMALL], ids=["full", "small"])
def test_training_form_equals_the_reference(changes):
    """In float64, for lengths off the chunk and every row of a batch; norms and decays are away from their starts."""
    c = config(**changes)
    generator = torch.Generator().manual_seed(1)
    params = {name: value.double() + 0.05 * torch.randn(value.shape, generator=generator).double()
              for name, value in tiny_model.initial(c, 0).items()}
    ids = torch.randint(0, c.vocab_size, (2, 71), generator=generator)
    with torch.no_grad():
        model = tiny_model.Model(c, params, torch.float64)
        ours = model.head(model.hidden(ids))
        for row, got in zip(ids, ours, strict=True):
            want, _ = Decoder(c, params).forward(row)
            assert (got - want).abs().max() < FLOAT64_NOISE * want.abs().max()


def test_batched_delta_rule_equals_chunked_and_its_gradients_are_right():
    generator = torch.Generator().manual_seed(2)
    q, k = (l2_norm(torch.randn(2, 70, 2, 8, generator=generator, dtype=torch.float64)) for _ in range(2))
    v = torch.randn(2, 70, 4, 5, generator=generator, dtype=torch.float64)
    g, beta = -torch.rand(2, 70, 4, generator=generator).double() * 3, torch.rand(2, 70, 4, generator=generator).double()
    got = tiny_model.delta_rule(q, k, v, g, beta, 8**-0.5)
    for b in range(2):
        zero = torch.zeros(4, 8, 5, dtype=torch.float64)
        want, _ = gdn.chunked(q[b], k[b], v[b], g[b], beta[b], zero, 8**-0.5)
        assert (got[b] - want).abs().max() < FLOAT64_NOISE
    inputs = [x[:1, :36, :, :].clone().requires_grad_() for x in (q, k, v)]
    inputs += [x[:1, :36].clone().requires_grad_() for x in (g, beta)]
    assert torch.autograd.gradcheck(lambda *x: tiny_model.delta_rule(*x, 8**-0.5), inputs, fast_mode=True)


def test_hand_written_gradients_are_right():
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    assert torch.autograd.gradcheck(lambda x: tiny_model.UnitLowerInverse.apply(x.tril(-1)), (drawn(2, 16, 16),))
    assert torch.autograd.gradcheck(tiny_model.Scan.apply, (drawn(4, 2, 3, 3), drawn(4, 2, 3, 5)))
    assert torch.autograd.gradcheck(tiny_model.CausalConv.apply, (drawn(2, 7, 3), drawn(3, 4)))


def test_inverse_stays_exact_where_keys_repeat():
    """All ones below the diagonal: a plain Neumann product of this size loses every digit in float32."""
    lower = torch.ones(32, 32).tril(-1)
    inverse = tiny_model.UnitLowerInverse.apply(lower)
    assert torch.equal(inverse, torch.eye(32) - torch.eye(32).roll(1, 0).tril(-1))


# Quantised training


def test_rounded_weights_are_the_references_q4_0():
    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(4)) * 0.1
    x[3, :32] = 0
    assert torch.equal(as_q4_0(x), quant.dequantize_q4_0(*quant.quantize_q4_0(x)))


def test_master_sees_each_tensor_as_a_pack_would_store_it():
    c = config(**SMALL)
    params = tiny_model.initial(c, 5)
    master = Master.of(params)
    seen = master.seen(torch.float32, storage=True, q4_0=True)
    shapes = tiny_model.shapes(c)
    assert quantised_names(shapes) == {n for n, row in assign(shapes, "q4_0").items() if row.format == "q4_0"}
    for name, value in params.items():
        stored = value.bfloat16().float()
        if name in quantised_names(shapes):
            rows = stored.reshape(-1, stored.shape[-1])
            stored = quant.dequantize_q4_0(*quant.quantize_q4_0(rows)).view(stored.shape)
        assert torch.equal(seen[name], stored), name
        seen[name].grad = torch.full_like(seen[name], float(len(name)))
    gradients = master.views(master.gradient(seen))
    assert all(torch.all(gradients[name] == len(name)) for name in params)
    assert all(torch.equal(view, params[name]) for name, view in master.views().items())


def test_orthogonal_steps_have_like_singular_values():
    x = torch.randn(3, 48, 16, generator=torch.Generator().manual_seed(6))
    values = torch.linalg.svdvals(orthogonal(x))
    assert values.min() > 0.6  # the quintic settles between 0.68 and 1.13
    assert values.max() < 1.25


# Batches, files and a short run


def test_batches_depend_on_their_order_alone(encoder, texts):
    order = tiny_batches.Order(7, 0, 160, 4)
    ids, kinds, images = tiny_batches.make_batch(encoder, order)
    source = tiny_batches.Source(texts, 1)
    try:
        got_order, got = source.next(lambda index: dataclasses.replace(order, index=index), 7)
    finally:
        source.close()
    assert got_order == order
    assert np.array_equal(got[0], ids)
    assert np.array_equal(got[1], kinds)
    assert images is None
    assert not np.array_equal(tiny_batches.make_batch(encoder, dataclasses.replace(order, index=8)).ids, ids)
    assert set(np.unique(kinds)) <= {tiny_batches.PADDING, tiny_batches.READ, tiny_batches.SAID}
    assert (kinds == tiny_batches.SAID).any(axis=1).all()


def test_lengths_follow_the_phases():
    early, late = ({tiny_batches.length_at(p, i, 0, tiny_batches.TEXT_PHASES) for i in range(200)} for p in (0.0, 1.0))
    assert early == {64, 160, 416}
    assert late == {64, 160, 416, 2048, 10240}
    for phases in tiny_batches.PHASES.values():
        assert phases[0][0] == 0
        for _, shares in phases:
            assert min(shares.values()) > 0
            assert set(shares) <= set(tiny_batches.LENGTHS)


def test_final_answers_mark_the_answer(encoder):
    samples = some(encoder, "turns", count=3)
    ids, kinds, _ = tiny_batches.final_answers(encoder, samples, 480)
    for sample, row, kind in zip(samples, ids, kinds, strict=True):
        whole = encoder.prompt(sample) + encoder.answer(sample)
        assert row[kind != tiny_batches.PADDING].tolist() == whole
        assert encoder.tokenizer.decode(row[kind == tiny_batches.SAID].tolist()) == sample.answer + "<|im_end|>"
        assert (row[len(whole) :] == tiny_tokenizer.token_id("<|endoftext|>")).all()
    with pytest.raises(ValueError, match="room is for 32"):
        tiny_batches.final_answers(encoder, samples, 32)


def test_state_comes_back_whole_or_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_files, "PART_BYTES", 1000)
    tensors = {"a": torch.arange(1000.0), "b": torch.ones(3, dtype=torch.bfloat16)}
    tiny_files.save_state(tmp_path, {"a": torch.zeros(5)}, {"step": 1})
    tiny_files.save_state(tmp_path, tensors, {"step": 2, "note": "ä"})
    loaded, facts = tiny_files.load_state(tmp_path)
    assert facts["step"] == 2
    assert all(torch.equal(loaded[name], value) for name, value in tensors.items())
    assert {p.name.split("-")[1] for p in tmp_path.glob("state-*.bin")} == {"2"}
    part = sorted(tmp_path.glob("state-*.bin"))[1]
    part.write_bytes(b"x" + part.read_bytes()[1:])
    with pytest.raises(tiny_files.StateError, match="do not belong together"):
        tiny_files.load_state(tmp_path)
    part.unlink()
    with pytest.raises(tiny_files.StateError, match="no whole training state"):
        tiny_files.load_state(tmp_path)


def small_trainer(texts) -> train_tiny.Trainer:
    settings = train_tiny.Settings(tokens=20 * 1280, step_tokens=1280, rate=4e-3, model=SMALL)
    return train_tiny.Trainer(settings, texts, "cpu")


@pytest.fixture(scope="module")
def run(texts, tmp_path_factory):
    """Twenty steps of a small model on sums, its state, and its checkpoint."""
    out = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_batches.PHASES, "text", ((0.0, {64: 1.0}),))
        patch.setattr(tiny_batches, "HELD_SIZES", {"arithmetic": 8})
        patch.setattr(tiny_batches, "HELD_ROWS", {})
        trainer = small_trainer(texts)
        train_tiny.train(trainer, tiny_batches.Source(texts, 0), out, None, log_every=4)
    trainer.export(out / "model")
    return trainer, out


def test_twenty_steps_lower_the_loss(run):
    trainer, out = run
    series = tiny_curves.read(out / "curve.tsv")
    said = [value for _, value in series["said/64"]]
    assert trainer.progress == 1
    assert trainer.step == 20
    assert said[-1] < said[0] - 1  # nats: the format of the sums is learnt in a few steps
    assert {"accuracy/arithmetic/bf16", "accuracy/arithmetic/q4_0", "read/64", "norm/64"} <= set(series)
    tiny_curves.draw(series, out / "curves.png")
    assert (out / "curves.png").read_bytes()[1:4] == b"PNG"


def test_a_resumed_run_goes_on_where_it_stopped(run):
    trainer, out = run
    again = train_tiny.Trainer.resumed(out, "cpu", tokens=10**6)
    assert torch.equal(again.master.flat, trainer.master.flat)
    assert torch.equal(again.optimiser.first, trainer.optimiser.first.bfloat16().float())
    assert (again.step, again.tokens, again.optimiser.steps) == (20, trainer.tokens, 20)
    assert again.progress < 0.1
    assert again.config == trainer.config


def test_options_that_do_not_go_together_are_refused_in_one_line(run, capsys):
    """Before anything is trained or written."""
    state = str(run[1])
    for arguments, parts in (
        (["--mean", state, state, "--out", state], ["--mean trains nothing", "give --export"]),
        (["--resume", state, "--start", state, "--out", state], ["--resume", "--start", "give one of them"]),
        (["--resume", state, "--stage", "images", "--export", state], ["of stage text, but stage images", "give --start"]),
    ):
        assert train_tiny.main([*arguments, "--device", "cpu"]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith("train_tiny: ")
        assert all(part in err for part in parts)


def test_export_loads_strictly_and_transformers_agrees(run):
    trainer, out = run
    checkpoint = Checkpoint.open(out / "model")
    params = {name: torch.from_numpy(checkpoint.read(name)) for name in checkpoint.tensors if not is_vision(name)}
    assert {n: tuple(p.shape) for n, p in params.items()} == tiny_model.shapes(trainer.config)
    for name, value in trainer.master.views().items():
        assert torch.equal(params[name], value.bfloat16().float()), name
    model, report = transformers.Qwen3_5MoeForConditionalGeneration.from_pretrained(
        out / "model", dtype=torch.float32, attn_implementation="eager", experts_implementation="eager",
        output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = list(range(300, 340))
    want = hf.logits(model.eval(), ids)
    with torch.no_grad():
        got, _ = Decoder(checkpoint.config, params).forward(ids)
    ceiling = 1e-4  # of fp32 logits against transformers, as for every model here
    assert (got - want).abs().max() <= ceiling * max(1.0, float(want.abs().max()))


# Accuracy


class Oracle:
    """A runner that knows the answers: logits that point at the next token of one of `texts`, or off by `shift`."""

    def __init__(self, texts: list[list[int]], shift: int = 0) -> None:
        self.texts, self.shift, self.read_tokens = texts, shift, 0

    def read(self, ids, images=()):
        self.read_tokens += len(ids)
        return list(ids)

    def logits(self, state, ids):
        text = next((t for t in self.texts if t[: len(state) + len(ids)] == [*state, *ids]), None)
        rows = np.zeros((len(ids), tiny_tokenizer.VOCAB_SIZE), np.float32)
        for i in range(len(ids) if text else 0):
            place = len(state) + i + 1
            rows[i, (text[place] + self.shift) % 1024 if place < len(text) else 0] = 1
        return rows


def test_accuracy_reads_shared_prompts_once_and_can_fail(encoder):
    row = tasks.drawn_row("held", 4, 0, encoder.measure, 600)
    whole = [encoder.prompt(s) + encoder.answer(s) for s in row]
    oracle = Oracle(whole)
    assert tiny_accuracy.right(oracle, encoder, row) == [True] * 9
    assert oracle.read_tokens < 600
    assert tiny_accuracy.right(Oracle(whole, shift=1), encoder, row) == [False] * 9


def test_another_reasoning_with_the_right_answer_counts(encoder):
    """The likeliest tokens differ from the sample's reasoning, so the text is generated and checked."""
    sample = some(encoder, "arithmetic", count=1)[0]
    other = dataclasses.replace(sample, answer=f"so\n</think>\n\n{sample.expected}")
    assert tiny_accuracy.right(Oracle([encoder.prompt(other) + encoder.answer(other)]), encoder, [sample]) == [True]


def test_table_and_targets():
    results = {(task, runner): [True] * 9 for task in ("needle_2k", "arithmetic") for runner in tiny_accuracy.RUNNERS}
    assert tiny_accuracy.missed(results) == []
    results["arithmetic", "engine q4_0"] = results["arithmetic", "engine f32"] = [True] * 8 + [False]
    results["needle_2k", "reference fp32"] = [True] * 8 + [False]
    assert [line.split(" loses")[0].split(" through")[0] for line in tiny_accuracy.missed(results)] == [
        "needle_2k: 88.9%", "arithmetic: the engine f32", "arithmetic: the engine q4_0"]
    lines = "\n".join(tiny_accuracy.table(results))
    assert "(8/9)" in lines
    assert "+11.1%" in lines
    assert "0.9:  0%" in lines


def test_jobs_cover_every_sample_once():
    found = tiny_accuracy.jobs({"arithmetic": 23, "needle_10k": 2})
    for runner in tiny_accuracy.RUNNERS:
        mine = [job for job in found if (job.runner, job.task) == (runner, "arithmetic")]
        assert sorted(i for job in mine for i in range(job.begin, job.end)) == list(range(23))
    assert [job.work for job in found] == sorted((job.work for job in found), reverse=True)
