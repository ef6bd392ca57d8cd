"""The engine on an emulated Westmere (x86-64-v2 without AVX): same bits as here, same verdicts, and nothing illegal.

qemu-x86_64 (Debian: qemu-user) runs the whole Python process; any instruction the CPU model lacks would end it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fermi_engine.kernels import dispatch

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 120  # each; both together take about 20 s on two cores


def emulated(cpu: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this Python under qemu with the given CPU model."""
    qemu = shutil.which("qemu-x86_64")
    if qemu is None:
        pytest.fail("qemu-x86_64 is missing: `make test` installs it, or install Debian's qemu-user")
    return subprocess.run(
        [qemu, "-cpu", cpu, sys.executable, *arguments],
        cwd=ROOT,
        timeout=TIMEOUT_S,
        capture_output=True,
        text=True,
        check=False,
    )


def op_lines(output: str) -> dict[str, dict[str, str]]:
    """backend -> op -> hash, as tools/op_hashes.py prints them."""
    found: dict[str, dict[str, str]] = {}
    for line in output.splitlines():
        backend, op, value = line.split()
        found.setdefault(backend, {})[op] = value
    return found


@pytest.fixture(scope="module")
def native() -> dict[str, dict[str, str]]:
    done = subprocess.run([sys.executable, "tools/op_hashes.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    return op_lines(done.stdout)


def test_backends_agree_on_fixed_shapes(native):
    assert set(native) == set(dispatch.supported())
    assert set(native["scalar"]) == set(dispatch.ops())
    for backend, values in native.items():
        assert values == native["scalar"], backend


def test_every_op_gives_the_same_bits_on_westmere(native):
    done = emulated("Westmere", "tools/op_hashes.py")
    assert done.returncode == 0, done.stderr
    lines = op_lines(done.stdout)
    assert set(lines) == {"ssse3", "scalar"}
    for values in lines.values():
        assert values == native["scalar"]


def test_verify_passes_on_westmere():
    done = emulated("Westmere", "-m", "fermi_engine.cli.app", "verify")
    assert done.returncode == 0, done.stdout + done.stderr


def test_dispatch_picks_ssse3_on_westmere():
    done = emulated("Westmere", "-c", "from fermi_engine import kernels; print(set(kernels.get().backends.values()))")
    assert done.stdout.strip() == "{'ssse3'}", done.stderr


def test_a_cpu_below_the_floor_gets_one_line():
    done = emulated("core2duo", "-m", "fermi_engine.cli.app", "verify")
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        "error: this CPU lacks sse4.1, sse4.2, popcnt: x86-64-v2 (Westmere, 2010, or newer) is the floor"
    ]
