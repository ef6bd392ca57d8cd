"""The demo: a small random checkpoint in the released layout becomes a Q4_0 pack, every stage is verified, text comes out.

Random weights give noise, not sense; what is shown is that the whole path runs and that each stage is right.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "demo"


def run(*command: str) -> None:
    """Show a command and run it; stop the demo with its status if it fails."""
    print("\n$ " + " ".join(command), flush=True)
    program = (
        [sys.executable, "-m", "fermi_engine.cli", *command[1:]]
        if command[0] == "fermi-engine"
        else [sys.executable, *command[1:]]
    )
    status = subprocess.run(program, cwd=ROOT, check=False).returncode
    if status:
        sys.exit(status)


def main() -> None:
    shutil.rmtree(DEMO, ignore_errors=True)
    DEMO.mkdir()
    run("python", "tools/make_checkpoint.py", "demo/checkpoint", "--seed", "1")
    run("fermi-engine", "convert", "demo/checkpoint", "demo/model.pack", "--format", "q4_0")
    run("fermi-engine", "info", "demo/model.pack", "--check")
    run("fermi-engine", "verify")
    run(
        "fermi-engine",
        "generate",
        "--model",
        "demo/model.pack",
        "--prompt",
        "Which stage broke?",
        "--no-think",
        "--max-tokens",
        "48",
        "--seed",
        "1",
        "--timing",
    )


if __name__ == "__main__":
    main()
