"""Source trees with faults: the kernels of planted.cu beside the real headers, or the real kernels with one text replaced."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fermi_engine.kernels import emulated, emulator_build, ptx, sm20

HERE = Path(__file__).resolve().parent
CACHED = (sm20.entries, sm20._structs, emulator_build.build, emulator_build._runtime, emulated._library, emulated._needs,
          emulated._variables)


def make_tree(root: Path, ops_h: str = "", **kernels: str) -> Path:
    """csrc/ under `root` with the real headers, planted.cu and `kernels` (op -> source); `ops_h` goes to the end of ops.h."""
    csrc = root / "csrc"
    shutil.copytree(sm20.csrc() / "emulator", csrc / "emulator")
    (csrc / "sm20").mkdir()
    for header in (sm20.csrc() / "sm20").glob("*.cuh"):
        shutil.copy(header, csrc / "sm20")
    for kernels_file in (HERE / "planted.cu", sm20.source("selftest")):
        shutil.copy(kernels_file, csrc / "sm20")
    text = (sm20.csrc() / "sm20" / "ops.h").read_text()
    head, end = text.rsplit("#endif", 1)
    (csrc / "sm20" / "ops.h").write_text(f"{head}{(HERE / 'planted.h').read_text()}{ops_h}\n#endif{end}")
    for op, source in kernels.items():
        (csrc / "sm20" / f"{op}.cu").write_text(source)
    return csrc


@contextmanager
def faulty(root: Path, file: str, right: str, wrong: str) -> Iterator[None]:
    """The kernels inside are those that ship with one text replaced in csrc/sm20/<file>; copied to `root`/csrc."""
    for folder in ("emulator", "sm20"):
        shutil.copytree(sm20.csrc() / folder, root / "csrc" / folder)
    path = root / "csrc" / "sm20" / file
    text = path.read_text()
    assert right in text
    path.write_text(text.replace(right, wrong))
    with sources_from(root / "csrc"):
        yield


def in_a_child(question: Callable[[], bool]) -> bool:
    """Asked in a forked process, with which faulty kernels and the stacks of their threads go away."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if question() else 1)
        finally:
            os._exit(2)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 1)
    return status == 0


@contextmanager
def sources_from(csrc: Path) -> Iterator[None]:
    """The kernels' sources are those of `csrc` inside."""
    before = sm20._CSRC
    sm20._CSRC = (csrc,)
    _forget()
    try:
        yield
    finally:
        sm20._CSRC = before
        _forget()


def _forget() -> None:
    for function in CACHED:
        function.cache_clear()
    ptx.clang.cache_clear()
    ptx.nvcc.cache_clear()
