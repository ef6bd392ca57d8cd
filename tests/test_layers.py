"""The Q4_0 engine against the reference on the same quantised values: op by op inside every layer, and whole models.

Layer by layer every layer is fed the reference's input (tools/dump_reference.py derives the limits). Whole models are
judged as verification by noise must be: a flipped activation code is a whole quantum, so the engine may differ from the
reference as much as the reference differs from itself with its layer inputs moved by one unit in the last place.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import save

from fermi_engine import Engine, EngineConfig, FermiError
from fermi_engine.against import against, first_failure
from fermi_engine.convert import convert
from fermi_engine.errors import VerifyError
from fermi_engine.pack import Pack
from tests import hf
from tools import dump_reference, oracle
from tools.make_checkpoint import make_checkpoint

LENGTH = 80
PROMPTS, DRAWS = 32, 2


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    """Packs by (family, format); calm weights, as quantised runs need."""
    directory = tmp_path_factory.mktemp("layers")
    found = {}
    for family in ("moe", "dense"):
        checkpoint = make_checkpoint(directory / family, seed=8, family=family)
        for name in ("q4_0", "q8_0"):
            found[family, name] = convert(checkpoint, directory / f"{family}-{name}.pack", format=name)
    return found


@pytest.fixture(autouse=True)
def _one_thread_without_gradients():
    with hf.threads(1), torch.no_grad():
        yield


def ids_for(pack: Pack, length: int = LENGTH, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, pack.config.vocab_size, length).tolist()


@pytest.mark.parametrize("name", ["q4_0", "q8_0"])
@pytest.mark.parametrize("family", ["moe", "dense"])
@pytest.mark.parametrize("activations", ["q8_0", "f32"])
def test_every_layer_fed_the_references_input(packs, tmp_path, family, name, activations):
    path = packs[family, name]
    pack = Pack.open(path)
    dump = dump_reference.write(tmp_path / "dump.safetensors", pack, ids_for(pack), activations)
    rows = against(Engine.load(path, config=EngineConfig(activations=activations)), dump)
    bad = first_failure(rows)
    assert bad is None, f"{bad} over its limit"
    assert len({row.tensor for row in rows}) == len(rows)
    per_layer = sum(row.tensor.startswith("layers.0.") for row in rows)
    assert per_layer == (16 if family == "moe" else 13)
    skipped = max(row.skipped for row in rows)
    assert skipped <= 0.05 * LENGTH, (
        f"{skipped} of {LENGTH} positions lie within the router's noise: nothing was compared"
    )


def test_codes_and_block_sums_are_those_of_the_reference(packs):
    """Row 7's exact half: identical float inputs give bit-equal activation codes and integer sums, in every matrix."""
    from reference import quant

    pack = Pack.open(packs["moe", "q4_0"])
    kernels = Engine.load(packs["moe", "q4_0"]).kernels
    matrices = [pack.matrix(name) for name in pack.matrix_names if pack.matrix(name).format == "q4_0"]
    matrices += [m for e in (0, 7) for m in pack.expert(2, e)]
    for seed, w in enumerate(matrices):
        x = np.random.default_rng(seed).standard_normal((5, w.cols)).astype(np.float32)
        codes, d = quant.quantize_activation(torch.from_numpy(x))
        q = kernels.quantize_q8_0(x)
        assert np.array_equal(q.codes, codes.numpy())
        assert q.d.tobytes() == d.numpy().tobytes()
        isums = np.empty((5, w.rows, w.cols // 32), np.int32)
        kernels.matmul_q8("gemm_q4_0_q8_0", q, w, isums)
        expected, _ = quant.dot_q4_0_q8_0(*quant.unpack_q4_0(torch.from_numpy(np.array(w.plain()))), codes, d)
        assert np.array_equal(isums, expected.numpy())


def test_a_wrong_layer_is_named(packs, tmp_path):
    path = packs["moe", "q4_0"]
    pack = Pack.open(path)
    dump = dump_reference.write(tmp_path / "dump.safetensors", pack, ids_for(pack, 20), "q8_0")
    engine = Engine.load(path)
    layer = engine.decoder.layers[5]
    layer.mixer.dt_bias = layer.mixer.dt_bias + np.float32(1e-3)
    bad = first_failure(against(engine, dump))
    assert bad is not None
    assert bad.tensor == "layers.5.g"
    engine.decoder.layers[3].mixer.k_norm = engine.decoder.layers[3].mixer.k_norm * np.float32(1.001)
    assert first_failure(against(engine, dump)).tensor == "layers.3.k"


def test_a_dump_of_another_model_is_refused(packs, tmp_path):
    pack = Pack.open(packs["dense", "q4_0"])
    dump = dump_reference.write(tmp_path / "dump.safetensors", pack, ids_for(pack, 5), "q8_0")
    with pytest.raises(FermiError, match="was made from pack"):
        against(Engine.load(packs["moe", "q4_0"]), dump)
    with pytest.raises(FermiError, match="pass --activations q8_0"):
        against(Engine.load(packs["dense", "q4_0"], config=EngineConfig(activations="f32")), dump)
    dump.write_bytes(dump.read_bytes()[:-5])
    with pytest.raises(FermiError, match=r"dump\.safetensors"):
        against(Engine.load(packs["dense", "q4_0"]), dump)


@pytest.fixture(scope="module")
def sound(packs):
    """A loaded engine and the tensors of a sound dump of five tokens."""
    engine = Engine.load(packs["moe", "q4_0"], config=EngineConfig(ctx_size=12))
    with hf.threads(1), torch.no_grad():
        return engine, dump_reference.dump(engine.pack, ids_for(engine.pack, 5), "q8_0")


def refusal(engine, path, tensors):
    """The one line that refuses a dump of these tensors; None for one leaves it out."""
    kept = {name: torch.as_tensor(value).contiguous() for name, value in tensors.items() if value is not None}
    path.write_bytes(save(kept, metadata=dump_reference.metadata(engine.pack, "q8_0")))
    with pytest.raises(VerifyError) as caught:
        against(engine, path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("ids", "text"), [
    (np.array([10**9], np.int32), "token id 1000000000 is outside the model's 0..337; make it again with"),
    (np.array([1, -1], np.int32), "token id -1 is outside the model's 0..337; make it again with"),
    (np.array([337, 338], np.int32), "token id 338 is outside"),
    (np.array([], np.int32), "holds ids int32 [0], expected token ids as a list of int32, one at least"),
    (np.array([[1, 2]], np.int32), "holds ids int32 [1, 2], expected"),
    (np.array(1, np.int32), "holds ids int32 [], expected"),
    (np.array([1.0], np.float32), "holds ids float32 [1], expected"),
    (None, "holds no ids, expected"),
    (np.zeros(13, np.int32), "holds 13 token ids, the context is 12; dump fewer of them"),
    (np.array([1], np.int64), "tensor ids has dtype I64, a dump has F32, F64, I32; make it again with"),
])
def test_ids_of_a_dump_that_cannot_be_run(sound, tmp_path, ids, text):
    engine, tensors = sound
    path = tmp_path / "dump.safetensors"
    found = refusal(engine, path, {**tensors, "ids": ids})
    assert found.startswith(f"{path}")
    assert text in found


def test_other_dtypes_in_a_dump(sound, tmp_path):
    engine, tensors = sound
    wide = torch.as_tensor(tensors["tensor.embed"]).to(torch.bfloat16)
    assert "tensor tensor.embed has dtype BF16, a dump has F32, F64, I32; make it again" in refusal(
        engine, tmp_path / "d", {**tensors, "tensor.embed": wide})


@pytest.mark.parametrize(("name", "change", "text"), [
    ("tensor.layers.1.input", lambda a: a[:, :-1], "tensor.layers.1.input has shape [5, 63], expected [5, 64]"),
    ("tensor.layers.1.input", lambda a: a[:-1], "tensor.layers.1.input has shape [4, 64], expected [5, 64]"),
    ("tensor.layers.1.input", lambda a: a.astype(np.float64), "layers.1.input is float64, expected float32"),
    ("tensor.layers.7.output", lambda a: a[0], "tensor.layers.7.output has shape [64], expected [5, 64]"),
    ("tensor.layers.1.output", lambda a: a[0, 0], "tensor.layers.1.output has shape [], expected [5, 64]"),
    ("tensor.logits", lambda a: a[:, 1:], "tensor.logits has shape [5, 337], expected [5, 338]"),
    ("tensor.layers.2.router_ids", lambda a: None, "lacks tensor.layers.2.router_ids"),
    ("limit.embed", lambda a: a[:0], "limit.embed has shape [0], expected [1]"),
    ("limit.layers.0.ffn", lambda a: None, "lacks limit.layers.0.ffn"),
    ("margin.0", lambda a: a[1:], "margin.0 has shape [4], expected [5]"),
])
def test_tensors_of_a_dump_that_do_not_fit(sound, tmp_path, name, change, text):
    engine, tensors = sound
    found = refusal(engine, tmp_path / "d", {**tensors, name: change(tensors[name])})
    assert text in found
    assert "make it again with tools/dump_reference.py" in found


def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """KL(p || q) per position of two logit arrays [T, vocab], in float64."""
    log_p, log_q = (torch.log_softmax(torch.from_numpy(np.asarray(x, np.float64)), -1) for x in (p, q))
    return (log_p.exp() * (log_p - log_q)).sum(-1).numpy()


@dataclasses.dataclass
class Run:
    logits: np.ndarray
    router: np.ndarray  # [layers, T, E] router logits

    def undecided(self, moved: Run, k: int) -> np.ndarray:
        """[T]: in some layer the k-th and the next logit lie closer than twice what noise moved them towards each other."""
        order = np.argsort(-self.router, axis=-1, kind="stable")[..., k - 1 : k + 1]
        margin, after = (np.take_along_axis(run.router, order, -1) @ np.array([1.0, -1.0]) for run in (self, moved))
        return (margin <= 2 * np.abs(after - margin)).any(axis=0)


def run_reference(decoder, ids: list[int], generator: np.random.Generator | None) -> Run:
    """Whole float32 forward; with a generator each layer's input is moved by one unit in the last place."""
    trace: dict[str, np.ndarray] = {}

    def note(name: str, value: torch.Tensor) -> None:
        trace[name] = value.numpy()

    positions = torch.arange(len(ids)).expand(3, -1)
    cos, sin = decoder.rope_tables(positions)
    x = decoder.embed(torch.tensor(ids))
    for i, state in enumerate(decoder.initial_state()):
        x = x if generator is None else dump_reference._one_ulp(x, generator)
        x, _ = decoder.forward_layer(i, x, state, cos, sin, note)
    logits = decoder.head(x).numpy()
    return Run(logits, np.stack([trace[f"layers.{i}.router_logits"] for i in range(decoder.config.num_hidden_layers)]))


def test_whole_model_is_within_the_references_own_noise(tmp_path, capsys):
    """Mean KL over many short prompts, because what it averages is rare: a prompt without a flipped code sits at 1e-14, one
    with a flip at 1e-6. PROMPTS * DRAWS runs of 48 tokens meet some twenty flips, so that twice the noise is two to three of
    its standard deviations away."""
    model = hf.build(moe=True, value_head_ratio=2)
    hf.save(model, tmp_path / "model", fused=True)
    path = convert(tmp_path / "model", tmp_path / "model.pack")
    reference = oracle.decoder(Pack.open(path), "q8_0", torch.float32)
    engine = Engine.load(path)
    ours, noise, left_out, positions = [], [], 0, 0
    for seed in range(PROMPTS):
        ids = ids_for(engine.pack, 48, seed)
        plain, mine = run_reference(reference, ids, None), engine.session().logits(ids)
        for draw in range(DRAWS):
            moved = run_reference(reference, ids, np.random.default_rng([seed, draw]))
            undecided = plain.undecided(moved, engine.config.num_experts_per_tok)
            left_out, positions = left_out + int(undecided.sum()), positions + len(ids)
            ours.append(kl(plain.logits, mine)[~undecided])
            noise.append(kl(plain.logits, moved.logits)[~undecided])
    mean, limit = np.concatenate(ours).mean(), 2 * np.concatenate(noise).mean()
    with capsys.disabled():
        print(f"\nmean KL engine {mean:.2e}, limit {limit:.2e}, {left_out} of {positions} positions undecided", end="")
    assert mean <= limit
    assert left_out <= 0.01 * positions


def test_format_loss_is_reported(packs, tmp_path, capsys):
    """f32 against q4_0 and q8_0: a report, not a gate; it only has to be there and ordered."""
    checkpoint = make_checkpoint(tmp_path / "c", seed=8, family="moe")
    exact = Engine.load(convert(checkpoint, tmp_path / "f32.pack", format="f32"))
    ids = ids_for(exact.pack, 128)
    truth = exact.session().logits(ids)
    losses = {}
    for name in ("q8_0", "q4_0"):
        logits = Engine.load(packs["moe", name]).session().logits(ids)
        losses[name] = kl(truth, logits).mean()
        top1 = (truth.argmax(1) == logits.argmax(1)).mean()
        with capsys.disabled():
            print(f"\n{name}: mean KL {losses[name]:.2e} against f32, top-1 agreement {top1:.1%}", end="")
    assert 0 < losses["q8_0"] < losses["q4_0"]
