"""Where in a prompt snapshots are left: spacing from what they cost, a ladder that widens away from the end, and its thinning.

Positions count tokens from the first. The promise of a ladder: whoever changes the last d tokens recomputes at most
max(ratio * d, d + spacing) of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

BLOCK = 64  # tokens: boundaries lie at multiples, where the GPU's chunks end
WIDEST = 1024  # tokens: the widest spacing that costs may ask for
RATIO = 1.15  # of the default ladder: about 20 boundaries for 1500 tokens
GROWTH = 1.25  # step in which the ratio's part above 1 grows until a ladder fits


def spacing(save_s: float, token_s: float, tokens: int) -> int:
    """Tokens between the boundaries nearest to the end of a prompt of so many, a multiple of 64.

    save_s seconds for a snapshot against token_s for evaluating one token. With boundaries every D tokens a prompt pays
    tokens / D * save_s, and a request that changes it D / 2 * token_s on average; the sum is least at
    D = sqrt(2 * tokens * save_s / token_s) (J. W. Young, "A first order approximation to the optimum checkpoint interval",
    1974, with one change a prompt).
    """
    best = math.sqrt(2 * tokens * save_s / max(token_s, 1e-12))
    return min(WIDEST, max(BLOCK, int(best) // BLOCK * BLOCK))


def allowed(after: int, end: int, spacing: int, ratio: float) -> int:
    """How far before `end` a boundary may lie so that the promise holds up to the next boundary `after`."""
    behind = end - after
    return max(int(ratio * behind), behind + spacing)


def ladder(start: int, end: int, spacing: int, ratio: float = RATIO, base: int = 0) -> list[int]:
    """Boundaries in start..end, neither included, in rising order: as few as keep the promise down to `start`, and one in the
    last two blocks however wide the spacing is. They lie at `base` plus multiples of 64; of `spacing`, where that is wider."""
    found = {at for at in (last_multiple(end - BLOCK, base),) if at > start}
    after = end
    while True:
        reach = end - allowed(after, end, spacing, ratio)  # no boundary may lie further back
        if reach <= start:
            return sorted(found)
        at = reach + -(reach - base) % BLOCK
        after = at if at < after else after - BLOCK
        found.add(after)


def last_multiple(position: int, base: int = 0) -> int:
    """The last place for a boundary that is not behind `position`."""
    return position - (position - base) % BLOCK


def fitting(start: int, end: int, spacing: int, most: int, base: int = 0) -> tuple[list[int], float]:
    """A ladder of at most `most` boundaries and its ratio: RATIO, or as little above as that takes; infinite where none fits."""
    ratio = RATIO
    while len(found := ladder(start, end, spacing, ratio, base)) > most:
        if ratio * BLOCK > 2 * (end - start):
            return found[len(found) - most :], math.inf
        ratio = 1 + (ratio - 1) * GROWTH
    return found, ratio


def superfluous(positions: Sequence[int], removable: Iterable[int], end: int, spacing: int, ratio: float = RATIO) -> list[int]:
    """Those of `removable` without which `positions` (rising, before `end`) keep the promise to a sequence that ends there."""
    places, removable, found = [0, *positions], {at for at in removable if at < end - 2 * BLOCK}, []
    after = end
    while places:
        reach = end - allowed(after, end, spacing, ratio)
        after = places.pop()
        while places and after in removable and places[-1] >= reach:
            found.append(after)
            after = places.pop()
    return found
