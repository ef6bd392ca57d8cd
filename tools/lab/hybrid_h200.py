"""Full-geometry GPU prefill through a small memory budget on a modern NVIDIA card, held against what copies and arithmetic cost.

    python tools/lab/hybrid_h200.py [--pack FILE] [--geometry NAME] [--tokens 947] [--vram 6442450944] [--spans OUT.json]
                                    [--device cuda|emulated] [--slots 2] [--gemm own|vendor] [--skip-check]

Makes the synthetic pack where it is absent, prefills once, which locks pages and compiles kernels, and seven times more, and
prints the ledger's peak, seconds, time by kernel, pinned bandwidth, bytes copied, floating-point operations and the bound for the
median: 1.25 times the larger of the copies at the measured pinned bandwidth and of the arithmetic at half the measured cuBLAS
float32 rate. Then layers 2 and 3 of the model (one of each kind) run alone, each fed the input that the float64 reference gives
it, on the GPU and on the CPU with float32 activations; their errors are printed beside those of the reference in float32
(tools/hybrid_layers.py).
Exit status 1: the limit was passed, the bound missed, or the GPU's error above twice the reference's own in float32.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

import numpy as np

with suppress(ImportError):
    import torch  # noqa: F401 - brings cuBLAS to machines without an installed CUDA

if not __package__:  # run as a script, which puts this folder on the path instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from fermi_engine import report
from fermi_engine.config import EngineConfig, ModelConfig
from fermi_engine.engine import Engine
from fermi_engine.errors import FermiError
from fermi_engine.gpu.prefill import HybridPrefill
from fermi_engine.kernels.gpu import Device, Span, open_device
from fermi_engine.state import HybridState
from tools.bench.make_pack import make_pack
from tools.lab.timeline_svg import rows_of

SGEMM_SIZE, PINNED_BYTES, REPEATS, RUNS = 3840, 256 << 20, 5, 7
CHUNK, LAYERS, ALLOWED, SHARE = 64, (2, 3), 1.25, 0.5
LAYER_DRAWS = 4  # of tools/hybrid_layers.py


def flop(c: ModelConfig, tokens: int) -> float:
    """Floating-point operations of products, attention and the chunked delta rule over `tokens`, and of the head on one row."""
    hidden, total = c.hidden_size, 2.0 * c.hidden_size * c.vocab_size
    for kind in c.layer_types:
        if kind == "full_attention":
            heads = c.num_attention_heads * c.head_dim
            total += 2.0 * tokens * hidden * (3 * heads + 2 * c.num_key_value_heads * c.head_dim)
            total += 2.0 * heads * tokens * (tokens + 1)
        else:
            total += 2.0 * tokens * hidden * (c.conv_dim + 2 * c.linear_value_dim + 2 * c.linear_num_value_heads)
            dk, dv = c.linear_key_head_dim, c.linear_value_head_dim
            total += 2.0 * tokens * c.linear_num_value_heads * (3 * dk * dv + CHUNK * (dk + dv))
        if c.num_experts:
            width = c.num_experts_per_tok * c.moe_intermediate_size + c.shared_expert_intermediate_size
            total += 2.0 * tokens * hidden * (3 * width + c.num_experts + 1)
        else:
            total += 6.0 * tokens * hidden * c.intermediate_size
    return total


def pinned_rate(device: Device, nbytes: int) -> float:
    """Bytes per second from page-locked memory to the device."""
    host, buffer, stream = device.pinned(nbytes), device.alloc(nbytes, "bandwidth"), device.stream("bandwidth")
    host[:] = 1
    begin, end = device.event(), device.event()
    device.h2d(buffer, host, stream)
    begin.record(stream)
    for _ in range(REPEATS):
        device.h2d(buffer, host, stream)
    end.record(stream)
    stream.synchronize()
    seconds = end.seconds_since(begin)
    device.free(buffer)
    device.unpin(host)
    return REPEATS * nbytes / seconds


def sgemm_rate(device: Device, size: int) -> float:
    """The vendor's float32 products, floating-point operations per second."""
    buffers, stream = [device.alloc(4 * size * size, name) for name in "abc"], device.stream("sgemm")
    for buffer in buffers:
        device.memset(buffer, 0x3C, buffer.nbytes, stream)
    begin, end = device.event(), device.event()
    for run in range(REPEATS + 2):
        if run == 2:
            begin.record(stream)
        device.sgemm(size, size, size, *buffers, stream)
    end.record(stream)
    stream.synchronize()
    seconds = end.seconds_since(begin)
    for buffer in buffers:
        device.free(buffer)
    return REPEATS * 2.0 * size**3 / seconds


def token_ids(config: ModelConfig, tokens: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, config.vocab_size, tokens).astype(np.int32)


