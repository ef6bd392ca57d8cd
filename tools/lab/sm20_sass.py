"""Counts the instructions of the inner loops of sm_20 kernels: what share of them is FFMA, what a C2075 would need.

    python tools/lab/sm20_sass.py --ptxas PATH kernel.ptx ...

No assembler for sm_20 is to be had today. The oldest one at hand, ptxas 11.8 (Python package nvidia-cuda-nvcc-cu11
11.8.89), starts at sm_35, which has the same instructions for this purpose; it is held to Fermi's 63 registers a
thread. Launch bounds are taken out of the PTX, since they allow more. There is no disassembler for sm_35 either, so
this tells instructions apart by their operation bits, as the envytools project documents them for GK110
(envydis/gk110.c); every eighth word holds scheduling hints.

The hot loop of a kernel is the loop that has the most FFMA in it. Its time on a C2075 (14 multiprocessors, 1.15 GHz)
is the larger of two sums over the loop, in shader clocks a warp: issue (1 an instruction, 2 for shifts, comparisons,
integer products and conversions: CUDA C programming guide 8.0, throughput of arithmetic instructions, compute
capability 2.0) and the shared-memory pipe (2, 4 or 16 clocks for a load of 32, 64 or 128 bits; Lai and Seznec, CGO
2013). Stalls, bank conflicts and global memory are not in it.
"""

from __future__ import annotations

import argparse
import re
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

REGISTERS = 63
BOUNDS = re.compile(r"^\s*\.(maxntid|minnctapersm|maxnreg|reqntid)\b[^{\n]*$", re.MULTILINE)
REPORT = re.compile(r"entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?"
                    r"Used (\d+) registers", re.DOTALL)
PEAK_TFLOPS = 14 * 32 * 2 * 1.15e9 / 1e12

# form (the two lowest bits), mask, value, name; the first match counts
OPERATIONS = (
    (2, 0x3C00000000000000, 0x0C00000000000000, "ffma"),
    (1, 0xB4C0000000000000, 0x9400000000000000, "ffma"),
    (0, 0xE000000000000000, 0x6000000000000000, "ffma"),
    (2, 0x7FC0000000000000, 0x7A00000000000000, "ldl"),
    (2, 0x7FC0000000000000, 0x7A80000000000000, "stl"),
    (2, 0x7FC0000000000000, 0x7A40000000000000, "lds"),
    (2, 0x7FC0000000000000, 0x7AC0000000000000, "sts"),
    (0, 0xE000000000000000, 0xC000000000000000, "ldg"),
    (0, 0xE000000000000000, 0xE000000000000000, "stg"),
    (2, 0x3FC0000000000000, 0x2240000000000000, "shift"),
    (2, 0x3FC0000000000000, 0x2140000000000000, "shift"),
    (1, 0x37C0000000000000, 0x0240000000000000, "shift"),
    (1, 0x37C0000000000000, 0x0140000000000000, "shift"),
    (1, 0xFFC0000000000000, 0xC000000000000000, "shift"),   # bit field
    (2, 0xFFC0000000000000, 0xE000000000000000, "shift"),
    (2, 0x3FC0000000000000, 0x27C0000000000000, "shift"),   # funnel shift: two plain ones on Fermi
    (1, 0x37C0000000000000, 0x07C0000000000000, "shift"),
    (2, 0xFFC0000000000000, 0xDFC0000000000000, "shift"),
    (1, 0x37C0000000000000, 0x37C0000000000000, "shift"),
    (2, 0x3F80000000000000, 0x2580000000000000, "convert"),
    (2, 0x3FC0000000000000, 0x2540000000000000, "convert"),
    (2, 0x3FC0000000000000, 0x2600000000000000, "convert"),
    (2, 0x3FC0000000000000, 0x2200000000000000, "logic"),
    (1, 0x37C0000000000000, 0x0200000000000000, "logic"),
    (0, 0xE000000000000000, 0x2000000000000000, "logic"),
    (2, 0x3FC0000000000000, 0x22C0000000000000, "fadd"),
    (1, 0x37C0000000000000, 0x02C0000000000000, "fadd"),
    (0, 0xE000000000000000, 0x4000000000000000, "fadd"),
    (2, 0x3FC0000000000000, 0x2340000000000000, "fmul"),
    (1, 0x37C0000000000000, 0x0340000000000000, "fmul"),
    (2, 0xF800000000000000, 0x2000000000000000, "fmul"),
    (2, 0x3F80000000000000, 0x1B00000000000000, "compare"),
    (1, 0xB780000000000000, 0xB300000000000000, "compare"),
    (2, 0x3C00000000000000, 0x1000000000000000, "imad"),
    (1, 0xB400000000000000, 0xA000000000000000, "imad"),
    (2, 0x3FC0000000000000, 0x24C0000000000000, "mov"),
    (2, 0x7F80000000000000, 0x7400000000000000, "mov"),
    (2, 0xFFC0000000000000, 0x8540000000000000, "barrier"),
    (2, 0xFFC0000000000000, 0x8580000000000000, "nop"),
    (0, 0xFF80000000000000, 0x1200000000000000, "branch"),
)
LOAD_BITS = {4: 32, 5: 64, 6: 128}          # operand size field of lds
HALF_RATE = ("shift", "convert", "compare", "imad")
SHARED_CLOCKS = {"lds8": 2, "lds32": 2, "lds64": 4, "lds128": 16, "sts": 2}


