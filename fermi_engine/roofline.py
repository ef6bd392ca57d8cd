"""What the machine can do at best, to hold measured speeds against: streaming reads of a pack, integer dot products.

Both run in C (csrc/roofline.c) on the engine's own threads. What each loop leaves behind is checked, so that a rate is
never that of a loop that did less than it claims.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fermi_engine.kernels.dispatch import cpu_features, library

LEAST_BYTES = 2 << 30  # read at a time where the pack is that large: far more than any cache holds
REPEATS = 5  # of each pattern; the fastest counts
CHUNKS = (64 << 10, 1 << 20)  # bytes a thread takes at a time
UNIT = 256  # bytes: reads cover a multiple of this
ROUNDS = 100_000  # of an item of the dot loop: under a millisecond
ITEMS = 64  # for each thread, so that a late start hardly shows
PATTERNS = (  # name, function of csrc/roofline.c, CPU feature it needs
    ("16-byte loads", "roofline_read_plain", None),
    ("16-byte loads, prefetch 2 kB ahead", "roofline_read_ahead_2k", None),
    ("16-byte loads, prefetch 4 kB ahead", "roofline_read_ahead_4k", None),
    ("two streams", "roofline_read_two", None),
    ("four streams", "roofline_read_four", None),
    ("one word a line", "roofline_read_touch", None),
    ("one word a line, prefetch 4 kB ahead", "roofline_read_touch_ahead", None),
    ("32-byte loads", "avx2_roofline_read", "avx2"),
    ("32-byte loads, prefetch 4 kB ahead", "avx2_roofline_read_ahead", "avx2"),
)
DOTS = (("ssse3", 128, 288), ("avx2", 256, 576))  # feature, multiply-adds a round, what they add to the sum


class Reads(NamedTuple):
    """The fastest streaming read: bytes per second, its pattern, how much was read, and every pattern's best."""

    bytes_per_s: float
    pattern: str
    read_bytes: int
    all: dict[str, float]


def streaming_read(data: np.ndarray, threads: int, repeats: int = REPEATS,
                   report: Callable[[int, int, str], None] | None = None) -> Reads:
    """Read the first LEAST_BYTES of `data` (uint8, 64-byte aligned; all of it where smaller) in every pattern.

    The bytes are touched once before, so that pages are mapped and in memory. `report(done, total, pattern)` after each.
    """
    part = data[: min(data.size, LEAST_BYTES) // UNIT * UNIT]
    run_pattern("roofline_read_plain", part, CHUNKS[-1], threads)
    known = patterns()
    best: dict[str, float] = {}
    for done, (name, function, chunk) in enumerate(known, 1):
        seconds = min(_timed(run_pattern, function, part, chunk, threads) for _ in range(repeats))
        best[name] = part.size / seconds
        if report:
            report(done, len(known), name)
    fastest = max(best, key=best.__getitem__)
    return Reads(best[fastest], fastest, part.size, best)


def patterns() -> list[tuple[str, str, int]]:
    """(name, function, bytes a thread takes at a time) of every pattern this CPU runs."""
    features = cpu_features()
    return [(f"{name}, {chunk >> 10} kB at a time", function, chunk)
            for name, function, feature in PATTERNS if feature is None or feature in features for chunk in CHUNKS]


def run_pattern(function: str, data: np.ndarray, chunk: int, threads: int) -> int:
    """Read `data` once; the xor of the 64-bit words that the pattern saw."""
    module = library()
    items = -(-data.size // chunk)
    seen = np.zeros(items, np.uint64)
    args = module.ffi.new("roofline_read_args *", {
        "data": module.ffi.from_buffer("uint8_t[]", data), "bytes": data.size, "chunk": chunk,
        "seen": module.ffi.from_buffer("uint64_t[]", seen)})
    module.lib.fermi_run(_pointer(module, function), args, items, 1, threads)
    return int(np.bitwise_xor.reduce(seen))


def integer_peak(threads: int, repeats: int = REPEATS) -> dict[str, float]:
    """Multiply-adds per second of 8-bit dots in registers, by instruction set, on `threads` threads; best of `repeats`."""
    features = cpu_features()
    return {name: max(_dot_rate(name, macs, total, threads) for _ in range(repeats))
            for name, macs, total in DOTS if name in features}


def _dot_rate(name: str, macs: int, total: int, threads: int) -> float:
    module = library()
    items = ITEMS * threads
    seen = np.zeros(items, np.uint32)
    args = module.ffi.new("roofline_dot_args *", {
        "rounds": ROUNDS, "seen": module.ffi.from_buffer("uint32_t[]", seen)})
    pointer = _pointer(module, f"{name}_roofline_dot")
    seconds = _timed(module.lib.fermi_run, pointer, args, items, 1, threads)
    if not (seen == total * ROUNDS % 2**32).all():
        raise RuntimeError(f"{name}_roofline_dot did not do its multiply-adds")
    return items * ROUNDS * macs / seconds


def _pointer(module: Any, function: str) -> Any:
    return module.ffi.cast("kernel_fn", module.ffi.addressof(module.lib, function))


def _timed(call: Callable[..., Any], *args: Any) -> float:
    start = time.perf_counter()
    call(*args)
    return time.perf_counter() - start
