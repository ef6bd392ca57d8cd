"""Which prefills the GPU gets, and what the command line says about it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest

from fermi_engine import Engine, EngineConfig, SamplingParams
from fermi_engine.cli import app as cli
from fermi_engine.errors import ConfigError, DeviceError, RequestError
from fermi_engine.gpu import choice as gpu_choice
from fermi_engine.gpu import cost as gpu_cost
from fermi_engine.gpu.cost import Cost
from fermi_engine.gpu.report import busy
from fermi_engine.kernels import selftest
from fermi_engine.kernels.emulated import EmulatedDevice
from fermi_engine.sizes import parse_bytes
from tests.fake_cuda import fake_driver, install, working_driver
from tests.gpu_cases import LENGTH, engines, fresh, hybrid, ids_for, packs


def choice_for(engine: Engine, notes: list[str], **options: Any) -> gpu_choice.GpuChoice:
    changed = dataclasses.replace(engine.options, device="emulated", **options)
    return gpu_choice.GpuChoice(engine.pack, engine.decoder, changed, notes.append)


def test_auto_measures_once_and_gives_a_failing_device_up(engines, monkeypatch):
    engine, notes, measured = engines["moe"], [], []
    choice = choice_for(engine, notes, prefill="auto")
    monkeypatch.setattr(gpu_cost, "measure", lambda *args: measured.append(args) or Cost(1.0, 0.0, 1.0))
    assert choice.hidden(ids_for(engine, gpu_choice.SHORTEST - 1), fresh(engine)) is None
    assert choice.prefill is None
    for _ in range(2):
        assert choice.hidden(ids_for(engine), fresh(engine)) is None
    assert len(measured) == 1
    choice.cost = Cost(0.0, 0.0, 1.0)
    assert choice.hidden(ids_for(engine), fresh(engine)) is not None
    choice.prefill.device.faults.fail("launch")
    for _ in range(2):
        assert choice.hidden(ids_for(engine), fresh(engine)) is None
    assert len(notes) == 1
    assert "injected" in notes[0]
    assert "the CPU does all prefill" in notes[0]


def test_the_longer_of_copies_and_kernels_counts():
    assert Cost(1e-3, 1.0, 2.0).favours_gpu(tokens=6, streamed_bytes=10_000)  # 10 against 12 seconds
    assert not Cost(1e-3, 1.0, 2.0).favours_gpu(tokens=5, streamed_bytes=10_000)
    assert not Cost(1e-3, 2.0, 2.0).favours_gpu(tokens=10**6, streamed_bytes=10_000)  # kernels as slow as the CPU
    assert Cost(1e-3, 0.0, 2.0).favours_gpu(tokens=1, streamed_bytes=0)


@pytest.mark.parametrize("name", ["moe", "dense"])
def test_the_cost_is_that_of_layers_that_ran(engines, name):
    """On the simulated card: its copies and kernels as its own clock has them in a whole prefill."""
    engine, device, notes = engines[name], EmulatedDevice(), []
    options = choice_for(engine, notes)._options
    ids = ids_for(engine, gpu_cost.GPU_TOKENS)
    cost = gpu_cost.measure(device, engine.pack, engine.decoder, options, ids, notes.append)
    assert device.free_bytes == device.total_bytes
    assert notes == []
    prefill = hybrid(engine, device, timing=True)
    prefill.run(ids, fresh(engine))
    copies = [span for span in prefill.last.spans if span.label.startswith("dense" if name == "dense" else "experts")]
    byte_s = sum(span.end_s - span.begin_s for span in copies) / sum(span.nbytes for span in copies)
    token_s = sum(end - begin for begin, end in busy(prefill.last.spans, "compute")) / len(ids)
    assert cost.byte_s == pytest.approx(byte_s, rel=0.02)
    assert cost.token_s == pytest.approx(token_s, rel=0.02)
    assert cost.cpu_token_s > 0


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


def no_pycuda(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "pycuda", None)


def no_driver(patch: pytest.MonkeyPatch) -> None:
    install(patch, driver := fake_driver())

    def fail() -> None:
        raise driver.Error("cuInit failed: no CUDA-capable device is detected")

    driver.init = fail


def old_card(patch: pytest.MonkeyPatch) -> None:
    install(patch, fake_driver())


def wrong_cublas(patch: pytest.MonkeyPatch) -> None:
    install(patch, working_driver())
    patch.setattr(selftest, "check", lambda device: None)  # this card runs no kernels
    patch.setenv("FERMI_CUBLAS", "libm.so.6")


def failing(kind: str, nth: int) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        device = EmulatedDevice()
        device.faults.fail(kind, nth)
        patch.setattr(gpu_choice, "open_device", lambda kind: device)

    return plant


@pytest.mark.parametrize(("plant", "text"), [
    (no_pycuda, "the CUDA device needs pycuda, which does not load"),
    (no_driver, "no usable NVIDIA driver (cuInit failed: no CUDA-capable device is detected)"),
    (old_card, "Old Card has compute capability 1.3; 2.0 is the floor"),
    (wrong_cublas, "libm.so.6 is no cuBLAS: it lacks cublasCreate_v2; FERMI_CUBLAS names a library"),
    (failing("alloc", 2), "alloc of "), (failing("launch", 1), "launch of rope_tables"), (failing("copy", 9), "copy of "),
])
def test_every_failure_is_one_line_and_offers_the_cpu(packs, capsys, monkeypatch, plant, text):
    argv = ["generate", "-m", str(packs["trained"]), "--ids", ",".join(map(str, range(40, 90))), "-n", "3", "--ignore-eos",
            "-t", "1", "--gemm", "vendor", "--prefill"]
    assert cli.run([*argv, "cpu"]) == 0
    right = capsys.readouterr().out
    plant(monkeypatch)
    assert cli.run([*argv, "gpu"]) == cli.MISTAKE
    said = capsys.readouterr()
    errors = [line for line in said.err.splitlines() if "error" in line]
    assert said.out == ""
    assert len(errors) == 1
    assert text in errors[0]
    assert "--prefill cpu" in errors[0]
    assert said.err.rstrip().endswith(errors[0])
    plant(monkeypatch)
    assert cli.run([*argv, "auto"]) == 0
    said = capsys.readouterr()
    warnings = [line for line in said.err.splitlines() if "warning" in line]
    assert said.out == right
    assert len(warnings) == 1
    assert text in warnings[0]
    assert warnings[0].endswith("the CPU does all prefill from here on")


def test_the_engine_says_whose_products_it_takes(packs):
    for options, expected in (({"prefill": "gpu"}, "own"), ({"prefill": "auto", "gemm": "vendor"}, "vendor")):
        engine = Engine.load(packs["trained"], config=EngineConfig(threads=1, device="emulated", **options))
        assert engine.options.gemm == expected
        assert f" {expected} " in engine.session().path.prefill  # which snapshots carry
    with pytest.raises(ConfigError, match="gemm = 'cublas'; choose 'own' or 'vendor'"):
        EngineConfig(gemm="cublas")


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
