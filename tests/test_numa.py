"""Placement on memory nodes: a made-up machine with two and more of them, and this one."""

from __future__ import annotations

import errno
import mmap
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fermi_engine import memory, numa, pages
from fermi_engine.errors import ConfigError
from fermi_engine.pages import PAGE, PIECE
from tests.memory_nodes import PAGES, Machine, mapped


@pytest.fixture(scope="module")
def weights() -> np.ndarray:
    """Memory that is never written: its pages cost nothing."""
    return np.frombuffer(mmap.mmap(-1, PAGES * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def nodes_in_sysfs(root: Path, nodes: tuple[int, ...], cpus: dict[int, int] | None = None) -> Path:
    """A /sys with memory nodes and logical CPUs (node by CPU), one core each."""
    for node in nodes:
        (root / f"devices/system/node/node{node}").mkdir(parents=True)
    for cpu, node in (cpus or {}).items():
        (root / f"devices/system/cpu/cpu{cpu}/node{node}").mkdir(parents=True)
    return root


CHOICES = {  # asked, machine -> placement in words, policy afterwards
    "two nodes": (None, {}, "numa interleave on nodes 0+1", (pages.INTERLEAVE, (0, 1))),
    "asked for": ("interleave", {}, "numa interleave on nodes 0+1", (pages.INTERLEAVE, (0, 1))),
    "others allowed": (None, {"nodes": (1, 3)}, "numa interleave on nodes 1+3", (pages.INTERLEAVE, (1, 3))),
    "one allowed": ("interleave", {"nodes": (1,)}, "numa off (node 1 only is allowed)", (pages.DEFAULT, ())),
    "off": ("off", {}, "numa off", (pages.DEFAULT, ())),
    "numactl --interleave": (None, {"nodes": (0, 1, 2), "own": (pages.INTERLEAVE, (0, 2))},
                             "numa interleave on nodes 0+2", (pages.INTERLEAVE, (0, 2))),
    "numactl --membind": (None, {"own": (2, (1,))}, "numa off (the memory policy this process was started under stays)",
                          (2, (1,))),
    "asked for, against numactl": ("interleave", {"own": (2, (1,))}, "numa interleave on nodes 0+1",
                                   (pages.INTERLEAVE, (0, 1))),
    "a container": (None, {"refused": errno.EPERM},
                    "numa off (the system forbids memory policies: Operation not permitted)", (pages.DEFAULT, ())),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_placement_and_the_policy(tmp_path: Path, name: str) -> None:
    asked, machine, words, policy = CHOICES[name]
    kernel = Machine(**machine)
    placement = numa.settle(asked, kernel, nodes_in_sysfs(tmp_path, (0, 1)))
    assert str(placement) == words
    assert kernel.own == policy
    assert placement.nodes == (policy[1] if placement.mode == "interleave" else ())


def test_one_node_asks_nothing_of_the_system(tmp_path: Path) -> None:
    kernel = Machine(refused=errno.ENOSYS)
    for asked in (None, "interleave", "local"):
        assert str(numa.settle(asked, kernel, nodes_in_sysfs(tmp_path / str(asked), (0,)))) == \
            "numa off (one memory node)"
    assert str(numa.settle(None, kernel, tmp_path / "no /sys")) == "numa off (one memory node)"


def test_a_mode_that_was_asked_for_and_is_forbidden(tmp_path: Path) -> None:
    sysfs = nodes_in_sysfs(tmp_path, (0, 1))
    for asked in ("interleave", "local"):
        with pytest.raises(ConfigError, match=rf"^--numa {asked}: .*Operation not permitted.*SYS_NICE.*--numa off$"):
            numa.settle(asked, Machine(refused=errno.EPERM), sysfs)


@pytest.mark.parametrize(("cpus", "home"), [
    ({0: 0, 1: 0, 2: 1, 3: 1, 4: 1}, 1),  # most cores
    ({0: 1, 1: 1, 2: 0, 3: 0}, 0),  # the first of equals
    ({2: 1, 3: 1}, 1),  # as taskset left it
])
def test_local_stays_on_one_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpus: dict[int, int],
                                 home: int) -> None:
    held: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cpus))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, mask: held.append(mask))
    kernel = Machine()
    placement = numa.settle("local", kernel, nodes_in_sysfs(tmp_path, (0, 1), cpus))
    assert (placement.mode, placement.nodes, str(placement)) == ("local", (home,), f"numa local on node {home}")
    assert kernel.own == (pages.PREFERRED, (home,))
    assert held == [{cpu for cpu, node in cpus.items() if node == home}]


