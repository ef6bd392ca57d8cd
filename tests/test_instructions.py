"""The recorded instruction counts: there, sensible, and still true."""

from __future__ import annotations

import json
import shutil

import pytest

from fermi_engine.errors import VerifyError
from tools.bench import instructions


def test_what_is_recorded() -> None:
    record = json.loads(instructions.RECORD.read_text())
    assert record["geometry"] == instructions.GEOMETRY
    assert set(record["per_token"]) == set(instructions.BACKENDS)
    # 16 lanes of 8 bits against one: less than a third of that would mean that vectors serve only part of the work
    assert record["per_token"]["scalar"] > 16 / 3 * record["per_token"]["ssse3"]


def test_a_run_that_counts_nothing_is_an_error(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "valgrind"
    fake.write_text("#!/bin/sh\necho 'Collected : 0' >&2\n")
    fake.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(fake))
    with pytest.raises(VerifyError, match="valgrind counted nothing for ssse3"):
        instructions.counted(tmp_path / "pack", "ssse3", 2)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(VerifyError, match="needs valgrind"):
        instructions.counted(tmp_path / "pack", "ssse3", 2)


@pytest.mark.soak
def test_no_backend_needs_more_than_recorded() -> None:
    record = json.loads(instructions.RECORD.read_text())["per_token"]
    for backend, count in instructions.count_all().items():
        assert count <= instructions.ALLOWED_GROWTH * record[backend], backend
