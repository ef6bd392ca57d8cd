"""Prefixes: equal digests exactly where states are interchangeable; where boundaries lie and which are superfluous."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fermi_engine.snapshots import boundaries
from fermi_engine.snapshots.cache import Snapshot
from fermi_engine.snapshots.prefix import ImageSpan, NumericPath, Prefix
from fermi_engine.snapshots.prefix_tree import Entry, PrefixTree
from fermi_engine.state import HybridState

PATH = NumericPath("pack", "q8_0", "f32")


def image(begin: int, end: int, which: int = 0) -> ImageSpan:
    return ImageSpan(begin, end, bytes([which]) * 32)


prefixes = st.builds(
    lambda ids, spans, path: Prefix(ids, replace(PATH, kv_format=path), [s for i, s in enumerate(spans) if s.begin < len(ids)
                                                                        and all(s.begin >= t.end for t in spans[:i])]),
    st.lists(st.integers(0, 2), max_size=9), st.lists(st.builds(image, st.integers(0, 3), st.integers(4, 6), st.integers(0, 1)),
                                                     max_size=1), st.sampled_from(["f32", "f16"]))


@given(prefixes, prefixes)
def test_digests_are_equal_exactly_where_prefixes_are(a, b):
    agreeing = [n for n in range(min(len(a), len(b)) + 1) if a.digest(n) == b.digest(n)]
    same = [n for n in range(min(len(a), len(b)) + 1) if a.agrees(b, n)]
    assert agreeing == same
    assert same == (list(range(a.common(b) + 1)) if a.path == b.path else [])
    assert (a == b) == (len(a) == len(b) and len(a) in same)
    assert a.digests(range(len(a) + 1)) == {n: Prefix(a.ids[:n], a.path, a.head(n).images).digest() for n in range(len(a) + 1)}


def test_what_makes_a_digest_another():
    plain = Prefix([1, 2, 3], PATH)
    others = [Prefix([1, 2, 3, 3], PATH), Prefix([1, 2, 4], PATH), Prefix([1, 2], PATH), Prefix([], PATH),
              *(Prefix([1, 2, 3], replace(PATH, **{name: "x"})) for name in PATH.fields()),
              *(Prefix([1, 2, 3], PATH, [image(*span)]) for span in ((0, 1), (0, 2), (1, 2), (1, 2, 1))),
              Prefix([1, 2, 3], PATH, [image(0, 1), image(1, 2)]),
              Prefix([1, 2, 3], replace(PATH, pack_hash="packq", activations="8_0"))]
    assert len({prefix.digest() for prefix in (plain, *others)}) == 1 + len(others)
    assert Prefix(np.array([1, 2, 3], np.int64), PATH) == plain == Prefix((1, 2, 3), NumericPath(**PATH.fields()))
    assert len({plain, Prefix([1, 2, 3], PATH)}) == 1


def test_an_image_counts_from_its_first_token_on():
    one, two = (Prefix([5, 6, 7, 8], PATH, [image(1, 3, which)]) for which in (1, 2))
    assert [one.digest(n) == two.digest(n) for n in range(5)] == [True, True, False, False, False]
    assert one.common(two) == 1
    assert one.head(2).images == one.images  # cut inside the image, whose content is in the state


def test_what_is_no_prefix():
    for images in ([image(2, 3)], [image(1, 2), image(0, 1)], [image(0, 2), image(1, 2)]):
        with pytest.raises(ValueError, match="images must lie among the tokens"):
            Prefix([1, 2], PATH, images)
    with pytest.raises(ValueError, match="ids are at least 0"):
        Prefix([1, -1], PATH)
    for begin, end, digest in ((1, 1, b"1" * 32), (-1, 2, b"1" * 32), (0, 1, b"short")):
        with pytest.raises(ValueError, match="image at tokens"):
            ImageSpan(begin, end, digest)
    with pytest.raises(ValueError, match="digest at position 3"):
        Prefix([1, 2], PATH).digest(3)


def test_ids_are_its_own():
    ids = np.array([1, 2, 3], np.int32)
    prefix = Prefix(ids, PATH)
    before = prefix.digest()
    ids[0] = 9
    assert prefix.ids.tolist() == [1, 2, 3]
    assert Prefix(prefix.ids, PATH).digest() == before
    with pytest.raises(ValueError, match="read-only"):
        prefix.ids[0] = 9


# the tree


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), max_size=12, unique_by=tuple), st.randoms())
def test_parents_are_the_longest_beginnings(sequences, random):
    """Whatever is inserted and removed in whatever order."""
    tree, there = PrefixTree(), {}
    for ids in sequences:
        entry = Entry(Snapshot(Prefix(ids, PATH), HybridState(len(ids), [])), {})
        tree.insert(entry)
        there[tuple(ids)] = entry
        if random.random() < 0.3:
            gone = random.choice(list(there))
            tree.remove(there.pop(gone))
    for ids, entry in there.items():
        beginnings = [other for other in there if len(other) < len(ids) and ids[: len(other)] == other]
        parent = max(beginnings, key=len, default=None)
        assert entry.parent is (there[parent] if parent else None)
        assert entry.children == {other for other in there.values() if other.parent is entry}
        assert [e.position for e in tree.path(entry.snapshot.prefix)] == sorted(map(len, [*beginnings, ids]))
        assert tree.at(entry.snapshot.prefix) is entry
    assert len(tree) == len(there)


# boundaries


@given(st.integers(1, 5000), st.integers(0, 4000), st.integers(1, 8), st.floats(1.05, 3), st.integers(0, 63))
def test_a_ladder_keeps_its_promise(length, start, blocks, ratio, base):
    end, spacing = start + length, 64 * blocks
    found = boundaries.ladder(start, end, spacing, ratio, base)
    assert found == sorted(set(found))
    assert all(start < at < end and (at - base) % 64 == 0 for at in found)
    assert recomputed([start, *found], end, spacing, ratio) <= 1
    if length > 128:
        assert end - found[-1] < 128


def recomputed(places: list[int], end: int, spacing: int, ratio: float) -> float:
    """The worst edit's cost in units of what is promised; divergence right before each place is the worst for its gap."""
    worst = 0.0
    for before, after in zip(places, [*places[1:], end], strict=True):
        changed = end - after + 1
        worst = max(worst, (end - before) / max(ratio * changed, changed + spacing))
    return worst


