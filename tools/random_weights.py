"""Random weights for generated checkpoints: by seed and tensor name, in blocks, the same bits on every machine."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator

import numpy as np

Shape = tuple[int, ...]

TOWERS = ("model.visual.", "model.vision_tower.", "model.merger.")
BLOCK = 1 << 20  # values drawn and written at a time: some 30 MB of temporaries
UNIT = math.sqrt(12 / (4 * (65536**2 - 1)))  # one over the deviation of a sum of four uniform 16-bit integers


def values(seed: int, name: str, shape: Shape, tied: bool = False) -> Iterator[np.ndarray]:
    """The tensor's values as float32 vectors of at most BLOCK, in memory order.

    Matrices have deviation 1/sqrt(fan_in), times 0.3 at the end of a branch (a calm residual stream) and 4 in the
    router (clear choices). Norm weights are offsets from one with deviation 0.1, but the Gated DeltaNet output norm and
    the vision tower store the weight itself. Decay A in 1..16 and time step in 0.001..0.1, as training starts them.
    """
    count = math.prod(shape)
    if name.endswith(".A_log"):
        yield _map(lambda u: math.log(1 + 15 * u), seed, name, count)
    elif name.endswith(".dt_bias"):
        yield _map(lambda u: _inverse_softplus(1e-3 * 100**u), seed, name, count)
    elif len(shape) == 1:
        plain = name.endswith("linear_attn.norm.weight") or (name.startswith(TOWERS) and name.endswith(".weight"))
        yield from (np.float32(plain) + np.float32(0.1) * z for z in _normal(seed, name, count))
    else:
        deviation = np.float32(_deviation(name, shape, tied))
        yield from (deviation * z for z in _normal(seed, name, count))


def _deviation(name: str, shape: Shape, tied: bool) -> float:
    module = name.split(".")[-2]
    if module == "embed_tokens" and not tied:
        return 1.0
    gain = {"gate": 4.0, "out_proj": 0.3, "o_proj": 0.3, "down_proj": 0.3}.get(module, 1.0)
    return gain / math.sqrt(math.prod(shape[1:]))


def _inverse_softplus(y: float) -> float:
    return y + math.log(-math.expm1(-y))


def _stream(seed: int, name: str) -> np.random.PCG64:
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return np.random.PCG64(np.random.SeedSequence([seed, key]))


def _map(function: Callable[[float], float], seed: int, name: str, count: int) -> np.ndarray:
    """`function` of `count` numbers uniform in [0, 1)."""
    bits = _stream(seed, name).random_raw(count)
    return np.array([function((int(b) >> 11) / 2**53) for b in bits], np.float32)


def _normal(seed: int, name: str, count: int) -> Iterator[np.ndarray]:
    """Nearly normal values, mean 0 and deviation 1: sums of four 16-bit integers, the same bits on every machine."""
    stream = _stream(seed, name)
    for begin in range(0, count, BLOCK):
        quarters = stream.random_raw(min(BLOCK, count - begin)).view(np.uint16).reshape(-1, 4)
        total = quarters[:, 0].astype(np.int32) - 131070
        for column in range(1, 4):
            total += quarters[:, column]
        yield total.astype(np.float32) * np.float32(UNIT)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Finite float32 to the bits of bfloat16, rounded to nearest, ties to even."""
    bits = x.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
