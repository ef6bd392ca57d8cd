"""Parts of the model that no kernel computes: rotary frequencies and axes, the paged cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fermi_engine import kernels
from fermi_engine.compare import U
from fermi_engine.errors import ConfigError
from fermi_engine.kernels import dispatch
from fermi_engine.model.attention import axis_of_frequency, inv_freq
from fermi_engine.state import KVPages
from reference import attention, quant, rope


@pytest.mark.parametrize(("rotary", "section"), [(64, (11, 11, 10)), (8, (2, 1, 1)), (24, (4, 4, 4)), (2, (1, 0, 0))])
def test_axes_and_frequencies_are_those_of_the_reference(rotary, section):
    assert axis_of_frequency(rotary // 2, section).tolist() == list(rope.axis_of_frequency(rotary // 2, section))
    for theta in (1e7, 1e4, 999983.0):
        assert inv_freq(rotary, theta).tobytes() == rope.inv_freq(rotary, theta).numpy().tobytes()


FORMATS = ("f32", "f16", "q8_0")


def appended(pages: KVPages, pieces: list[int], keys: np.ndarray, values: np.ndarray) -> KVPages:
    """`pages` with the rows before each of `pieces` appended in a call of their own."""
    k = kernels.get()
    for begin, end in zip([0, *pieces[:-1]], pieces, strict=True):
        pages.reserve(end)
        k.kv_append(pages, np.array([begin], np.int64), keys[begin:end], values[begin:end])
    return pages


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("page_tokens", [1, 3, 4, 64])
def test_pages_hold_what_was_appended(page_tokens, format):
    rows = np.random.default_rng(page_tokens).standard_normal((90, 2, 32)).astype(np.float32)
    pages = appended(KVPages(2, page_tokens, 32, format), [1, 9, 10, 90], rows, -rows)
    stored = quant.decode_cache(quant.encode_cache(torch.from_numpy(rows), format), format).numpy()
    for copy in (pages, pages.copy()):
        keys, values = copy.filled(90)
        assert np.array_equal(keys, stored)
        assert np.array_equal(values, -stored)
        assert len(copy.keys) == -(-90 // page_tokens)
        assert copy.capacity == len(copy.keys) * page_tokens
        assert copy.nbytes == 2 * copy.capacity * 2 * {"f32": 128, "f16": 64, "q8_0": 34}[format]
    copy.reserve(1)
    kernels.get().kv_append(copy, np.array([0], np.int64), -rows[:1], rows[:1])
    assert np.array_equal(pages.filled(90)[0], stored)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("length", [8, 9, 11])
def test_a_shared_page_is_copied_before_it_is_written(length, format):
    """Two holders go on from the same rows, each its own way; full pages stay shared."""
    rows = np.random.default_rng(length).standard_normal((40, 2, 32)).astype(np.float32)
    first = appended(KVPages(2, 4, 32, format), [length], rows, -rows)
    second = first.copy()
    third = KVPages(2, 4, 32, format)
    appended(third, [30], -rows, rows)
    third.restore(second, length)
    for pages, sign in ((first, 1), (second, -1), (third, 2)):
        grown(pages, length, sign * rows)
    for pages, sign in ((first, 1), (second, -1), (third, 2)):
        want = np.concatenate([rows[:length], sign * rows[length:20]])
        stored = quant.decode_cache(quant.encode_cache(torch.from_numpy(want), format), format).numpy()
        assert np.array_equal(pages.filled(20)[0], stored)
        assert pages.k_table[:5].tolist() == [page.ctypes.data for page in pages.keys]
    shared = {page.ctypes.data for page in first.keys} & {page.ctypes.data for page in second.keys}
    assert len(shared) == length // 4


def grown(pages: KVPages, length: int, rows: np.ndarray) -> None:
    for at in range(length, 20):
        pages.reserve(at + 1, at)
        kernels.get().kv_append(pages, np.array([at], np.int64), rows[at : at + 1], -rows[at : at + 1])


def test_pages_move_between_sizes_as_they_are_kept():
    rows = np.random.default_rng(1).standard_normal((13, 2, 32)).astype(np.float32)
    for format in FORMATS:
        source = appended(KVPages(2, 4, 32, format), [13], rows, -rows)
        other = KVPages(2, 5, 32, format)
        other.fill(*source.rows(13))
        assert [part.tobytes() for part in other.rows(13)] == [part.tobytes() for part in source.rows(13)]
        assert other.rows(13)[0].shape == (2, 13, source.row_bytes)


def test_a_table_that_grows_is_told():
    """A recorded program reads the old one."""
    pages = KVPages(1, 2, 8)
    assert not pages.reserve(1)
    before = pages.k_table
    moved = [pages.reserve(end) for end in range(1, 2 * len(before) + 2)]
    assert moved == [False] * (2 * len(before)) + [True]
    assert pages.k_table[: len(before)].tolist() == before.tolist()


def test_rows_that_do_not_fit_are_refused():
    pages, row = KVPages(2, 4, 8), np.zeros((1, 2, 8), np.float32)
    pages.reserve(4)
    with pytest.raises(ValueError, match="5 positions in a cache of 4"):
        kernels.get().kv_append(pages, np.array([4], np.int64), row, row)
    with pytest.raises(ValueError, match="2 heads of 8"):
        kernels.get().kv_append(pages, np.array([0], np.int64), row[..., :4].copy(), row[..., :4].copy())
    with pytest.raises(ConfigError, match="heads of 24 do not divide into blocks of 32"):
        KVPages(1, 4, 24, "q8_0")


def loss(x: np.ndarray, format: str) -> np.ndarray:
    """Most by which a stored element may differ from x [S, HKV, D]. f16: half a unit in the last place, 2^-11 of it or 2^-25.
    q8_0: half a code, and 127 codes times the rounding of d to half; 2^-20 for float32 roundings of x / d."""
    if format == "f32":
        return np.zeros(x.shape)
    if format == "f16":
        return np.maximum(np.abs(x) * 2.0**-11, 2.0**-25)
    d = np.abs(x).reshape(*x.shape[:-1], -1, 32).max(-1).astype(np.float64) / 127
    return np.repeat(d * (0.5 + 127 * 2.0**-11 + 127 * 2.0**-20), 32, axis=-1)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_what_a_format_loses_is_bounded(format, spread):
    """Scores move by e = scale * sum |q| * loss of k, so weights by a factor within exp(+-2e), and o by the loss of v and by
    (exp(2e) - 1) * (sum of weights * |v|)."""
    draw = np.random.default_rng(3).standard_normal
    keys, values = (draw((150, 2, 64)).astype(np.float32) for _ in range(2))
    query = (spread * draw((7, 6, 64))).astype(np.float32)
    pages = appended(KVPages(2, 16, 64, format), [143, 150], keys, values)
    for stored, x in zip(pages.filled(150), (keys, values), strict=True):
        assert (np.abs(stored - x) <= loss(x, format)).all()
    got = kernels.get().attention(query, pages, np.array([143], np.int64), 1 / 8)
    q, k, v = (torch.from_numpy(x).double() for x in (query, keys, values))
    truth, size = attention.attend(q, k, v).numpy(), attention.attend(q, k, v.abs()).numpy()
    moved = np.einsum("thd,shd->hts", np.abs(query), np.repeat(loss(keys, format), 3, axis=1)).max() / 8
    roundings = 200 * U * size  # of float32: 64 positions and 2 merges, 16 in a score, and exp of scores below 30
    error = np.abs(got - truth)
    assert (error <= loss(values, format).max() + np.expm1(2 * moved) * size + roundings).all()
    assert (error > roundings).any() == (format != "f32")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("backend", dispatch.supported())
def test_tokens_that_run_together_see_no_later_ones(backend, format):
    """All in one call on one thread, a token at a time, and over a cache that ends with the token: the same bits."""
    draw, k = np.random.default_rng(7).standard_normal, kernels.get(backend, 1)
    keys, values = (draw((135, 2, 32)).astype(np.float32) for _ in range(2))
    query = draw((75, 18, 32)).astype(np.float32)
    pages = appended(KVPages(2, 16, 32, format), [135], keys, values)
    together = k.attention(query, pages, np.array([60], np.int64), 1.0)
    for t in (0, 3, 4, 5, 67, 74):
        short = appended(KVPages(2, 16, 32, format), [61 + t], keys, values)
        for cache in (pages, short):
            alone = k.attention(query[t : t + 1], cache, np.array([60 + t], np.int64), 1.0)
            assert np.array_equal(alone[0], together[t]), t


@pytest.mark.parametrize("format", FORMATS)
def test_heads_too_wide_for_the_tiles_give_the_same_bits(format):
    draw = np.random.default_rng(9).standard_normal
    keys, query = draw((67, 1, 1056)).astype(np.float32), draw((3, 2, 1056)).astype(np.float32)
    found = []
    for backend in dispatch.supported():
        pages = appended(KVPages(1, 4, 1056, format), [67], keys, keys)
        found.append(kernels.get(backend, 1).attention(query, pages, np.array([64], np.int64), 0.03).tobytes())
    assert len(set(found)) == 1
