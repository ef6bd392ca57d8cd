"""Instructions per decoded token, counted by valgrind: a figure that needs no quiet machine.

`python tools/bench/instructions.py` counts a small synthetic model with each backend that valgrind's CPU has and compares
with tools/bench/instructions.json; `--write` records new counts. Only what runs inside the kernel runner is counted, with
one thread, and the counts of two lengths are subtracted, so that start-up, Python and the prompt fall out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from fermi_engine import report
from fermi_engine.errors import FermiError, VerifyError
from tools.bench.make_pack import make_pack

RECORD = Path(__file__).with_name("instructions.json")
GEOMETRY = "medium"
BACKENDS = ("scalar", "ssse3")  # a regression of another one shows in these or in a timing
SHORT, LONG = 2, 6  # decoded tokens
# Compilers of one major version agree to the instruction; another one may lay out loops differently by a few percent.
ALLOWED_GROWTH = 1.05
DECODE = """
import sys
from fermi_engine.config import EngineConfig
from fermi_engine.engine import Engine
session = Engine.load(sys.argv[1], config=EngineConfig(threads=1)).session()
session.prefill([1, 2, 3])
for token in range(int(sys.argv[2])):
    session.decode(token + 4)
"""


def per_token(pack: Path, backend: str) -> int:
    """Instructions that the kernels of `backend` take for one token. VerifyError where valgrind is missing or fails."""
    return (counted(pack, backend, LONG) - counted(pack, backend, SHORT)) // (LONG - SHORT)


def counted(pack: Path, backend: str, tokens: int) -> int:
    """Instructions inside the kernel runner over the whole run."""
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise VerifyError("counting instructions needs valgrind (Debian: apt-get install valgrind)")
    command = [valgrind, "--tool=callgrind", "--callgrind-out-file=/dev/null", "--toggle-collect=fermi_run_steps",
               sys.executable, "-c", DECODE, str(pack), str(tokens)]
    environment = {**os.environ, "FERMI_BACKEND": backend, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or not found or not int(found[1]):
        raise VerifyError(f"valgrind counted nothing for {backend}: {done.stderr.strip().splitlines()[-1:]}")
    return int(found[1])


def count_all() -> dict[str, int]:
    """Backend -> instructions per token."""
    with tempfile.TemporaryDirectory(prefix="instructions.") as directory:
        pack = make_pack(Path(directory) / "medium.fermi", GEOMETRY)
        return {backend: per_token(pack, backend) for backend in BACKENDS}


def main() -> int:
    """The command line; exit status 1 when a backend needs more than recorded."""
    parser = argparse.ArgumentParser(description="Instructions per decoded token.")
    parser.add_argument("--write", action="store_true", help=f"record the counts in {RECORD.name}")
    write = parser.parse_args().write
    try:
        counts = count_all()
    except FermiError as err:
        print(err, file=sys.stderr)
        return 2
    recorded = json.loads(RECORD.read_text())["per_token"] if RECORD.exists() else {}
    rows = [(name, f"{count:,}", f"{recorded.get(name, 0):,}", f"{counts['scalar'] / count:.2f}")
            for name, count in counts.items()]
    report.table(f"instructions per decoded token, {GEOMETRY}", ("backend", "now", "recorded", "scalar / this"), rows,
                 right=("now", "recorded", "scalar / this"))
    if write:
        RECORD.write_text(json.dumps({"geometry": GEOMETRY, "per_token": counts}, indent=2) + "\n")
        return 0
    return int(any(count > ALLOWED_GROWTH * recorded.get(name, 0) for name, count in counts.items()))


if __name__ == "__main__":
    sys.exit(main())
