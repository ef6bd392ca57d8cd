"""Q4_0 whose scales and codes minimise an error, in place of the largest element over -8: other numbers in the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from fermi_engine.errors import ConfigError
from fermi_engine.formats import FORMATS, Format
from fermi_engine.kernels.dispatch import library
from fermi_engine.kernels.threads import default_threads

BLOCK, BYTES = 32, 18  # elements of a block, and its bytes
GRAIN, ROWS = 64, 128  # blocks, and rows of a fit, that a thread takes at a time
DAMPING, PASSES = 0.01, 4  # of 2 to 8 passes and 0.01 to 0.1 the best trade on the trained model (tools/lab/results.tsv)
KINDS = ("plain", "mse")


@dataclass(frozen=True)
class Scales:
    """How a conversion chooses scales. kind 'plain': as ggml does; 'mse': q4_0 blocks of least error, in themselves, or with
    `moments(name, expert)`, E[u u^T] of what a matrix reads or None, in the product. Other formats stay plain."""

    kind: str = "plain"
    moments: Callable[[str, int | None], np.ndarray | None] | None = None
    said: str = ""  # about the moments

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"unknown scales {self.kind!r}; choose one of {', '.join(KINDS)}")
        if self.moments is not None and self.kind == "plain":
            raise ConfigError("moments say what an error costs, plain scales minimise none; ask for mse scales")

    @property
    def label(self) -> dict[str, Any]:
        """What the pack says about them: nothing for plain ones."""
        return {} if self.kind == "plain" else {"scales": self.kind + (f", {self.said}" if self.said else "")}

    def quantize(self, format: Format, x: np.ndarray, name: str, expert: int | None = None) -> np.ndarray:
        """float32 rows [rows, n] of a tensor -> plain bytes. FormatError as `Format.quantize`."""
        if self.kind == "plain" or format.name != "q4_0":
            return format.quantize(x)
        moments = self.moments(name, expert) if self.moments else None
        return mse_q4_0(x) if moments is None else fitted_q4_0(x, moments)


PLAIN = Scales()


def mse_q4_0(x: np.ndarray, weight: np.ndarray | None = None, threads: int | None = None) -> np.ndarray:
    """float32 [rows, n] -> plain q4_0 uint8 [rows, bytes]: each block's scale is the half, of all there are, of least
    sum of weight * (x - value)^2; weight float32 [n], at least 0, of a row's elements, 1 where it is None.

    csrc/q4_0_mse.c searches, kernels.h fixes the result to the bit. FormatError as `Format.quantize`.
    """
    module = library()
    x = np.ascontiguousarray(x, np.float32)
    blocks = FORMATS["q4_0"].quantize(x)
    args = {"x": module.ffi.from_buffer("float[]", x), "blocks": module.ffi.from_buffer("uint8_t[]", blocks),
            "weight": module.ffi.NULL, "n": x.shape[1]}
    if weight is not None:
        weight = np.ascontiguousarray(weight, np.float32)
        if weight.shape != x.shape[1:] or not (np.isfinite(weight).all() and (weight >= 0).all()):
            raise ValueError(f"weights {weight.shape} of rows of {x.shape[1]}, expected as many, finite and at least 0")
        args["weight"] = module.ffi.from_buffer("float[]", weight)
    pointer = module.ffi.cast("kernel_fn", module.ffi.addressof(module.lib, "q4_0_mse"))
    module.lib.fermi_run(pointer, module.ffi.new("q4_0_mse_args *", args), x.size // BLOCK, GRAIN,
                         threads or default_threads())
    return blocks


def fitted_q4_0(x: np.ndarray, moments: np.ndarray, threads: int | None = None) -> np.ndarray:
    """float32 [rows, n] -> plain q4_0 uint8 [rows, bytes] that give about the least error of the product with inputs u whose
    second moments E[u u^T] are `moments` [n, n]: the sum over rows of r M r^T, r = x - values.

    From mse_q4_0 under the diagonal on, each block in turn takes the codes and the scale that are best for what all others
    leave over, as coordinate descent: no step makes the error larger. M gains DAMPING of its mean diagonal, so that
    directions in which few inputs were seen keep their weight. FormatError as `Format.quantize`.
    """
    m = _damped(moments)
    start = mse_q4_0(x, np.diag(m).astype(np.float32), threads)
    inverse = [np.linalg.inv(m[s, s]) for s in _spans(len(m))]
    rows = [slice(begin, begin + ROWS) for begin in range(0, len(x), ROWS)]  # of this size for any number of threads
    with ThreadPoolExecutor(threads or default_threads()) as pool:
        return np.concatenate(list(pool.map(lambda s: _fitted(x[s], start[s], m, inverse), rows)))


def _fitted(x: np.ndarray, start: np.ndarray, m: np.ndarray, inverse: list[np.ndarray]) -> np.ndarray:
    """Rows on their own: nothing passes from one to another."""
    d, codes = unpack_q4_0(start)
    left = (x.astype(np.float64) - values_q4_0(d, codes)) @ m
    for _ in range(PASSES):
        for b, s in enumerate(_spans(len(m))):
            before = d[:, b, None] * codes[:, s]
            target = before + left[:, s] @ inverse[b]
            _improve(target, m[s, s], d[:, b], codes[:, s])
            left -= (d[:, b, None] * codes[:, s] - before) @ m[s]
    return pack_q4_0(d, codes)


def _damped(moments: np.ndarray) -> np.ndarray:
    m = moments.astype(np.float64)
    mean = float(np.trace(m)) / len(m)
    return m + np.eye(len(m)) * (DAMPING * mean if mean > 0 else 1.0)


def _spans(n: int) -> list[slice]:
    return [slice(begin, begin + BLOCK) for begin in range(0, n, BLOCK)]


def _improve(target: np.ndarray, m: np.ndarray, d: np.ndarray, codes: np.ndarray) -> None:
    """One block of every row, in place: d [rows] and codes [rows, 32] nearer to `target` [rows, 32] under the metric m.

    Each code in turn becomes the best whole number for the others as they are; then the scale, if the half next to its
    best value is better.
    """
    gradient = (target - d[:, None] * codes) @ m
    step = np.divide(1.0, d, out=np.zeros_like(d), where=d != 0)
    for j in range(BLOCK):
        code = np.clip(np.rint(codes[:, j] + gradient[:, j] * step / m[j, j]), -8, 7)
        gradient -= np.outer((code - codes[:, j]) * d, m[j])
        codes[:, j] = code
    towards = codes @ m
    size, along = np.einsum("ij,ij->i", towards, codes), np.einsum("ij,ij->i", towards, target)
    best = np.divide(along, size, out=d.copy(), where=size > 0)
    with np.errstate(over="ignore"):
        half = best.astype(np.float16).astype(np.float64)
    better = np.isfinite(half) & (np.abs(half - best) < np.abs(d - best))
    d[better] = half[better]


def unpack_q4_0(plain: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Plain q4_0 bytes [rows, bytes] -> d [rows, blocks] and codes -8..7 [rows, n], both float64."""
    blocks = plain.reshape(len(plain), -1, BYTES)
    d = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0].astype(np.float64)
    codes = np.concatenate([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], axis=-1).astype(np.float64) - 8
    return d, codes.reshape(len(plain), -1)


def values_q4_0(d: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """What d [rows, blocks] and codes [rows, n] stand for."""
    return np.repeat(d, BLOCK, axis=1) * codes


def pack_q4_0(d: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """The inverse of unpack_q4_0; a scale of 0 is stored as gguf stores it, -0.0 with codes 8."""
    rows = len(d)
    out = np.empty((rows, d.shape[1], BYTES), np.uint8)
    out[..., :2] = np.where(d == 0, -0.0, d).astype(np.float16)[..., None].view(np.uint8)
    whole = (np.where(np.repeat(d, BLOCK, axis=1) == 0, 0, codes) + 8).astype(np.uint8).reshape(rows, -1, 2, BLOCK // 2)
    out[..., 2:] = whole[:, :, 0] | whole[:, :, 1] << 4
    return out.reshape(rows, -1)
