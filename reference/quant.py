"""Block quantisation: ggml's q4_0 and q8_0 weights, 8-bit activations, their integer dot product, and the
formats of the key/value cache.

A block is 32 consecutive elements of a row with one scale, float16 for weights, float32 for activations.
Source of the weight formats: ggml's quantize_row_q4_0_ref and quantize_row_q8_0_ref. All quantisers calculate
in float32 whatever comes in, because their codes are defined by float32 rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
SMALLEST_NORMAL = 2.0**-126
SMALLEST_ACTIVATION = 2.0**-110


def _blocks(x: Tensor) -> Tensor:
    """[rows, n] -> float32 [rows, n/32, 32]. Raises ValueError where n is no multiple of 32."""
    rows, n = x.shape
    if n % BLOCK:
        raise ValueError(f"row length {n} is not a multiple of the block size {BLOCK}")
    return x.to(torch.float32).reshape(rows, n // BLOCK, BLOCK)


def _quotient(numerator: float, x: Tensor) -> Tensor:
    """numerator / x, rounded once: torch's `number / tensor` multiplies by a reciprocal and rounds twice."""
    return torch.full_like(x, numerator) / x


def _half_scale(d: Tensor) -> Tensor:
    """float32 scales -> float16. Raises ValueError naming the first row whose scale is infinite or NaN."""
    half = d.to(torch.float16)
    bad = (~torch.isfinite(half)).nonzero()
    if len(bad):
        row, block = bad[0].tolist()
        raise ValueError(f"row {row}, block {block}: scale {d[row, block].item()} is not finite in float16")
    return half


def quantize_q4_0(x: Tensor) -> tuple[Tensor, Tensor]:
    """f32 [rows, n] -> codes uint8 [rows, n/32, 32] in 0..15, d float16 [rows, n/32].

    d = m / -8 with m the first element of largest magnitude, sign included; code = trunc(x * (1/d) + 8.5)
    with the unrounded 1/d, at most 15. Blocks with |d| < 2**-126 are the zero block: d = -0.0, all codes 8.
    Raises ValueError for a row length off the block size and for scales that float16 cannot hold.
    """
    blocks = _blocks(x)
    first_largest = blocks.abs().argmax(dim=-1, keepdim=True)
    d = blocks.gather(-1, first_largest) / -8.0
    zero = d.abs() < SMALLEST_NORMAL
    inverse = torch.where(zero, 0.0, _quotient(1.0, d))
    d = torch.where(zero, -0.0, d)
    codes = torch.trunc(blocks * inverse + 8.5).clamp(0, 15)
    half = _half_scale(d.squeeze(-1))
    return codes.to(torch.uint8), half


