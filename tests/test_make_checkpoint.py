"""The checkpoint generator: what it writes is what the released layout says, and transformers agrees."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from fermi_engine.checkpoint import Checkpoint
from fermi_engine.vision.config import is_vision
from tools import make_checkpoint as maker
from tools import random_weights
from tools.byte_tokenizer import SPECIALS, token_id
from tools.make_checkpoint import BIG, MakeError, Options, make_checkpoint, stored_tensors

ROOT = Path(__file__).resolve().parent.parent
SMALL = {"layers": 4, "hidden": 32, "experts": 4, "experts_per_tok": 2}


def contents(path: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.iterdir()}


def weights(path: Path) -> dict[str, np.ndarray]:
    """All tensors in float32, experts one by one."""
    checkpoint = Checkpoint.open(path)
    found = {name: checkpoint.read(name) for name in checkpoint.tensors if ".experts." not in name}
    c = checkpoint.config
    for layer in range(c.num_hidden_layers if c.num_experts else 0):
        for e in range(c.num_experts):
            found[f"{layer}.{e}.gate_up"] = checkpoint.expert_rows(layer, "gate_up", e, 0, 2 * c.moe_intermediate_size)
            found[f"{layer}.{e}.down"] = checkpoint.expert_rows(layer, "down", e, 0, c.hidden_size)
    return found


def test_seed_decides_every_byte(tmp_path: Path) -> None:
    first = contents(make_checkpoint(tmp_path / "a", 7, **SMALL))
    assert contents(make_checkpoint(tmp_path / "b", 7, **SMALL)) == first
    other = contents(make_checkpoint(tmp_path / "c", 8, **SMALL))
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}


def test_bits_are_the_same_on_every_machine() -> None:
    """A change of these bits changes every checkpoint that anyone has generated."""
    block = np.concatenate(list(random_weights.values(0, "layers.0.mlp.gate.weight", (16, 64))))
    assert hashlib.sha256(block.tobytes()).hexdigest()[:16] == "d8d41e8002f7a873"


@pytest.mark.parametrize("options", [
    {"layout": "per-expert"}, {"shards": 5}, {"prefix": "language_model.model."}, {"text_only": True},
    {"tokenizer": False, "layout": "per-expert", "shards": 2, "prefix": "model."},
], ids=str)
def test_form_does_not_change_weights(tmp_path: Path, options: dict) -> None:
    want = weights(make_checkpoint(tmp_path / "a", 3, **SMALL))
    got = weights(make_checkpoint(tmp_path / "b", 3, **SMALL, **options))
    assert set(got) == {name for name in want if not (options.get("text_only") and is_vision(name))}
    for name in got:
        assert np.array_equal(got[name], want[name]), name


def test_dtypes_are_roundings_of_one_another(tmp_path: Path) -> None:
    f32, f16, bf16 = (weights(make_checkpoint(tmp_path / d, 3, dtype=d, **SMALL)) for d in ("f32", "f16", "bf16"))
    for name, value in f32.items():
        exact = torch.from_numpy(value)
        assert np.array_equal(f16[name], exact.half().float().numpy()), name
        assert np.array_equal(bf16[name], exact.bfloat16().float().numpy()), name


def test_bf16_rounds_to_nearest_even() -> None:
    top = np.arange(0x3F70, 0x3F90, dtype=np.uint32) << 16  # crosses the exponent step at one
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    x = (top[:, None] + low).reshape(-1).view(np.float32)
    x = np.concatenate([x, -x])
    want = torch.from_numpy(x).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(random_weights.to_bf16(x), want)


def test_values_are_in_the_ranges_of_the_family(tmp_path: Path) -> None:
    c = Checkpoint.open(make_checkpoint(tmp_path / "c", 1, dtype="f32", value_heads=32, key_heads=2))

    def deviates(name: str, expected: float) -> None:
        """Within five standard errors of a deviation estimated from as many values (kurtosis is under the normal's)."""
        value = c.read(name)
        assert abs(value.std() / expected - 1) < 5 / math.sqrt(2 * value.size), name
        assert abs(value.mean()) < 5 * expected / math.sqrt(value.size), name

    deviates("embed_tokens.weight", 1)
    deviates("lm_head.weight", 1 / 8)
    deviates("layers.0.linear_attn.in_proj_qkv.weight", 1 / 8)
    deviates("layers.0.linear_attn.conv1d.weight", 1 / 2)
    deviates("layers.0.linear_attn.out_proj.weight", 0.3 / math.sqrt(32 * 32))
    deviates("layers.3.self_attn.o_proj.weight", 0.3 / math.sqrt(4 * 32))
    deviates("layers.3.mlp.gate.weight", 4 / 8)
    deviates("layers.3.mlp.experts.gate_up_proj", 1 / 8)
    deviates("layers.3.mlp.experts.down_proj", 0.3 / math.sqrt(32))
    for name in ("norm.weight", "layers.0.input_layernorm.weight", "layers.3.self_attn.q_norm.weight"):
        deviates(name, 0.1)
    assert abs(c.read("layers.0.linear_attn.norm.weight") - 1).max() < 0.4
    decay, step = np.exp(c.read("layers.0.linear_attn.A_log")), np.logaddexp(0, c.read("layers.0.linear_attn.dt_bias"))
    rounding = 1 + 2**-20
    assert 1 <= decay.min() < 4 < 12 < decay.max() <= 16 * rounding
    assert 1e-3 / rounding <= step.min() < 3e-3 < 3e-2 < step.max() <= 0.1 * rounding


@pytest.mark.parametrize("options", [
    {}, {"layout": "per-expert", "shards": 2}, {"family": "dense"}, {"tied": True}, {"text_only": True},
    {"family": "dense", "text_only": True}, {"family": "minicpm", "tied": True},
], ids=str)
def test_transformers_loads_it_whole(tmp_path: Path, options: dict) -> None:
    path = make_checkpoint(tmp_path / "c", 2, **options)
    minicpm = options.get("family") == "minicpm"
    classes = [] if minicpm else [transformers.AutoModelForCausalLM]
    if not options.get("text_only"):
        classes.append(transformers.AutoModelForImageTextToText)
    checkpoint = Checkpoint.open(path)
    c = checkpoint.config
    for cls in classes:
        model, report = cls.from_pretrained(path, output_loading_info=True, dtype=torch.float32)
        assert not any(report.values()), report
        state = {re.sub(r"^(model\.)?(language_model\.)?", "", name): p for name, p in model.named_parameters()}
        for name, parameter in state.items():
            got = parameter.detach().numpy()
            if ".experts." in name:
                layer, part = int(name.split(".")[1]), name.split(".")[-1].removesuffix("_proj")
                want = np.stack([checkpoint.expert_rows(layer, part, e, 0, got.shape[1]) for e in range(len(got))])
            else:
                want = checkpoint.read(name)
            assert np.array_equal(got, want), name
        text = cls is transformers.AutoModelForCausalLM
        named = {n for n in checkpoint.tensors if ".experts." not in n and not (text and is_vision(n))}
        assert named == {n for n in state if ".experts." not in n}
    read = transformers.AutoConfig.from_pretrained(path).get_text_config()
    assert c.rope_theta == read.rope_parameters["rope_theta"] == 1e7
    if not minicpm:  # which counts on one axis and names no sections
        assert list(c.mrope_section) == read.rope_parameters["mrope_section"] == [2, 1, 1]
    if not options.get("text_only"):
        theirs = transformers.AutoImageProcessor.from_pretrained(path, backend="pil").to_dict()
        ours = dataclasses.asdict(checkpoint.vision.images)
        size = theirs.get("size") or {}
        theirs |= {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
        assert ours == {name: tuple(theirs[name]) if isinstance(theirs[name], list) else theirs[name] for name in ours}
    assert c.layer_types == tuple(read.layer_types) == (*["linear_attention"] * 3, "full_attention") * 2


def test_tokenizer(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", 1, **SMALL)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    texts = ["Hello, the winter wind", "It's 2024!\n\n  x = 1", "é漢字 \U0001f600", "\x00\x7f\t", " "]
    for text in [*texts, "<|im_start|>user\nhi<|im_end|>\n<think>"]:
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert theirs(text).input_ids == ids
    assert tokenizer.encode("a\xff").ids == [0x61, 0xC3, 0xBF], "byte b has the id b"
    assert len(tokenizer.encode(" the").ids) == 1, "merges are in use"
    assert [tokenizer.token_to_id(token) for token in SPECIALS] == [token_id(token) for token in SPECIALS]
    assert tokenizer.decode([token_id("<|im_end|>"), token_id("<think>")]) == "<think>"
    vocab = Checkpoint.open(path).config.vocab_size
    assert vocab >= tokenizer.get_vocab_size()
    assert vocab % 32
    assert theirs.eos_token_id == token_id("<|im_end|>")
    generation = json.loads((path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [token_id("<|im_end|>"), token_id("<|endoftext|>")]
    assert Checkpoint.open(path).config.eos_token_ids == (token_id("<|endoftext|>"),)


def render(messages: list[dict], **variables: object) -> str:
    """As transformers renders a template."""
    def refuse(text: str) -> None:
        raise TemplateError(text)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    template = environment.from_string((ROOT / "tools" / "chat_template.jinja").read_text())
    return template.render(messages=messages, **variables)


USER = {"role": "user", "content": "Hi {{ x }}"}
CALL = {"role": "assistant", "content": "", "reasoning_content": "Look.", "tool_calls": [
    {"type": "function", "function": {"name": "find", "arguments": {"word": "a\nb", "limit": 3, "all": True}}},
    {"name": "stop", "arguments": {}}]}
CALL_XML = ("<tool_call>\n<function=find>\n<parameter=word>\na\nb\n</parameter>\n<parameter=limit>\n3\n</parameter>\n"
            "<parameter=all>\ntrue\n</parameter>\n</function>\n</tool_call>\n"
            "<tool_call>\n<function=stop>\n</function>\n</tool_call>")


def test_chat_turns() -> None:
    start = "<|im_start|>user\nHi {{ x }}<|im_end|>\n"
    assert render([USER]) == start
    assert render([USER], add_generation_prompt=True) == start + "<|im_start|>assistant\n<think>\n"
    assert render([USER], add_generation_prompt=True, enable_thinking=True).endswith("assistant\n<think>\n")
    off = render([USER], add_generation_prompt=True, enable_thinking=False)
    assert off == start + "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    system = {"role": "system", "content": "Be brief."}
    assert render([system, USER]) == "<|im_start|>system\nBe brief.<|im_end|>\n" + start
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    assert render([{"role": "user", "content": parts}]) == f"<|im_start|>user\na{picture}b<|im_end|>\n"


@pytest.mark.parametrize("answer", [{"content": "<think>\nHm.\n</think>\n\nYes."},
                                    {"content": "Yes.", "reasoning_content": "Hm."}], ids=["inline", "field"])
def test_chat_strips_earlier_thinking(answer: dict) -> None:
    answer = {"role": "assistant", **answer}
    turn = "<|im_start|>user\nHi {{ x }}<|im_end|>\n"
    assert render([USER, answer, USER]) == f"{turn}<|im_start|>assistant\nYes.<|im_end|>\n{turn}"
    assert render([USER, answer]) == f"{turn}<|im_start|>assistant\n<think>\nHm.\n</think>\n\nYes.<|im_end|>\n"


def test_chat_tools() -> None:
    tools = [{"type": "function", "function": {"name": "find", "description": "é"}}]
    results = [{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]
    text = render([USER, CALL, *results], tools=tools, add_generation_prompt=True)
    head, rest = text.split("<|im_end|>\n", 1)
    assert head.startswith("<|im_start|>system\n")
    assert "\n<tools>\n" + json.dumps(tools[0], ensure_ascii=False) + "\n</tools>\n" in head
    assert rest == (
        "<|im_start|>user\nHi {{ x }}<|im_end|>\n"
        f"<|im_start|>assistant\n<think>\nLook.\n</think>\n\n{CALL_XML}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n")
    said = {**CALL, "content": "I look."}
    assert f"I look.\n{CALL_XML}<|im_end|>" in render([USER, said])
    assert render([{"role": "system", "content": "S"}, USER], tools=tools).split("<|im_end|>")[0].endswith("\n\nS")


@pytest.mark.parametrize(("messages", "part"), [
    ([], "at least one message"), ([{"role": "robot", "content": ""}], "robot"),
    ([USER, {"role": "system", "content": ""}], "must be the first"),
    ([{"role": "user", "content": [{"type": "video"}]}], "video"),
    ([{"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{}"}]}], "must be an object"),
])
def test_chat_refuses(messages: list[dict], part: str) -> None:
    with pytest.raises(TemplateError, match=part):
        render(messages)


def test_template_in_the_checkpoint_renders_in_transformers(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", 1, **SMALL)
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    tools = [{"type": "function", "function": {"name": "find", "parameters": {"a": ["é"]}}}]
    messages = [USER, CALL, {"role": "tool", "content": "one"}]
    for thinking in (True, False):
        options = {"add_generation_prompt": True, "enable_thinking": thinking, "tools": tools}
        assert theirs.apply_chat_template(messages, tokenize=False, **options) == render(messages, **options)


# The destination


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", 1, **SMALL)
    before = contents(path)
    with pytest.raises(MakeError, match=r"is not empty.*--force"):
        make_checkpoint(path, 2, **SMALL)
    assert contents(path) == before
    make_checkpoint(path, 2, force=True, tokenizer=False, **SMALL)
    assert "tokenizer.json" not in contents(path)
    assert contents(path)["model.safetensors"] != before["model.safetensors"]
    (path / "config.json").unlink()
    with pytest.raises(MakeError, match="remove it yourself"):
        make_checkpoint(path, 2, force=True, **SMALL)
    with pytest.raises(MakeError, match="is a file"):
        make_checkpoint(path / "model.safetensors", 2, force=True, **SMALL)
    (tmp_path / "empty").mkdir()
    make_checkpoint(tmp_path / "empty", 1, **SMALL)
    make_checkpoint(tmp_path / "deep" / "er", 1, **SMALL)
    assert sorted(os.listdir(tmp_path)) == ["c", "deep", "empty"]


def test_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(make_checkpoint(tmp_path / "c", 1, **SMALL))
    rename = os.rename

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for owner, name, fault in [(maker, "tokenizer_json", full),
                               (os, "rename", lambda a, b: full() if Path(a).name == "new" else rename(a, b))]:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fault)
            with pytest.raises(OSError, match="No space"):
                make_checkpoint(tmp_path / "c", 2, force=True, **SMALL)
        assert os.listdir(tmp_path) == ["c"]
        assert contents(tmp_path / "c") == before


@pytest.mark.parametrize(("options", "part"), [
    ({"layers": 0}, "layers = 0"), ({"heads": 3}, "kv_heads = 2"), ({"value_heads": 3}, "key_heads = 2"),
    ({"head_dim": 20}, "multiple of 8"), ({"experts_per_tok": 17}, "exceeds experts = 16"), ({"seed": -1}, "seed"),
    ({"vocab": 300}, "vocab = 300"), ({"family": "rwkv"}, "'rwkv'.*moe, dense"), ({"dtype": "f8"}, "'f8'"),
    ({"layout": "x"}, "'x'"), ({"prefix": "x."}, "'x.'"), ({"shards": 10**6}, "shards = 1000000"),
    ({"color": 1}, "color"),
])
def test_options_are_checked(tmp_path: Path, options: dict, part: str) -> None:
    with pytest.raises(MakeError, match=part):
        make_checkpoint(tmp_path / "c", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 40, 167])
def test_shards_are_all_used(tmp_path: Path, shards: int) -> None:
    path = make_checkpoint(tmp_path / "c", 1, shards=shards)
    assert len(list(path.glob("*.safetensors"))) == shards
    Checkpoint.open(path)
    if shards in (2, 3, 7):
        sizes = [file.stat().st_size for file in path.glob("*.safetensors")]
        largest_tensor = 16 * 64 * 64 * 2
        assert max(sizes) - min(sizes) < 2 * largest_tensor


def test_command_line(tmp_path: Path) -> None:
    """Without torch, from any folder; a mistake is one line and status 2."""
    script = str(ROOT / "tools" / "make_checkpoint.py")
    block = ("import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'fermi_engine', 'tokenizers')));"
             "import runpy; sys.argv = sys.argv[1:]; sys.path[0] = sys.argv[0].rpartition('/')[0];"
             "runpy.run_path(sys.argv[0], run_name='__main__')")
    args = ["c", "--seed", "9", "--layout", "per-expert", "--layers", "4", "--no-tokenizer", "--text-only"]
    done = subprocess.run([sys.executable, "-c", block, script, *args], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    want = make_checkpoint(tmp_path / "d", 9, layout="per-expert", layers=4, tokenizer=False, text_only=True)
    assert contents(tmp_path / "c") == contents(want)
    done = subprocess.run([sys.executable, script, "c"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("make_checkpoint: ")
    assert done.stderr.count("\n") == 1


def test_the_big_one_is_big_and_drawn_in_blocks() -> None:
    sizes = {name: 2 * math.prod(shape) for name, (shape, _) in stored_tensors(Options(**BIG)).items()}
    assert max(sizes.values()) >= 2**30
    assert 2e9 < sum(sizes.values()) < 2.4e9
    blocks = random_weights.values(1, "embed_tokens.weight", (1500, 2048))
    assert [len(block) for block in blocks] == [2**20, 2**20, 1500 * 2048 - 2**21]


@pytest.mark.soak
def test_the_big_one_needs_little_memory(tmp_path: Path) -> None:
    measure = ("import resource, subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]], check=True);"
               "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)")
    script = str(ROOT / "tools" / "make_checkpoint.py")
    done = subprocess.run([sys.executable, "-c", measure, script, str(tmp_path / "c"), "--big", "--shards", "2"],
                          capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < 300 * 1024
    fused = Checkpoint.open(tmp_path / "c").tensors["layers.0.mlp.experts.gate_up_proj"]
    assert fused.nbytes >= 10**9
