"""Plants known faults one at a time into a copy of the tree and reports which guard caught each.

    python tools/mutate.py [--only TEXT] [--list]

A check that cannot fail is a defect: every fault must be caught, and by the guard that is there for it (tools/faults.py).
Faults in kernels, model and quantiser are judged by replaying the golden files, those of the GPU's half in the emulator's checked
mode; the first stage that diverges must be the right one. Exit status 1 if any fault slips through or is caught elsewhere.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fermi_engine.kernels import _build, sm20  # noqa: E402
from tools.faults import FAULTS, Fault  # noqa: E402

# Prints the first stage that diverges; what comes after it builds on it.
REPLAY = """
import sys
from fermi_engine import verify
from fermi_engine.stages import device_run
from fermi_engine.errors import DeviceError
from fermi_engine.kernels import emulator_build
from fermi_engine.kernels.emulated import EmulatedDevice
from fermi_engine.stages.table import STAGES

def compiled(*args, compile=emulator_build._compile):
    try:
        compile(*args)
    except DeviceError as err:  # which would pass for a device that fails in a stage
        sys.exit(f"a planted fault does not compile: {err}")

emulator_build._compile = compiled
device_run.open_device = lambda kind: EmulatedDevice(mode="checked", seed=1)
backend = {"stage": None, "sm20": "emulated"}[sys.argv[1]]
for stage in STAGES:
    failed = [row for row in verify.replay(backend, [stage.name]) if not row.passed] if stage.form(backend) else []
    if failed:
        print(f"{stage.name}: {failed[0].metric}, {failed[0].detail}")
        break
"""
SKIPPED = shutil.ignore_patterns(
    ".git", ".venv*", "build", "demo", "*.egg-info", "__pycache__", ".pytest_cache", ".hypothesis"
)
TIMEOUT_S = 120
INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)


class Module:
    """The compiled kernels of a copied tree: all objects once, then one at a time."""

    def __init__(self, tree: Path, scratch: Path) -> None:
        self.tree, self.objects = tree, scratch
        scratch.mkdir()
        generated = scratch / "_cpu.c"
        _build.ffi_builder(ROOT).emit_c_code(str(generated))
        self.sources = [generated, *(tree / path.relative_to(ROOT) for path in _build.sources(ROOT / "csrc"))]
        self.target = next((tree / "fermi_engine/kernels").glob("_cpu*.so"))
        self.build(self.sources)
        self.link()

    def build(self, sources: list[Path]) -> None:
        include = ["-I", str(self.tree / "csrc"), "-I", sysconfig.get_paths()["include"]]
        jobs = [
            subprocess.Popen(["gcc", *_build.CFLAGS, "-w", "-fPIC", *include, "-c", str(s), "-o", str(self._object(s))])
            for s in sources
        ]
        statuses = [job.wait() for job in jobs]  # all of them, before the objects are linked
        if any(statuses):
            raise SystemExit("a planted fault does not compile")

    def link(self) -> None:
        objects = [str(self._object(source)) for source in self.sources]
        self.target.unlink(missing_ok=True)
        subprocess.run(["gcc", "-shared", "-pthread", *objects, "-o", str(self.target)], check=True)

    def rebuild(self, changed: Path) -> None:
        """After a change to a source, or to a header that others include."""
        changed = changed.resolve()
        self.build([source for source in self.sources if changed in {source.resolve()} | included(source)])
        self.link()

    def _object(self, source: Path) -> Path:
        return self.objects / f"{source.parent.name}_{source.stem}.o"


def included(source: Path) -> set[Path]:
    """The headers beside a source that it includes, and those that they include."""
    found: set[Path] = set()
    for name in INCLUDE.findall(source.read_text()):
        header = (source.parent / name).resolve()
        if header.exists():
            found |= {header} | included(header)
    return found


def is_c(file: str) -> bool:
    """Whether it is compiled into the module; the emulator builds csrc/sm20 by itself."""
    return file.endswith((".c", ".h")) and "sm20" not in file


def caught_by(fault: Fault, tree: Path) -> str:
    """The guard that noticed, or '' if none did."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
                   "FERMI_CACHE": str(tree.parent / "cache")}
    kind, _, name = fault.guard.partition(":")
    folder = Path(fault.file).parent
    if folder.parent.name == "csrc" and folder.name in set(_build.BACKENDS) - {"scalar"}:
        environment["FERMI_BACKEND"] = folder.name  # where another backend is better, it would hide the fault
    if kind == "test":
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", name]
    else:
        command = [sys.executable, "-c", REPLAY, kind]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, timeout=TIMEOUT_S, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        return f"error: no answer in {TIMEOUT_S} s"
    if kind == "test":
        return fault.guard if done.returncode == 1 else "" if done.returncode == 0 else f"error: {_last_line(done)}"
    if done.returncode:
        return f"error: {_last_line(done)}"
    first = done.stdout.partition(":")[0]
    return f"{kind}:{first}" if first else ""


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1] if lines else f"exit status {done.returncode}"


