"""tools/lab/sanitize.py reads what compute-sanitizer says, and takes nothing for clean that is not: with a fake one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fermi_engine.kernels import sm20
from tools.lab import sanitize

ALL = json.dumps(dict.fromkeys(sm20.entries(), 2))
CLEAN, ERRORS = "========= ERROR SUMMARY: 0 errors", "========= ERROR SUMMARY: 3 errors"
WRITE = "========= Invalid __global__ write of size 4 bytes\n=========     at conv1d_silu+0x3f0\n"
RACE = "========= Warning: Race reported between Write access at rms_norm+0x8d0\n"


def outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, *options: str) -> int:
    """Exit status when the tool says `said`."""
    fake = tmp_path / "compute-sanitizer"
    fake.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "argv", ["sanitize.py", "--tool", "memcheck", *options])
    return sanitize.main()


@pytest.mark.parametrize(("said", "options", "status"), [
    (f"LAUNCHED {ALL}\n{CLEAN}", (), 0),
    (f"{WRITE}LAUNCHED {ALL}\n{ERRORS}", (), 1),
    (f"LAUNCHED {ALL}\n========= RACECHECK SUMMARY: 2 hazards displayed (1 errors, 1 warnings)", (), 1),
    (f'LAUNCHED {{"add": 1}}\n{CLEAN}', (), 1),
    (f"Traceback: something\n{CLEAN}", (), 1),
    (f"LAUNCHED {ALL}", (), 1),
    (f"{WRITE}{ERRORS}", ("--planted",), 0),
    (f"LAUNCHED {ALL}\n{CLEAN}", ("--planted",), 1),
], ids=["clean", "errors", "hazards", "kernels left out", "did not end", "no summary", "planted", "planted and not seen"])
def test_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, options: tuple[str, ...], status: int) -> None:
    assert outcome(tmp_path, monkeypatch, said, *options) == status


def test_the_table_says_how_many_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    outcome(tmp_path, monkeypatch, f"{WRITE * 2}{RACE}LAUNCHED {ALL}\n{ERRORS}")
    said = capsys.readouterr().out.splitlines()
    assert said[1].split()[:4] == ["memcheck", str(len(sm20.entries())), str(2 * len(sm20.entries())), "3"]
    assert said[2:] == ["    2 in conv1d_silu", "    1 in rms_norm"]


def test_without_the_tool_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["sanitize.py"])
    assert sanitize.main() == 2
    assert capsys.readouterr().err == "error: there is no compute-sanitizer on the path; it comes with the CUDA toolkit\n"