@dataclass(frozen=True)
class Loop:
    """The hot loop of one kernel: `counts` by kind of instruction; spill bytes are those of the whole kernel."""

    kernel: str
    registers: int
    spill_bytes: int
    counts: Counter

    @property
    def size(self) -> int:
        """Instructions in the loop."""
        return sum(self.counts.values())

    @property
    def ffma_share(self) -> float:
        """FFMA as a fraction of all instructions of the loop."""
        return self.counts["ffma"] / max(1, self.size)

    @property
    def clocks(self) -> int:
        """Shader clocks that one warp takes of its multiprocessor for one turn of the loop."""
        issue = self.size + sum(self.counts[kind] for kind in HALF_RATE)
        shared = sum(clocks * self.counts[kind] for kind, clocks in SHARED_CLOCKS.items())
        return max(issue, shared)


def operation(word: int) -> str:
    """The kind of one 64-bit sm_35 instruction; 'other' for what no column counts."""
    for form, mask, value, name in OPERATIONS:
        if word & 3 == form and word & mask == value:
            return f"lds{LOAD_BITS.get(word >> 51 & 7, 8)}" if name == "lds" else name
    return "other"


def branch_target(address: int, word: int) -> int:
    """Byte address that a relative branch at `address` jumps to: a signed 24-bit distance from the next instruction."""
    distance = word >> 23 & 0xFFFFFF
    return address + 8 + (distance - (distance >> 23 << 24))


def hot_loop(code: bytes) -> Counter:
    """Counts of the loop with the most FFMA in one kernel's code; empty where it has no loop."""
    words = struct.unpack(f"<{len(code) // 8}Q", code)
    kinds = {8 * i: operation(word) for i, word in enumerate(words) if i % 8}
    loops = []
    for address, kind in kinds.items():
        if kind == "branch":
            target = branch_target(address, words[address // 8])
            if target <= address:
                loops.append(Counter(k for a, k in kinds.items() if target <= a <= address and k != "nop"))
    return max(loops, key=lambda counts: (counts["ffma"], -sum(counts.values())), default=Counter())


def sections(elf: bytes) -> dict[str, bytes]:
    """Name -> contents of the sections of a 64-bit little-endian ELF file."""
    start, = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, start + i * size) for i in range(count)]
    table = elf[headers[names][4]:][:headers[names][5]]
    return {table[h[0]:table.index(b"\0", h[0])].decode(): elf[h[4]:h[4] + h[5]] for h in headers}


def count_ptx(ptx: str, ptxas: str) -> list[Loop]:
    """Counts each kernel's hot loop in PTX text assembled for sm_35. CalledProcessError if ptxas refuses it."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "k.ptx"), Path(folder, "k.cubin")
        source.write_text(BOUNDS.sub("", ptx))
        command = [ptxas, "-arch", "sm_35", "--maxrregcount", str(REGISTERS), "-v", str(source), "-o", str(cubin)]
        report = subprocess.run(command, check=True, capture_output=True, text=True)
        code = sections(cubin.read_bytes())
    found = REPORT.findall(report.stdout + report.stderr)
    return [Loop(name, int(registers), int(stores) + int(loads), hot_loop(code[f".text.{name}"]))
            for name, stores, loads, registers in found]


def table(loops: list[Loop]) -> str:
    """One line a kernel; TFLOP/s is the bound that the loop sets on a C2075."""
    kinds = ("ffma", "lds32", "lds64", "lds128", "sts", "ldg", "shift", "logic", "convert", "fadd", "fmul")
    lines = [f"{'kernel':30} regs spill  loop ffma% {' '.join(f'{k:>7}' for k in kinds)} local  rest  bound TFLOP/s"]
    for loop in loops:
        counts = loop.counts
        local = counts["ldl"] + counts["stl"]
        rest = loop.size - local - sum(counts[k] for k in kinds)
        bound = PEAK_TFLOPS * counts["ffma"] / max(1, loop.clocks)
        lines.append(f"{loop.kernel:30} {loop.registers:4} {loop.spill_bytes:5} {loop.size:5} "
                     f"{100 * loop.ffma_share:5.1f} " + " ".join(f"{counts[k]:7}" for k in kinds)
                     + f" {local:5} {rest:5}  {bound:5.2f}")
    return "\n".join(lines)


def main() -> int:
    """Prints the table for the PTX files named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ptxas", required=True, help="ptxas 11.8")
    parser.add_argument("ptx", nargs="+", type=Path)
    arguments = parser.parse_args()
    print(table([loop for path in arguments.ptx for loop in count_ptx(path.read_text(), arguments.ptxas)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