@given(st.lists(st.integers(20, 900), min_size=1, max_size=6), st.integers(1, 3))
def test_thinning_keeps_the_promise_to_the_new_end(turns, blocks):
    """Turn by turn, with the ends of turns fixed."""
    places, ends, spacing = set(), [0], 64 * blocks
    for turn in turns:
        end = ends[-1] + turn
        places |= set(boundaries.ladder(ends[-1], end, spacing)) | {end}
        ends.append(end)
        before = sorted(places - {end, 0})
        gone = boundaries.superfluous(before, set(before) - set(ends), end, spacing)
        assert not set(gone) & set(ends)
        places -= set(gone)
        assert recomputed([0, *sorted(places - {end})], end, spacing, boundaries.RATIO) <= 1
    fresh = boundaries.ladder(0, ends[-1], spacing)
    assert len(places) <= 2 * len(fresh) + 2 * len(ends) + 2


def test_a_ladder_of_1500_tokens_has_about_20_steps():
    assert 16 <= len(boundaries.ladder(0, 1500, 64)) <= 20
    for most in (30, 17, 9, 5, 2, 1, 0):
        found, ratio = boundaries.fitting(0, 1500, 64, most)
        assert len(found) <= most
        assert (ratio > boundaries.RATIO) == (most < 18)
        if np.isfinite(ratio):
            assert recomputed([0, *found], 1500, 64, ratio) <= 1


def test_spacing_balances_saving_and_evaluating():
    """At the optimum the cost is no more than at the neighbours: tokens / D * save + D / 2 * token."""
    for save_s, token_s, tokens in ((0.01, 0.001, 4000), (0.02, 0.0004, 1500), (0.005, 0.0003, 20_000)):
        best = boundaries.spacing(save_s, token_s, tokens)

        def cost(width: int, s: float = save_s, t: float = token_s, n: int = tokens) -> float:
            return n / width * s + width / 2 * t

        assert 64 < best <= 1024
        assert cost(best) <= cost(best - 64)
        assert cost(best) <= 1.1 * cost(best + 64)
    assert boundaries.spacing(0.0, 1.0, 100) == boundaries.spacing(1e-9, 0.0, 0) == 64
    assert boundaries.spacing(10, 1e-9, 10_000) == 1024
