"""On which memory nodes the weights lie.

A page of a file gets its memory when the page cache first reads it, by the policy of the thread that reads; mapping the
file later moves nothing. So the policy is set before anything is read, and pages that an earlier reader left on one
node are moved, in place: they stay well placed for every later start, and no second copy is needed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fermi_engine.errors import ConfigError
from fermi_engine.kernels import threads
from fermi_engine.pages import DEFAULT, HUGE_PAGE, INTERLEAVE, PAGE, PREFERRED, SYSTEM, Kernel, pieces, touch
from fermi_engine.report import Progress

SAMPLE, WINDOWS = 4096, 8  # pages looked at, parts of the file they are counted in
# Least share of an even one. Of a sample on 2..8 nodes, each holding its share, the part found on one has a standard
# deviation of sqrt((nodes - 1) / pages) of itself: 1.6 .. 4.1 % in all, 4.4 .. 11.7 % in a window. Both limits are more
# than three and a half of them away.
LEAST_SHARE, LEAST_IN_WINDOW = 0.85, 0.5
STRIPES = (1, 16, HUGE_PAGE // PAGE)  # pages in a row on one node: the finest that the page cache's own units allow
UNEVEN = "uneven, and these pages cannot be moved: end other programs that use the file, or use --load resident"


@dataclass(frozen=True)
class Placement:
    """mode: interleave, local or off. nodes: where pages belong, empty when off. reason: why off unasked."""

    mode: str
    nodes: tuple[int, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        if self.mode == "off":
            return f"numa off ({self.reason})" if self.reason else "numa off"
        return f"numa {self.mode} on node{'s' * (len(self.nodes) > 1)} {'+'.join(map(str, self.nodes))}"


def settle(asked: str | None, kernel: Kernel = SYSTEM, sysfs: Path = threads.SYS) -> Placement:
    """Choose the placement and make it the policy of the calling thread, for good: threads it starts later inherit it.

    asked: interleave, local or off; None keeps what the process was started under (numactl), else interleaves where
    there are two nodes. 'local' keeps memory and the calling thread on the node with most cores in the affinity mask,
    the first of equals: taskset chooses another.
    Raises ConfigError where a mode was asked for and the system forbids it.
    """
    if asked == "off":
        return Placement("off")
    if len(list(sysfs.glob("devices/system/node/node[0-9]*"))) < 2:
        return Placement("off", reason="one memory node")
    try:
        return _settle(asked, kernel, sysfs)
    except OSError as err:
        if asked is None:
            return Placement("off", reason=f"the system forbids memory policies: {err.strerror}")
        raise ConfigError(f"--numa {asked}: the system forbids memory policies ({err.strerror}); allow them (docker "
                          "run --cap-add SYS_NICE), or use --numa off") from None


def _settle(asked: str | None, kernel: Kernel, sysfs: Path) -> Placement:
    nodes, (mode, own) = kernel.nodes(), kernel.policy()
    if len(nodes) < 2:
        return Placement("off", reason=f"node {nodes[0]} only is allowed")
    if asked == "local":
        node, cpus = _home(nodes, sysfs)
        kernel.set_policy(PREFERRED, (node,))
        os.sched_setaffinity(0, cpus)
        return Placement("local", (node,))
    if asked is None and mode not in (DEFAULT, INTERLEAVE):
        return Placement("off", reason="the memory policy this process was started under stays")
    if asked is None and mode == INTERLEAVE:
        return Placement("interleave", own)
    kernel.set_policy(INTERLEAVE, nodes)
    return Placement("interleave", nodes)


def _home(nodes: tuple[int, ...], sysfs: Path) -> tuple[int, set[int]]:
    """The node to stay on and its logical CPUs within the affinity mask."""
    allowed = os.sched_getaffinity(0)
    cpus = {node: {cpu for cpu in allowed if threads.node_of(sysfs, cpu) == node} for node in nodes}
    home = max(nodes, key=lambda node: (len({threads.core_of(sysfs, cpu) for cpu in cpus[node]}), -node))
    return home, cpus[home] or allowed


def even_out(data: np.ndarray, nodes: tuple[int, ...], kernel: Kernel, progress: Progress | None = None) -> str:
    """Move pages of `data` that are in memory so that they alternate between `nodes`, where they do not yet.

    Returns the share of each node in words. Pages that other processes map stay where they are, and the words say so.
    """
    counts = spread(data, nodes, kernel)
    if not counts.sum():
        return "as pages are read"
    if not is_even(counts):
        _move_all(data, nodes, kernel, progress)
        counts = spread(data, nodes, kernel)
    return shares(counts) if is_even(counts) else f"{shares(counts)}: {UNEVEN}"


def shares(counts: np.ndarray) -> str:
    """`50+50 %`: what each node holds."""
    return "+".join(f"{part:.0f}" for part in 100 * counts.sum(0)[:-1] / max(1, counts.sum())) + " %"


def spread(data: np.ndarray, nodes: tuple[int, ...], kernel: Kernel) -> np.ndarray:
    """Pages by window of the file and by node, int64 [WINDOWS, len(nodes) + 1], other nodes last.

    From a sample of those in memory, taken at random: steps of a fixed length can fall in with the alternation.
    """
    cached = np.flatnonzero(kernel.cached(data))
    counts = np.zeros((WINDOWS, len(nodes) + 1), np.int64)
    if cached.size:
        chosen = np.unique(np.random.default_rng(0).choice(cached, SAMPLE))
        touch(data, chosen * PAGE)
        found = kernel.nodes_of(data.ctypes.data + chosen * PAGE)
        windows = np.searchsorted(cached, chosen) * WINDOWS // cached.size
        for window, node in zip(windows[found >= 0], found[found >= 0], strict=True):
            counts[window, nodes.index(node) if node in nodes else -1] += 1
    return counts


def is_even(counts: np.ndarray) -> bool:
    """Whether each node holds its share, of the whole and of every window."""
    fair = counts.shape[1] - 1
    share = counts[:, :-1].sum(0) * fair / max(1, counts.sum())
    in_window = counts[:, :-1] * fair / np.maximum(1, counts.sum(1, keepdims=True))
    enough = counts.sum(1) >= SAMPLE // WINDOWS // 2  # a small file has windows of a few pages, which say nothing
    return bool(share.min() >= LEAST_SHARE and in_window[enough].min(initial=1.0) >= LEAST_IN_WINDOW)


def _move_all(data: np.ndarray, nodes: tuple[int, ...], kernel: Kernel, progress: Progress | None) -> None:
    cached = kernel.cached(data)
    stripes = list(STRIPES)
    for at, end in pieces(data.size):
        pages = at // PAGE + np.flatnonzero(cached[at // PAGE:-(-end // PAGE)])
        touch(data, pages * PAGE)
        while not _move_piece(data.ctypes.data, pages, nodes, stripes[0], kernel) and len(stripes) > 1:
            stripes.pop(0)
        if progress:
            progress(end, data.size, "moving weights between memory nodes")


def _move_piece(base: int, pages: np.ndarray, nodes: tuple[int, ...], stripe: int, kernel: Kernel) -> bool:
    """False when pages that moved are elsewhere in the end: they are parts of larger units that moved again as a whole.

    One call a node, so that even such a unit moves no more than once for each of them.
    """
    addresses = base + pages * PAGE
    target = np.asarray(nodes, np.int32)[pages // stripe % len(nodes)]
    astray = kernel.nodes_of(addresses) != target
    for node in nodes:
        chosen = addresses[astray & (target == node)]
        if chosen.size:
            kernel.nodes_of(chosen, move_to=node)
    return not len(pages) or bool(np.mean(kernel.nodes_of(addresses) == target) >= LEAST_SHARE)
