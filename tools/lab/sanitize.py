"""compute-sanitizer over every kernel of csrc/sm20, on an NVIDIA card.

    python tools/lab/sanitize.py [--tool memcheck ...] [--planted]

Each tool runs the cases of tests/sm20_cases.py, which launch every entry point at awkward sizes (tests/test_sm20_cases.py holds
that), and a prefill of golden/tiny with streamed experts; a table of launches and errors follows. initcheck has no prefill:
its scratch is read where nobody has written, without consequence (the cases fill it with NaN). --planted runs each tool over
a kernel with the fault that it is there for (compiled here by clang), and all must be seen. Exit status 1: an error in a
kernel, a fault that was not seen, or a run that did not end; 2: there is no compute-sanitizer.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # run as a script
    sys.path.insert(0, str(ROOT))

from fermi_engine.kernels import sm20  # noqa: E402
from fermi_engine.kernels.gpu import Device, open_device  # noqa: E402
from tests.planted import faulty  # noqa: E402
from tests.sm20_cases import CASES, FAULTS, Bench  # noqa: E402

TOOLS = {"memcheck": ("--padding", "1024"), "racecheck": (), "synccheck": (), "initcheck": ()}
# Backtraces of the host cost a tenth of a second an allocation below pytest; a fault can show at every access.
BRIEF = ("--show-backtrace", "device", "--print-limit", "200")
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
PLACE = re.compile(r"^=+ +(?:at|.*Race reported between .* access at) (\w+)\+0x|^=+ +(Program hit .*)$", re.MULTILINE)
TIMEOUT_S = 300


@dataclass(frozen=True)
class Outcome:
    """A tool's run: errors it counts (None where it did not end), launches by entry, seconds, where the first ones are."""

    tool: str
    errors: int | None
    launched: dict[str, int]
    seconds: float
    findings: list[str]

    def row(self) -> str:
        """A line of the table."""
        errors = "did not end" if self.errors is None else str(self.errors)
        return f"{self.tool:10} {len(self.launched):8} {sum(self.launched.values()):9} {errors:>12} {self.seconds:8.1f} s"


def run(tool: str, what: str) -> Outcome:
    """This file as a child under `tool`."""
    command = ["compute-sanitizer", "--tool", tool, *TOOLS[tool], *BRIEF, sys.executable, __file__, "--child", what]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT)
    except subprocess.TimeoutExpired as late:
        text = (late.stdout or b"").decode()
        return Outcome(tool, None, {}, time.perf_counter() - start, text.splitlines()[-3:])
    text = done.stdout + done.stderr
    found = SUMMARY.findall(text)
    launched = re.search(r"^LAUNCHED (.*)$", text, re.MULTILINE)
    errors = sum(int(count or hazards) for count, hazards in found) if found else None
    places = Counter(kernel or call for kernel, call in PLACE.findall(text))
    findings = [f"{count} in {place}" for place, count in places.most_common(5)] or text.splitlines()[-3:] * (not launched)
    return Outcome(tool, errors, json.loads(launched[1]) if launched else {}, time.perf_counter() - start, findings)


def child(what: str) -> None:
    """What runs under a tool; the last line says what was launched."""
    device = open_device("cuda")
    launched = planted(device, what) if what in FAULTS else cases(device, with_prefill=what == "all")
    device.close()
    print(f"LAUNCHED {json.dumps(launched)}", flush=True)


def cases(device: Device, with_prefill: bool) -> dict[str, int]:
    """Every case, and a prefill."""
    bench = Bench(device)
    for name, case in CASES.items():
        start = time.perf_counter()
        bench.run(case)
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    if with_prefill:
        prefill(device)
    return dict(device.launched)


def prefill(device: Device) -> None:
    """Two blocks, streamed, of the trained model: the copies beside the kernels, and the state's way back."""
    from fermi_engine.config import EngineConfig
    from fermi_engine.convert import convert
    from fermi_engine.engine import Engine
    from fermi_engine.gpu.prefill import HybridPrefill
    from fermi_engine.state import HybridState

    with tempfile.TemporaryDirectory() as folder:
        pack = convert(ROOT / "golden" / "tiny", Path(folder) / "tiny.pack", "q4_0")
        engine = Engine.load(pack, config=EngineConfig(threads=1, load="resident"))
        ids = np.arange(100, 200, dtype=np.int32)
        vram = HybridPrefill(device, engine.pack, engine.decoder, token_block=64).plan(0, len(ids)).total - 1
        run = HybridPrefill(device, engine.pack, engine.decoder, vram, token_block=64)
        run.run(ids, HybridState.fresh(engine.config, 64))
        run.close()


def planted(device: Device, tool: str) -> dict[str, int]:
    """The case that shows the fault which `tool` must see."""
    fault, bench = FAULTS[tool], Bench(device)
    with tempfile.TemporaryDirectory() as folder, faulty(Path(folder), fault.file, fault.right, fault.wrong):
        bench.run(CASES[fault.case])
    return dict(device.launched)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", action="append", choices=tuple(TOOLS), help="default: all")
    parser.add_argument("--planted", action="store_true", help="kernels with faults, which must be seen")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child)
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("error: there is no compute-sanitizer on the path; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    print(f"{'tool':10} {'entries':>8} {'launches':>9} {'errors':>12} {'time':>10}")
    good = True
    for tool in args.tool or TOOLS:
        outcome = run(tool, tool if args.planted else "cases" if tool == "initcheck" else "all")
        print(outcome.row(), *([f"({FAULTS[tool].what})"] if args.planted else []), flush=True)
        print("".join(f"    {line}\n" for line in outcome.findings), end="")
        complete = args.planted or outcome.launched.keys() == sm20.entries().keys()
        good &= outcome.errors is not None and (outcome.errors > 0) == args.planted and complete
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
