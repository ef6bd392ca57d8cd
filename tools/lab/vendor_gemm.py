"""Times the products of a prefill by our own kernels and by the vendor's sgemm, on a card.

    python tools/lab/vendor_gemm.py [--device cuda|emulated] [--geometry qwen3.6-35b-a3b-reap128] [--tokens 947] [--runs 20]

Dense products: the own kernel in both of its tiles, the vendor's with the matrix expanded before it, and sgemm alone; then what
all of them together take in a prefill. Experts: the grouped kernel against a call of sgemm for each expert that has rows, whose
matrix is expanded before it. Weights are random q4_0, or float32 where a pack has that. Times are medians of events round a call
that was queued while the device was busy. On the emulated device times are modelled: that is for trying the script.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np

with suppress(ImportError):
    import torch  # noqa: F401 - brings cuBLAS to machines without an installed CUDA

if not __package__:  # run as a script, which puts this folder on the path instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from fermi_engine.config import ModelConfig
from fermi_engine.formats import FORMATS
from fermi_engine.kernels.device_arrays import DeviceArray, DeviceExperts, DeviceMatrix
from fermi_engine.kernels.gpu import open_device
from fermi_engine.kernels.gpu_kernels import LARGE_TILE, SMALL_TILE, GpuKernels
from fermi_engine.kernels.sm20_vendor import VendorKernels
from fermi_engine.model.gpu_layers import LARGE_ROWS, tile_rows
from tools.bench.geometries import geometry
from tools.lab.sm20_gdn_bench import Bench

SMALLEST, LARGEST = 1 << 20, 1  # multiprocessors for which every product takes the small tile, and the large one


def dense_products(c: ModelConfig) -> Iterator[tuple[str, int, int, int, str]]:
    """Name, times in a prefill, n, k and format of every dense product."""
    h, layers = c.hidden_size, c.num_hidden_layers
    full = c.layer_types.count("full_attention")
    rows = [("in_proj_qkv", layers - full, c.conv_dim, h, "q4_0"), ("in_proj_z", layers - full, c.linear_value_dim, h, "q4_0"),
            ("in_proj_a, b", 2 * (layers - full), c.linear_num_value_heads, h, "f32"),
            ("out_proj", layers - full, h, c.linear_value_dim, "q4_0"),
            ("q_proj", full, 2 * c.num_attention_heads * c.head_dim, h, "q4_0"),
            ("k_proj, v_proj", 2 * full, c.num_key_value_heads * c.head_dim, h, "q4_0"),
            ("o_proj", full, h, c.num_attention_heads * c.head_dim, "q4_0")]
    width = c.shared_expert_intermediate_size if c.num_experts else c.intermediate_size
    if c.num_experts:
        rows += [("gate", layers, c.num_experts, h, "f32"), ("shared_expert_gate", layers, 1, h, "f32")]
    rows += [("gate_proj, up_proj", 2 * layers, width, h, "q4_0"), ("down_proj", layers, h, width, "q4_0")]
    return (row for row in rows if row[1])


def stored(bench: Bench, count: int, n: int, k: int) -> DeviceArray:
    """`count` random q4_0 matrices one behind the other, scales near 0.01."""
    groups = bench.random.integers(0, 256, (count, -(-n // 8), k // 32, 144), np.uint8)
    groups[..., :16] = bench.random.uniform(0.005, 0.015, (*groups.shape[:3], 8)).astype(np.float16).view(np.uint8)
    return bench.put(groups.reshape(-1))


def matrix(bench: Bench, format: str, n: int, k: int) -> DeviceMatrix:
    data = stored(bench, 1, n, k) if format == "q4_0" else bench.floats(n, k)
    return DeviceMatrix(format, n, k, data)


def time_dense(bench: Bench, c: ModelConfig, tokens: int) -> None:
    """A line a product, and the sums over a prefill."""
    kernels = {name: GpuKernels(bench.device, bench.stream, processors) for name, processors in
               (("large", LARGEST), ("small", SMALLEST), ("own", None))}
    scratch = bench.floats(max(n * k for _, _, n, k, _ in dense_products(c)))
    kernels["vendor"] = VendorKernels(bench.device, bench.stream, scratch)
    names = [*kernels, "sgemm"]
    print(f"{'product':20} {'times':>5} {'m x n x k':>18} " + " ".join(f"{name + ' us':>10}" for name in names))
    totals = dict.fromkeys(names, 0.0)
    for name, times, n, k, format in dense_products(c):
        w, x = matrix(bench, format, n, k), bench.floats(tokens, k)
        y = bench.floats(tokens, n)
        found = {kind: bench.seconds(lambda k=k_, w=w, x=x, y=y: k.gemm(x, w, y)) for kind, k_ in kernels.items()}
        floats = scratch if format == "q4_0" else w.data
        found["sgemm"] = bench.seconds(lambda w=w, x=x, y=y, f=floats: bench.device.sgemm(
            tokens, w.rows, w.cols, x.address, f.address, y.address, bench.stream))
        print(f"{name:20} {times:5} {f'{tokens} x {n} x {k}':>18} " + " ".join(f"{1e6 * found[kind]:10.1f}" for kind in names))
        for kind in names:
            totals[kind] += times * found[kind]
        for array in (w.data, x, y):
            bench.device.free(array.buffer)
    print(f"{'all of a prefill, ms':45} " + " ".join(f"{1e3 * totals[kind]:10.2f}" for kind in names), flush=True)


def time_experts(bench: Bench, c: ModelConfig, tokens: int) -> None:
    """Both products of a layer's experts, grouped and one by one."""
    experts, total = c.num_experts, tokens * c.num_experts_per_tok
    counts = bench.random.multinomial(total, np.full(experts, 1 / experts))
    first = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    small = tile_rows(c, tokens) != LARGE_ROWS
    own, width = GpuKernels(bench.device, bench.stream), c.moe_intermediate_size
    ends, hits = bench.put(first), bench.put(np.array([experts], np.int32))
    height = (SMALL_TILE if small else LARGE_TILE)[0]
    tiles = bench.put(np.zeros(1 + 2 * (min(experts, total) + total // height), np.int32))
    own.grouped_tiles(ends, hits, tiles, height)
    for name, n, k in (("experts, gate_up", 2 * width, c.hidden_size), ("experts, down", c.hidden_size, width)):
        groups, bytes_each = FORMATS["q4_0"].stored_shape(n, k)
        stride = groups * bytes_each
        data, x, y, scratch = stored(bench, experts, n, k), bench.floats(total, k), bench.floats(total, n), bench.floats(n * k)
        whole = DeviceExperts("q4_0", experts, n, k, stride, data)
        vendor = VendorKernels(bench.device, bench.stream, scratch)

        def each(data=data, stride=stride, n=n, k=k, x=x, y=y, vendor=vendor) -> None:
            for i, (begin, end) in enumerate(pairwise(first.tolist())):
                part = DeviceArray.within(data.buffer, (stride,), np.uint8, i * stride)
                vendor.gemm(x.rows(begin, end - begin), DeviceMatrix("q4_0", n, k, part), y.rows(begin, end - begin))

        grouped_s = bench.seconds(lambda whole=whole, x=x, y=y: own.grouped_gemm(x, whole, ends, tiles, y, None, None, small))
        each_s = bench.seconds(each, ahead=8)
        print(f"{name:20} {experts:5} {f'{total / experts:.1f} x {n} x {k}':>18}  grouped {1e6 * grouped_s:.1f} us, one sgemm an "
              f"expert {1e6 * each_s:.1f} us ({each_s / grouped_s:.2f} times)", flush=True)
        for array in (data, x, y, scratch):
            bench.device.free(array.buffer)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "emulated"), default="cuda")
    parser.add_argument("--geometry", default="qwen3.6-35b-a3b-reap128")
    parser.add_argument("--tokens", type=int, default=947)
    parser.add_argument("--runs", type=int, default=20)
    args = parser.parse_args()
    config, bench = geometry(args.geometry), Bench(open_device(args.device), args.runs)
    print(f"{bench.device.name}, {bench.device.multiprocessors} multiprocessors, vendor {bench.device.vendor()}")
    time_dense(bench, config, args.tokens)
    if config.num_experts:
        time_experts(bench, config, args.tokens)
    bench.device.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
