"""Compiles every op of csrc/sm20 for sm_20 and holds the PTX to the card's rules; --write makes the PTX that ships.

    python tools/check_sm20.py [--write] [OP ...]

Each op is compiled by clang (warnings are errors). Findings: instructions or modifiers that sm_20 or PTX ISA 3.2 lack (the
list below is what they have), a version newer than driver 390 takes, more than 48 KiB of static shared memory, 4 KiB of
arguments or 1024 threads a block, entry points that differ from the ENTRY lines of ops.h, and shipped PTX made from other
sources. A table says what each entry point needs; registers and spills at Fermi's 63 registers are an estimate: ptxas of CUDA
11.8 for sm_35, its oldest target (FERMI_PTXAS, or `pip install nvidia-cuda-nvcc-cu11==11.8.89`), left out by name without it.

Exit status: 0 nothing found, 1 findings, 2 the check could not run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fermi_engine.errors import DeviceError
from fermi_engine.kernels import ptx, sm20


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


NEWEST_VERSION = (6, 1)  # what driver 390, the last for these cards, takes
MAX_SHARED, MAX_ARGUMENTS, MAX_THREADS, REGISTERS = 48 * 1024, 4096, 1024, 63
# Instructions of PTX ISA 3.2 for sm_20, without textures, surfaces and video.
KNOWN = _words("""abs add addc and atom bar bfe bfi bfind bra brev brkpt call clz cnot copysign cos cvt cvta div ex2 exit fma
    isspacep ld ldu lg2 mad mad24 madc max membar min mov mul mul24 neg not or popc prefetch prefetchu prmt rcp red rem ret
    rsqrt sad selp set setp shl shr sin slct sqrt st sub subc testp trap vote xor""")
# Modifiers that the instructions above got later, and what they mean.
LATER = (
    (re.compile(r"^ld\.(?:\w+\.)*nc\b"), "loads through the texture path (sm_32)"),
    (re.compile(r"^vote\.sync\b|^bar\.(?:warp|cta)\b|^barrier\b"), "synchronisation of named lanes (sm_70)"),
    (re.compile(r"^(?:atom|red)\.(?:\w+\.)*(?:f64|f16x2|f16|cas\.b16|sys|cta|gpu)\b|^(?:atom|red)\.(?:\w+\.)*(?:and|or|xor|min|max)\.[bsu]64"),
     "atomics of newer cards"),
    (re.compile(r"^(?!cvt|mov|ld|st)\w+\.(?:\w+\.)*(?:f16|f16x2|bf16|bf16x2)\b"), "half-precision arithmetic (sm_53)"),
    (re.compile(r"^(?:ld|st)\.(?:\w+\.)*(?:relaxed|acquire|release|weak|L1|L2|v8)\b"), "memory operations of newer cards"),
    (re.compile(r"^fma\.(?:\w+\.)*relu|^(?:min|max)\.(?:\w+\.)*(?:NaN|xorsign)"), "arithmetic of newer cards"),
    (re.compile(r"^(?:sin|cos|ex2|lg2|rcp|rsqrt|sqrt|div)\.(?:approx|full)\b"), "approximate (math.cuh has accurate ones)"),
)
INSTRUCTION = re.compile(r"^(?:@!?%?\w+\s+)?([a-z]\w*(?:[.:]+\w+)*)\b")
ENTRY_HEAD = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)(.*?)\{", re.DOTALL)
PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(?:\.ptr\s+(?:\.\w+\s+)?\.align\s+\d+\s+)?\w+(?:\[(\d+)\])?")
STORAGE = re.compile(r"\.(shared|local)\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+[\w$]+(?:\[(\d*)\])?")
MAX_NTID = re.compile(r"\.(?:max|req)ntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")
USAGE = re.compile(r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill "
                   r"loads.*?Used (\d+) registers", re.DOTALL)


@dataclass
class Entry:
    """What the PTX of an entry point says: bytes of static shared memory, local memory and arguments, threads a block."""

    name: str
    shared: int
    local: int
    arguments: int
    threads: int


@dataclass
class Usage:
    """Estimate of ptxas: registers a thread, bytes of stack frame, of spill stores and of spill loads."""

    registers: int
    stack: int
    stores: int
    loads: int


def plain(text: str) -> str:
    """PTX without comments."""
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)


def instructions(text: str) -> list[str]:
    """Opcode with modifiers of every instruction."""
    found = []
    for statement in re.split(r"[;{}]", plain(text)):
        statement = re.sub(r"^(?:\s*[\w$]+:)+", "", statement).strip()
        match = INSTRUCTION.match(statement)
        if match and not statement.startswith("."):
            found.append(match.group(1))
    return found


def size_of(kind: str, count: str | None) -> int:
    """Bytes of a variable: `b8` and the text between brackets, which is empty for dynamic shared memory, None for a scalar."""
    return int(re.sub(r"\D", "", kind)) // 8 * (1 if count is None else int(count or 0))


def entries(text: str) -> list[Entry]:
    """The entry points of a PTX module. Shared variables outside of functions count for every one."""
    text = plain(text)
    heads = list(ENTRY_HEAD.finditer(text))
    starts = [match.start() for match in heads]
    common = text[: starts[0]] if starts else text
    found = []
    for match, end in zip(heads, [*starts[1:], len(text)], strict=True):
        body = common + text[match.end() : end]
        storage = {"shared": 0, "local": 0}
        for space, kind, count in (declared.groups() for declared in STORAGE.finditer(body)):
            storage[space] += size_of(kind, count)
        arguments = sum(size_of(*declared.groups()) for declared in PARAMETER.finditer(match.group(2)))
        ntid = MAX_NTID.search(match.group(3))
        threads = 1
        for axis in ntid.groups() if ntid else ():
            threads *= int(axis or 1)
        found.append(Entry(match.group(1), storage["shared"], storage["local"], arguments, threads))
    return found


def violations(text: str) -> list[str]:
    """What in a PTX module breaks the card's rules."""
    found = []
    version = re.search(r"^\.version\s+(\d+)\.(\d+)", text, re.MULTILINE)
    target = re.search(r"^\.target\s+(\w+)", text, re.MULTILINE)
    if not version or tuple(map(int, version.groups())) > NEWEST_VERSION:
        found.append(f"PTX version {'.'.join(version.groups()) if version else 'missing'}: driver 390 takes up to 6.1")
    if not target or target.group(1) != "sm_20":
        found.append(f"target {target.group(1) if target else 'missing'} is not sm_20")
    for instruction in dict.fromkeys(instructions(text)):
        if re.split(r"[.:]", instruction)[0] not in KNOWN:
            found.append(f"{instruction}: sm_20 has no such instruction")
        found += [f"{instruction}: {why}" for pattern, why in LATER if pattern.search(instruction)]
    for entry in entries(text):
        for what, value, most in (("bytes of static shared memory", entry.shared, MAX_SHARED),
                                  ("bytes of arguments", entry.arguments, MAX_ARGUMENTS),
                                  ("threads a block", entry.threads, MAX_THREADS)):
            if value > most:
                found.append(f"{entry.name}: {value} {what}, sm_20 has {most}")
    return found