def measure(engine: Engine, device: Device, args: argparse.Namespace) -> bool:
    """The whole model; whether limit and bound held."""
    small = args.device == "emulated"
    bandwidth = pinned_rate(device, PINNED_BYTES >> 8 if small else PINNED_BYTES)
    rate = sgemm_rate(device, 128 if small else SGEMM_SIZE)
    prefill = HybridPrefill(device, engine.pack, engine.decoder, args.vram, args.slots, gemm=args.gemm)
    ids = token_ids(engine.config, args.tokens)
    first_s, *seconds = [timed(prefill, ids, engine) for _ in range(1 + RUNS)]
    copied, work = prefill.last.copied_bytes, flop(engine.config, args.tokens)
    prefill.timing = True
    timed(prefill, ids, engine)
    print_kernels(prefill.last.spans)
    if args.spans:
        args.spans.write_text(json.dumps(rows_of(prefill.last.spans)))
    copy_s, work_s = copied / bandwidth, work / (SHARE * rate)
    floor, peak = max(copy_s, work_s), prefill.ledger.peak
    prefill.close()
    print(f"pinned {bandwidth / 1e9:.2f} GB/s, sgemm {rate / 1e12:.2f} Tflop/s, {copied / 1e9:.3f} GB copied, "
          f"{work / 1e12:.3f} Tflop")
    print(f"copies {copy_s:.3f} s, arithmetic at {SHARE:.0%} {work_s:.3f} s, bound {ALLOWED * floor:.3f} s; first {first_s:.3f}, "
          f"best {min(seconds):.3f}, median {median(seconds):.3f} s ({median(seconds) / floor:.2f} times the larger)")
    print(f"ledger peak {peak} of {args.vram} bytes, pages {engine.pack.placed}", flush=True)
    return peak <= args.vram and median(seconds) <= ALLOWED * floor


def timed(prefill: HybridPrefill, ids: np.ndarray, engine: Engine) -> float:
    """Seconds of one prefill into a new state."""
    state = HybridState.fresh(engine.config, engine.options.kv_block)
    start = time.perf_counter()
    prefill.run(ids, state)
    seconds = time.perf_counter() - start
    print(f"prefill: {seconds:.4f} s, {prefill.last.line()}", flush=True)
    return seconds


def print_kernels(spans: Sequence[Span]) -> None:
    """Launches and milliseconds of each kernel in a timeline, longest first."""
    rows: dict[str, list[float]] = {}
    for span in spans:
        if span.engine == "compute":
            rows.setdefault(span.label, []).append(span.end_s - span.begin_s)
    for label, times in sorted(rows.items(), key=lambda row: -sum(row[1])):
        print(f"  {label:28} {len(times):5} launches {1e3 * sum(times):8.2f} ms")


def check(engine: Engine, device: Device, args: argparse.Namespace) -> bool:
    """Two layers, one of each kind, each fed the reference's input; whether the GPU's output and state are within its limits."""
    from tools import hybrid_layers

    good, x = True, engine.kernels.rows(engine.decoder.embed_tokens, token_ids(engine.config, args.tokens))
    for layer in LAYERS:
        truth = hybrid_layers.truth(engine.pack, layer, x, LAYER_DRAWS)
        ours, cpu = (truth.errors(got) for got in (hybrid_layers.on_gpu(engine.pack, engine.kernels, layer, x, device),
                                                   hybrid_layers.on_cpu(engine.pack, engine.kernels, layer, x)))
        for part, limit in truth.limits().items():
            good &= ours[part] <= limit
            print(f"layer {layer}, {part}: errs by {ours[part]:.3e} on the GPU (limit {limit:.3e}), {cpu[part]:.3e} on the CPU, "
                  f"{truth.noise[part]:.3e} in torch, largest {np.abs(truth.arrays[part]).max():.3e}", flush=True)
        print(f"layer {layer}: {np.count_nonzero(~truth.decided)} of {len(x)} tokens undecided")
        x = truth.arrays["output"].astype(np.float32)
    return good


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometry", default="qwen3.6-35b-a3b-reap128")
    parser.add_argument("--pack", type=Path, default=Path(tempfile.gettempdir()) / "hybrid.fermi")
    parser.add_argument("--tokens", type=int, default=947)
    parser.add_argument("--vram", type=int, default=6 << 30)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--gemm", choices=("own", "vendor"), default="own")
    parser.add_argument("--device", choices=("cuda", "emulated"), default="cuda")
    parser.add_argument("--load", choices=("resident", "mmap"), default="resident")
    parser.add_argument("--spans", type=Path)
    parser.add_argument("--skip-check", action="store_true", help="leave out the comparison with the CPU")
    args = parser.parse_args()
    try:
        return 0 if run(args) else 1
    except FermiError as err:
        report.note(f"error: {err}")
        return 2


def run(args: argparse.Namespace) -> bool:
    """Everything; whether all held."""
    device, start = open_device(args.device), time.perf_counter()
    if not args.pack.exists():
        make_pack(args.pack, args.geometry)
        print(f"pack of {args.pack.stat().st_size} bytes made in {time.perf_counter() - start:.1f} s", flush=True)
    engine = Engine.load(args.pack, config=EngineConfig(activations="f32", load=args.load))
    print(f"{device.name}, loaded after {time.perf_counter() - start:.1f} s", flush=True)
    good = measure(engine, device, args)
    good &= args.skip_check or check(engine, device, args)
    print("held" if good else "NOT HELD")
    device.close()
    return good


if __name__ == "__main__":
    sys.exit(main())
