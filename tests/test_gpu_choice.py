"""Which prefills the GPU gets, and what the command line says about it."""

from __future__ import annotations

import dataclasses

import pytest

from fermi_engine import Engine, EngineConfig, SamplingParams, cli, gpu_choice
from fermi_engine.cli_generate import parse_bytes
from fermi_engine.errors import DeviceError, RequestError
from fermi_engine.gpu_prefill import HybridPrefill
from tests.gpu_cases import LENGTH, engines, fresh, hybrid, ids_for, packs


def test_auto_measures_once_and_gives_a_failing_device_up(engines, monkeypatch):
    engine, notes = engines["moe"], []
    options = dataclasses.replace(engine.options, prefill="auto", device="emulated")
    choice = gpu_choice.GpuChoice(engine.pack, engine.decoder, options, notes.append)
    assert choice.hidden(ids_for(engine, gpu_choice.SAMPLE_TOKENS - 1), fresh(engine)) is None
    assert choice.prefill is None
    monkeypatch.setattr(HybridPrefill, "copying_s", lambda self: 1e9)
    assert choice.hidden(ids_for(engine), fresh(engine)) is None
    assert choice.threshold > LENGTH
    choice.threshold = LENGTH
    assert choice.hidden(ids_for(engine), fresh(engine)) is not None
    choice.prefill.device.faults.fail("launch")
    for _ in range(2):
        assert choice.hidden(ids_for(engine), fresh(engine)) is None
    assert len(notes) == 1
    assert "injected" in notes[0]
    assert "the CPU does all prefill" in notes[0]


def test_the_trial_copy_is_a_real_one(engines):
    for name in ("moe", "dense"):
        prefill = hybrid(engines[name])
        assert prefill.copying_s() > 0
        assert prefill.ledger.used == 0
        assert prefill.host.copied_bytes > 0


def test_sampling_runs_on_what_the_gpu_left(packs):
    engine = Engine.load(packs["trained"], config=EngineConfig(threads=1, prefill="gpu", device="emulated"))
    stream = engine.generate(list(range(5, 60)), SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    assert len(list(stream)) >= 4
    assert engine.gpu.prefill.last.plan.blocks == ((0, 55),)


def test_the_command_line(packs, capsys):
    argv = ["generate", "-m", str(packs["trained"]), "--ids", ",".join(map(str, range(40, 90))), "-n", "3", "--ignore-eos",
            "-t", "1", "--prefill", "gpu", "--device", "emulated", "--timing", "--vram"]
    assert cli.run([*argv, "1.5GiB"]) == 0
    said = capsys.readouterr()
    assert "GPU prefill of 50 tokens in 1 block, 8 layers resident" in said.err
    assert "of 1.61 GB | copies" in said.err
    assert cli.run([*argv, "70kB"]) == cli.MISTAKE
    assert "70000 are allowed: raise --vram" in capsys.readouterr().err
    assert cli.run([*argv, "much"]) == cli.MISTAKE
    assert "--vram 'much' is not a size" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "count"), [("6GiB", 6 << 30), ("500MB", 500_000_000), ("1.5 KiB", 1536), ("7", 7),
                                             (None, None)])
def test_sizes(text, count):
    assert parse_bytes("--vram", text) == count


@pytest.mark.parametrize("text", ["", "0", "-1", "6 gigabytes", "GiB", "1e9", "nan"])
def test_what_is_no_size(text):
    with pytest.raises(RequestError, match=r"--vram .* is not a size"):
        parse_bytes("--vram", text)


@pytest.mark.parametrize(("name", "text"), [("f16", "matrices are stored as f16"), ("narrow", "delta rule heads of 16")])
def test_a_model_the_kernels_cannot_run_is_refused(engines, name, text):
    with pytest.raises(DeviceError, match=f"the GPU cannot run this model: {text}.*--prefill cpu"):
        hybrid(engines[name])