def undeclared(op: str, text: str) -> list[str]:
    """Entry points that the PTX of `op` and the ENTRY lines of ops.h do not share."""
    declared = {entry.name for entry in sm20.entries().values() if entry.op == op}
    return [f"{name}: not both in {op}.cu and in an ENTRY line" for name in sorted(declared ^ {e.name for e in entries(text)})]


def find_ptxas() -> str | None:
    """ptxas of CUDA 11.x: FERMI_PTXAS, on the PATH, or the PyPI package's."""
    packaged = [str(Path(path) / "nvidia" / "cuda_nvcc" / "bin" / "ptxas") for path in sys.path]
    for name in [os.environ.get("FERMI_PTXAS"), shutil.which("ptxas"), *packaged]:
        if name and os.access(name, os.X_OK):
            text = subprocess.run([name, "--version"], capture_output=True, text=True).stdout
            if "release 11." in text:
                return name
    return None


def usage(text: str, ptxas: str) -> dict[str, Usage]:
    """Registers and spills of each entry point at 63 registers a thread. Raises DeviceError when ptxas rejects the PTX."""
    bare = re.sub(r"^\s*\.(?:maxntid|minnctapersm|maxnreg|reqntid)\b[^{\n]*$", "", text, flags=re.MULTILINE)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(bare)
        file.flush()
        command = [ptxas, "-arch=sm_35", f"--maxrregcount={REGISTERS}", "-v", "-o", os.devnull, file.name]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise DeviceError(f"ptxas rejects it: {(done.stderr + done.stdout).splitlines()[0]}")
    rows = USAGE.findall(done.stderr + done.stdout)
    return {name: Usage(int(registers), int(stack), int(stores), int(loads)) for name, stack, stores, loads, registers in rows}


