"""Memory nodes of a machine that is not there, and files to map."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import numpy as np

from fermi_engine import pages
from fermi_engine.pages import PAGE, PIECE

PAGES = 2 * PIECE // PAGE + 1024  # two whole pieces and a part of one


class Machine(pages.Kernel):
    """Memory nodes of a machine that is not there, and the one array whose pages lie on them.

    where: node by page, -1 for not in memory. unit: pages that can move together only. shared: pages that another
    process maps. refused: errno of every call about policies. Calls about regions are recorded and do nothing.
    """

    def __init__(self, data: np.ndarray | None = None, where: np.ndarray | None = None, nodes: tuple[int, ...] = (0, 1),
                 own: tuple[int, tuple[int, ...]] = (pages.DEFAULT, ()), unit: int = 1, refused: int = 0) -> None:
        self.base, self.where = (0 if data is None else data.ctypes.data), where
        self.all, self.own, self.unit, self.refused = nodes, own, unit, refused
        self.shared = np.zeros(PAGES, bool)
        self.moves, self.regions = 0, []
        self.fails: dict[str, int] = {}

    def _get_policy(self, flags: int) -> tuple[int, tuple[int, ...]]:
        if self.refused:
            raise OSError(self.refused, os.strerror(self.refused))
        return (0, self.all) if flags == pages.MEMS_ALLOWED else self.own

    def set_policy(self, mode: int, nodes: tuple[int, ...] = ()) -> None:
        self.own = mode, nodes

    def nodes_of(self, addresses: np.ndarray, move_to: int | None = None) -> np.ndarray:
        page = (addresses - self.base) // PAGE
        assert ((addresses - self.base) % PAGE == 0).all()
        if move_to is not None:
            units = np.unique(page[~self.shared[page]] // self.unit)
            together = (units[:, None] * self.unit + np.arange(self.unit)).ravel()
            together = together[together < len(self.where)]
            self.moves += together.size
            self.where[together] = move_to
        return np.where(self.where[page] < 0, -errno.ENOENT, self.where[page])

    def cached(self, data: np.ndarray) -> np.ndarray:
        return self.where[:-(-data.size // PAGE)] >= 0

    def region(self, name: str, data: np.ndarray, *args: int) -> None:
        self.regions.append((name, data.size, *args))
        if name in self.fails:
            raise OSError(self.fails[name], os.strerror(self.fails[name]))


def mapped(folder: Path, length: int) -> tuple:
    """A file of random bytes, open, and its read-only mapping."""
    path = folder / "weights"
    path.write_bytes(np.random.default_rng(length).bytes(length))
    file = open(path, "rb+")  # noqa: SIM115 - the caller closes it
    return file, np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
