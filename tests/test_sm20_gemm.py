"""The sm_20 matrix products in the emulator: every tile shape, format, gather and grouping gives the bits that ops.h says."""

from __future__ import annotations

import os

import numpy as np
import pytest

from fermi_engine.formats import Matrix
from fermi_engine.kernels.device_arrays import DeviceArray, DeviceMatrix
from fermi_engine.kernels.emulated import EmulatedDevice
from fermi_engine.kernels.gpu import DeviceBuffer
from fermi_engine.kernels.gpu_kernels import GpuKernels

TILES = {"": (64, 128, 256), "_small": (32, 64, 128), "_any": (64, 64, 256)}  # rows, cols, block
FORMATS = ("q4_0", "q8_0")
SHAPES = ((1, 8, 32), (5, 3, 64), (64, 128, 32), (65, 129, 96), (97, 130, 64), (33, 33, 128), (3, 9, 512), (66, 5, 544),
          (2, 70, 1056))
PART = 512  # columns of a chain
MODE = os.environ.get("EMULATOR_MODE", "plain")


class Runner:
    """Arrays to a device of its own, kernels run, arrays back; outputs start as NaN."""

    def __init__(self, seed: int) -> None:
        self.device = EmulatedDevice(seed=seed, mode=MODE)
        self.stream = self.device.stream("test")

    def up(self, array):
        if array is None:
            return None
        buffer = self.device.alloc(array.nbytes, "in")
        self.device.h2d(buffer, np.ascontiguousarray(array), self.stream)
        return buffer

    def run(self, entry, grid, block, y, **arguments):
        """`y` with what the kernel left in it; arguments that are arrays are uploaded."""
        values = {k: self.up(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
        out = self.up(y)
        name = "tiles" if entry == "grouped_tiles" else "y"
        self.device.launch(entry, (*grid, 1, 1)[:3], (block, 1, 1), {**values, name: out}, self.stream)
        got = np.empty_like(y)
        self.device.d2h(got, out, self.stream)
        self.device.synchronize()
        for buffer in (*values.values(), out):
            if buffer is not None and not isinstance(buffer, (int, np.integer)):
                self.device.free(buffer)
        return got


@pytest.fixture(params=(0, 7))
def runner(request):
    return Runner(request.param or None)


def ceil(a, b):
    return -(-a // b)


def nans(*shape):
    return np.full(shape, np.nan, np.float32)


def same_bits(a, b):
    return a.shape == b.shape and bool((a.view(np.uint32) == b.view(np.uint32)).all())


def gemm(runner, format, tile, x, w, n, k, source=None, stride=None):
    m = len(x) if source is None else len(source)
    rows, cols, block = TILES[tile]
    y = runner.run(f"gemm_{format}{tile}", (ceil(n, cols), ceil(m, rows)), block, nans(m + 1, stride or n), x=x, source=source,
                   w=w,
                   x_stride=x.shape[1], y_stride=stride or n, m=m, n=n, k=k)
    assert np.isnan(y[m]).all()
    assert np.isnan(y[:, n:]).all()
    return y[:m, :n].copy()


def product(x, w):
    """Parts of 512 columns, counted from the end of the row rounded up to 16, each a chain acc = fma(x[k], w[k], acc) in
    float32, added in order. A product of two floats is exact in 64 bits of mantissa, their sum rounds twice there; equal to
    one rounding but for ties that 2^-40 of all sums meet."""
    first = (ceil(x.shape[1], 16) * 16 - 1) % PART + 1
    sums = []
    for columns in np.split(np.arange(x.shape[1]), range(first, x.shape[1], PART)):
        acc = np.zeros((len(x), len(w)), np.float32)
        for k in columns:
            acc = (x[:, k, None].astype(np.longdouble) * w[None, :, k] + acc).astype(np.float32)
        sums.append(acc)
    total = sums[0]
    for part in sums[1:]:
        total = total + part
    return total


def floats(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("m", "n", "k"), [(3, 40, 16), (17, 20, 48), *SHAPES])
def test_f32(runner, m, n, k):
    rng = np.random.default_rng(m)
    x, w = floats(rng, m, k), floats(rng, n, k)
    source = rng.integers(0, m, m + 3).astype(np.int32)
    expected = product(x, w)
    for tile in TILES:
        assert same_bits(gemm(runner, "f32", tile, x, w, n, k), expected), tile
        assert same_bits(gemm(runner, "f32", tile, x, w, n, k, source, n + 5), expected[source]), tile


@pytest.mark.parametrize("k", [1, 7, 30, 65, 503, 521, 1041])
def test_f32_any_k(runner, k):
    rng = np.random.default_rng(k)
    x, w = floats(rng, 70, k + 3), floats(rng, 67, k)
    assert same_bits(gemm(runner, "f32", "_any", x, w, 67, k), product(x[:, :k], w))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_codes(runner, format, m, n, k):
    rng = np.random.default_rng(n)
    x, w = floats(rng, m, k), floats(rng, n, k)
    w[0] = 0
    matrix = Matrix.from_f32(w, format)
    whole = runner.run(f"dequantize_{format}", (ceil(n, 8),), 256, nans(n, k), w=matrix.data, row_ids=None, first_row=0,
                       items=n, n=k)
    assert same_bits(whole, matrix.dequantize())
    ids = rng.integers(0, n, 13).astype(np.int32)
    some = runner.run(f"dequantize_{format}", (2,), 256, nans(13, k), w=matrix.data, row_ids=ids, first_row=0, items=13, n=k)
    assert same_bits(some, whole[ids])
    expected = gemm(runner, "f32", "", x, whole, n, k)
    for tile in ("", "_small"):
        assert same_bits(gemm(runner, format, tile, x, matrix.data, n, k), expected), tile


def test_f16_rows(runner):
    halves = np.arange(65536, dtype=np.uint16).view(np.float16).reshape(-1, 64)
    halves = halves[np.isfinite(halves).all(axis=1)]
    y = runner.run("dequantize_f16", (ceil(len(halves) - 3, 8),), 256, nans(len(halves) - 3, 64), w=halves.view(np.uint8),
                   row_ids=None,
                   first_row=3, items=len(halves) - 3, n=64)
    assert same_bits(y, halves[3:].astype(np.float32))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tile", ["", "_small"])
@pytest.mark.parametrize("k", [64, 544])
def test_grouped(runner, format, tile, k):
    rng = np.random.default_rng(3)
    n, counts = 140, np.array([30, 0, 1, 65, 0, 128, 5, 64])
    hit = np.flatnonzero(counts).astype(np.int32)
    first = np.append(0, np.cumsum(counts[hit])).astype(np.int32)
    total = int(first[-1])
    x, source = floats(rng, 50, k), rng.integers(0, 50, total).astype(np.int32)
    experts = [Matrix.from_f32(floats(rng, n, k), format) for _ in counts]
    stride = experts[0].nbytes + 64
    blob = np.zeros(stride * len(experts), np.uint8)
    for e, matrix in enumerate(experts):
        blob[e * stride:][:matrix.nbytes] = matrix.data.reshape(-1)
    rows, cols, block = TILES[tile]
    bound = len(hit) + total // rows
    tiles = runner.run("grouped_tiles", (1,), 256, np.full(1 + 2 * bound, -7, np.int32), first=first,
                       hits=np.array([len(hit)], np.int32), tile_rows=rows)
    expected = [(i, row) for i in range(len(hit)) for row in range(first[i], first[i + 1], rows)]
    assert tiles[0] == len(expected)
    assert [tuple(t) for t in tiles[1:].reshape(-1, 2)[: len(expected)]] == expected
    assert (tiles[1 + 2 * len(expected):] == -7).all()
    y = runner.run(f"grouped_gemm_{format}{tile}", (ceil(n, cols), bound), block, nans(total + 1, n), x=x, source=source, w=blob,
                   slot=hit, first=first, tiles=tiles, x_stride=k, y_stride=n, w_stride=stride, n=n, k=k)
    assert np.isnan(y[total]).all()
    for i, e in enumerate(hit):
        mine = slice(first[i], first[i + 1])
        alone = gemm(runner, format, "_small" if tile == "" else "", x, experts[e].data, n, k, source[mine].copy())
        assert same_bits(y[mine], alone), e


def test_many_hits(runner):
    counts = np.arange(600) % 70 + 1
    first = np.append(0, np.cumsum(counts)).astype(np.int32)
    expected = [(i, row) for i in range(600) for row in range(first[i], first[i + 1], 32)]
    tiles = runner.run("grouped_tiles", (1,), 256, np.zeros(1 + 2 * len(expected), np.int32), first=first,
                       hits=np.array([600], np.int32), tile_rows=32)
    assert tiles[0] == len(expected)
    assert [tuple(t) for t in tiles[1:].reshape(-1, 2)] == expected


class Noted:
    """A device that runs nothing and says what was launched last."""

    multiprocessors = 132

    def launch(self, entry, *args, **more):
        self.entry = entry


# The faster tile as tools/lab/vendor_gemm.py timed both on an H200; for a C2075, whose 14 multiprocessors are easier to
# fill, what its count of tiles says.
@pytest.mark.parametrize(("multiprocessors", "m", "n", "small"), [
    (132, 947, 1, True), (132, 947, 128, True), (132, 947, 512, True), (132, 947, 2048, False), (132, 947, 8192, False),
    (14, 947, 1, True), (14, 947, 128, True), (14, 947, 512, False), (14, 947, 8192, False), (14, 64, 8192, False),
    (14, 64, 512, True), (1, 128, 256, False), (1, 1, 1, True)])
def test_the_tile_follows_from_the_busiest_multiprocessor(multiprocessors, m, n, small):
    device = Noted()
    stored = DeviceArray.within(DeviceBuffer(1 << 20, 1 << 30, "w"), (ceil(n, 8) * 2 * 144,), np.uint8)
    matrix = DeviceMatrix("q4_0", n, 64, stored)
    x, y = (DeviceArray.within(DeviceBuffer(1 << 31, 1 << 30, "x"), shape) for shape in ((m, 64), (m, n)))
    GpuKernels(device, None, multiprocessors).gemm(x, matrix, y)
    assert device.entry == ("gemm_q4_0_small" if small else "gemm_q4_0")
    assert GpuKernels(device, None).multiprocessors == 132


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("k", [32, 512, 544, 1024, 1568])
def test_few_rows(runner, format, k):
    rng = np.random.default_rng(k)
    x, matrix = floats(rng, 2, k), Matrix.from_f32(floats(rng, 131, k), format)
    y = runner.run(f"gemv_rows_{format}", (2, 2), 128, nans(2, 131), x=x, source=None, w=matrix.data, x_stride=k, y_stride=131,
                   m=2, n=131, k=k)
    assert same_bits(y, product(x, matrix.dequantize()))