def compiled(op: str) -> str:
    """PTX of `op` by clang, warnings as errors. Raises DeviceError."""
    compiler = ptx.clang()
    if compiler is None:
        raise DeviceError("no clang >= 14 here; install it (Debian: clang-14) or set FERMI_CLANG")
    return ptx.cached(op, "ptx", [compiler.path, *ptx.CLANG_FLAGS, "-Werror"], compiler.text).decode()


def table(rows: list[tuple[str, Entry, Usage | None]]) -> str:
    """One line per entry point, or the head alone."""
    lines = [f"{'op':20} {'entry':28} {'threads':>7} {'shared':>7} {'args':>5} {'local':>6} {'regs':>5} {'spill st/ld':>12}"]
    for op, entry, use in rows:
        estimate = f"{use.registers:5} {f'{use.stores}/{use.loads}':>12}" if use else f"{'-':>5} {'-':>12}"
        lines.append(f"{op:20} {entry.name:28} {entry.threads if entry.threads > 1 else '-':>7} {entry.shared:7} "
                     f"{entry.arguments:5} {entry.local:6} {estimate}")
    return "\n".join(lines)


def check(op: str, ptxas: str | None, write: bool, findings: list[str], rows: list[tuple[str, Entry, Usage | None]]) -> None:
    """Add what is wrong with `op` to `findings`, and its entry points to `rows`; write: make its shipped PTX too."""
    used: dict[str, Usage] = {}
    try:
        text = compiled(op)
        if write:
            ptx.write_prebuilt(op)
        findings += [f"{op}: {finding}" for finding in violations(text) + undeclared(op, text)]
        rows += [(op, entry, None) for entry in entries(text)]
        used = usage(text, ptxas) if ptxas else {}
    except DeviceError as err:
        findings.append(str(err) if repr(op) in str(err) else f"{op}: {err}")
    rows[:] = [(name, entry, used.get(entry.name, use) if name == op else use) for name, entry, use in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", help="ops to check (default: all)")
    parser.add_argument("--write", action="store_true", help="write the PTX that ships with the package")
    chosen = parser.parse_args()
    ptxas = find_ptxas()
    findings: list[str] = []
    rows: list[tuple[str, Entry, Usage | None]] = []
    try:
        if ptx.clang() is None:
            compiled("")
        for op in chosen.ops or sm20.ops():
            check(op, ptxas, chosen.write, findings, rows)
        for path in ptx.PREBUILT.glob("*.ptx"):
            if chosen.write and path.stem not in sm20.ops():
                path.unlink()
        stale = [op for op in ptx.stale() if op in (chosen.ops or sm20.ops()) or not sm20.source(op).is_file()]
    except DeviceError as err:
        print(f"check_sm20: {err}", file=sys.stderr)
        return 2
    print(table(rows))
    if not ptxas:
        print("registers and spills: left out, no ptxas of CUDA 11.8 here")
    findings += [f"{op}: the PTX that ships is absent, from other sources or of no op; run `make ptx`" for op in stale]
    for finding in findings:
        print(f"FOUND {finding}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
