"""Vision towers on the GPU: what memory they take, what they say where there is none, and where an engine encodes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
import pytest

from fermi_engine import Engine, EngineConfig, kernels
from fermi_engine.errors import ConfigError, DeviceError, DeviceMemoryError
from fermi_engine.formats import FORMATS, Matrix
from fermi_engine.gpu.resident import Resident
from fermi_engine.gpu.stream import HostMemory
from fermi_engine.gpu.vision import WEIGHTS, GpuVision
from fermi_engine.kernels import emulated
from fermi_engine.kernels.emulated import EmulatedDevice
from fermi_engine.kernels.gpu import Device, open_device
from fermi_engine.model.decoder import Decoder
from fermi_engine.placement import Ledger
from fermi_engine.snapshots.prefix import NumericPath
from fermi_engine.stages.array_weights import ArrayTensors
from fermi_engine.state import HybridState
from fermi_engine.vision.config import MINICPM, QWEN, VisionConfig, stored_shapes
from tests.devices import on_devices
from tests.gpu_vision_cases import FAMILIES, GRIDS, on_gpu, patches_of, tower
from tests.resident_cases import Hollow, Unread
from tools.bench.geometries import TOWERS, geometry
from tools.make_checkpoint import make_checkpoint

families = pytest.mark.parametrize("family", FAMILIES)
GIB = 1 << 30


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    on_devices(metafunc, "device", ("emulated",))


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    opened = open_device(request.param)
    yield opened
    opened.close()


# memory and failures


@families
def test_little_memory_makes_more_batches_and_none_a_clear_line(family, device):
    grids = GRIDS[family]
    patches, model = patches_of(family, grids), on_gpu(family, device)
    expected = model.forward(patches, grids)
    assert set(model.ledger.held()) == {WEIGHTS}
    one = on_gpu(family, device)
    one.most_rows = 1
    one.forward(patches, grids)
    assert one.ledger.peak < model.ledger.peak
    small = on_gpu(family, device, limit=one.ledger.peak)
    assert np.array_equal(small.forward(patches, grids), expected)
    assert small.last.batches > 1
    assert small.ledger.peak <= one.ledger.peak
    for limit, what in ((one.ledger.peak - 256, "vision activations"), (1 << 10, "vision weights")):
        tight = on_gpu(family, device, limit=limit)
        with pytest.raises(DeviceMemoryError, match=rf"{what} take \d+ bytes .* encode images on the CPU with --vision cpu$"):
            tight.forward(patches, grids)
        assert tight.ledger.held().keys() <= {WEIGHTS}


def test_weights_are_copied_once_and_again_where_they_are_gone(device):
    patches, grids, model = patches_of(QWEN, GRIDS[QWEN]), GRIDS[QWEN], on_gpu(QWEN, device)
    expected = model.forward(patches, grids)
    copied = model.host.copied_bytes
    assert np.array_equal(model.forward(patches, grids), expected)
    assert model.host.copied_bytes == copied + patches.nbytes
    for gone in (model.release, lambda: model.ledger.settle({})):
        gone()
        assert model.ledger.used == 0
        assert np.array_equal(model.forward(patches, grids), expected)


def test_what_else_the_ledger_holds_makes_room(device):
    patches, grids, model = patches_of(QWEN, GRIDS[QWEN]), GRIDS[QWEN], on_gpu(QWEN, device)
    expected = model.forward(patches, grids)
    config, arrays = tower(QWEN)
    one = on_gpu(QWEN, device)
    one.most_rows = 1
    one.forward(patches, grids)
    ledger = Ledger(device, one.ledger.peak)
    ledger.alloc(1 << 12, "somebody's")
    beside = GpuVision(device, ArrayTensors(arrays), config, ledger, HostMemory(device, lambda text: None), "own",
                       evict=lambda: ledger.settle({}))
    assert np.array_equal(beside.forward(patches, grids), expected)
    assert set(ledger.held()) == {WEIGHTS}


def test_a_failure_leaves_no_memory_behind_and_the_next_encode_goes_well():
    patches, grids, device = patches_of(MINICPM, GRIDS[MINICPM]), GRIDS[MINICPM], EmulatedDevice()
    model = on_gpu(MINICPM, device)
    expected = model.forward(patches, grids)
    for kind, nth in (("alloc", 1), ("alloc", 2), ("copy", 3)):
        device.faults.fail(kind, nth)
        with pytest.raises(DeviceError):
            model.forward(patches, grids)
        assert model.ledger.held().keys() <= {WEIGHTS}
        if kind == "copy":
            device.close()
            device = EmulatedDevice()
            model = on_gpu(MINICPM, device)
        assert np.array_equal(model.forward(patches, grids), expected)
    device.close()


def test_towers_that_the_kernels_cannot_run_are_refused(device):
    config, arrays = tower(QWEN)
    host = HostMemory(device, lambda text: None)
    odd = dataclasses.replace(config, num_attention_heads=6)
    with pytest.raises(DeviceError, match="heads of 4, expected a multiple of 8, or run with --vision cpu"):
        GpuVision(device, ArrayTensors(arrays), odd, Ledger(device), host, "own")

    class Halves(ArrayTensors):
        def matrix(self, name: str) -> Matrix:
            return Matrix.from_f32(arrays[name], "f16")

    with pytest.raises(DeviceError, match="stored as f16; convert the checkpoint"):
        GpuVision(device, Halves(arrays), config, Ledger(device), host, "own")


# the real sizes


class UnreadTower:
    """Weights in memory that the system has not given yet: zeros, never touched."""

    def __init__(self, config: VisionConfig) -> None:
        self._shapes = stored_shapes(config)

    def vector(self, name: str) -> np.ndarray:
        return np.zeros(self._shapes[name], np.float32)

    def matrix(self, name: str) -> Matrix:
        return Matrix("f32", *self._shapes[name], np.zeros(FORMATS["f32"].stored_shape(*self._shapes[name]), np.uint8))


def big_image(config: VisionConfig, grids: list[tuple[int, int]]) -> np.ndarray:
    return np.zeros((sum(height * width for height, width in grids), config.patch_width), np.float32)


@pytest.mark.parametrize("gemm", ["own", "vendor"])
def test_minicpm_sees_within_6_gib_with_10240_tokens(gemm, monkeypatch):
    """The released sizes, text and tower in one ledger: an image of ten views, a prompt of 10,240 tokens, a token, an image."""
    monkeypatch.setattr(HostMemory, "copy", lambda *_: None)
    config, tower_config, grids = geometry("minicpm-v-4.6"), TOWERS["minicpm-v-4.6"], [(28, 36)] * 10
    device, weights = Hollow(6 * GIB), Unread(config, "q8_0")
    decoder = Decoder(weights, kernels.get(None, 1), "f32")
    text, state = Resident(device, weights, decoder, gemm=gemm, note=lambda said: None), HybridState.fresh(config, 64)
    tower = GpuVision(device, UnreadTower(tower_config), tower_config, text.ledger, text.host, gemm, evict=text.spare)
    tower.forward(big_image(tower_config, grids), grids)
    assert tower.last.batches == 1
    held = text.ledger.held()
    assert 2.19e9 < held[WEIGHTS] < 2.2e9
    text.prefill(np.zeros(10240, np.int32), state)
    text.decode(0, state)
    tower.forward(big_image(tower_config, grids), grids)
    print(f"{gemm}: peak {text.ledger.peak} bytes, at rest {text.ledger.used}")
    assert text.ledger.peak < 6 * GIB
    assert text.ledger.used == device.total_bytes - device.free_bytes


def test_an_image_of_a_million_pixels_takes_less_than_2_gb(monkeypatch):
    """Qwen's tower with it."""
    monkeypatch.setattr(HostMemory, "copy", lambda *_: None)
    config, device = TOWERS["qwen3.6-35b-a3b"], Hollow(2 * 10**9)
    ledger = Ledger(device)
    tower = GpuVision(device, UnreadTower(config), config, ledger, HostMemory(device, lambda said: None), "own")
    tower.forward(big_image(config, [(64, 64)]), [(64, 64)])
    print(f"weights {ledger.held()[WEIGHTS]}, peak {ledger.peak} bytes")


