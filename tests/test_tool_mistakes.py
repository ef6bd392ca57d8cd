"""What the tools say of wrong paths and missing devices: one line, and exit status 2."""

from __future__ import annotations

import shutil
import sys

import pytest

from tests.test_cli import assert_one_line_error
from tools import greedy_images, long_context, tiny_accuracy, tiny_sheet
from tools.tiny_accuracy import ROOT


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # tiny_accuracy sets it, for its processes


@pytest.mark.parametrize(("tool", "arguments", "part"), [
    (tiny_sheet, ["{}/sheet.png"], "No such file or directory"),
    (tiny_sheet, ["{}"], "give a file to write"),
    (tiny_accuracy, ["{}"], "does not exist"),
    (greedy_images, ["--backend", "emulated", "--processes", "1", "--model", "{}"], "does not exist"),
    (long_context, ["--backend", "emulated", "--only", "needles", "--checkpoint", "{}"], "No such file or directory"),
])
def test_a_wrong_path(tool, arguments, part, tmp_path, capsys):
    where = str(tmp_path / "nowhere")
    status = tool.main([argument.format(where) for argument in arguments])
    assert_one_line_error(status, *capsys.readouterr(), where, part)


def test_a_missing_device(monkeypatch, capsys):
    for module in ("pycuda", "pycuda.driver"):
        monkeypatch.setitem(sys.modules, module, None)
    status = long_context.main(["--backend", "cuda", "--only", "attention"])
    assert_one_line_error(status, *capsys.readouterr(), "pycuda")


def test_accuracy_of_a_checkpoint_without_a_template(tmp_path, capsys):
    """Processes that cannot begin would be started again and again."""
    lacking = tmp_path / "lacking"
    shutil.copytree(ROOT / "golden" / "tiny", lacking)
    (lacking / "chat_template.jinja").unlink()
    status = tiny_accuracy.main([str(lacking), "--processes", "1"])
    assert_one_line_error(status, *capsys.readouterr(), "chat_template.jinja")
