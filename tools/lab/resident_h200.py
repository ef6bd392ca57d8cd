"""A dense model resident on a modern NVIDIA card: prefill against cuBLAS's float32 rate, decode against the memory's.

    python tools/lab/resident_h200.py [--pack FILE] [--geometry minicpm-v-4.6] [--tokens 2048,10240] [--decode 64]
                                      [--vram 6442450944] [--device cuda|emulated] [--gemm vendor] [--skip-check]

Makes the synthetic q8_0 pack where it is absent. Prefill: tokens per second, floating-point operations per second and their
share of the sgemm rate measured in the same run, device time by kernel and in all. Decode: the head's product against the
measured copy bandwidth (bytes read and written), launches a layer, host time a launch, the sum of device times of a token,
tokens per second at a short and at a long context. Then the first tokens are held against the CPU's float32 path.
Exit status 1: a target of the second system was missed (TARGETS), the ledger passed the limit, or the paths are too far apart.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

with suppress(ImportError):
    import torch  # noqa: F401 - brings cuBLAS to machines without an installed CUDA

if not __package__:  # run as a script, which puts this folder on the path instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from fermi_engine import Engine, EngineConfig, report
from fermi_engine.errors import FermiError
from fermi_engine.gpu.report import busy
from fermi_engine.gpu.resident import Resident
from fermi_engine.kernels.gpu import Device, Recording, Span, open_device
from fermi_engine.state import HybridState
from tools.bench.make_pack import make_pack
from tools.lab.hybrid_h200 import SGEMM_SIZE, flop, print_kernels, sgemm_rate, token_ids

# Shares: prefill of cuBLAS's rate, of the longest prompt's rate in the shortest's, of the copy bandwidth by the head.
TARGETS = {"prefill": 0.64, "long": 0.88, "head": 0.70}
COPY_BYTES, REPEATS, RUNS, CHECKED, NOISE_FACTOR = 2 << 30, 10, 5, 48, 4.0


def copy_rate(device: Device, nbytes: int) -> float:
    """Bytes read and written per second by a copy on the device."""
    source, target = (device.alloc(nbytes, name) for name in ("source", "target"))
    stream, begin, end = device.stream("copy"), device.event(), device.event()
    device.memset(source, 1, nbytes, stream)
    device.d2d(target, source, nbytes, stream)
    begin.record(stream)
    for _ in range(REPEATS):
        device.d2d(target, source, nbytes, stream)
    end.record(stream)
    stream.synchronize()
    seconds = end.seconds_since(begin)
    for buffer in (source, target):
        device.free(buffer)
    return 2.0 * REPEATS * nbytes / seconds


def fresh(engine: Engine) -> HybridState:
    return HybridState.fresh(engine.config, engine.options.kv_block)


def traced(device: Device, call: Callable[[], Any]) -> tuple[Span, ...]:
    device.start_trace()
    call()
    return tuple(device.end_trace())


def prefill(r: Resident, engine: Engine, tokens: int, sgemm: float) -> float:
    """Tokens per second; prints where the time goes."""
    ids, seconds = token_ids(engine.config, tokens), []
    for run in range(RUNS + 1):
        state, start = fresh(engine), time.perf_counter()
        r.prefill(ids, state)
        if run:
            seconds.append(time.perf_counter() - start)
    spans = traced(r.device, lambda: r.prefill(ids, fresh(engine)))
    middle, rate = median(seconds), flop(engine.config, tokens) / median(seconds)
    computing = sum(end - begin for begin, end in busy(spans, "compute"))
    print(f"prefill of {tokens}, {r.gemm}: {1e3 * middle:.2f} ms (best {1e3 * min(seconds):.2f}), {tokens / middle:.0f} tok/s, "
          f"{rate / 1e12:.2f} Tflop/s = {rate / sgemm:.1%} of sgemm; kernels {1e3 * computing:.2f} ms in a trace of "
          f"{sum(span.engine == 'compute' for span in spans)} operations", flush=True)
    print_kernels(spans)
    return tokens / middle


def decode(r: Resident, engine: Engine, context: int, count: int) -> None:
    """Prints tokens per second behind a prompt, with the logits on the host and with the id alone, and a token's kernels."""
    state, ids = fresh(engine), token_ids(engine.config, context)
    token = int(r.prefill(ids, state).argmax())
    steps: dict[str, Callable[[int], int]] = {"logits": lambda last: int(r.decode(last, state).argmax()),
                                              "greedy": lambda last: r.greedy(last, state)}
    for name, step in steps.items():
        token = step(token)
        start = time.perf_counter()
        for _ in range(count):
            token = step(token)
        seconds = (time.perf_counter() - start) / count
        print(f"decode behind {context}, {name}: {1e3 * seconds:.3f} ms a token, {1 / seconds:.0f} tok/s", flush=True)
    device_times(r)