def plant(fault: Fault, tree: Path, module: Module | None) -> str:
    """Change the copy, run the guard, undo the change."""
    path = tree / fault.file
    text = path.read_text()
    if text.count(fault.old) != 1:
        raise SystemExit(
            f"fault '{fault.name}': its text stands {text.count(fault.old)} times in {fault.file}; adapt tools/faults.py"
        )
    path.write_text(text.replace(fault.old, fault.new))
    try:
        if module and is_c(fault.file):
            module.rebuild(path)
        return caught_by(fault, tree)
    finally:
        path.write_text(text)
        if module and is_c(fault.file):
            module.rebuild(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="faults whose name or file contains this")
    parser.add_argument("--list", action="store_true", help="show the faults and their guards, plant nothing")
    args = parser.parse_args()
    faults = [f for f in FAULTS if args.only in f.name or args.only in f.file]
    console = Console(width=None if sys.stdout.isatty() else 150)
    if args.list:
        for fault in faults:
            console.print(f"{fault.file}: {fault.name} -> {fault.guard}", highlight=False)
        return 0
    table = Table("fault", "file", "caught by", "s", title=f"{len(faults)} planted faults")
    missed = 0
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory) / "tree"
        shutil.copytree(ROOT, tree, ignore=SKIPPED)
        built = sm20.cache_directory() / "emulated"  # kernels without a fault need not be compiled again
        if built.is_dir():
            unfinished = shutil.ignore_patterns("tmp*")  # of whoever builds at the same time
            shutil.copytree(built, Path(directory) / "cache" / "emulated", ignore=unfinished)
        module = Module(tree, Path(directory) / "objects") if any(is_c(fault.file) for fault in faults) else None
        kinds = {f"{kind}:any" for kind in ("stage", "sm20") if any(f.guard.startswith(kind) for f in faults)}
        for guard in [*sorted(kinds), *dict.fromkeys(f.guard for f in faults if f.guard.startswith("test:"))]:
            failed = caught_by(Fault("none", "", "", "", guard), tree)
            if failed:
                console.print(f"the tree fails without a fault: {failed}")
                return 1
        for fault in faults:
            started = time.monotonic()
            guard = plant(fault, tree, module)
            right = guard == fault.guard
            missed += not right
            shown = (
                guard.partition(":")[2].rsplit("::", 1)[-1]
                if right
                else f"[red]{guard or 'NOTHING'}[/red], expected {fault.guard}"
            )
            table.add_row(fault.name, fault.file, shown, f"{time.monotonic() - started:.0f}")
            print(f"{'caught' if right else 'MISSED'}: {fault.name}", file=sys.stderr, flush=True)
    console.print(table)
    console.print(f"{len(faults) - missed} of {len(faults)} faults caught by their guard")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