def quantize_q4_0_mse(x: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As quantize_q4_0, but d the finite half, of all there are, that minimises sum w (x - d * code)^2 over the block.

    weight float32 [n], of a row's elements, at least 0; 1 without, and in blocks where all are 0. code = floor(x / d + 1/2)
    in -8..7. Of equal errors the smaller |d|, then the negative d; d = 0 is stored as -0.0 with codes 8. Sums in float64, in
    order.
    """
    rows, n = x.shape
    blocks = _blocks(x).to(torch.float64)
    weights = torch.ones(n) if weight is None else weight
    weights = weights.to(torch.float64).reshape(-1, BLOCK).expand(rows, -1, -1)
    sizes = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).to(torch.float64)
    candidates = torch.stack([-sizes, sizes], dim=1).flatten()  # in the order of preference
    codes, scales = torch.empty(blocks.shape, dtype=torch.uint8), torch.empty(blocks.shape[:2], dtype=torch.float16)
    for row in range(rows):
        for b in range(n // BLOCK):
            w = weights[row, b] if weights[row, b].sum() > 0 else torch.ones(BLOCK, dtype=torch.float64)
            d = candidates[_errors(blocks[row, b], w, candidates).argmin()]
            scales[row, b] = d if d else -0.0
            codes[row, b] = _nearest(blocks[row, b], d).to(torch.uint8) + 8
    return codes, scales


def _nearest(x: Tensor, d: Tensor) -> Tensor:
    """Codes in -8..7 of x under the scale d, as float64; 0 for d = 0."""
    return torch.where(d == 0, 0.0, torch.floor(x / torch.where(d == 0, 1.0, d) + 0.5).clamp(-8, 7))


def _errors(x: Tensor, w: Tensor, d: Tensor) -> Tensor:
    """Sum over a block x [32] of w (x - d * code)^2, in order, for each of the scales d [n]."""
    total = torch.zeros_like(d)
    for i in range(BLOCK):
        rest = x[i] - d * _nearest(x[i], d)
        total = total + w[i] * (rest * rest)
    return total


def dequantize_q4_0(codes: Tensor, d: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes uint8 [rows, nb, 32], d float16 [rows, nb] -> (codes - 8) * d as dtype [rows, nb*32]."""
    return ((codes.to(dtype) - 8) * d.to(dtype).unsqueeze(-1)).flatten(1)


def quantize_q8_0_weight(x: Tensor) -> tuple[Tensor, Tensor]:
    """f32 [rows, n] -> codes int8 [rows, n/32, 32], d float16 [rows, n/32].

    d = max|x| / 127; code = x * (1/d) with the unrounded 1/d, rounded to nearest, halves away from zero.
    Blocks with d < 2**-126 become zeros (d = +0.0). Raises ValueError as quantize_q4_0 does.
    """
    blocks = _blocks(x)
    amax = blocks.abs().amax(dim=-1, keepdim=True)
    d = amax / torch.full_like(amax, 127.0)
    zero = d < SMALLEST_NORMAL
    inverse = torch.where(zero, 0.0, _quotient(1.0, d))
    half = _half_scale(torch.where(zero, 0.0, d).squeeze(-1))
    return _round_half_away(blocks * inverse).to(torch.int8), half


def _round_half_away(x: Tensor) -> Tensor:
    whole = x.abs().floor()
    return torch.sign(x) * (whole + (x.abs() - whole >= 0.5))


def dequantize_q8_0(codes: Tensor, d: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes int8 [rows, nb, 32], d float16 [rows, nb] -> codes * d as dtype [rows, nb*32]."""
    return (codes.to(dtype) * d.to(dtype).unsqueeze(-1)).flatten(1)


def _scale_bytes(d: Tensor) -> Tensor:
    """float16 [rows, nb] -> its two little-endian bytes, uint8 [rows, nb, 2]."""
    return d.contiguous().view(torch.uint8).reshape(*d.shape, 2)


def pack_q4_0(codes: Tensor, d: Tensor) -> Tensor:
    """-> uint8 [rows, nb*18]: per block d, then 16 bytes with elements i (low nibble) and i+16 (high)."""
    nibbles = codes[..., :16] | (codes[..., 16:] << 4)
    return torch.cat([_scale_bytes(d), nibbles], dim=-1).flatten(1)


def unpack_q4_0(data: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of pack_q4_0: uint8 [rows, nb*18] -> (codes uint8 [rows, nb, 32], d float16 [rows, nb])."""
    blocks = data.reshape(data.shape[0], -1, 18)
    d = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1)
    nibbles = blocks[..., 2:]
    return torch.cat([nibbles & 15, nibbles >> 4], dim=-1), d


def pack_q8_0(codes: Tensor, d: Tensor) -> Tensor:
    """-> uint8 [rows, nb*34]: per block d, then 32 signed codes."""
    return torch.cat([_scale_bytes(d), codes.view(torch.uint8)], dim=-1).flatten(1)


def unpack_q8_0(data: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of pack_q8_0: uint8 [rows, nb*34] -> (codes int8 [rows, nb, 32], d float16 [rows, nb])."""
    blocks = data.reshape(data.shape[0], -1, 34)
    d = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1)
    return blocks[..., 2:].contiguous().view(torch.int8), d


def quantize_activation(x: Tensor) -> tuple[Tensor, Tensor]:
    """[T, n] -> codes int8 [T, n] in -127..127, d float32 [T, n/32], by float32 arithmetic for every dtype.

    d = max|x| / 127; code = round_half_to_even(x * id) with id = 127 / max|x| in float32. A block whose
    max|x| is under 2**-110 is all zeros (d = 0): there 127 / max|x| nears overflow.
    """
    blocks = _blocks(x)
    amax = blocks.abs().amax(dim=-1, keepdim=True)
    zero = amax < SMALLEST_ACTIVATION
    d = torch.where(zero, 0.0, amax / torch.full_like(amax, 127.0))
    inverse = torch.where(zero, 0.0, _quotient(127.0, amax))
    codes = torch.round(blocks * inverse)
    return codes.to(torch.int8).flatten(1), d.squeeze(-1)


def to_half(x: Tensor) -> Tensor:
    """float32 -> the bits of the nearest float16, ties to even, int16: overflow gives infinity, NaN a quiet NaN with the
    sign and the upper bits of the payload."""
    bits = x.contiguous().view(torch.int32)
    nan = (bits >> 16 & 0x8000) | 0x7E00 | (bits >> 13 & 0x3FF)
    return torch.where(x.isnan(), nan, x.to(torch.float16).view(torch.int16).int() & 0xFFFF).to(torch.int16)


def encode_cache(x: Tensor, format: str) -> Tensor:
    """Keys or values float32 [S, HKV, D] -> the bytes the cache keeps, uint8 [S, HKV, row]; format 'f32', 'f16' or 'q8_0'.

    A q8_0 row: D codes, then D / 32 scales; both as quantize_activation, the scale rounded to float16 afterwards. A block
    that holds NaN or infinity has codes 0; its scale, and one that float16 cannot hold, is NaN (bits 0x7e00).
    """
    if format == "f32":
        return x.contiguous().view(torch.uint8)
    if format == "f16":
        return to_half(x).view(torch.uint8)
    rows = x.reshape(-1, x.shape[-1])
    good = _blocks(rows).isfinite().all(-1)
    codes, d = quantize_activation(torch.where(good.repeat_interleave(BLOCK, dim=1), rows, 0.0))
    half = d.to(torch.float16)
    half[~good | ~half.isfinite()] = torch.nan
    bits = torch.where(half.isnan(), 0x7E00, half.view(torch.int16)).to(torch.int16)
    return torch.cat([codes.view(torch.uint8), bits.view(torch.uint8)], dim=-1).reshape(*x.shape[:-1], -1)


def decode_cache(data: Tensor, format: str) -> Tensor:
    """The inverse: uint8 [S, HKV, row] -> the float32 values [S, HKV, D] that the bytes stand for."""
    data = data.contiguous()
    if format == "f32":
        return data.view(torch.float32)
    if format == "f16":
        return data.view(torch.float16).float()
    codes = data.shape[-1] // (BLOCK + 2) * BLOCK
    d = data[..., codes:].contiguous().view(torch.float16).float()
    return data[..., :codes].contiguous().view(torch.int8).float() * d.repeat_interleave(BLOCK, dim=-1)


def _block_sums(wcodes: Tensor, acodes: Tensor) -> Tensor:
    """Signed wcodes [rows, nb, 32] and acodes [T, nb*32] -> exact int32 [T, rows, nb]."""
    activations = acodes.to(torch.int32).reshape(acodes.shape[0], -1, BLOCK)
    return torch.einsum("rbi,tbi->trb", wcodes.to(torch.int32), activations)


def _scaled(sums: Tensor, wd: Tensor, ad: Tensor, dtype: torch.dtype) -> Tensor:
    """sum over blocks of sums * (wd * ad): int32 [T, rows, nb] -> dtype [T, rows]."""
    return (sums.to(dtype) * (wd.to(dtype) * ad.to(dtype).unsqueeze(1))).sum(-1)


def dot_q4_0_q8_0(wcodes: Tensor, wd: Tensor, acodes: Tensor, ad: Tensor) -> tuple[Tensor, Tensor]:
    """q4_0 weights (codes uint8 [rows, nb, 32], wd float16 [rows, nb]) times 8-bit activations.

    acodes int8 [T, nb*32], ad float32 [T, nb] -> the block sums of (code - 8) * activation, exact int32
    [T, rows, nb], and their scaled sum, float64 [T, rows].
    """
    sums = _block_sums(wcodes.to(torch.int32) - 8, acodes)
    return sums, _scaled(sums, wd, ad, torch.float64)


def dot_q8_0_q8_0(wcodes: Tensor, wd: Tensor, acodes: Tensor, ad: Tensor) -> tuple[Tensor, Tensor]:
    """q8_0 weights (codes int8 [rows, nb, 32], wd float16 [rows, nb]); otherwise as dot_q4_0_q8_0."""
    sums = _block_sums(wcodes, acodes)
    return sums, _scaled(sums, wd, ad, torch.float64)


class QuantMatrix:
    """A quantised weight [rows, n]: codes [rows, n/32, 32], d float16 [rows, n/32], kind 'q4_0' or 'q8_0'."""

    def __init__(self, codes: Tensor, d: Tensor, kind: str) -> None:
        if kind not in ("q4_0", "q8_0"):
            raise ValueError(f"unknown weight format {kind!r}; expected 'q4_0' or 'q8_0'")
        self.codes, self.d, self.kind = codes, d, kind

    @classmethod
    def quantize(cls, x: Tensor, kind: str) -> QuantMatrix:
        """f32 [rows, n] -> QuantMatrix. Raises ValueError as the quantisers do."""
        return cls(*(quantize_q4_0(x) if kind == "q4_0" else quantize_q8_0_weight(x)), kind)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, n) of the matrix it stands for."""
        return self.codes.shape[0], self.codes.shape[1] * BLOCK

    def rows(self, ids: Tensor) -> QuantMatrix:
        """The rows ids [T] as a QuantMatrix [T, n]."""
        return QuantMatrix(self.codes[ids], self.d[ids], self.kind)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """-> dtype [rows, n]."""
        return (dequantize_q4_0 if self.kind == "q4_0" else dequantize_q8_0)(self.codes, self.d, dtype)


def linear(x: Tensor, w: Tensor | QuantMatrix) -> Tensor:
    """x [T, n] times w [rows, n] transposed -> x.dtype [T, rows].

    A QuantMatrix quantises x to 8 bits first, multiplies integers exactly, adds the scaled blocks in x.dtype.
    """
    if isinstance(w, Tensor):
        return x @ w.T
    acodes, ad = quantize_activation(x)
    dot = dot_q4_0_q8_0 if w.kind == "q4_0" else dot_q8_0_q8_0
    sums, _ = dot(w.codes, w.d, acodes, ad)
    return _scaled(sums, w.d, ad, x.dtype)
