"""Model configurations: what config.json may say, and that nonsense in it, or in a pack's copy, is one clear line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fermi_engine import config as config_module
from fermi_engine import kernels
from fermi_engine.config import MAX_LAYERS, MAX_TAPS, MAX_WHOLE, ModelConfig, eos_ids
from fermi_engine.errors import ConfigError
from fermi_engine.kernels import dispatch
from tools.make_checkpoint import Options, config

RELEASE = config(Options())  # nested, a mixture of experts
ABSENT = object()
INTEGERS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "shared_expert_intermediate_size", "max_position_embeddings",
)
NO_NUMBER = ("x", True, float("nan"), float("inf"), 10**400, [1.0])
ROPE = RELEASE["text_config"]["rope_parameters"]


def changed(outer: dict[str, Any] | None = None, rope: dict[str, Any] | None = None, **text: Any) -> dict[str, Any]:
    """RELEASE with some fields set, or ABSENT: of the file (`outer`), of its RoPE table, of its text_config."""
    inner = {**RELEASE["text_config"], **({"rope_parameters": {**ROPE, **rope}} if rope else {}), **text}
    both = {**RELEASE, "text_config": inner, **(outer or {})}
    both = {name: value for name, value in both.items() if value is not ABSENT}
    if isinstance(both.get("text_config"), dict):
        both["text_config"] = {name: value for name, value in both["text_config"].items() if value is not ABSENT}
    return both


def refusal(action: Callable[..., object], *args: object) -> str:
    with pytest.raises(ConfigError) as caught:
        action(*args)
    text = str(caught.value)
    assert "\n" not in text
    return text


def refused(raw: dict[str, Any], *parts: str) -> None:
    text = refusal(ModelConfig.from_hf, raw)
    for part in parts:
        assert part in text


# What is read


def test_the_release_layout() -> None:
    c = ModelConfig.from_hf(RELEASE)
    assert (c.model_type, c.num_experts, c.intermediate_size, c.tie_word_embeddings) == ("qwen3_5_moe_text", 16, 0, False)
    assert (c.rope_theta, c.rotary_dim, c.mrope_section) == (1e7, c.head_dim // 4, tuple(ROPE["mrope_section"]))
    assert c.eos_token_ids == (RELEASE["text_config"]["eos_token_id"],)
    assert ModelConfig.from_dict(json.loads(json.dumps(c.to_dict()))) == c
    dense = ModelConfig.from_hf(config(Options(family="dense", text_only=True, tied=True)))
    assert (dense.model_type, dense.num_experts, dense.tie_word_embeddings) == ("qwen3_5_text", 0, True)
    assert dense.intermediate_size > 0


def test_what_may_be_left_out() -> None:
    c = ModelConfig.from_hf(changed(
        outer={"tie_word_embeddings": ABSENT}, rope_parameters={"rope_theta": 5}, head_dim=ABSENT, layer_types=ABSENT,
        rms_norm_eps=ABSENT, max_position_embeddings=ABSENT, linear_conv_kernel_dim=ABSENT, tie_word_embeddings=ABSENT,
        hidden_act=ABSENT, model_type=ABSENT, eos_token_id=None, full_attention_interval=2, hidden_size=256))
    assert c.head_dim == 256 // c.num_attention_heads
    assert c.layer_types == ("linear_attention", "full_attention") * (c.num_hidden_layers // 2)
    assert (c.rms_norm_eps, c.max_position_embeddings, c.linear_conv_kernel_dim) == (1e-6, 32768, 4)
    assert (c.rope_theta, c.rotary_dim, c.mrope_section) == (5.0, 16, (11, 11, 10))
    assert (c.tie_word_embeddings, c.eos_token_ids) == (False, ())


def test_older_places_of_the_rope_settings() -> None:
    c = ModelConfig.from_hf(changed(rope_parameters=ABSENT, rope_theta=7, partial_rotary_factor=0.5,
                                    rope_scaling={"type": "mrope", "mrope_section": [0, 9, 1]}))
    assert (c.rope_theta, c.rotary_dim, c.mrope_section) == (7.0, c.head_dim // 2, (0, 9, 1))


@pytest.mark.parametrize(("outer", "inner", "tied"), [
    (True, False, True), (False, True, False), (ABSENT, True, True), (None, True, True), (True, ABSENT, True)])
def test_tied_head(outer: object, inner: object, tied: bool) -> None:
    raw = changed({"tie_word_embeddings": outer}, tie_word_embeddings=inner)
    assert ModelConfig.from_hf(raw).tie_word_embeddings is tied


def test_end_of_turn_ids() -> None:
    assert eos_ids({}) == eos_ids({"eos_token_id": None}) == eos_ids({"eos_token_id": []}) == set()
    assert eos_ids({"eos_token_id": 0}) == {0}
    assert eos_ids({"eos_token_id": [7, 5, 7]}) == {5, 7}
    assert ModelConfig.from_hf(changed({"eos_token_id": [9, 2]}, eos_token_id=4)).eos_token_ids == (2, 4, 9)


# What is refused


@pytest.mark.parametrize("value", [0, -1, "x", None, 1.5, True, [4], {}, 10**30, float("nan")], ids=repr)
@pytest.mark.parametrize("name", INTEGERS)
def test_whole_numbers(name: str, value: object) -> None:
    refused(changed(**{name: value}), f"'{name}'")


def test_whole_numbers_are_named_with_what_was_found() -> None:
    assert refusal(ModelConfig.from_hf, changed(vocab_size="x")) == (
        f"config.json: 'vocab_size' is 'x', expected a whole number in 1..{MAX_WHOLE}; fetch the file again")
    assert refusal(ModelConfig.from_hf, changed(vocab_size=ABSENT)) == (
        "config.json of a qwen3_5_moe_text model lacks 'vocab_size'; the file is incomplete")


def test_a_nonsense_count_of_layers_fills_no_memory() -> None:
    refused(changed(num_hidden_layers=MAX_WHOLE, layer_types=ABSENT), f"'num_hidden_layers' is {MAX_WHOLE}",
            f"in 1..{MAX_LAYERS}")


@pytest.mark.parametrize("value", NO_NUMBER, ids=lambda v: repr(v)[:9])
@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta", "partial_rotary_factor"])
def test_numbers(name: str, value: object) -> None:
    raw = changed(rms_norm_eps=value) if name == "rms_norm_eps" else changed(rope={name: value})
    refused(raw, f"'{name}' is ", "expected a finite number")


@pytest.mark.parametrize(("raw", "parts"), [
    (changed(rms_norm_eps=None), ["lacks 'rms_norm_eps'"]),
    (changed(rms_norm_eps=0), ["rms_norm_eps = 0.0 must be positive"]),
    (changed(rope={"rope_theta": -1}), ["rope_theta = -1.0 must be positive"]),
    (changed(rope={"rope_theta": ABSENT, "rope_type": "yarn"}), ["rope_type 'yarn' is not supported"]),
    (changed(rope={"rope_theta": None}), ["lacks 'rope_theta'"]),
    (changed(rope={"partial_rotary_factor": None}), ["lacks 'partial_rotary_factor'"]),
    (changed(rope={"partial_rotary_factor": -0.25}), ["rotary_dim is -8, expected a whole number"]),
    (changed(rope={"partial_rotary_factor": 0}), ["rotary_dim = 0 must be positive"]),
    (changed(rope={"partial_rotary_factor": 1.5}), ["rotary part of a head is 48 of 32"]),
    (changed(rope={"partial_rotary_factor": 1e308}), ["config.json cannot be read (", "fetch the file again"]),
    (changed(rope={"mrope_section": 5}), ["'mrope_section' is 5, expected a list"]),
    (changed(rope={"mrope_section": "abc"}), ["'mrope_section' is 'abc', expected a list"]),
    (changed(rope={"mrope_section": ["a", "b", "c"]}), ["'mrope_section' is ['a', 'b', 'c']", "whole numbers"]),
    (changed(rope={"mrope_section": [-4, 1, 100]}), ["'mrope_section' is [-4, 1, 100]", "at least 0"]),
    (changed(rope={"mrope_section": [1, 2]}), ["mrope_section is (1, 2), expected three"]),
    (changed(rope_parameters=5), ["'rope_parameters' is 5, expected an object"]),
    (changed(rope_scaling=[1]), ["'rope_scaling' is [1], expected an object"]),
    (changed(layer_types="abc"), ["'layer_types' is 'abc', expected a list"]),
    (changed(layer_types=5), ["'layer_types' is 5, expected a list"]),
    (changed(layer_types=[1] * 8), ["layer_types is (1, 1, ", "expected a list of names"]),
    (changed(layer_types=[["a"]] * 8), ["layer_types is (['a'], ", "expected a list of names"]),
    (changed(layer_types=["a"] * 8), ["unknown kinds ['a']"]),
    (changed(layer_types=["full_attention"]), ["layer_types has 1 entries for num_hidden_layers = 8"]),
    (changed(layer_types=ABSENT, full_attention_interval=0), ["'full_attention_interval' is 0"]),
    (changed(num_attention_heads=0, head_dim=32), ["'num_attention_heads' is 0"]),
    (changed(num_attention_heads=5), ["num_attention_heads = 5 is not a multiple"]),
    (changed(linear_num_value_heads=5), ["linear_num_value_heads = 5 is not a multiple"]),
    (changed(num_experts_per_tok=17), ["num_experts_per_tok = 17 must lie in 1..16"]),
    (changed(eos_token_id="x"), ["eos_token_id is 'x'", "fetch the file again"]),
    (changed(eos_token_id={}), ["eos_token_id is {}"]),
    (changed(eos_token_id=[None]), ["eos_token_id is [None]"]),
    (changed(eos_token_id=-5), ["eos_token_id is -5"]),
    (changed(eos_token_id=True), ["eos_token_id is True"]),
    (changed(eos_token_id=1.5), ["eos_token_id is 1.5"]),
    (changed(eos_token_id=[float("inf")]), ["eos_token_id is [inf]"]),
    (changed({"eos_token_id": "x"}), ["eos_token_id is 'x'"]),
    (changed(tie_word_embeddings="no"), ["'tie_word_embeddings' is 'no', expected true or false"]),
    (changed({"tie_word_embeddings": 0}), ["'tie_word_embeddings' is 0, expected true or false"]),
    (changed(hidden_act="gelu"), ["hidden_act 'gelu' is not supported", "'silu'"]),
    (changed(hidden_act=None), ["hidden_act None is not supported"]),
    (changed(model_type="gemma"), ["text_config has model_type='gemma'", "'qwen3_5_moe_text'"]),
    (changed(model_type=["x"]), ["text_config has model_type=['x']"]),
    (changed({"model_type": "llama"}), ["unknown architecture model_type='llama'"]),
    (changed({"model_type": ["x"]}), ["unknown architecture model_type=['x']"]),
    (changed({"model_type": None}), ["unknown architecture model_type=None"]),
    (changed({"text_config": 5}), ["'text_config' is 5, expected an object"]),
    (changed({"text_config": None}), ["lacks 'num_hidden_layers'"]),
], ids=lambda value: value[0] if isinstance(value, list) else "")
def test_nonsense_is_one_line(raw: dict[str, Any], parts: list[str]) -> None:
    refused(raw, *parts)


@pytest.mark.parametrize(("taps", "legal"), [(0, False), (1, True), (16, True), (17, False)])
def test_taps_of_the_convolution(taps: int, legal: bool) -> None:
    raw = changed(linear_conv_kernel_dim=taps)
    if legal:
        assert ModelConfig.from_hf(raw).linear_conv_kernel_dim == taps
    else:
        refused(raw, "linear_conv_kernel_dim")


@pytest.mark.parametrize("backend", dispatch.supported())
@pytest.mark.parametrize("taps", [0, MAX_TAPS + 1, 40])
def test_kernels_refuse_other_taps(backend: str, taps: int) -> None:
    k, channels = kernels.get(backend, 1), 64
    for legal in (1, MAX_TAPS):
        zeros = np.zeros((3, channels), np.float32)
        assert not k.conv1d_silu(zeros, zeros[:1].repeat(legal, 0), np.zeros((legal - 1, channels), np.float32)).any()
    x, w, tail = (np.ones((rows, channels), np.float32) for rows in (5, taps, max(taps - 1, 0)))
    with pytest.raises(ValueError, match=rf"conv1d_silu: {taps} taps, the kernels take 1\.\.{MAX_TAPS}"):
        k.conv1d_silu(x, w, tail)


@pytest.mark.parametrize("kind", [TypeError, ValueError, ZeroDivisionError, OverflowError, AttributeError])
def test_what_no_rule_foresaw_is_the_files_fault_too(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    fields = ModelConfig.from_hf(RELEASE).to_dict()

    def fails(_: object) -> None:
        raise kind("two\nlines")

    monkeypatch.setattr(config_module, "_check", fails)
    assert refusal(ModelConfig.from_hf, RELEASE) == "config.json cannot be read (two lines); fetch the file again"
    assert refusal(ModelConfig.from_dict, fields) == (
        "model configuration cannot be read (two lines); convert the checkpoint again")


# The copy in a pack


FIELDS = ModelConfig.from_hf(RELEASE).to_dict()
NONSENSE = {"str": [5, None], "int": ["x", None, 1.5, True, -1, 10**30, [1]], "float": [*NO_NUMBER, None],
            "bool": [0, None, "no"], "tuple[str, ...]": [5, "abc", [1], [["a"]], None],
            "tuple[int, ...]": [5, "12", [-1], [None], [1.5], None],
            "tuple[int, int, int]": [5, [1, 2], [-4, 1, 100], ["a", "b", "c"], [True, 1, 1], None]}


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_of_a_packs_configuration(name: str) -> None:
    kind = ModelConfig.__dataclass_fields__[name].type
    for value in NONSENSE[kind]:
        text = refusal(ModelConfig.from_dict, {**FIELDS, name: value})
        assert text.startswith(f"model configuration: {name} is ")
    if kind == "int" and name not in ("intermediate_size", "num_experts"):
        assert name in refusal(ModelConfig.from_dict, {**FIELDS, name: 0})


def test_a_packs_configuration_as_a_whole() -> None:
    for value in (5, None, [1], "abc"):
        assert refusal(ModelConfig.from_dict, value).startswith("model configuration cannot be read (")
    assert "unknown fields ['more']" in refusal(ModelConfig.from_dict, {**FIELDS, "more": 1})
    assert "incomplete (it lacks hidden_size, vocab_size)" in refusal(
        ModelConfig.from_dict, {k: v for k, v in FIELDS.items() if k not in ("vocab_size", "hidden_size")})
    assert "num_experts = 0 does not fit" in refusal(ModelConfig.from_dict, {**FIELDS, "num_experts": 0})
    assert "num_experts = 16 does not fit" in refusal(ModelConfig.from_dict, {**FIELDS, "model_type": "qwen3_5_text"})
    assert "linear_conv_kernel_dim = 17" in refusal(ModelConfig.from_dict, {**FIELDS, "linear_conv_kernel_dim": 17})
