"""Vision towers on the (emulated) GPU against the reference, and the same bits in any company."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fermi_engine.gpu.vision import WEIGHTS
from fermi_engine.kernels.emulated import EmulatedDevice
from fermi_engine.kernels.gpu import Device, open_device
from fermi_engine.kernels.sm20_vision import view_tiles
from fermi_engine.model import gpu_vision
from fermi_engine.stages.device_run import DeviceRun
from fermi_engine.vision.config import MINICPM
from tests.devices import on_devices
from tests.gpu_vision_cases import FAMILIES, GRIDS, expected, on_gpu, patches_of, quantised, tower

families = pytest.mark.parametrize("family", FAMILIES)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    on_devices(metafunc, "device", ("emulated",))


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    opened = open_device(request.param)
    yield opened
    opened.close()


# against the reference


@pytest.mark.parametrize("gemm", ["own", "vendor"])
@families
def test_error_is_at_most_twice_that_of_torch(family, device, gemm):
    """|error| over all embeddings, which is no matter of luck as the largest of few is; and no element errs by more than is
    published of one image, 1.4e-5, not to speak of 1.2e-4 of several."""
    model = on_gpu(family, device, gemm=gemm)
    for grids in (GRIDS[family], [GRIDS[family][0]]):
        patches = patches_of(family, grids)
        exact, single = (expected(family, patches, grids, dtype) for dtype in (torch.float64, torch.float32))
        theirs, ours = single - exact, model.forward(patches, grids) - exact
        print(f"{family} {grids}: largest error {np.abs(ours).max():.1e}, torch {np.abs(theirs).max():.1e}; "
              f"norms {np.linalg.norm(ours):.1e}, {np.linalg.norm(theirs):.1e}")
        assert np.linalg.norm(ours) <= 2 * np.linalg.norm(theirs)
        assert np.abs(ours).max() < 1.4e-5


@families
def test_every_stage_meets_the_reference(family, device):
    """By the names of the CPU's traces, each with at most twice the error of torch in float32 (norms, as above)."""
    patches, seen, known, single = patches_of(family, GRIDS[family]), {}, {}, {}
    on_gpu(family, device).forward(patches, GRIDS[family], seen.__setitem__)
    expected(family, patches, GRIDS[family], torch.float64, trace=known.__setitem__)
    expected(family, patches, GRIDS[family], torch.float32, trace=single.__setitem__)
    assert list(seen) == list(known) == list(single)
    for name, value in known.items():
        exact = value.numpy()
        assert np.linalg.norm(seen[name] - exact) <= 2 * np.linalg.norm(single[name].numpy() - exact), name


@pytest.mark.parametrize("gemm", ["own", "vendor"])
@families
def test_quantised_towers_are_the_reference_on_the_same_values(family, device, gemm):
    patches, grids = patches_of(family, GRIDS[family]), GRIDS[family]
    stored, values = quantised(tower(family, heads=4, mlp=64)[1])
    exact, single = (expected(family, patches, grids, dtype, values) for dtype in (torch.float64, torch.float32))
    model = on_gpu(family, device, gemm=gemm, arrays=stored, heads=4, mlp=64)
    error = np.linalg.norm(model.forward(patches, grids) - exact)
    assert error <= 2 * np.linalg.norm(single - exact)
    assert model.ledger.held().keys() == {WEIGHTS}  # scratch is there for no longer than an encode


# the same bits


@families
def test_views_have_the_same_bits_alone_among_others_and_in_any_batches(family, device, monkeypatch):
    grids, model = GRIDS[family], on_gpu(family, device, mlp=200)  # in parts, where few rows may pass an MLP together
    patches = patches_of(family, grids)
    together, begin, row = model.forward(patches, grids), 0, 0
    assert model.last.batches == 1
    for height, width in grids:
        end = begin + height * width
        alone = model.forward(patches[begin:end], [(height, width)])
        assert np.array_equal(alone, together[row : row + len(alone)])
        begin, row = end, row + len(alone)
    assert row == len(together)
    monkeypatch.setattr(gpu_vision, "MLP_ROWS", 7)
    for most, batches in ((1, len(grids)), (sum(height * width for height, width in grids[:-1]), 2)):
        model.most_rows = most
        assert np.array_equal(model.forward(patches, grids), together)
        assert model.last.batches == batches


def test_threads_and_blocks_in_any_order_race_nowhere():
    grids, results = GRIDS[MINICPM], []
    for options in ({}, {"seed": 3}, {"mode": "checked"}):
        device = EmulatedDevice(**options)
        results.append(on_gpu(MINICPM, device).forward(patches_of(MINICPM, grids), grids))
        device.close()
    assert all(np.array_equal(result, results[0]) for result in results)


def long_view(kind: str, length: int) -> tuple[np.ndarray, ...]:
    """q, k and v [length, 72] of one head. flat: all positions count alike; sharp: one in the middle has most of the first
    query's weight; rising: every block has a new maximum."""
    rng = np.random.default_rng(length)
    q, k, v = (rng.standard_normal((length, 72)) for _ in "qkv")
    along = q[0] / np.linalg.norm(q[0]) * 72**0.5
    if kind == "flat":
        k *= 0.1
    elif kind == "sharp":
        k[length // 2] = 3 * along
    else:
        k += along * np.linspace(-1, 1, length)[:, None]
    return tuple(x.astype(np.float32) for x in (q, k, v))


@pytest.mark.parametrize("kind", ["flat", "sharp", "rising"])
@pytest.mark.parametrize("length", [1024, 4096, 10000])
def test_long_views_err_as_the_whole_matrix_does(device, kind, length):
    """The first 64 queries of a view; at most twice the error of torch's softmax over all scores in float32."""
    parts, run = long_view(kind, length), DeviceRun(device)
    out = run.empty(length, 72, aligned=True)
    qkv, tile = np.concatenate(parts, axis=1), np.array([[0, 0, length]], np.int32)
    run.vision.full_attention(run.put(qkv), 1, run.put(tile), 72**-0.5, out)
    got = run.get(out)[:64]
    run.close()
    exact, single = (((q[:64] @ k.T * 72**-0.5).softmax(-1) @ v).numpy() for q, k, v in
                     ([torch.from_numpy(x).to(dtype) for x in parts] for dtype in (torch.float64, torch.float32)))
    errors = [float(np.abs(x - exact).max()) for x in (got, single)]
    assert errors[0] <= 2 * errors[1], errors


def test_tiles_cover_every_view_once():
    for lengths in ((1,), (64, 65, 1), (300, 4), (128, 128)):
        tiles = view_tiles(lengths)
        queries = [q for first, _, end in tiles.tolist() for q in range(first, min(first + 64, end))]
        assert sorted(queries) == list(range(sum(lengths)))
        begins = np.cumsum((0, *lengths))
        assert all((begin, end) in set(itertools.pairwise(begins.tolist())) for _, begin, end in tiles.tolist())
