"""Sessions by name: a conversation goes on in another process as if it had never stopped, and nothing of it is lost."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fermi_engine import Engine, EngineConfig, generate
from fermi_engine.cli import app as cli
from fermi_engine.convert import convert
from fermi_engine.errors import RequestError, SnapshotError
from fermi_engine.snapshots import named_session
from fermi_engine.snapshots.files import read_info
from fermi_engine.snapshots.named_session import NamedSession, Record, check_name
from tests.test_snapshot_disk import tier
from tests.test_snapshot_files import SIZES
from tools.make_checkpoint import make_checkpoint

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "golden" / "tiny"
TURNS = ("What is 3 plus 4?", "And 12 plus 7?", "Say it again.")
FIRST, SECOND = [5, 6, 7, 8], [9, 10]


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return convert(TINY, tmp_path_factory.mktemp("sessions") / "tiny.pack")


@pytest.fixture(scope="module")
def engine(pack):
    return Engine.load(pack, config=EngineConfig(threads=1))


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "snapshots"


@pytest.fixture
def run(pack, directory, capsys):
    """One run of the program in this process: standard output and standard error; `status` is what it must end with."""
    def runs(*args, status: int = 0, model: Path = pack, where: Path = directory) -> tuple[str, str]:
        assert cli.run(line(model, where, *args)) == status
        return capsys.readouterr()
    return runs


def line(model: Path, where: Path, *args) -> list[str]:
    options = ["generate", "--model", model, "--snapshot-dir", where, "--temp", "0", "--threads", "1", *args]
    return [str(option) for option in options]


def process(*args: str, **options) -> subprocess.Popen:
    command, pipe = [sys.executable, "-m", "fermi_engine.cli.app", *args], subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, **options)


def ids_text(ids) -> str:
    return ",".join(map(str, ids))


def greedy(engine: Engine, ids, count: int) -> list[int]:
    """What follows, without any session."""
    return generate.greedy(engine.session(), ids, count, engine.eos_ids)


def evaluated(err: str) -> int:
    return int(re.search(r"prefill (\d+) of", err)[1])


def session_file(directory: Path, name: str = "s") -> Path:
    return directory / "sessions" / f"{name}.safetensors"


def record_of(directory: Path, name: str = "s") -> dict:
    return json.loads(read_info(session_file(directory, name)).extra["conversation"])


def assert_refused(err: str, *parts: str) -> None:
    assert err.startswith("error: ") or "\nerror: " in err
    assert err.count("error: ") == 1
    for part in parts:
        assert part in err


# going on


def test_token_ids_go_on_in_another_run(run, engine, directory):
    first = greedy(engine, FIRST, 6)
    second = greedy(engine, [*FIRST, *first, *SECOND], 6)
    assert run("--ids", ids_text(FIRST), "-n", 6, "--session", "s")[0] == ids_text(first) + "\n"
    out, err = run("--ids", ids_text(SECOND), "-n", 6, "--session", "s", "--timing")
    assert out == ids_text(second) + "\n"
    assert evaluated(err) == 1 + len(SECOND)  # the last token of the answer had not gone in
    assert record_of(directory) == {"ids": [*FIRST, *first, *SECOND, *second], "messages": None, "tools": None, "images": []}


def test_an_answer_that_was_cut_goes_on(run, engine, directory):
    """With nothing new to evaluate but the last token; with nothing at all where that had gone in."""
    whole = greedy(engine, FIRST, 12)
    run("--ids", ids_text(FIRST), "-n", 5, "--session", "s")
    out, err = run("-n", 7, "--session", "s", "--timing")
    assert record_of(directory)["ids"] == [*FIRST, *whole]
    assert out.rstrip("\n") == engine.tokenizer.decode(whole[5:]).rstrip("\n")
    assert evaluated(err) == 1


def test_a_finished_answer_repeats_its_end_without_evaluating_anything(run, engine, directory):
    """The logits of the last token are kept."""
    run("--prompt", "What is 3+4?", "--no-think", "--session", "s")
    before = record_of(directory)
    assert len(before["messages"]) == 2
    out, err = run("--session", "s", "--timing")
    assert (out, evaluated(err)) == ("", 0)
    assert "decode 0 tokens" in err
    assert record_of(directory) == before


GPU = ["--prefill", "gpu", "--device", "emulated", "--activations", "f32"]


def test_a_chat_in_one_process_and_in_three_says_the_same(run, monkeypatch, tmp_path):
    for number, options in enumerate((["--no-think"], ["--think", "--show-reasoning"], ["--system", "Be short.", "--no-think"],
                                      ["--no-think", *GPU])):
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(TURNS)))
        whole = run("--chat", "-n", 15, *options, where=tmp_path / f"whole{number}")[0]
        parts = [run("--prompt", turn, "-n", 15, "--session", f"s{number}", *options)[0] for turn in TURNS]
        assert "".join(parts) == whole


def test_a_later_turn_evaluates_what_is_new_only(run, directory):
    """The prompt up to the end of the last question is found again, also where the reasoning has left the history."""
    run("--prompt", TURNS[0], "--think", "-n", 60, "--session", "s")
    first = len(record_of(directory)["ids"])
    err = run("--prompt", TURNS[1], "--think", "-n", 1, "--session", "s", "--timing")[1]
    answer = record_of(directory)["messages"][1]
    assert answer["reasoning_content"]
    assert evaluated(err) < first
    prompt = int(re.search(r"of (\d+) tokens", err)[1])
    question = run("--prompt", TURNS[0], "--think", "-n", 0, "--session", "other", "--timing")
    shared = len(record_of(directory, "other")["ids"])
    assert evaluated(err) <= prompt - shared + 8  # what asks for the answer is not part of the history
    assert question[0] == ""


def test_a_chat_session_goes_on_as_a_chat(run, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(TURNS)))
    whole = run("--chat", "--no-think", "-n", 40, where=tmp_path / "whole")[0]
    parts = []
    for turns in (TURNS[:1], TURNS[1:]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(turns)))
        parts.append(run("--chat", "--no-think", "-n", 40, "--session", "s")[0])
    assert "".join(parts) == whole


def test_reset_begins_the_session_again(run, monkeypatch, directory):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{TURNS[0]}\n/reset\n{TURNS[1]}"))
    run("--chat", "--no-think", "-n", 10, "--system", "Be short.", "--session", "s")
    messages = record_of(directory)["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert messages[1]["content"] == TURNS[1]


def test_the_system_message_and_the_tools_stay(run, directory, tmp_path):
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([{"type": "function", "function": {"name": "f", "parameters": {}}}]))
    run("--prompt", TURNS[0], "-n", 2, "--system", "Be short.", "--tools", tools, "--session", "s")
    run("--prompt", TURNS[1], "-n", 2, "--session", "s")
    record = record_of(directory)
    assert [message["role"] for message in record["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert record["tools"] == json.loads(tools.read_text())
    run("--prompt", TURNS[1], "-n", 2, "--system", "Be short.", "--tools", tools, "--session", "s")
    assert_refused(run("--prompt", TURNS[1], "--system", "Be long.", "--session", "s", status=2)[1],
                   "--system is not that of session 's'; leave it out or choose another name")
    tools.write_text("[]")
    assert_refused(run("--prompt", TURNS[1], "--tools", tools, "--session", "s", status=2)[1], "--tools is not that of")


@pytest.mark.parametrize("options", [["--kv-format", "f16"], ["--activations", "f32"], ["--snapshot-ram", "0"]])
def test_a_session_goes_on_under_other_settings(run, engine, options):
    """Its state is of no use then, what was said is; one line says so."""
    run("--ids", ids_text(FIRST), "-n", 6, "--session", "s")
    settings = {"--kv-format": "kv_format", "--activations": "activations"}
    changes = {settings[options[0]]: options[1]} if options[0] in settings else {}
    other = Engine.load(engine.pack.path, config=EngineConfig(threads=1, **changes))
    before = [*FIRST, *greedy(engine, FIRST, 6), *SECOND]
    out, err = run("--ids", ids_text(SECOND), "-n", 6, "--session", "s", "--timing", *options)
    assert out == ids_text(greedy(other, before, 6)) + "\n"
    assert evaluated(err) == len(before)
    assert err.count("no use here") == bool(changes)


def test_a_damaged_state_is_evaluated_again(run, engine, directory):
    """The header holds, so what was said does; the state does not, so it is not used."""
    run("--ids", ids_text(FIRST), "-n", 6, "--session", "s")
    for path in directory.glob("*.safetensors"):
        path.unlink()
    data = bytearray(session_file(directory).read_bytes())
    data[len(data) // 2] ^= 1
    session_file(directory).write_bytes(data)
    before = [*FIRST, *greedy(engine, FIRST, 6), *SECOND]
    out, err = run("--ids", ids_text(SECOND), "-n", 6, "--session", "s", "--timing")
    assert out == ids_text(greedy(engine, before, 6)) + "\n"
    assert evaluated(err) == len(before)
    assert err.count("is damaged: tensor") == 1


def test_processes_of_their_own(pack, directory, engine):
    first = greedy(engine, FIRST, 6)
    second = greedy(engine, [*FIRST, *first, *SECOND], 6)
    for ids, expected in ((FIRST, first), (SECOND, second)):
        out, err = process(*line(pack, directory, "--ids", ids_text(ids), "-n", 6, "--session", "s")).communicate(timeout=60)
        assert out == ids_text(expected) + "\n", err


def test_where_sessions_lie_by_default(run, pack, tmp_path, monkeypatch, capsys):
    for name, value, folder in (("FERMI_SNAPSHOTS", tmp_path / "a", tmp_path / "a"),
                                ("XDG_STATE_HOME", tmp_path / "b", tmp_path / "b" / "fermi_engine"),
                                ("HOME", tmp_path / "c", tmp_path / "c" / ".local" / "state" / "fermi_engine")):
        for other in ("FERMI_SNAPSHOTS", "XDG_STATE_HOME"):
            monkeypatch.delenv(other, raising=False)
        monkeypatch.setenv(name, str(value))
        assert cli.run(["generate", "-m", str(pack), "--ids", "5", "-n", "1", "--session", "s"]) == 0
        assert session_file(folder).is_file()


def test_snapshots_without_a_session_serve_the_next_run(run):
    first = run("--prompt", TURNS[0], "--no-think", "--timing")
    again = run("--prompt", TURNS[0], "--no-think", "--timing")
    assert again[0] == first[0]
    assert (evaluated(first[1]) > 0, evaluated(again[1])) == (True, 0)
    assert "snapshots on disk: 1 loaded" in again[1]


# what is refused


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/etc/passwd", "a/b", "a\0b", ".hidden", "-x", "a b", "x\n", "é", "~",
                                  "a\\b", "x" * 65, "x" * 100_000, "con:", "$(id)"])
def test_a_name_cannot_leave_the_directory(name, tmp_path, pack, capsys):
    with pytest.raises(RequestError, match=r"--session .* is no name: give 1 to 64 letters"):
        check_name(name)
    if "\0" not in name:
        assert cli.run(["generate", "-m", str(pack), "--ids", "5", "--snapshot-dir", str(tmp_path), f"--session={name}"]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: --session ")
        assert err.count("\n") == 1
        assert len(err) < 300
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a", "A-1_b.c", "x" * 64, "0"])
def test_names(name):
    assert check_name(name) == name


def test_links_are_not_followed(run, directory, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (directory / "sessions").mkdir(parents=True)
    session_file(directory).symlink_to(outside / "s")
    assert_refused(run("--ids", "5", "-n", 1, "--session", "s", status=2)[1], "s.safetensors is a link", "choose another name")
    session_file(directory).unlink()
    (directory / "sessions" / ".s.lock").symlink_to(outside / "lock")
    assert_refused(run("--ids", "5", "-n", 1, "--session", "s", status=2)[1], "cannot be kept in")
    (directory / "sessions" / ".s.lock").unlink()
    (directory / "sessions").rmdir()
    (directory / "sessions").symlink_to(outside)
    assert_refused(run("--ids", "5", "-n", 1, "--session", "s", status=2)[1], "sessions is a link, which may lead out")
    assert list(outside.iterdir()) == []


def test_a_session_of_another_model_is_refused(run, directory, tmp_path):
    run("--ids", "5", "-n", 1, "--session", "s")
    before = session_file(directory).read_bytes()
    other = convert(make_checkpoint(tmp_path / "checkpoint", seed=1, **SIZES), tmp_path / "other.pack")
    out, err = run("--ids", "5", "-n", 1, "--session", "s", status=2, model=other)
    assert_refused(err, "session 's' belongs to another model (pack ", "continue it with that model or choose another name")
    assert out == ""
    assert session_file(directory).read_bytes() == before


@pytest.mark.parametrize("content", ["half", "noise", "empty", "snapshot", "directory"])
def test_what_is_no_session_is_refused_and_left_alone(run, directory, content):
    run("--ids", "5", "-n", 1, "--session", "s", "--snapshot-ram", "1GB")
    path, other = session_file(directory), next(directory.glob("*.safetensors"))
    data = {"half": path.read_bytes()[:-100], "noise": os.urandom(10_000), "empty": b"", "snapshot": other.read_bytes()}
    path.unlink()
    if content == "directory":
        path.mkdir()
    else:
        path.write_bytes(data[content])
    assert_refused(run("--ids", "5", "-n", 1, "--session", "s", status=2)[1], "session 's'", "choose another name")
    assert path.is_dir() or path.read_bytes() == data[content]


@pytest.mark.parametrize("record", [
    {}, {"ids": 5}, {"ids": ["x"]}, {"ids": [], "messages": [{}]}, {"ids": [], "messages": [{"role": "user", "content": 5}]},
    {"ids": [], "messages": "text"}, {"ids": [], "tools": [5]}, {"ids": [], "more": 1}, [], 5,
])
def test_a_record_of_another_form_is_refused(engine, directory, record, monkeypatch):
    session = engine.session()
    session.prefill(FIRST)
    monkeypatch.setattr(named_session, "asdict", lambda _: record)
    named = NamedSession(tier(engine, directory), "s")
    named.save(session.snapshot(), Record([]))
    named.close()
    with pytest.raises(SnapshotError, match="holds a snapshot but no conversation"):
        NamedSession(tier(engine, directory), "s")


def test_a_session_is_one_processs_at_a_time(engine, directory):
    first = NamedSession(tier(engine, directory), "s")
    other = NamedSession(tier(engine, directory), "other")
    with pytest.raises(SnapshotError, match="session 's' is in use by another process"):
        NamedSession(tier(engine, directory), "s")
    first.close()
    NamedSession(tier(engine, directory), "s").close()
    other.close()


def test_tokens_and_messages_do_not_mix(run):
    run("--ids", "5", "-n", 1, "--session", "tokens")
    run("--prompt", "a", "-n", 1, "--session", "chat")
    err = run("--prompt", "a", "--session", "tokens", status=2)[1]
    assert_refused(err, "session 'tokens' is made of tokens", "--ids or --raw")
    err = run("--ids", "5", "--session", "chat", status=2)[1]
    assert_refused(err, "session 'chat' is made of messages", "--prompt or --chat")
    run("--prompt", "a", "--raw", "-n", 1, "--session", "tokens")


def test_nothing_to_go_on_from(run):
    assert_refused(run("--session", "s", status=2)[1], "session 's' has said nothing yet")
    assert_refused(run("--session", "s", "--ids", "5", "--chat", status=2)[1], "exactly one of")


def test_a_directory_that_cannot_be_used(run, tmp_path):
    (tmp_path / "file").touch()
    assert_refused(run("--ids", "5", "--session", "s", where=tmp_path / "file", status=2)[1], "cannot use", "--snapshot-dir")


# interruptions


def test_a_failed_save_keeps_what_was_there_and_ends_with_an_error(run, directory, monkeypatch):
    run("--ids", ids_text(FIRST), "-n", 3, "--session", "s")
    before = session_file(directory).read_bytes()
    with monkeypatch.context() as refusing:
        def refuse(*args):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        refusing.setattr(os, "fsync", refuse)
        out, err = run("--ids", ids_text(SECOND), "-n", 3, "--session", "s", status=2)
    assert out.count(",") == 2  # the answer is there all the same
    assert_refused(err, "session 's' was not saved and stands where it stood: No space left on device; make room")
    assert session_file(directory).read_bytes() == before
    run("--ids", ids_text(SECOND), "-n", 3, "--session", "s")


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_answer_loses_nothing(pack, directory, run, engine, sign):
    """While it comes, and while it is saved; then the session goes on from where it stood."""
    run("--ids", ids_text(FIRST), "-n", 3, "--session", "s")
    before = session_file(directory).read_bytes()
    running = process(*line(pack, directory, "--ids", ids_text(SECOND), "-n", 100_000, "--ignore-eos", "--session", "s"))
    running.stdout.read(20)  # it is at it
    running.send_signal(sign)
    running.communicate(timeout=60)
    assert running.returncode == (130 if sign == signal.SIGINT else -signal.SIGKILL)
    assert session_file(directory).read_bytes() == before
    expected = greedy(engine, [*FIRST, *greedy(engine, FIRST, 3), *SECOND], 3)
    assert run("--ids", ids_text(SECOND), "-n", 3, "--session", "s")[0] == ids_text(expected) + "\n"


def test_kill_9_while_a_session_is_saved(engine, directory):
    """The session stands at the answer before or at the one after it, whole."""
    code = f"""
