"""A source tree with the kernels of planted.cu beside the real headers, for tests of the emulator and of the builds."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
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
