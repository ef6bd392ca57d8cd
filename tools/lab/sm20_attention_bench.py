"""Times attention and expert routing on sm_20 through the op layer, beside our own float32 product.

    python tools/lab/sm20_attention_bench.py [--device cuda|emulated] [--tokens 947,2048,10240] [--block 2048]
        [--runs 10] [--gemm 3840] [--vocabulary 248320] [--no-check]

Full geometry: 16 query heads, 2 key heads of 256; 256 experts, 8 chosen, rows of 2048. Attention runs a whole prompt at
once, and then the same prompt in token blocks, each over all that stands before it; the bits must be those of the prompt
at once. Its rate counts the products over positions that are seen, masked ones not. Times are medians of events round one
call. Before the clock runs, some rows of the shortest prompt are held against float64. On the emulated device times are
modelled, not measured: that is for trying the script.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from fermi_engine.formats import FORMATS
from fermi_engine.kernels.device_arrays import DeviceArray, DeviceMatrix
from fermi_engine.kernels.gpu import Device, open_device
from fermi_engine.kernels.gpu_kernels import GpuKernels
from fermi_engine.kernels.sm20_attention import AttentionKernels, DeviceCache, DeviceExpertRows, attention_work

HEADS, KV_HEADS, HEAD_DIM, EXPERTS, CHOSEN, HIDDEN = 16, 2, 256, 256, 8, 2048
SCALE = 1 / math.sqrt(HEAD_DIM)


class Bench:
    """A device, arrays on it, and medians of event times."""

    def __init__(self, device: Device, runs: int) -> None:
        self.device, self.runs, self.stream = device, runs, device.stream("bench")
        self.ops = AttentionKernels(device, self.stream)
        self.random = np.random.default_rng(1)

    def put(self, array: np.ndarray) -> DeviceArray:
        placed = DeviceArray.within(self.device.alloc(array.nbytes, "array"), array.shape, array.dtype)
        placed.upload(self.device, np.ascontiguousarray(array), self.stream)
        return placed

    def floats(self, *shape: int) -> DeviceArray:
        return self.put(self.random.standard_normal(shape, dtype=np.float32))

    def get(self, array: DeviceArray) -> np.ndarray:
        out = np.empty(array.shape, array.dtype)
        array.download(self.device, out, self.stream)
        return out

    def free(self, *arrays: DeviceArray) -> None:
        self.device.synchronize()
        for array in arrays:
            self.device.free(array.buffer)

    def seconds(self, call: Callable[[], None]) -> float:
        """Median over the runs, two more before them."""
        times = []
        for _ in range(self.runs + 2):
            begin, end = self.device.event(), self.device.event()
            begin.record(self.stream)
            call()
            end.record(self.stream)
            end.synchronize()
            times.append(end.seconds_since(begin))
        return median(times[2:])


class Prompt:
    """Queries, keys and values of a layer, the latter in the cache already."""

    def __init__(self, bench: Bench, tokens: int) -> None:
        self.bench, self.tokens = bench, tokens
        self.q, self.out, self.total = (bench.floats(tokens, HEADS, HEAD_DIM) for _ in range(3))
        self.key, self.value = (bench.floats(tokens, KV_HEADS, HEAD_DIM) for _ in range(2))
        self.cache = DeviceCache(*(bench.floats(KV_HEADS, tokens, HEAD_DIM) for _ in range(2)))
        self.append()

    def append(self) -> None:
        self.bench.ops.kv_append(self.cache, 0, self.key, self.value)

    def attend(self, block: int) -> None:
        """Token block by token block."""
        for first in range(0, self.tokens, block):
            count = min(block, self.tokens - first)
            self.bench.ops.attention(self.q.rows(first, count), self.cache, first, SCALE, self.out.rows(first, count),
                                     self.total.rows(first, count))

    def free(self) -> None:
        self.bench.free(self.q, self.out, self.total, self.key, self.value, self.cache.k, self.cache.v)


def error(bench: Bench, prompt: Prompt, rows: int = 16) -> float:
    """Largest error of some rows against float64."""
    prompt.attend(prompt.tokens)
    q, out, keys, values = (bench.get(x) for x in (prompt.q, prompt.out, prompt.key, prompt.value))
    worst = 0.0
    for t in np.linspace(0, prompt.tokens - 1, rows).astype(int):
        for h in range(HEADS):
            k, v = (x[: t + 1, h // (HEADS // KV_HEADS)].astype(np.float64) for x in (keys, values))
            scores = k @ q[t, h].astype(np.float64) * SCALE
            weights = np.exp(scores - scores.max())
            worst = max(worst, float(np.abs(weights @ v / weights.sum() - out[t, h]).max()))
    return worst


def attention(bench: Bench, lengths: list[int], block: int, check: bool) -> dict[int, float]:
    """Prints a line per prompt, at once and in token blocks; length -> GFLOP/s at once."""
    rates = {}
    print(f"{'tokens':>7} {'block':>7} {'ms':>9} {'tokens/s':>10} {'GFLOP/s':>9}  bits")
    for tokens in lengths:
        prompt = Prompt(bench, tokens)
        if check and tokens == min(lengths):
            print(f"largest error of {tokens} tokens against float64: {error(bench, prompt):.2e}")
        prompt.attend(tokens)
        whole = bench.get(prompt.out)
        for size in (tokens, block) if block < tokens else (tokens,):
            seconds = bench.seconds(lambda prompt=prompt, size=size: prompt.attend(size))
            same = np.array_equal(whole.view(np.uint32), bench.get(prompt.out).view(np.uint32))
            rate = attention_work(tokens, 0, HEADS, KV_HEADS, HEAD_DIM).flops / seconds / 1e9
            rates.setdefault(tokens, rate)
            verdict = "same" if same else "DIFFERENT"
            print(f"{tokens:7} {size:7} {seconds * 1e3:9.3f} {tokens / seconds:10.0f} {rate:9.0f}  {verdict}",
                  flush=True)
        prompt.free()
    return rates


def gemm_rate(bench: Bench, size: int) -> float:
    """GFLOP/s of our float32 product of that many rows, columns and terms."""
    x, out = bench.floats(size, size), bench.floats(size, size)
    w = DeviceMatrix("f32", size, size, bench.floats(size, size))
    seconds = bench.seconds(lambda: GpuKernels(bench.device, bench.stream).gemm(x, w, out))
    bench.free(x, out, w.data)
    return 2e-9 * size**3 / seconds


def routing(bench: Bench, tokens: int) -> None:
    """Prints microseconds of each op round the experts, and of kv_append."""
    logits, weights = bench.floats(tokens, EXPERTS), bench.floats(tokens, CHOSEN)
    ids = bench.put(np.zeros((tokens, CHOSEN), np.int32))
    work = DeviceExpertRows(**{name: bench.put(np.zeros(shape, np.int32))
                               for name, shape in DeviceExpertRows.shapes(tokens, CHOSEN, EXPERTS).items()})
    rows, out, shared = (bench.floats(n, HIDDEN) for n in (tokens * CHOSEN, tokens, tokens))
    gate, prompt = bench.floats(tokens, 1), Prompt(bench, tokens)
    calls = {
        "router_topk": lambda: bench.ops.router_topk(logits, ids, weights),
        "expert_rows": lambda: bench.ops.expert_rows(ids, EXPERTS, work),
        "moe_combine": lambda: bench.ops.moe_combine(rows, work.row_of, weights, out, shared, gate),
        "kv_append": prompt.append,
    }
    for name, call in calls.items():
        print(f"{name:12} {tokens:6} tokens {bench.seconds(call) * 1e6:9.1f} us", flush=True)
    bench.free(logits, weights, ids, *vars(work).values(), rows, out, shared, gate)
    prompt.free()


def logits(bench: Bench, rows: int) -> None:
    """Prints microseconds of the head on one row: by gemv_rows, and by the product for many."""
    x, out = bench.floats(1, HIDDEN), bench.floats(1, rows)
    for format in ("q4_0", "q8_0"):
        groups, width = FORMATS[format].stored_shape(rows, HIDDEN)
        stored = DeviceArray.within(bench.device.alloc(groups * width, "head"), (groups, width), np.uint8)
        bench.device.memset(stored.buffer, 0, stored.nbytes, bench.stream)
        w = DeviceMatrix(format, rows, HIDDEN, stored)
        few = bench.seconds(lambda w=w: bench.ops.gemv_rows(x, w, out))
        many = bench.seconds(lambda w=w: GpuKernels(bench.device, bench.stream).gemm(x, w, out))
        print(f"logits {format} {rows} x {HIDDEN}: gemv_rows {few * 1e6:.1f} us, {stored.nbytes / few / 1e9:.0f} GB/s; "
              f"gemm {many * 1e6:.1f} us", flush=True)
        bench.free(stored)
    bench.free(x, out)


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "emulated"))
    parser.add_argument("--tokens", default="947,2048,10240")
    parser.add_argument("--block", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--gemm", type=int, default=3840, help="size of the product to compare with; 0: none")
    parser.add_argument("--vocabulary", type=int, default=248320)
    parser.add_argument("--no-check", action="store_true")
    chosen = parser.parse_args()
    bench = Bench(open_device(chosen.device), chosen.runs)
    print(bench.device.name)
    lengths = [int(n) for n in chosen.tokens.split(",")]
    rates = attention(bench, lengths, chosen.block, not chosen.no_check)
    if chosen.gemm:
        product = gemm_rate(bench, chosen.gemm)
        shares = ", ".join(f"{rate / product:.0%} at {tokens}" for tokens, rate in rates.items())
        print(f"gemm_f32 {chosen.gemm}^3: {product:.0f} GFLOP/s; attention {shares}")
    print("rate against the one before: " + ", ".join(f"{b}/{a} {rates[b] / rates[a]:.2f}" for a, b in pairwise(lengths)))
    for tokens in lengths:
        routing(bench, tokens)
    logits(bench, chosen.vocabulary)
    bench.device.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