def launches(r: Resident, layers: int) -> None:
    """Launches a layer, what one takes of the host while the device has enough to do, and the layers' time from begin to end
    where no launch waits for the host."""
    recording, times, ahead = r.token.layers, [], r.device.alloc(min(16 << 30, r.device.free_bytes // 4), "ahead")
    begin, end, spans = r.device.event(), r.device.event(), []
    for _ in range(REPEATS):
        r.compute.synchronize()
        r.device.memset(ahead, 0, ahead.nbytes, r.compute)
        begin.record(r.compute)
        start = time.perf_counter()
        r.device.replay(recording, r.compute)
        times.append(time.perf_counter() - start)
        end.record(r.compute)
        end.synchronize()
        spans.append(end.seconds_since(begin))
    r.device.free(ahead)
    print(f"{len(recording)} launches of a token's layers, {(len(recording) - 2) / layers:.2f} a layer; "
          f"host {1e6 * median(times) / len(recording):.2f} us a launch; begin to end {1e3 * median(spans):.3f} ms", flush=True)


def device_times(r: Resident) -> None:
    """What each kernel of a token takes by itself: several of one launch behind one another, which no launch waits for."""
    rows: dict[str, list[float]] = {}
    ahead, begin, end = r.device.alloc(min(1 << 30, r.device.free_bytes // 4), "ahead"), r.device.event(), r.device.event()
    for row in (*r.token.layers.rows, *r.token.head.rows, *r.token.choice.rows):
        r.device.memset(ahead, 0, ahead.nbytes, r.compute)
        begin.record(r.compute)
        r.device.replay(Recording([row] * REPEATS), r.compute)
        end.record(r.compute)
        end.synchronize()
        rows.setdefault(row[0].name, []).append(end.seconds_since(begin) / REPEATS)
    r.device.free(ahead)
    total = sum(map(sum, rows.values()))
    print(f"device times of a token's kernels {1e3 * total:.3f} ms in sum: " + ", ".join(
        f"{name} {len(times)} x {1e6 * sum(times) / len(times):.1f} us" for name, times in rows.items()), flush=True)


def head(r: Resident, bandwidth: float) -> float:
    """The head's share of the copy bandwidth."""
    begin, end, nbytes = r.device.event(), r.device.event(), r._ends["lm_head"].data.nbytes
    for run in range(2 * REPEATS + 2):
        if run == 2:
            begin.record(r.compute)
        r.device.replay(r.token.head, r.compute)
    end.record(r.compute)
    r.compute.synchronize()
    seconds = end.seconds_since(begin) / (2 * REPEATS)
    share = nbytes / seconds / bandwidth
    print(f"head: {1e6 * seconds:.1f} us for {nbytes / 1e6:.1f} MB, {nbytes / seconds / 1e9:.0f} GB/s = {share:.1%} of a copy's "
          f"{bandwidth / 1e9:.0f} GB/s", flush=True)
    return share


def check(r: Resident, engine: Engine) -> bool:
    """Logits of a prompt and of tokens after it, GPU against the CPU's float32 path and its noise."""
    ids = token_ids(engine.config, CHECKED + 4)
    pieces = [ids[:CHECKED], *ids[CHECKED:, None]]
    state = fresh(engine)
    got = np.stack([r.prefill(p, state) if len(p) > 1 else r.decode(int(p[0]), state) for p in pieces])
    right, moved = (cpu(engine, pieces, shift) for shift in (0.0, 2.0**-24))
    error, noise, scale = (float(np.abs(x).max()) for x in (got - right, moved - right, right))
    print(f"logits of {len(ids)} tokens differ from the CPU's by {error:.3e}, its noise {noise:.3e}, largest {scale:.3e}; "
          f"same likeliest token {np.count_nonzero(got.argmax(1) == right.argmax(1))} of {len(got)}")
    return error <= NOISE_FACTOR * noise + scale * 2.0**-23


def cpu(engine: Engine, pieces: Sequence[np.ndarray], shift: float) -> np.ndarray:
    """Logits after each piece; the input of every layer scaled by 1 +- shift, element by element."""
    generator, state, layers = np.random.default_rng(1), fresh(engine), engine.decoder.layers

    def moved(forward: Any) -> Any:
        def call(k: Any, x: np.ndarray, *rest: Any) -> np.ndarray:
            signs = generator.integers(-1, 2, x.shape)
            return forward(k, (x.astype(np.float64) * (1.0 + 2 * shift * signs)).astype(np.float32), *rest)
        return call

    for layer in layers:
        layer.forward = moved(layer.forward)
    rows = [engine.decoder.logits(engine.decoder.hidden(piece.astype(np.int32), state)[-1:])[0] for piece in pieces]
    for layer in layers:
        vars(layer).pop("forward")
    return np.stack(rows)


def run(args: argparse.Namespace) -> bool:
    """Everything; whether all targets held."""
    if not args.pack.exists():
        make_pack(args.pack, args.geometry, format="q8_0")
    engine = Engine.load(args.pack, config=EngineConfig(activations="f32", load="mmap"))
    device, small = open_device(args.device), args.device == "emulated"
    lengths = sorted(int(tokens) for tokens in args.tokens.split(","))
    bandwidth = copy_rate(device, COPY_BYTES >> 10 if small else COPY_BYTES)
    sgemm = sgemm_rate(device, 128 if small else SGEMM_SIZE)
    print(f"copy {bandwidth / 1e9:.0f} GB/s read and written, sgemm {sgemm / 1e12:.2f} Tflop/s", flush=True)
    start = time.perf_counter()
    r = Resident(device, engine.pack, engine.decoder, args.vram, args.gemm)
    print(f"weights on the card in {time.perf_counter() - start:.2f} s", flush=True)
    rates = [prefill(r, engine, tokens, sgemm) for tokens in lengths]
    share = rates[0] * flop(engine.config, lengths[0]) / lengths[0] / sgemm
    for context in (64, lengths[-1]):
        decode(r, engine, context, args.decode)
    launches(r, engine.config.num_hidden_layers)
    found = {"prefill": share, "long": rates[-1] / rates[0], "head": head(r, bandwidth)}
    for name, value in found.items():
        print(f"target {name}: {value:.3f} of {TARGETS[name]}")
    print(f"ledger peak {r.ledger.peak} of {args.vram} bytes", flush=True)
    good = r.ledger.peak <= args.vram and all(value >= TARGETS[name] for name, value in found.items())
    r.close()
    for label, text in device.facts().items():
        print(f"{label}: {text}")
    if not args.skip_check:
        good &= all(check(Resident(device, engine.pack, engine.decoder, args.vram, gemm), engine) for gemm in ("own", args.gemm))
    return good


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometry", default="minicpm-v-4.6")
    parser.add_argument("--pack", type=Path, default=Path(tempfile.gettempdir()) / "resident.fermi")
    parser.add_argument("--tokens", default="2048,10240")
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--vram", type=int, default=6 << 30)
    parser.add_argument("--gemm", choices=("own", "vendor"), default="vendor")
    parser.add_argument("--device", choices=("cuda", "emulated"), default="cuda")
    parser.add_argument("--skip-check", action="store_true", help="leave out the comparison with the CPU")
    try:
        return 0 if run(parser.parse_args()) else 1
    except FermiError as err:
        report.note(f"error: {err}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
