"""Compiles an op of csrc/sm20 for the CPU, together with the emulator's runtime: one shared object per op and mode.

On first use it takes a C++ compiler (CXX, else g++ or clang++); the results stay in the cache directory under a hash of
sources, flags and compiler. The emulator is for tests, so nothing of it is built when the package is installed.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fermi_engine.errors import DeviceError
from fermi_engine.kernels import sm20

# Nothing is contracted behind the source's back: fmaf is fused, a * b + c is not.
FLAGS = ("-std=gnu++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing",
         "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-unused-function", "-g1",
         "-gdwarf-4")  # addr2line of some binutils names the wrong file in DWARF 5
RUNTIME_FLAGS = ("-O2", "-U_FORTIFY_SOURCE")  # fortified longjmp refuses to leave a fiber
MODES = {
    # kernels only: every memory access calls checked.cc, every array index and shift is looked at
    "checked": ("-O1", "-fsanitize=thread", "-fsanitize=bounds,alignment,shift,integer-divide-by-zero"),
    "asan": ("-O1", "-fsanitize=address", "-fsanitize-sections=fermi_shared"),
    "plain": ("-O3",),
}
SHARED_SYMBOL = re.compile(r"^([0-9a-f]+) ([0-9a-f]+) [dDbB] (.*)$", re.MULTILINE)
SHARED_BEGIN = re.compile(r"^([0-9a-f]+) \w __start_fermi_shared$", re.MULTILINE)
LAUNCH_BOUNDS = re.compile(r"__launch_bounds__\s*\(([^;{}]*?)\)\s*void\s+(\w+)\s*\(")
SHARED_END = re.compile(r"^([0-9a-f]+) \w __stop_fermi_shared$", re.MULTILINE)


@dataclass(frozen=True)
class SharedVariable:
    """A __shared__ array: its kernel (or helper), name, offset in the section and bytes."""

    owner: str
    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class Build:
    """A compiled op: the shared object, the shared variables in it, and which entry points have launch bounds."""

    path: Path
    variables: tuple[SharedVariable, ...]
    bounded: tuple[str, ...]

    def of_entry(self, name: str) -> tuple[SharedVariable, ...]:
        """Shared variables that count for entry point `name`: its own and those of helpers."""
        own = sm20.entries()
        return tuple(v for v in self.variables if v.owner == name or v.owner not in own)

    def bound(self, name: str) -> int | None:
        """Threads a block that entry point `name` is compiled for, None without launch bounds."""
        if name not in self.bounded:
            return None
        return ctypes.c_uint.in_dll(ctypes.CDLL(str(self.path)), f"fermi_bound_{name}").value


@functools.cache
def compiler() -> tuple[str, str]:
    """The C++ compiler and its version line. Raises DeviceError when there is none."""
    for name in filter(None, (os.environ.get("CXX"), "g++", "clang++")):
        if shutil.which(name.split()[0]):
            return name, _output([*name.split(), "--version"]).splitlines()[0]
    raise DeviceError("the emulated device compiles its kernels and found no C++ compiler; install g++ or set CXX")


@functools.cache
def build(op: str, mode: str = "plain") -> Build:
    """The shared object of `op` in `mode` (plain, checked, asan), compiled unless the cache has it.

    Raises DeviceError when there is no (suitable) compiler, no source, or the source does not compile.
    """
    files = sm20.source_files(op)
    if mode == "asan" and "clang" in compiler()[1]:
        raise DeviceError("the emulator's mode asan needs g++: clang leaves shared variables without redzones")
    flags = (*FLAGS, *MODES[mode], *_cpu_flags())
    key = sm20.digest([*files, *_runtime_files(), Path(__file__)], *flags, *RUNTIME_FLAGS, *compiler())
    directory = sm20.cache_directory() / "emulated"
    directory.mkdir(exist_ok=True)
    target = directory / f"{op}-{mode}-{key}.so"
    table = target.with_suffix(".json")
    if not (target.is_file() and table.is_file()):
        with tempfile.TemporaryDirectory(dir=directory) as work:
            _compile(op, files[0], mode, flags, Path(work), target, table)
    read = json.loads(table.read_text())
    return Build(target, tuple(SharedVariable(*row) for row in read["variables"]), tuple(read["bounded"]))


def _compile(op: str, source: Path, mode: str, flags: tuple[str, ...], work: Path, target: Path, table: Path) -> None:
    text = _run(op, [*_command(), "-x", "c++", *FLAGS, "-DFERMI_LIST_BOUNDS", "-E", "-P", str(source)])
    bounds = LAUNCH_BOUNDS.findall(text)
    (work / "op.cc").write_text(_with_bounds(source, bounds))
    (work / "table.cc").write_text(_table(op))
    _run(op, [*_runtime_command(mode), "-c", str(work / "table.cc"), "-o", str(work / "table.o")])
    _run(op, [*_command(), *flags, "-c", str(work / "op.cc"), "-o", str(work / "op.o")])
    objects = [*_runtime(mode), work / "table.o", work / "op.o"]
    link = ["-fsanitize=address"] if mode == "asan" else []
    _run(op, [*_command(), "-shared", *link, *map(str, objects), "-lm", "-o", str(work / "op.so")])
    variables = _shared_variables(_run(op, ["nm", "-SC", "--defined-only", str(work / "op.so")]))
    rows = [[v.owner, v.name, v.offset, v.size] for v in variables]
    (work / "table.json").write_text(json.dumps({"variables": rows, "bounded": [name for _, name in bounds]}))
    os.replace(work / "table.json", table)
    os.replace(work / "op.so", target)


@functools.cache
def _runtime(mode: str) -> tuple[Path, ...]:
    """Objects of the runtime, which every op of a mode shares."""
    command = _runtime_command(mode)
    key = sm20.digest(_runtime_files(), *command, *compiler())
    directory = sm20.cache_directory() / "emulated"
    objects = []
    for name in ("launch", "fibers", "checked"):
        target = directory / f"{name}-{mode}-{key}.o"
        if not target.is_file():
            with tempfile.TemporaryDirectory(dir=directory) as work:
                made = Path(work) / target.name
                _run(name, [*command, "-c", str(sm20.csrc() / "emulator" / f"{name}.cc"), "-o", str(made)])
                os.replace(made, target)
        objects.append(target)
    return tuple(objects)


def _command() -> list[str]:
    return compiler()[0].split()


def _runtime_command(mode: str) -> list[str]:
    """Compiles the runtime: without the kernels' instrumentation, except for AddressSanitizer's."""
    extra = {"asan": ["-fsanitize=address"], "checked": ["-DFERMI_CHECKED"]}.get(mode, [])
    return [*_command(), *FLAGS, *_cpu_flags(), *RUNTIME_FLAGS, *extra, f"-I{sm20.csrc() / 'emulator'}"]


def with_lines(message: str, op: str, mode: str) -> str:
    """`message` with each {pc 0x...}, an address in the op's shared object, turned into file and line."""

    def line(found: re.Match[str]) -> str:
        try:
            place = _output(["addr2line", "-e", str(build(op, mode).path), found.group(1)]).split()[0]
        except (OSError, subprocess.CalledProcessError):
            return f"at {found.group(1)}"
        return f"({Path(place).name})"

    return re.sub(r"\{pc (0x[0-9a-f]+)\}", line, message)