from pathlib import Path
from fermi_engine import Engine, EngineConfig
from fermi_engine.snapshots import sealed_file
from fermi_engine.snapshots.named_session import NamedSession, Record
from tests.test_snapshot_disk import tier
sealed_file.CHUNK_BYTES = 500  # many writes
engine = Engine.load({str(engine.pack.path)!r}, config=EngineConfig(threads=1))
session, named = engine.session(), NamedSession(tier(engine, Path({str(directory)!r})), "s")
for number in range(1, 10_000):
    session.decode(5)
    named.save(session.snapshot(), Record([5] * number))
    print(number, flush=True)
"""
    order, last = random.Random(3), 0
    for _ in range(5):
        running = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(3):
            running.stdout.readline()
        time.sleep(order.uniform(0, 0.1))
        running.kill()
        last = int((running.communicate()[0].split() or ["3"])[-1])
        at = tier(engine, directory)
        named = NamedSession(at, "s")
        stands = len(named.record.ids)
        assert last - 2 <= stands <= last + 1
        prefix = engine.session()
        prefix.prefill([5] * stands)
        loaded = at.load(at.longest(type(prefix.prefix)([5] * (stands + 1), prefix.path)))
        assert loaded.position == stands
        assert all(a.tobytes() == b.tobytes() for a, b in zip(loaded.state.arrays().values(), prefix.state.arrays().values(),
                                                              strict=True))
        named.close()
