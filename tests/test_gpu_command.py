"""`python -m pytest -m gpu`, the command for a machine with a card: what it needs, and that it leaves nothing out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Of the test group in pyproject.toml; torch, pytest and hypothesis are needed.
NOT_NEEDED = ("transformers", "gguf", "PIL", "safetensors")
COLLECT = "import sys; {block}; import pytest; sys.exit(pytest.main(['--collect-only', '-q', '-m', {mark!r}, 'tests']))"


def collected(mark: str, block: tuple[str, ...] = ()) -> list[str]:
    """Ids of the tests that `-m mark` selects in a process that cannot import `block`."""
    script = COLLECT.format(block=f"sys.modules.update(dict.fromkeys({block!r}))", mark=mark)
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_the_gpu_tests_need_torch_only_and_all_of_them_are_found() -> None:
    """Against a collection that imports every module, whatever it needs."""
    found = collected("gpu", NOT_NEEDED)
    assert found == collected("gpu and not soak or gpu and soak")
    assert any("[cuda" in name for name in found)