def _table(op: str) -> str:
    """C++ that lists the entry points of `op` for the runtime."""
    rows = [entry for entry in sm20.entries().values() if entry.op == op]
    calls = [f"static void call_{e.name}(const void *a) {{ {e.name}(*(const {e.struct} *)a); }}" for e in rows]
    items = [f'{{"{e.name}", call_{e.name}, sizeof({e.struct})}},' for e in rows]
    header = sm20.csrc() / "sm20" / "fermi.cuh"
    return "\n".join([f'#include "{header}"', '#include "runtime.h"', *calls, "const fermi_entry fermi_entries[] = {",
                      *items, "{nullptr, nullptr, 0},", "};", ""])


def _with_bounds(source: Path, bounds: list[tuple[str, str]]) -> str:
    """C++ that includes the op and has its launch bounds, which may be any constant expression, as variables."""
    first = "template <class... T> static constexpr unsigned fermi_first(unsigned threads, T...) { return threads; }"
    exported = '__attribute__((visibility("default"))) extern const unsigned'
    rows = [f"{exported} fermi_bound_{name};\nconst unsigned fermi_bound_{name} = fermi_first({numbers});"
            for numbers, name in bounds]
    return "\n".join([f'#include "{source}"', first, 'extern "C" {', *rows, "}", ""])


def _shared_variables(symbols: str) -> list[SharedVariable]:
    """Symbols of section fermi_shared, from `nm -SC`."""
    begin, end = SHARED_BEGIN.search(symbols), SHARED_END.search(symbols)
    if not begin or not end:
        return []
    first, last = int(begin.group(1), 16), int(end.group(1), 16)
    found = []
    for address, size, name in SHARED_SYMBOL.findall(symbols):
        offset = int(address, 16) - first
        if 0 <= offset < last - first:
            owner, _, variable = name.rpartition("::")
            found.append(SharedVariable(owner.split("(")[0], variable or name, offset, int(size, 16)))
    return sorted(found, key=lambda v: v.offset)


def _runtime_files() -> list[Path]:
    directory = sm20.csrc() / "emulator"
    return sorted([*directory.glob("*.h"), *directory.glob("*.cc")])


@functools.cache
def _cpu_flags() -> tuple[str, ...]:
    """fmaf as an instruction where the CPU has it: the same bits, many times the speed."""
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return ()
    return ("-mavx2", "-mfma") if {"avx2", "fma"} <= words else ()


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _run(op: str, command: list[str]) -> str:
    """What `command` prints. Raises DeviceError with its first error line."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["no message"]
        raise DeviceError(f"op {op!r} does not compile for the emulator: {errors[0]}")
    return done.stdout
