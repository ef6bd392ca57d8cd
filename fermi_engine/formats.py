"""THE FORMAT TABLE: one row per weight format, and Matrix, a weight matrix as packs and kernels hold it.

Plain bytes are ggml's: a row is a run of blocks, block_q4_0 = f16 d + 16 bytes qs (low nibble = elements 0..15),
block_q8_0 = f16 d + 32 int8 qs, byte for byte what gguf's quantiser writes.

Stored bytes are what one vector register wants: the quantised formats interleave 8 rows. Per 32-element block of a
group come the 8 rows' scales, then the codes 4 bytes a row: piece 0 of rows 0..7, piece 1 of rows 0..7, and so on.
So a 16-byte load meets one f16 scale of every row, and a 32-byte load meets the same 4 code bytes of every row while
one activation word is broadcast. The last group is padded with all-zero rows. f16 and f32 are stored plain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from fermi_engine.errors import ConfigError, FormatError

LANES = 8  # rows interleaved in the stored layout of a quantised matrix
_PIECE = 4  # code bytes of one row that stay together: one int32 lane
_SCALE_BYTES = 2
_CHUNK = 1 << 16  # elements handled at a time, so that the temporaries (about 1 MB) stay in a core's cache
_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = np.float32(2.0**-126)  # below it 1/d overflows and a block has no defined codes

Blocks = np.ndarray  # [blocks, elements] f32, or the [blocks, bytes] u8 they become


@dataclass(frozen=True)
class Format:
    """One weight format. `block` is in elements, `block_bytes` in bytes; `lanes` rows share a stored group.

    `encode(blocks f32, out u8) -> bool [blocks]` fills `out` and tells which blocks came out finite;
    `decode(bytes u8, out f32)` is its inverse. Rows always hold whole blocks.
    """

    name: str
    block: int
    block_bytes: int
    lanes: int
    encode: Callable[[Blocks, Blocks], np.ndarray] = field(repr=False)
    decode: Callable[[Blocks, Blocks], None] = field(repr=False)

    def row_bytes(self, cols: int) -> int:
        """Plain bytes of a row of `cols` elements. FormatError where `cols` holds no whole number of blocks."""
        if cols % self.block:
            raise FormatError(f"{self.name} needs rows of a multiple of {self.block} elements, found {cols}; "
                              "use f16 or f32 for this matrix")
        return cols // self.block * self.block_bytes

    def stored_shape(self, rows: int, cols: int) -> tuple[int, int]:
        """Shape of the uint8 array that stores a [rows, cols] matrix. FormatError as `row_bytes`."""
        return -(-rows // self.lanes), self.lanes * self.row_bytes(cols)

    def quantize(self, x: np.ndarray) -> np.ndarray:
        """f32 [rows, n] -> plain uint8 [rows, bytes].

        FormatError, with `.row` and `.problem`, for NaN or infinity in the source and for values the format cannot
        hold (a scale or value beyond float16, a float64 beyond float32); also for n off the block size.
        """
        rows, n = x.shape
        out = np.empty((rows, self.row_bytes(n)), np.uint8)
        with np.errstate(over="ignore", invalid="ignore"):
            source = np.ascontiguousarray(x, np.float32).reshape(-1, self.block)
        target = out.reshape(-1, self.block_bytes)
        step = _CHUNK // self.block
        for start in range(0, len(source), step):
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                good = self.encode(source[start:start + step], target[start:start + step])
            if not good.all():
                self._refuse(x, (start + int(np.argmin(good))) * self.block // n)
        return out

    def _refuse(self, x: np.ndarray, row: int) -> None:
        finite = bool(np.isfinite(x[row]).all())
        peak = float(np.abs(x[row]).max())
        remedy = "; store this tensor as f32" if peak <= _LARGEST else ""
        problem = (f"reaches {peak:.4g}, beyond what {self.name} can hold{remedy}" if finite
                   else "holds NaN or infinity; the source is damaged")
        error = FormatError(f"row {row} {problem}")
        error.row, error.problem = row, problem
        raise error

    def dequantize(self, plain: np.ndarray) -> np.ndarray:
        """Plain uint8 [rows, bytes] -> f32 [rows, n]; exact, since a scale times a code fits a float32."""
        rows, width = plain.shape
        if width % self.block_bytes:
            raise FormatError(f"{self.name} rows have a multiple of {self.block_bytes} bytes, found {width}")
        out = np.empty((rows, width // self.block_bytes * self.block), np.float32)
        source = np.ascontiguousarray(plain).reshape(-1, self.block_bytes)
        target = out.reshape(-1, self.block)
        step = _CHUNK // self.block
        for start in range(0, len(source), step):
            self.decode(source[start:start + step], target[start:start + step])
        return out

    def interleave(self, plain: np.ndarray) -> np.ndarray:
        """Plain uint8 [rows, bytes] -> stored uint8 [ceil(rows/lanes), lanes*bytes]; see the module's text."""
        rows, width = plain.shape
        if self.lanes == 1:
            return plain
        groups = -(-rows // self.lanes)
        padded = plain
        if rows % self.lanes:
            padded = np.zeros((groups * self.lanes, width), np.uint8)
            padded[:rows] = plain
        stored = np.empty((groups, self.lanes * width), np.uint8)
        scales, codes = self._plain_parts(padded, groups)
        stored_scales, stored_codes = self._stored_parts(stored)
        stored_scales[...] = scales
        stored_codes[...] = codes
        return stored

    def deinterleave(self, stored: np.ndarray, rows: int) -> np.ndarray:
        """Stored uint8 [groups, lanes*bytes] -> plain uint8 [rows, bytes]; padding rows are dropped."""
        if self.lanes == 1:
            return stored
        groups, width = stored.shape
        plain = np.empty((groups * self.lanes, width // self.lanes), np.uint8)
        scales, codes = self._plain_parts(plain, groups)
        scales[...], codes[...] = self._stored_parts(stored)
        return plain[:rows]

    def _plain_parts(self, plain: np.ndarray, groups: int) -> tuple[np.ndarray, np.ndarray]:
        """Views in stored order: scales u16 [groups, blocks, lanes], codes u32 [groups, blocks, pieces, lanes]."""
        blocks = plain.reshape(groups, self.lanes, -1, self.block_bytes)
        scales = blocks[..., :_SCALE_BYTES].view("<u2")[..., 0]
        codes = blocks[..., _SCALE_BYTES:].view("<u4")
        return scales.transpose(0, 2, 1), codes.transpose(0, 2, 3, 1)

    def _stored_parts(self, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same two views on stored bytes."""
        blocks = stored.reshape(len(stored), -1, self.lanes * self.block_bytes)
        head = _SCALE_BYTES * self.lanes
        pieces = (self.block_bytes - _SCALE_BYTES) // _PIECE
        codes = blocks[..., head:].view("<u4").reshape(len(stored), -1, pieces, self.lanes)
        return blocks[..., :head].view("<u2"), codes

    def is_finite(self, stored: np.ndarray) -> bool:
        """True when every scale (f16, f32: every value) in stored bytes [groups, bytes] is finite."""
        if self.lanes == 1:
            return bool(np.isfinite(stored.view(f"<f{self.block_bytes}")).all())
        return bool(np.isfinite(self._stored_parts(stored)[0].view(np.float16)).all())


def _inverse(d: np.ndarray) -> np.ndarray:
    """1/d, and 0 where d is zero or too small to have a finite inverse."""
    return np.divide(np.float32(1), d, out=np.zeros_like(d), where=np.abs(d) >= _SMALLEST)


def _write_scales(d: np.ndarray, out: Blocks) -> np.ndarray:
    half = d.astype(np.float16)
    out[:, :_SCALE_BYTES] = half.view(np.uint8).reshape(-1, _SCALE_BYTES)
    return np.isfinite(half)


def _encode_q4_0(x: Blocks, out: Blocks) -> np.ndarray:
    """d = (first element of largest magnitude, signed) / -8; code = trunc(x/d + 8.5), at most 15 (ggml)."""
    peak = x[np.arange(len(x)), np.abs(x).argmax(axis=1)]
    d = peak / np.float32(-8)
    codes = x * _inverse(d)[:, None]
    codes += np.float32(8.5)
    np.minimum(codes, np.float32(15), out=codes)
    codes = codes.astype(np.uint8)
    out[:, _SCALE_BYTES:] = codes[:, :16] | codes[:, 16:] << np.uint8(4)
    d[(np.abs(d) < _SMALLEST) & (d != 0)] = np.float32(-0.0)  # the zero block, whatever the sign was
    return _write_scales(d, out)


def _decode_q4_0(data: Blocks, out: Blocks) -> None:
    d = data[:, :_SCALE_BYTES].copy().view(np.float16).astype(np.float32)
    codes = data[:, _SCALE_BYTES:]
    np.subtract(codes & np.uint8(15), np.float32(8), out=out[:, :16])
    np.subtract(codes >> np.uint8(4), np.float32(8), out=out[:, 16:])
    out *= d


def _encode_q8_0(x: Blocks, out: Blocks) -> np.ndarray:
    """d = largest magnitude / 127; code = x/d rounded half away from zero (ggml).

    The half is the float32 below 0.5: adding 0.5 itself would round 0.49999997 up to 1.
    """
    d = np.abs(x).max(axis=1) / np.float32(127)
    codes = x * _inverse(d)[:, None]
    codes += np.copysign(np.nextafter(np.float32(0.5), np.float32(0)), codes)
    out[:, _SCALE_BYTES:] = codes.astype(np.int8).view(np.uint8)
    return _write_scales(d, out)


def _decode_q8_0(data: Blocks, out: Blocks) -> None:
    d = data[:, :_SCALE_BYTES].copy().view(np.float16).astype(np.float32)
    np.multiply(data[:, _SCALE_BYTES:].view(np.int8), d, out=out)


def _encode_float(dtype: str) -> Callable[[Blocks, Blocks], np.ndarray]:
    def encode(x: Blocks, out: Blocks) -> np.ndarray:
        values = x.astype(dtype)
        out[...] = values.view(np.uint8)
        return np.isfinite(values[:, 0])
    return encode


def _decode_float(dtype: str) -> Callable[[Blocks, Blocks], None]:
    def decode(data: Blocks, out: Blocks) -> None:
        out[...] = data.view(dtype)
    return decode


FORMATS = {row.name: row for row in (
    #      name    block  bytes  lanes  encode                 decode
    Format("q4_0", 32,    18,    LANES, _encode_q4_0,          _decode_q4_0),
    Format("q8_0", 32,    34,    LANES, _encode_q8_0,          _decode_q8_0),
    Format("f16",  1,     2,     1,     _encode_float("<f2"),  _decode_float("<f2")),
    Format("f32",  1,     4,     1,     _encode_float("<f4"),  _decode_float("<f4")),
)}


def find_format(name: str) -> Format:
    """The table row called `name`; ConfigError naming the choices for an unknown one."""
    if name not in FORMATS:
        raise ConfigError(f"unknown weight format {name!r}; choose one of {', '.join(FORMATS)}")
    return FORMATS[name]


@dataclass(frozen=True, eq=False)
class Matrix:
    """A weight matrix [rows, cols] in stored bytes: uint8 [groups, 8*bytes] for q4_0 and q8_0, else [rows, bytes]."""

    format: str
    rows: int
    cols: int
    data: np.ndarray = field(repr=False)

    @classmethod
    def from_f32(cls, x: np.ndarray, format: str) -> Matrix:
        """Quantise f32 [rows, cols]. ConfigError for an unknown format, FormatError as `Format.quantize`."""
        row = find_format(format)
        return cls(format, *x.shape, row.interleave(row.quantize(x)))

    @property
    def nbytes(self) -> int:
        """Stored size in bytes, padding rows included."""
        return self.data.nbytes

    def part(self, first: int, rows: int) -> Matrix:
        """Rows first..first+rows as a matrix, zero copy. ValueError where stored groups of rows would be cut."""
        lanes = FORMATS[self.format].lanes
        end = first + rows
        if first % lanes or (rows % lanes and end != self.rows) or not 0 <= first <= end <= self.rows:
            raise ValueError(f"rows {first}..{end} of {self.rows} in groups of {lanes}")
        return Matrix(self.format, rows, self.cols, self.data[first // lanes : -(-end // lanes)])

    def plain(self) -> np.ndarray:
        """ggml's bytes, uint8 [rows, bytes]."""
        return FORMATS[self.format].deinterleave(self.data, self.rows)

    def dequantize(self) -> np.ndarray:
        """The values the stored bytes stand for, f32 [rows, cols]."""
        return FORMATS[self.format].dequantize(self.plain())


@dataclass(frozen=True, eq=False)
class Experts:
    """One matrix of every expert of a layer, `stride` bytes apart in flat uint8 `data`, which starts with expert 0's."""

    format: str
    count: int
    rows: int
    cols: int
    stride: int
    data: np.ndarray = field(repr=False)

    @property
    def is_quantised(self) -> bool:
        """Whether it is stored as blocks of codes."""
        return self.format in ("q4_0", "q8_0")

    def matrix(self, expert: int) -> Matrix:
        """One expert's matrix, zero copy. IndexError beyond the last."""
        if not 0 <= expert < self.count:
            raise IndexError(f"expert {expert} of {self.count}")
        groups, width = FORMATS[self.format].stored_shape(self.rows, self.cols)
        begin = expert * self.stride
        return Matrix(self.format, self.rows, self.cols, self.data[begin : begin + groups * width].reshape(groups, width))

    @classmethod
    def join(cls, matrices: list[Matrix]) -> Experts:
        """Matrices of one shape and format, copied side by side."""
        first = matrices[0]
        data = np.concatenate([matrix.data.reshape(-1).view(np.uint8) for matrix in matrices])
        return cls(first.format, len(matrices), first.rows, first.cols, first.nbytes, data)


class KVLayout(Protocol):
    """A layer's key/value cache as kernels see it: csrc/kernels.h, kv_append."""

    kv_heads: int
    page_tokens: int
    head_dim: int
    format: str
    k_table: np.ndarray
    v_table: np.ndarray

    @property
    def capacity(self) -> int:
        """Positions that have a page."""


def kv_row_bytes(format: str, head_dim: int) -> int:
    """Bytes of one head's key or value in the cache. ConfigError for an unknown format or a head it cannot hold."""
    if format not in ("f32", "f16", "q8_0"):
        raise ConfigError(f"unknown key/value format {format!r}; choose one of f32, f16, q8_0")
    if format == "q8_0" and head_dim % 32:
        raise ConfigError(f"heads of {head_dim} do not divide into blocks of 32: choose f16 or f32 for keys and values")
    return {"f32": 4 * head_dim, "f16": 2 * head_dim, "q8_0": head_dim + head_dim // 16}[format]
