"""Times the sm_20 delta rule in chunks against the scan token by token, and every row op, through the op layer.

    python tools/lab/sm20_gdn_bench.py [--device cuda|emulated] [--tokens 947,4096] [--heads 16,32] [--runs 20]
                                       [--no-check]

Full geometry: 16 key heads, 32 value heads of 128. Times are medians of events round one call; the parts of a call
come from a trace. Before the clock runs, outputs and final states of the shortest prompt are held against the reference
in float64, and their relative errors printed beside those of torch's float32 forms (on the CPU; needs torch). Rates of
row ops count every array once. On the emulated device times are modelled, not measured: that is for trying the script.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from fermi_engine.kernels.device_arrays import DeviceArray, DeviceMatrix
from fermi_engine.kernels.gpu import Device, open_device
from fermi_engine.kernels.gpu_kernels import GpuKernels, OpenChunk, gdn_chunk_scratch

DIM, HIDDEN, TAPS, EXPERT_ROWS, EXPERT_WIDTH = 128, 2048, 4, 8, 512
QUERY_HEADS, HEAD_DIM, ROTARY = 16, 256, 64


class Bench:
    """A device, arrays on it, and medians of event times."""

    def __init__(self, device: Device, runs: int) -> None:
        self.device, self.runs, self.stream = device, runs, device.stream("bench")
        self.k = GpuKernels(device, self.stream)
        free = device.free_bytes
        self.ahead = device.alloc(16 << 30 if free > 64 << 30 else free // 64, "ahead")
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

    def seconds(self, call: Callable[[], None], ahead: int = 1) -> float:
        """Median over the runs, two more before them.

        The device is given something else to do, `ahead` times, while the host queues the call: no launch waits for Python.
        """
        times = []
        for _ in range(self.runs + 2):
            begin, end = self.device.event(), self.device.event()
            for _ in range(ahead):
                self.device.memset(self.ahead, 0, self.ahead.nbytes, self.stream)
            begin.record(self.stream)
            call()
            end.record(self.stream)
            end.synchronize()
            times.append(end.seconds_since(begin))
        return median(times[2:])

    def parts(self, call: Callable[[], None]) -> Counter[str]:
        """Seconds of each entry point in one call, queued while the device does something else: an event that waits for the
        host's next launch would count its time, too."""
        self.device.start_trace()
        self.device.memset(self.ahead, 0, self.ahead.nbytes, self.stream)
        call()
        found: Counter[str] = Counter()
        for span in self.device.end_trace()[1:]:
            found[span.label] += span.end_s - span.begin_s
        return found


class Prompt:
    """Inputs of the delta rule as a layer has them, on the host and on the device."""

    def __init__(self, bench: Bench, tokens: int, k_heads: int, v_heads: int) -> None:
        draw = bench.random
        q, k = (unit_rows(draw.standard_normal((tokens, k_heads, DIM))) for _ in range(2))
        rate, bias = np.exp(draw.uniform(0, 2.8, v_heads)), draw.uniform(-6, -2, v_heads)
        self.host = {
            "q": (q * DIM**-0.5).astype(np.float32), "k": k.astype(np.float32),
            "v": draw.standard_normal((tokens, v_heads * DIM), dtype=np.float32),
            "g": (-rate * np.log1p(np.exp(draw.standard_normal((tokens, v_heads)) + bias))).astype(np.float32),
            "beta": draw.uniform(0, 1, (tokens, v_heads)).astype(np.float32),
            "state": draw.standard_normal((v_heads, DIM, DIM), dtype=np.float32)}
        self.tokens, self.v_heads = tokens, v_heads
        shapes = OpenChunk.shapes(k_heads, v_heads, DIM, DIM)
        self.state = bench.put(self.host["state"])
        self.carried = OpenChunk(bench.put(self.host["state"]), *(bench.floats(*shapes[n]) for n in ("k", "v", "g",
                                                                                                     "beta")))
        self.inputs = [bench.put(self.host[name]) for name in ("q", "k", "v")]
        self.gates = [bench.put(self.host[name]) for name in ("g", "beta")]
        self.out, self.final = bench.floats(tokens, v_heads, DIM), bench.floats(v_heads, DIM, DIM)
        self.scratch = bench.floats(gdn_chunk_scratch(tokens, 0, v_heads))

    def scan(self, k: GpuKernels) -> None:
        k.gdn_step(*self.inputs, 0, *self.gates, self.state, self.out)

    def chunks(self, k: GpuKernels) -> None:
        self.carried.tokens = 0
        k.gdn_chunk(*self.inputs, 0, *self.gates, self.carried, self.out, self.scratch, self.final)


