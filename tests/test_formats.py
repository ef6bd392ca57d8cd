"""The format table against gguf's quantiser, the stored layout against its definition, sources no format can hold."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize as gguf_dequantize
from gguf.quants import quantize as gguf_quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from fermi_engine import formats
from fermi_engine.errors import ConfigError, FormatError
from fermi_engine.formats import FORMATS, LANES, Matrix, find_format

QUANTISED = ("q4_0", "q8_0")
TYPES = {"q4_0": gguf.GGMLQuantizationType.Q4_0, "q8_0": gguf.GGMLQuantizationType.Q8_0}
ZERO_BLOCK = {"q4_0": bytes([0x00, 0x80] + [0x88] * 16), "q8_0": bytes(34)}
DIVISOR = {"q4_0": 8, "q8_0": 127}  # largest magnitude of a block / its scale
SMALLEST = 2.0**-126  # gguf's 1/d is an infinity below it


def expected_bytes(name: str, x: np.ndarray) -> np.ndarray:
    """gguf's bytes, and the zero block where gguf divides by a scale that has no inverse."""
    with np.errstate(all="ignore"):
        out = gguf_quantize(x, TYPES[name]).reshape(-1, FORMATS[name].block_bytes)
    d = np.abs(x.reshape(-1, 32)).max(axis=1) / np.float32(DIVISOR[name])
    out[(d > 0) & (d < SMALLEST)] = np.frombuffer(ZERO_BLOCK[name], np.uint8)
    return out.reshape(len(x), -1)


