"""A kernel with a known answer, run before any work: a card or driver that rounds, fuses, flushes or copies otherwise is found
here and not in a model's output. csrc/sm20/ops.h says what the kernel computes."""

from __future__ import annotations

import numpy as np

from fermi_engine.errors import DeviceError
from fermi_engine.kernels.gpu import Device

BLOCK = 256
ELEMENTS = 3 * BLOCK + 77  # a last block that is not full


def inputs() -> np.ndarray:
    """uint32 [ELEMENTS]: a multiplicative sequence, which reaches halves and floats of every kind."""
    return (np.arange(1, ELEMENTS + 1, dtype=np.uint64) * np.uint64(2654435761)).astype(np.uint32)


def expected(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """y uint32 [n] and f float32 [n, 4] for x uint32 [n]."""
    reversed_blocks = [x[i : i + BLOCK][::-1] for i in range(0, len(x), BLOCK)]
    y = np.concatenate(reversed_blocks) * np.uint32(1664525) + np.uint32(1013904223)
    v = ((x & np.uint32(0x7FFFFF)) | np.uint32(0x3F800000)).view(np.float32)
    square = v.astype(np.float64) ** 2 - 1.0  # exact in float64: 47 bits
    halves = (x & np.uint32(0x7FFF)).astype(np.uint16).view(np.float16).astype(np.float32)
    return y, np.stack([v / np.float32(3), np.sqrt(v), square.astype(np.float32), halves], axis=1)


def check(device: Device) -> None:
    """Run it. Raises DeviceError naming what came out wrong."""
    x = inputs()
    y, f = np.zeros_like(x), np.zeros((len(x), 4), np.float32)
    stream = device.stream("selftest")
    buffers = [device.alloc(array.nbytes, f"selftest.{name}") for name, array in (("x", x), ("y", y), ("f", f))]
    device.h2d(buffers[0], x, stream)
    device.launch("selftest", (-(-len(x) // BLOCK), 1, 1), (BLOCK, 1, 1),
                  {"x": buffers[0], "y": buffers[1], "f": buffers[2], "n": len(x)}, stream)
    device.d2h(y, buffers[1], stream)
    device.d2h(f, buffers[2], stream)
    for buffer in buffers:  # not after an error: it would be hidden by the next
        device.free(buffer)
    _compare(device.name, x, y, f)


def _compare(name: str, x: np.ndarray, y: np.ndarray, f: np.ndarray) -> None:
    right_y, right_f = expected(x)
    wrong = [("integers", np.count_nonzero(y != right_y))]
    for i, what in enumerate(("division", "square root", "fused multiply-add", "conversion of halves")):
        both_nan = np.isnan(f[:, i]) & np.isnan(right_f[:, i])
        wrong.append((what, np.count_nonzero((f[:, i].view(np.uint32) != right_f[:, i].view(np.uint32)) & ~both_nan)))
    bad = [f"{what} in {count} of {len(x)} elements" for what, count in wrong if count]
    if bad:
        raise DeviceError(f"the self-test on {name} came out wrong: {', '.join(bad)}; the engine does not use this device")
