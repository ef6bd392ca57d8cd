"""Parts of the model that no kernel computes: rotary frequencies and axes, the paged cache."""

from __future__ import annotations

import numpy as np
import pytest

from fermi_engine.model.attention import axis_of_frequency, inv_freq
from fermi_engine.state import KVPages
from reference import rope


@pytest.mark.parametrize(("rotary", "section"), [(64, (11, 11, 10)), (8, (2, 1, 1)), (24, (4, 4, 4)), (2, (1, 0, 0))])
def test_axes_and_frequencies_are_those_of_the_reference(rotary, section):
    assert axis_of_frequency(rotary // 2, section).tolist() == list(rope.axis_of_frequency(rotary // 2, section))
    for theta in (1e7, 1e4, 999983.0):
        assert inv_freq(rotary, theta).tobytes() == rope.inv_freq(rotary, theta).numpy().tobytes()


@pytest.mark.parametrize("page_tokens", [1, 3, 4, 64])
def test_pages_hold_what_was_appended(page_tokens):
    rows = np.random.default_rng(page_tokens).standard_normal((30, 2, 5)).astype(np.float32)
    pages = KVPages(2, page_tokens, 5)
    for begin, end in ((0, 1), (1, 9), (9, 10), (10, 30)):
        pages.append(begin, rows[begin:end], -rows[begin:end])
    keys, values = pages.filled(30)
    assert np.array_equal(keys, rows)
    assert np.array_equal(values, -rows)
    assert len(pages.keys) == -(-30 // page_tokens)
    copy = pages.copy()
    pages.append(30, rows[:1], rows[:1])
    pages.keys[0].fill(7)
    assert np.array_equal(copy.filled(30)[0], rows)