def bf16(x: np.ndarray) -> np.ndarray:
    return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def draw(pattern: str, rows: int, n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, n)).astype(np.float32)
    exponents = rng.integers(-120, 15, (rows, n // 32)).repeat(32, axis=1)
    return {
        "random": x,
        "bf16": bf16(x),
        "zero": x * 0,  # signs of zero included
        "zero blocks": x * rng.integers(0, 2, (rows, n // 32)).repeat(32, axis=1),
        "tiny": (x * np.float32(2.0**-122)).astype(np.float32),  # scales on both sides of 2^-126
        "subnormal": (x * np.float32(2.0**-130)).astype(np.float32),
        "any exponent": np.ldexp(x, exponents).astype(np.float32),
        "huge": np.clip(x * 1e5, -5e5, 5e5).astype(np.float32),  # 5e5/8 is still a float16
        "clipped": np.clip(x, -0.5, 0.5),  # largest magnitude with both signs: the first one decides the sign of d
        "outlier": np.where(rng.random((rows, n)) < 1 / 64, np.float32(1000), x),
        "halves": (rng.integers(-254, 255, (rows, n)) / np.float32(2)).astype(np.float32),  # ties of rounding
    }[pattern]


PATTERNS = ("random", "bf16", "zero", "zero blocks", "tiny", "subnormal", "any exponent", "huge", "clipped", "outlier",
            "halves")


@pytest.mark.parametrize("name", QUANTISED)
@settings(deadline=None, derandomize=True, max_examples=150)
@given(st.sampled_from(PATTERNS), st.integers(1, 9), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_bytes_are_ggufs(name: str, pattern: str, rows: int, blocks: int, seed: int) -> None:
    x = draw(pattern, rows, 32 * blocks, seed)
    assert FORMATS[name].quantize(x).tobytes() == expected_bytes(name, x).tobytes()


@pytest.mark.parametrize("name", QUANTISED)
def test_bytes_are_ggufs_beyond_one_chunk(name: str) -> None:
    x = draw("bf16", 40, 2080, 3)
    assert x.size > formats._CHUNK
    assert FORMATS[name].quantize(x).tobytes() == expected_bytes(name, x).tobytes()


@pytest.mark.parametrize("name", QUANTISED)
def test_zero_block(name: str) -> None:
    for tiny in (0.0, 2.0**-149, 2.0**-127):
        assert FORMATS[name].quantize(np.full((1, 32), tiny, np.float32)).tobytes() == ZERO_BLOCK[name]
    assert not FORMATS[name].dequantize(np.frombuffer(ZERO_BLOCK[name], np.uint8)[None]).any()


def test_scale_that_underflows_float16_keeps_ggufs_codes() -> None:
    x = np.linspace(-1, 1, 32, dtype=np.float32)[None] * np.float32(2.0**-60)
    assert FORMATS["q4_0"].quantize(x).tobytes() == expected_bytes("q4_0", x).tobytes()
    assert len(set(FORMATS["q4_0"].quantize(x)[0, 2:].tolist())) > 1


def test_q4_0_sign_of_the_scale_follows_the_first_largest() -> None:
    for first, d in ((2.0, -0.25), (-2.0, 0.25)):
        x = np.zeros((1, 32), np.float32)
        x[0, 3], x[0, 20] = first, -first
        assert FORMATS["q4_0"].quantize(x)[0, :2].view(np.float16)[0] == d


def test_q4_0_low_nibbles_are_the_first_half() -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, 0], x[0, 16] = -8, 3  # d = 1, codes 0 and 11
    assert FORMATS["q4_0"].quantize(x)[0, 2] == 0 | 11 << 4


def test_q8_0_rounds_halves_away_and_nothing_else() -> None:
    """Around every half in reach; d is 1, so the codes are the rounded inputs."""
    halves = np.arange(-126.5, 127, 1, dtype=np.float32)
    inward = np.nextafter(halves, np.float32(0))
    x = np.resize(np.concatenate([halves, inward, 2 * halves - inward]), (25, 31))
    blocks = np.column_stack([np.full(25, 127, np.float32), x])
    codes = FORMATS["q8_0"].quantize(blocks)[:, 3:].view(np.int8)
    np.testing.assert_array_equal(codes, np.sign(x) * np.floor(np.abs(x.astype(np.float64)) + 0.5))


@pytest.mark.parametrize("name", QUANTISED)
def test_dequantize_is_ggufs_on_any_bytes(name: str) -> None:
    rng = np.random.default_rng(5)
    plain = rng.integers(0, 256, (300, 9 * FORMATS[name].block_bytes), np.uint8)
    scales = plain.reshape(-1, FORMATS[name].block_bytes)[:, :2]
    scales[...] = rng.standard_normal(len(scales)).astype(np.float16).view(np.uint8).reshape(-1, 2)
    np.testing.assert_array_equal(FORMATS[name].dequantize(plain), gguf_dequantize(plain, TYPES[name]))


@pytest.mark.parametrize("name", ["f16", "f32"])
def test_float_formats_are_numpys_bytes(name: str) -> None:
    x = draw("random", 5, 96, 1)[:, :33]
    plain = FORMATS[name].quantize(x)
    assert plain.tobytes() == x.astype({"f16": "<f2", "f32": "<f4"}[name]).tobytes()
    np.testing.assert_array_equal(FORMATS[name].dequantize(plain), x.astype({"f16": "<f2", "f32": "<f4"}[name]))
    assert FORMATS[name].interleave(plain).tobytes() == plain.tobytes()


@pytest.mark.parametrize("name", FORMATS)
def test_quantize_takes_strided_input_and_leaves_it_alone(name: str) -> None:
    wide = draw("random", 64, 64, 2)
    before = wide.copy()
    assert FORMATS[name].quantize(wide[::2, :32]).tobytes() == FORMATS[name].quantize(wide[::2, :32].copy()).tobytes()
    assert FORMATS[name].quantize(wide.T).tobytes() == FORMATS[name].quantize(wide.T.copy()).tobytes()
    np.testing.assert_array_equal(wide, before)


def stored_by_definition(name: str, plain: np.ndarray) -> bytes:
    """The stored layout written like its description, byte by byte."""
    size, rows = FORMATS[name].block_bytes, len(plain)
    out = bytearray()
    for group in range(0, rows, LANES):
        lanes = [plain[r].tobytes() if r < rows else bytes(plain.shape[1]) for r in range(group, group + LANES)]
        for b in range(0, plain.shape[1], size):
            blocks = [lane[b:b + size] for lane in lanes]
            out += b"".join(block[:2] for block in blocks)
            for piece in range(2, size, 4):
                out += b"".join(block[piece:piece + 4] for block in blocks)
    return bytes(out)


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 17])
@pytest.mark.parametrize("blocks", [1, 3])
def test_interleave_follows_the_layout_and_comes_back(name: str, rows: int, blocks: int) -> None:
    row = FORMATS[name]
    plain = np.random.default_rng(rows).integers(0, 256, (rows, blocks * row.block_bytes), np.uint8)
    stored = row.interleave(plain)
    assert stored.shape == row.stored_shape(rows, 32 * blocks) == (-(-rows // 8), 8 * plain.shape[1])
    assert stored.tobytes() == stored_by_definition(name, plain)
    np.testing.assert_array_equal(row.deinterleave(stored, rows), plain)


@pytest.mark.parametrize("name", FORMATS)
def test_matrix_round_trip(name: str) -> None:
    x = draw("random", 13, 96, 8)
    matrix = Matrix.from_f32(x, name)
    row = FORMATS[name]
    assert (matrix.rows, matrix.cols, matrix.format) == (13, 96, name)
    assert matrix.data.shape == row.stored_shape(13, 96)
    assert matrix.nbytes == matrix.data.size
    np.testing.assert_array_equal(matrix.plain(), row.quantize(x))
    np.testing.assert_array_equal(matrix.dequantize(), row.dequantize(row.quantize(x)))


def refusal(name: str, x: np.ndarray) -> FormatError:
    with pytest.raises(FormatError) as caught:
        FORMATS[name].quantize(x)
    return caught.value


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", [0, 2, 69])
def test_nan_and_infinity_are_refused_with_their_row(name: str, bad: float, row: int) -> None:
    x = draw("random", 70, 1024, 4)  # the last row lies in another chunk than the first
    x[row, 700] = bad
    error = refusal(name, x)
    assert str(error) == f"row {row} holds NaN or infinity; the source is damaged"
    assert (error.row, error.problem) == (row, "holds NaN or infinity; the source is damaged")


@pytest.mark.parametrize(("name", "fits", "overflows"), [
    # a scale or value rounds to infinity from 65520 on, the middle between 65504 and 65536
    ("q4_0", 8 * 65519.0, 8 * 65520.0), ("q8_0", 127 * 65519.0, 127 * 65521.0), ("f16", 65519.0, 65520.0)])
def test_values_beyond_float16_are_refused_with_their_row(name: str, fits: float, overflows: float) -> None:
    x = draw("random", 3, 64, 6)
    x[1, 40] = -fits
    FORMATS[name].quantize(x)
    x[1, 40] = -overflows
    assert str(refusal(name, x)) == (
        f"row 1 reaches {overflows:.4g}, beyond what {name} can hold; store this tensor as f32")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", FORMATS)
def test_values_beyond_float32_are_refused_without_a_warning_or_a_false_remedy(name: str) -> None:
    x = draw("random", 3, 64, 6).astype(np.float64)
    FORMATS[name].quantize(x)
    x[1, 40] = -1e300
    assert str(refusal(name, x)) == f"row 1 reaches 1e+300, beyond what {name} can hold"


@pytest.mark.parametrize("name", QUANTISED)
def test_row_length_off_the_block_is_refused(name: str) -> None:
    error = refusal(name, np.zeros((2, 40), np.float32))
    assert str(error) == (f"{name} needs rows of a multiple of 32 elements, found 40; use f16 or f32 for this matrix")
    with pytest.raises(FormatError, match=f"{name} rows have a multiple of .* bytes, found 33"):
        FORMATS[name].dequantize(np.zeros((1, 33), np.uint8))


@pytest.mark.parametrize("name", FORMATS)
def test_is_finite_sees_one_bad_scale_or_value(name: str) -> None:
    matrix = Matrix.from_f32(draw("random", 9, 64, 7), name)
    assert FORMATS[name].is_finite(matrix.data)
    size = 4 if name == "f32" else 2
    last = LANES * FORMATS[name].block_bytes if name in QUANTISED else 64  # the second block's first scale, or a value
    matrix.data[-1, last:last + size] = np.frombuffer(np.array([np.inf], f"<f{size}").tobytes(), np.uint8)
    assert not FORMATS[name].is_finite(matrix.data)


def test_unknown_format() -> None:
    with pytest.raises(ConfigError) as caught:
        find_format("q5_1")
    assert str(caught.value) == "unknown weight format 'q5_1'; choose one of q4_0, q8_0, f16, f32"