# in the engine


@functools.cache
def images(count: int) -> tuple[np.ndarray, ...]:
    draw = np.random.default_rng(4)
    return tuple(draw.integers(0, 256, (70 + 10 * i, 50, 3)).astype(np.uint8) for i in range(count))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> dict[str, Engine]:
    """Small models with towers, on the CPU with float32 activations."""
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FERMI_CACHE", str(tmp_path_factory.mktemp("cache")))
        for name, options in (("minicpm", {"family": "minicpm", "tied": True}), ("moe", {"experts": 4, "experts_per_tok": 2})):
            directory = make_checkpoint(tmp_path_factory.mktemp(name), seed=6, layers=4, key_dim=32, **options)
            made[name] = Engine.load(directory, format="q8_0", config=EngineConfig(activations="f32", threads=1))
    return made


@pytest.mark.parametrize(("name", "way"), [("minicpm", {"decode": "gpu"}), ("moe", {"prefill": "gpu"})])
def test_the_engine_encodes_where_it_is_told(seeing, name, way):
    """On the device of the text model and in its ledger; --vision cpu gives the CPU's bits, and another numeric path."""
    cpu = seeing[name]
    given = {"activations": "f32", "threads": 1, "device": "emulated", "gemm": "own", **way}
    gpu, beside = (Engine(cpu.pack, EngineConfig(vision=vision, **given)) for vision in ("auto", "cpu"))
    for pixels in images(2):
        image = cpu.vision.prepare(pixels)
        mine, theirs = gpu.vision.encode(image), cpu.vision.encode(image)
        assert np.array_equal(beside.vision.encode(image), theirs)
        assert not np.array_equal(mine, theirs)
        assert np.linalg.norm(mine - theirs) < 1e-5 * np.linalg.norm(theirs)
    owner = gpu.resident if name == "minicpm" else gpu.gpu.owner()
    assert gpu.vision.tower.ledger is owner.ledger
    assert WEIGHTS in owner.ledger.held()
    line = gpu.vision.encoded.line()
    assert "images encoded: 2 in" in line
    assert "on the GPU: patches" in line
    paths = {NumericPath.of("seal", engine.options).prefill for engine in (gpu, beside, cpu)}
    assert len(paths) == 3