def unit_rows(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def errors(bench: Bench, prompt: Prompt) -> list[str]:
    """Relative error of outputs and final state, |error| / |truth| over all: ours, then torch's."""
    import torch

    from reference import gated_delta_rule as gdn

    tensors = [torch.from_numpy(prompt.host[name]) for name in ("q", "k", "v", "g", "beta", "state")]
    tensors[2] = tensors[2].unflatten(1, (prompt.v_heads, DIM))
    with torch.no_grad():
        truth = gdn.recurrent(*(x.double() for x in tensors), 1.0)
        found = {"torch chunks": gdn.chunked(*tensors, 1.0), "torch scan": gdn.recurrent(*tensors, 1.0)}
    prompt.chunks(bench.k)
    found["chunks"] = bench.get(prompt.out), bench.get(prompt.final)
    prompt.scan(bench.k)
    found["scan"] = bench.get(prompt.out), bench.get(prompt.state)
    lines = []
    for name, results in found.items():
        relative = [np.linalg.norm(np.asarray(x, np.float64) - y.numpy()) / np.linalg.norm(y.numpy())
                    for x, y in zip(results, truth, strict=True)]
        lines.append(f"{name:14} outputs {relative[0]:.2e}  state {relative[1]:.2e}")
    return lines


def delta_rule(bench: Bench, prompt: Prompt) -> str:
    """One line: both forms, their ratio, FLOPs of the chunked one, its parts."""
    scan, chunks = (bench.seconds(lambda form=form: form(bench.k)) for form in (prompt.scan, prompt.chunks))
    parts = bench.parts(lambda: prompt.chunks(bench.k))
    flops = 2.0 * prompt.tokens * prompt.v_heads * (3 * DIM * DIM + 64 * DIM)
    inner = ", ".join(f"{name} {1e6 * s:.1f} us" for name, s in parts.items())
    return (f"T {prompt.tokens:5}: scan {1e6 * scan:9.1f} us ({1e9 * scan / prompt.tokens:7.1f} ns a token)  chunks "
            f"{1e6 * chunks:9.1f} us  ratio {scan / chunks:5.2f}  {1e-12 * flops / chunks:5.2f} TFLOP/s  [{inner}]")


def row_ops(bench: Bench, tokens: int, k_heads: int, v_heads: int) -> list[tuple[str, Callable[[], None], float]]:
    """Name, call and bytes of every row op at a layer's shapes."""
    k, f = bench.k, bench.floats
    channels = (2 * k_heads + v_heads) * DIM
    hidden, normed, weight = f(tokens, HIDDEN), f(tokens, HIDDEN), f(HIDDEN)
    mixed, conv, taps, tail = f(tokens, channels), f(tokens, channels), f(TAPS, channels), f(TAPS - 1, channels)
    heads, delta, z, gated, dim_weight = f(tokens, k_heads, DIM), *(f(tokens * v_heads, DIM) for _ in range(3)), f(DIM)
    a, b, g, beta = (f(tokens, v_heads) for _ in range(4))
    rate, bias = f(v_heads), f(v_heads)
    gate_up, up = f(tokens * EXPERT_ROWS, 2 * EXPERT_WIDTH), f(tokens * EXPERT_ROWS, EXPERT_WIDTH)
    attended, query = f(tokens * QUERY_HEADS, HEAD_DIM), f(tokens * QUERY_HEADS, 2 * HEAD_DIM)
    head_weight = f(HEAD_DIM)
    turned, cos, sin = f(tokens, QUERY_HEADS, HEAD_DIM), f(tokens, ROTARY // 2), f(tokens, ROTARY // 2)
    positions = bench.put(np.tile(np.arange(tokens, dtype=np.int32), (3, 1)))
    frequencies, axis = f(ROTARY // 2), bench.put(np.zeros(ROTARY // 2, np.int32))
    table = DeviceMatrix("f32", 4 * tokens, HIDDEN, f(4 * tokens, HIDDEN))
    ids = bench.put(bench.random.integers(0, 4 * tokens, tokens, dtype=np.int32))

    def size(*arrays: Any) -> float:
        return float(sum(array.nbytes for array in arrays))

    return [
        ("add", lambda: k.add(hidden, normed, normed), size(hidden, normed, normed)),
        ("rms_norm", lambda: k.rms_norm(hidden, weight, 1e-6, normed), size(hidden, normed)),
        ("rms_norm of heads", lambda: k.rms_norm(query, head_weight, 1e-6, attended), size(attended, attended)),
        ("gated_rms_norm", lambda: k.gated_rms_norm(delta, z, dim_weight, 1e-6, gated), size(delta, z, gated)),
        ("l2_norm", lambda: k.l2_norm(mixed, 0, k_heads, DIM, 1e-6, 1.0, heads), size(heads, heads)),
        ("conv1d_silu", lambda: k.conv1d_silu(mixed, taps, tail, conv), size(mixed, conv)),
        ("gdn_gates", lambda: k.gdn_gates(a, b, rate, bias, g, beta), size(a, b, g, beta)),
        ("swiglu", lambda: k.swiglu(gate_up, up), size(gate_up, up)),
        ("sigmoid_mul", lambda: k.sigmoid_mul(attended, query, HEAD_DIM, attended), 3 * size(attended)),
        ("rope_tables", lambda: k.rope_tables(positions, frequencies, axis, cos, sin), size(positions, cos, sin)),
        ("rope", lambda: k.rope(turned, cos, sin), size(cos, sin) + 2 * size(turned) * ROTARY / HEAD_DIM),
        ("rows of f32", lambda: k.rows(table, normed, ids), 2 * size(normed)),
    ]


def main() -> int:
    """Prints everything for the device that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", default="947,4096")
    parser.add_argument("--heads", default="16,32", help="key heads, value heads")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--no-check", action="store_true")
    arguments = parser.parse_args()
    lengths = sorted(int(tokens) for tokens in arguments.tokens.split(","))
    heads = [int(count) for count in arguments.heads.split(",")]
    bench = Bench(open_device(arguments.device), arguments.runs)
    prompts = [Prompt(bench, tokens, *heads) for tokens in lengths]
    if not arguments.no_check:
        print(f"relative errors, {lengths[0]} tokens:", *errors(bench, prompts[0]), sep="\n  ", flush=True)
    for prompt in prompts:
        print(delta_rule(bench, prompt), flush=True)
    print(f"row ops, {lengths[0]} tokens:")
    for name, call, nbytes in row_ops(bench, lengths[0], *heads):
        seconds = bench.seconds(call)
        print(f"  {name:18} {1e6 * seconds:8.1f} us  {1e-6 * nbytes:7.2f} MB  {1e-9 * nbytes / seconds:8.1f} GB/s",
              flush=True)
    for label, text in bench.device.facts().items():
        print(f"{label}: {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