INDEX = np.arange(PAGES)
LAYOUTS = {  # node by page, nodes wanted, most pages that may have moved
    "read by one thread": (0 * INDEX, (0, 1), PAGES // 2),
    "alternating": (INDEX % 2, (0, 1), 0),
    "alternating by chance": (np.random.default_rng(1).integers(0, 2, PAGES), (0, 1), 0),
    "a half on each": (INDEX * 2 // PAGES, (0, 1), PAGES // 2),
    "one window on one node": (np.where(INDEX < PAGES // 8, 1, INDEX % 2), (0, 1), PAGES // 8),
    "on another node": (5 + 0 * INDEX, (0, 1), PAGES),
    "three nodes": (0 * INDEX, (0, 1, 2), PAGES * 2 // 3 + 1),
    "eight nodes": (INDEX % 8, tuple(range(8)), 0),
    "local": (INDEX % 2, (1,), PAGES // 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_pages_that_lie_badly_are_moved(weights: np.ndarray, name: str) -> None:
    where, nodes, most = LAYOUTS[name]
    kernel = Machine(weights, where.copy())
    text = numa.even_out(weights, nodes, kernel)
    counts = np.array([(kernel.where == node).sum() for node in nodes])
    # one page, or what chance leaves: six standard deviations of PAGES tosses
    np.testing.assert_allclose(counts, PAGES / len(nodes), atol=1 if most else 6 * PAGES**0.5 / 2)
    assert (kernel.moves > 0) == (most > 0)
    assert kernel.moves <= most
    assert "uneven" not in text


def test_the_shares_are_told(weights: np.ndarray) -> None:
    text = numa.even_out(weights, (0, 1), Machine(weights, 0 * INDEX))
    shares, _, rest = text.partition(" ")
    first, second = map(int, shares.split("+"))
    assert abs(first - 50) <= 5  # a sample of 4096: six standard deviations of 0.8 %
    assert abs(first + second - 100) <= 1
    assert rest == "%"
    assert numa.even_out(weights, (1,), Machine(weights, 1 + 0 * INDEX)) == "100 %"


@pytest.mark.parametrize("unit", [16, 512])
def test_large_units_of_the_page_cache_move_few_times(weights: np.ndarray, unit: int) -> None:
    kernel = Machine(weights, 0 * INDEX, unit=unit)
    assert "uneven" not in numa.even_out(weights, (0, 1), kernel)
    runs = kernel.where[:PAGES // unit * unit].reshape(-1, unit)
    assert (runs == runs[:, :1]).all()
    assert (runs[:, 0] == np.arange(len(runs)) % 2).all()
    # the first piece is tried in finer stripes, twice at most with one move to each node; everything else moves once
    assert kernel.moves <= PAGES // 2 + 2 * 2 * PIECE // PAGE


def test_pages_that_others_map_are_told(weights: np.ndarray) -> None:
    kernel = Machine(weights, 0 * INDEX)
    kernel.shared[:] = True
    assert numa.even_out(weights, (0, 1), kernel)== f"100+0 %: {numa.UNEVEN}"
    kernel.shared[PAGES // 8:] = False  # one window of eight stays: 44 % of all, but nothing of that window, on node 1
    assert "uneven" in numa.even_out(weights, (0, 1), kernel)


def test_pages_not_in_memory_are_left_to_the_policy(weights: np.ndarray) -> None:
    kernel = Machine(weights, -1 + 0 * INDEX)
    assert numa.even_out(weights, (0, 1), kernel) == "as pages are read"
    kernel = Machine(weights, np.where(INDEX % 3 == 0, 0, -1))
    numa.even_out(weights, (0, 1), kernel)
    assert (kernel.where[INDEX % 3 != 0] == -1).all()
    assert kernel.moves <= PAGES // 3 / 2 + 1


def test_a_small_file_is_judged_as_a_whole() -> None:
    counts = np.zeros((numa.WINDOWS, 3), np.int64)
    counts[:, 0], counts[0, 0] = 1, 0
    counts[:, 1] = 1
    assert numa.is_even(counts)  # 7 of 15, and windows of one or two pages
    assert not numa.is_even(300 * counts)


@pytest.fixture
def policy_of_a_thread() -> None:
    """Skips, visibly, where the system refuses policies (containers)."""
    try:
        pages.SYSTEM.nodes()
    except OSError as err:
        pytest.skip(f"memory policies: {err.strerror}")


def in_thread(work: Callable[[], Any]) -> list:
    """Results of `work` in a thread of its own, whose policy ends with it."""
    done: list = []
    thread = threading.Thread(target=lambda: done.append(work()))
    thread.start()
    thread.join()
    return done


@pytest.mark.usefixtures("policy_of_a_thread")
def test_a_policy_is_one_of_the_thread_and_its_children() -> None:
    before, nodes = pages.SYSTEM.policy(), pages.SYSTEM.nodes()
    assert nodes

    def work() -> tuple:
        pages.SYSTEM.set_policy(pages.INTERLEAVE, nodes)
        return pages.SYSTEM.policy(), in_thread(pages.SYSTEM.policy)[0]

    assert in_thread(work) == [((pages.INTERLEAVE, nodes), (pages.INTERLEAVE, nodes))]
    assert pages.SYSTEM.policy() == before
    with pytest.raises(OSError, match="Invalid argument"):
        pages.SYSTEM.set_policy(pages.INTERLEAVE, (pages.MOST_NODES - 1,))


@pytest.mark.usefixtures("policy_of_a_thread")
def test_the_system_tells_where_pages_are(tmp_path: Path) -> None:
    file, data = mapped(tmp_path, 64 * PAGE)
    with file:
        memory.warm(data, file.fileno())
        found = pages.SYSTEM.nodes_of(data.ctypes.data + PAGE * np.arange(64))
        assert set(found.tolist()) <= set(pages.SYSTEM.nodes())
        again = pages.SYSTEM.nodes_of(data.ctypes.data + PAGE * np.arange(64), move_to=int(found[0]))
        assert (again == found[0]).all()
        nowhere = pages.SYSTEM.nodes_of(np.array([PAGE]))
        assert nowhere[0] < 0


@pytest.mark.usefixtures("policy_of_a_thread")
def test_this_machine_places_a_file(tmp_path: Path) -> None:
    """On one node nothing has to move; on two, pages really do."""
    file, data = mapped(tmp_path, 256 * PAGE)
    nodes = pages.SYSTEM.nodes()
    with file:
        text = numa.even_out(data, nodes, pages.SYSTEM)
        found = pages.SYSTEM.nodes_of(data.ctypes.data + PAGE * np.arange(256))
    assert re.fullmatch(r"\d+(\+\d+)* %", text)
    assert max(abs(int((found == node).sum()) - 256 // len(nodes)) for node in nodes) <= 256 // len(nodes) // 4