def test_activations_of_a_prefill_make_room_for_the_next_image(seeing):
    """And the next prefill takes what is left then: the same logits."""
    cpu = seeing["minicpm"]
    engine = Engine(cpu.pack, EngineConfig(decode="gpu", device="emulated", gemm="own", threads=1))
    image, ids = cpu.vision.prepare(images(1)[0]), np.arange(300, dtype=np.int32) % 200
    rows, logits = engine.vision.encode(image), engine.session().prefill(ids)
    ledger = engine.resident.ledger
    assert "activations" in ledger.held()
    ledger.limit = ledger.used
    assert np.array_equal(engine.vision.encode(image), rows)
    assert "activations" not in ledger.held()
    assert np.array_equal(engine.session().prefill(ids), logits)


def test_an_engine_without_room_for_the_tower_says_what_to_do(seeing):
    cpu = seeing["moe"]
    engine = Engine(cpu.pack, EngineConfig(prefill="gpu", device="emulated", vram=1 << 12, threads=1))
    with pytest.raises(DeviceMemoryError, match=r"^vision weights take .* --vision cpu$"):
        engine.vision.encode(cpu.vision.prepare(images(1)[0]))


@pytest.mark.parametrize(("name", "way", "remedy"), [
    ("minicpm", {"decode": "gpu"}, "--decode cpu does without the GPU"),
    ("moe", {"prefill": "gpu"}, "--prefill cpu does without the GPU"),
    ("moe", {"prefill": "auto", "vision": "gpu"}, "--vision cpu encodes images on the CPU")])
def test_without_a_device_the_remedy_is_one_for_the_text_model_too(seeing, monkeypatch, name, way, remedy):
    """Where that needs the device as well: images on the CPU would only lead to the next error."""
    cpu = seeing[name]
    engine = Engine(cpu.pack, EngineConfig(device="emulated", threads=1, **way))

    def absent():
        raise DeviceError("there is no card")

    monkeypatch.setattr(emulated, "EmulatedDevice", absent)
    with pytest.raises(DeviceError, match=f"^there is no card; {remedy}$"):
        engine.vision.encode(cpu.vision.prepare(images(1)[0]))


def test_a_text_model_that_does_not_fit_says_so_before_the_tower(seeing):
    cpu = seeing["minicpm"]
    engine = Engine(cpu.pack, EngineConfig(decode="gpu", device="emulated", gemm="own", vram=1 << 12, threads=1))
    with pytest.raises(DeviceMemoryError, match=r"raise --vram, or run with --decode cpu$"):
        engine.vision.encode(cpu.vision.prepare(images(1)[0]))


@pytest.mark.parametrize("place", ["stream", "alloc"])
def test_a_tower_that_fails_offers_the_cpu(seeing, monkeypatch, place):
    """When it is made, and when it runs."""
    cpu = seeing["moe"]
    engine = Engine(cpu.pack, EngineConfig(prefill="gpu", device="emulated", gemm="own", threads=1))
    device = engine.gpu.owner().device

    def broken(*args):
        raise DeviceError("the card is gone")

    monkeypatch.setattr(device, place, broken)
    with pytest.raises(DeviceError, match=r"^the card is gone; --vision cpu encodes images on the CPU$"):
        engine.vision.encode(cpu.vision.prepare(images(1)[0]))


def test_options_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="vision = 'gpu' where the GPU neither decodes nor prefills"):
        EngineConfig(vision="gpu")
    with pytest.raises(ConfigError, match="vision = 'tpu'; choose 'cpu', 'gpu' or 'auto'"):
        EngineConfig(vision="tpu")
    assert EngineConfig(prefill="auto", vision="gpu").is_vision_on_gpu
    assert not EngineConfig(prefill="auto").is_vision_on_gpu
