"""The command line from outside: exit status, one-line errors, what each command prints, what --help imports."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fermi_engine import against, chat, memory, report, verify
from fermi_engine.cli import app as cli
from fermi_engine.cli import files as cli_files
from fermi_engine.convert import convert
from fermi_engine.engine import Engine
from fermi_engine.formats import FORMATS
from fermi_engine.info import describe_checkpoint, describe_pack, left_out
from fermi_engine.kernels import dispatch
from fermi_engine.pack import Pack, blob_name
from fermi_engine.sampling import SamplingParams
from fermi_engine.timeline import Timeline
from fermi_engine.vision.config import stored_shapes
from tools.make_checkpoint import make_checkpoint

ROOT = Path(__file__).resolve().parents[1]
SMALL = {"layers": 4, "experts": 4, "experts_per_tok": 2}
HEAVY = ("numpy", "tokenizers", "jinja2", "torch", "transformers", "cffi")
COMMANDS = ("convert", "generate", "eval", "reap", "calibrate", "verify", "bench", "doctor", "info")
GREEDY = ["--temp", "0"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of one checkpoint, with and without its tokenizer, and the packs of both."""
    root = tmp_path_factory.mktemp("models")
    make_checkpoint(root / "checkpoint", 3, **SMALL)
    make_checkpoint(root / "no-tokenizer", 3, tokenizer=False, **SMALL)
    make_checkpoint(root / "tied", 4, tied=True, family="dense", layers=4)
    for name in ("checkpoint", "no-tokenizer", "tied"):
        convert(root / name, root / f"{name}.pack")
    return root


@pytest.fixture(scope="module")
def pack(models: Path) -> Path:
    return models / "checkpoint.pack"


def cli_process(*args: str | Path, **options) -> subprocess.CompletedProcess:
    """The program in a process of its own."""
    command = [sys.executable, "-m", "fermi_engine.cli.app", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False, **options)


def run(capsys: pytest.CaptureFixture, *args: str | Path) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the program in this process."""
    status = cli.run([str(arg) for arg in args])
    return status, *capsys.readouterr()


def assert_one_line_error(status: int, out: str, err: str, *parts: str) -> None:
    assert status == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert out == ""
    for part in parts:
        assert part in err


# help and version

def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom fermi_engine.cli import app as cli\n"
        f"lines = [[], ['--help'], ['-h'], ['--version'], *([c, '--help'] for c in {COMMANDS!r})]\n"
        "statuses = [cli.run(line) for line in lines]\n"
        f"print([statuses, sorted(set({HEAVY!r}) & set(sys.modules))])\n")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == str([[0] * (4 + len(COMMANDS)), []])
    assert done.stderr == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command(command: str) -> None:
    result = CliRunner().invoke(cli.app, [command, "--help"])
    assert result.exit_code == 0
    assert f"Usage: fermi-engine {command}" in result.output or f"Usage: root {command}" in result.output


def test_help_names_every_flag_of_generate() -> None:
    text = CliRunner().invoke(cli.app, ["generate", "--help"]).output
    flags = ("--model --prompt --chat --ids --system --tools --think --no-think --show-reasoning --raw --max-tokens -n "
             "--n-predict --temp --top-k --top-p --min-p --presence-penalty --frequency-penalty --repetition-penalty "
             "--logit-bias --seed --stop --ignore-eos --format --threads --backend --ctx-size --activations --timing "
             "--kv-format --pin --hyper-threads --numa --load --huge-pages --mlock --snapshot-ram --snapshot-dir "
             "--snapshot-disk --session --image")
    assert [flag for flag in flags.split() if not re.search(rf"(?<![\w-]){flag}(?![\w-])", text)] == []


def test_generate_offers_every_format() -> None:
    text = CliRunner().invoke(cli.app, ["generate", "--help"]).output
    assert "|".join(FORMATS) in text


def test_version(capsys: pytest.CaptureFixture) -> None:
    assert run(capsys, "--version") == (0, "fermi-engine 0.1.0\n", "")


# mistakes

GENERATE = "generate --model {pack}"
MISTAKES = {  # name -> command line, and what its error line must name; {files} holds one of each bad kind
    "no such command": ("converse", ("converse", "--help")),
    "no such option": ("info {pack} --colour", ("--colour", "fermi-engine info --help")),
    "missing argument": ("info", ("MODEL", "fermi-engine info --help")),
    "not a number": (f"{GENERATE} --prompt a --threads two", ("--threads",)),
    "more threads than the pool runs": (f"{GENERATE} --prompt a --threads 257", ("--threads", "256")),
    "threads 0": (f"{GENERATE} --prompt a --threads 0", ("threads = 0",)),
    "unknown backend": (f"{GENERATE} --prompt a --backend mmx", ("'mmx'", "scalar")),
    "unknown activations": (f"{GENERATE} --prompt a --activations q3", ("'q3'",)),
    "more threads than cores, pinned": (f"{GENERATE} --prompt a --pin --threads 256", ("--pin", "256 threads", "cores")),
    "unknown memory policy": (f"{GENERATE} --prompt a --numa both", ("'both'", "'interleave', 'local' or 'off'")),
    "unknown way to load": (f"{GENERATE} --prompt a --load twice", ("'twice'", "'mmap' or 'resident'")),
    "a session name that leads elsewhere": (f"{GENERATE} --prompt a --session ../x", ("--session", "'../x'", "letters")),
    "a snapshot budget of no size": (f"{GENERATE} --prompt a --snapshot-disk lots", ("--snapshot-disk", "'lots'", "6GiB")),
    "snapshots through a file": (f"{GENERATE} --prompt a --snapshot-dir {{files}}/garbage", ("garbage", "--snapshot-dir")),
    "missing pack": ("info {files}/none.pack", ("none.pack",)),
    "not a pack": ("info {files}/garbage", ("garbage",)),
    "path through a file": ("info {files}/garbage/x", ("garbage/x",)),
    "check of a directory": ("info {models}/checkpoint --check", ("--check",)),
    "missing DST": ("convert {models}/checkpoint", ("DST",)),
    "DST exists": ("convert {models}/checkpoint {pack}", ("checkpoint.pack exists",)),
    "DST a file of SRC": ("convert {models}/checkpoint {models}/checkpoint/model.safetensors --overwrite",
                          ("checkpoint/model.safetensors is a file of the checkpoint itself", "another name")),
    "DST in no directory": ("convert {models}/checkpoint {files}/none/x", ("files/none",)),
    "a pack again": ("convert {pack} {files}/x", ("already a pack",)),
    "unknown format": ("convert {models}/checkpoint {files}/x --format q9_9", ("q9_9", "q4_0")),
    "rule without format": ("convert {models}/checkpoint {files}/x --rules lm_head", ("lm_head",)),
    "rule that matches nothing": ("convert {models}/checkpoint --show-rules --rules x*=f16", ("x*",)),
    "no prompt": (GENERATE, ("--prompt, --chat and --ids", "none")),
    "two prompts": (f"{GENERATE} --prompt a --ids 1", ("--prompt and --ids",)),
    "words for ids": (f"{GENERATE} --ids 1,two", ("'two'",)),
    "an id of 5000 digits": (f"{GENERATE} --ids 1,{'9' * 5000}", ("'9999", "...' is not a token id")),
    "no ids": (f"{GENERATE} --ids ,", ("--ids",)),
    "id outside the vocabulary": (f"{GENERATE} --ids 1,338", ("338",)),
    "system without template": (f"{GENERATE} --ids 1 --system s", ("--system", "--ids")),
    "think without template": (f"{GENERATE} --prompt a --raw --no-think", ("--think", "--raw")),
    "raw chat": (f"{GENERATE} --chat --raw", ("--chat", "--raw")),
    "bad bias": (f"{GENERATE} --prompt a --logit-bias five", ("'five'", "ID=VALUE")),
    "bias of 4000 digits": (f"{GENERATE} --prompt a --logit-bias {'9' * 4000}=1", ("'9999", "...' is not of the form")),
    "bias outside the vocabulary": (f"{GENERATE} --prompt a --logit-bias 338=1", ("338",)),
    "NaN temperature": (f"{GENERATE} --prompt a --temp nan", ("temperature = nan",)),
    "context too small": (f"{GENERATE} --prompt a --ctx-size 4", ("context of 4",)),
    "missing tools": (f"{GENERATE} --prompt a --tools {{files}}/none.json", ("files/none.json", "JSON file with a list")),
    "tools a directory": (f"{GENERATE} --prompt a --tools {{files}}", ("/files", "JSON file with a list")),
    "tools not text": (f"{GENERATE} --prompt a --tools {{files}}/garbage", ("garbage",)),
    "tools not a list": (f"{GENERATE} --prompt a --tools {{files}}/object", ("object", "list")),
    "text without tokenizer": ("generate --model {models}/no-tokenizer.pack --prompt a", ("tokenizer.json", "--ids")),
    "chat without template": ("generate --model {models}/no-tokenizer.pack --chat", ("chat template",)),
    "another format than the pack's": (f"{GENERATE} --prompt a --format f32", ("q4_0 pack",)),
    "model without dump": ("verify --model {pack}", ("--against",)),
    "stage of a dump": ("verify --model {pack} --against x --stage y", ("--stage",)),
    "unknown stage": ("verify --stage warp_drive", ("warp_drive",)),
    "missing dump": ("verify --model {pack} --against {files}/none.dump", ("none.dump",)),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bad") / "files"
    root.mkdir()
    (root / "garbage").write_bytes(b"\xff\xfe\x00 neither text nor tensors")
    (root / "object").write_text("{}")
    return root


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_status_2(name: str, models: Path, pack: Path, files: Path,
                                            capsys: pytest.CaptureFixture) -> None:
    line, parts = MISTAKES[name]
    before = sorted(files.iterdir())
    status, out, err = run(capsys, *(word.format(models=models, pack=pack, files=files) for word in line.split()))
    lines = err.splitlines()
    assert status == 2
    assert lines[-1].startswith("error: ")
    # generate says what it has loaded before it looks at ids and text
    assert [text for text in lines[:-1] if " mapped, " not in text] == []
    assert len(lines[-1]) < 1000  # whatever the user typed
    assert [part for part in parts if part not in lines[-1]] == []
    assert out == ""
    assert sorted(files.iterdir()) == before


def test_a_mistake_in_a_process_of_its_own(tmp_path: Path) -> None:
    done = cli_process("info", tmp_path / "two\nlines")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_settings_are_refused_before_the_model_is_loaded(capsys: pytest.CaptureFixture) -> None:
    status, _, err = run(capsys, "generate", "--model", "/nonexistent", "--prompt", "a", "--top-p", "2")
    assert (status, err) == (2, "error: top_p = 2.0, expected a number in 0..1\n")


def test_an_old_cpu_is_refused_before_numpy_loads(pack: Path) -> None:
    script = ("import sys\nfrom fermi_engine.cli import app as cli\nfrom fermi_engine.kernels import dispatch\n"
              "dispatch.cpu_features = lambda: frozenset({'ssse3'})\n"
              f"statuses = [cli.run(line.split()) for line in ('info {pack}', 'convert a b', 'verify', "
              f"'generate -m {pack} -p x')]\nprint(statuses, 'numpy' in sys.modules)\n")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[2, 2, 2, 2] False\n"
    assert done.stderr.count("error: this CPU lacks sse4.1, sse4.2, popcnt: x86-64-v2") == 4


def test_a_defect_keeps_its_traceback(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_files, "info", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        cli.run(["info", str(pack)])


# the output goes away, the disk is full, the user gives up

def test_a_reader_that_leaves_is_no_error(pack: Path) -> None:
    for args in (["info", pack], ["--help"], ["generate", "-m", pack, "--ids", "1,2", "-n", "8"]):
        read_end, write_end = os.pipe()
        os.close(read_end)
        with open(write_end, "wb") as gone:
            done = subprocess.run([sys.executable, "-m", "fermi_engine.cli.app", *map(str, args)], cwd=ROOT, check=False,
                                  stdout=gone, stderr=subprocess.PIPE, text=True, timeout=120)
        assert done.returncode == 141
        assert [line for line in done.stderr.splitlines() if " mapped, " not in line] == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(pack: Path) -> None:
    for args in (["info", pack], ["generate", "-m", pack, "--ids", "1,2", "-n", "8"]):
        with open("/dev/full", "wb") as full:
            done = subprocess.run([sys.executable, "-m", "fermi_engine.cli.app", *map(str, args)], cwd=ROOT, check=False,
                                  stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1] == (
            "error: No space left on device (while writing output); make room, or send the output elsewhere")
        assert "Traceback" not in done.stderr
        assert "Exception ignored" not in done.stderr


class BrokenInput(io.StringIO):
    """A stdin on a disk that fails."""

    def read(self, *_: int) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    __next__ = read


@pytest.mark.parametrize("mode", [["--prompt", "-"], ["--chat"]])
def test_input_that_cannot_be_read_is_one_line_about_input(pack: Path, monkeypatch: pytest.MonkeyPatch,
                                                           capsys: pytest.CaptureFixture, mode: list[str]) -> None:
    monkeypatch.setattr(sys, "stdin", BrokenInput())
    status, out, err = run(capsys, "generate", "-m", pack, *mode)
    assert (status, out) == (2, "")
    assert err.splitlines()[1:] == ["error: cannot read standard input: Input/output error; give the text as a file or a "
                                    "pipe, or with --prompt"]


@pytest.mark.parametrize(("error", "line"), [
    (OSError(errno.EIO, "Input/output error"), "Input/output error (on standard input or output); check where they lead"),
    (OSError(errno.EACCES, "Permission denied", "/x"), "Permission denied: /x; check the path, and that you may use it")])
def test_an_unforeseen_system_error_is_one_line_with_a_remedy(monkeypatch: pytest.MonkeyPatch, error: OSError, line: str,
                                                              capsys: pytest.CaptureFixture) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(cli_files, "info", fail)
    assert_one_line_error(*run(capsys, "info", "x"), f"error: {line}\n")


def test_a_link_to_nowhere_in_a_checkpoint_is_one_line(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("FERMI_CACHE", str(tmp_path / "cache"))
    source = Path(shutil.copytree(models / "checkpoint", tmp_path / "c"))
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.json").symlink_to(tmp_path / "nowhere")
    for line in (["convert", source, tmp_path / "p"], ["info", source], ["generate", "-m", source, "--ids", "1"]):
        assert_one_line_error(*run(capsys, *line), "c/tokenizer.json", "; ")


def closed(redirection: str, *args: str | Path) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the program with a stream closed by the shell."""
    words = [sys.executable, "-m", "fermi_engine.cli.app", *map(str, args)]
    done = subprocess.run(["sh", "-c", f'exec "$@" {redirection}', "sh", *words], cwd=ROOT, capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


def test_closed_streams_are_no_defect(pack: Path) -> None:
    line = ["generate", "-m", pack, "--ids", "1,2", "-n", "4", *GREEDY, "--ignore-eos"]
    status, out, err = closed("", *line)
    assert (status, out.count(","), err.count("\n")) == (0, 3, 1)
    assert closed("<&-", *line) == (0, out, err)
    assert closed(">&-", *line) == (0, "", err)
    assert closed("2>&-", *line) == (0, out, "")
    assert closed("<&- >&- 2>&-", *line) == (0, "", "")
    assert closed("<&-", "generate", "-m", pack, "--chat")[:2] == (0, "")
    assert closed("2>&-", "info", "/nonexistent") == (2, "", "")
    assert closed(">&-", "--help") == (0, "", "")


def test_a_note_does_not_move_to_stdout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    report.note("loaded")
    with report.progress("working") as step:
        step(1, 2, "x")
    monkeypatch.undo()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("module", ["typer", "fermi_engine.report", "fermi_engine.cli.files"])
def test_interrupt_while_modules_load_is_one_line(module: str) -> None:
    """The start is half of a short command's time."""
    script = ("import sys\n"
              "class Interrupt:\n"
              "    def find_spec(self, name, *_):\n"
              f"        if name == {module!r}: raise KeyboardInterrupt\n"
              "sys.meta_path.insert(0, Interrupt())\n"
              "sys.argv = ['fermi-engine', 'info', '/nonexistent']\n"
              "from fermi_engine.cli.app import main\n"
              "main()\n")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_interrupt_ends_with_one_line_and_status_130(pack: Path) -> None:
    command = [sys.executable, "-m", "fermi_engine.cli.app", "generate", "-m", str(pack), "--ids", "1,2", "-n", "200000",
               "--ignore-eos"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(1)  # generation has begun
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.decode().splitlines()[1:] == ["interrupted"]


# convert and info

def test_convert_writes_the_pack_and_says_what_it_holds(models: Path, tmp_path: Path,
                                                        capsys: pytest.CaptureFixture) -> None:
    status, out, err = run(capsys, "convert", models / "checkpoint", tmp_path / "m", "--format", "q8_0",
                           "--rules", "*.experts.down_proj=q4_0,lm_head.weight=f16")
    assert (status, err) == (0, "")
    with Pack.open(tmp_path / "m") as made:
        formats = made.info()["formats"]
    assert set(formats) == {"q8_0", "q4_0", "f16", "f32"}
    for name, row in formats.items():
        assert re.search(rf"^ *{name} +{row['tensors']} +{row['weights']:,} +{re.escape(report.size(row['bytes']))}$",
                         out, re.MULTILINE)
    assert f"{tmp_path / 'm'}: {report.size((tmp_path / 'm').stat().st_size)}, " in out
    assert "left out of the checkpoint: mtp 5" in out


def test_convert_overwrites_only_when_told(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    target = tmp_path / "m"
    target.write_text("precious")
    assert run(capsys, "convert", models / "checkpoint", target)[0] == 2
    assert target.read_text() == "precious"
    assert run(capsys, "convert", models / "checkpoint", target, "--overwrite")[0] == 0
    Pack.open(target).close()


def test_show_rules_prints_the_table_and_converts_nothing(models: Path, tmp_path: Path,
                                                          capsys: pytest.CaptureFixture) -> None:
    status, out, _ = run(capsys, "convert", models / "checkpoint", tmp_path / "m", "--show-rules",
                         "--rules", "*.v_proj.*=f16")
    assert status == 0
    assert re.search(r"layers\.\*\.self_attn\.v_proj\.weight +1 +f16 +rule \*\.v_proj\.\*=f16", out)
    assert re.search(r"layers\.\*\.linear_attn\.A_log +3 +f32 +decay", out)
    assert list(tmp_path.iterdir()) == []


def test_info_counts_what_the_pack_holds(pack: Path) -> None:
    with Pack.open(pack) as opened:
        said, c = describe_pack(opened), opened.config
        plain = {name: opened.matrix(name).nbytes if name in opened._layout else opened.vector(name).nbytes
                 for name in opened.names if not name.endswith(".blob")}
        experts = [sum(matrix.nbytes for matrix in opened.expert(layer, 0)) for layer in range(c.num_hidden_layers)]
        row = opened.matrix("embed_tokens.weight").plain().shape[1]
        vision_weights = sum(math.prod(shape) for shape in stored_shapes(opened.vision).values())
        assert said["formats"].keys() == opened.info()["formats"].keys()
        for name, expected in opened.info()["formats"].items():
            assert {key: said["formats"][name][key] for key in expected} == expected
    stored = sum(plain.values()) + c.num_experts * sum(experts)
    assert sum(part["bytes"] for part in said["parts"].values()) == stored
    assert said["parts"]["experts"]["bytes"] == c.num_experts * sum(experts)
    vision = sum(size for name, size in plain.items() if name.startswith("visual."))
    assert said["parts"]["vision"] == {"tensors": 21, "weights": vision_weights, "bytes": vision, "read_per_token": 0}
    assert said["read_bytes_per_token"] == (sum(plain.values()) - vision - plain["embed_tokens.weight"] + row
                                            + c.num_experts_per_tok * sum(experts))
    # three Gated DeltaNet layers of 4 heads [16, 32] and a tail of 3 columns of 2*32 + 128 channels; one of attention
    assert said["recurrent_state_bytes"] == 3 * (4 * 16 * 32 + 3 * 192) * 4
    assert said["kv_bytes_per_token"] == 1 * 2 * 2 * 32 * 4
    assert said["parameters"] == sum(part["weights"] for part in said["parts"].values())


def test_state_sizes_are_those_of_a_session(pack: Path) -> None:
    engine = Engine.load(pack)
    said = describe_pack(engine.pack)
    session = engine.session()
    session.prefill(range(5))
    sizes = {name: array.nbytes for name, array in session.state.arrays().items()}
    assert said["kv_bytes_per_token"] * 5 == sum(n for name, n in sizes.items() if name.endswith((".k", ".v")))
    recurrent = [n for name, n in sizes.items() if name.endswith((".conv", ".recurrent"))]
    assert said["recurrent_state_bytes"] == sum(recurrent)


def test_a_tied_head_is_read_whole(models: Path) -> None:
    with Pack.open(models / "tied.pack") as opened:
        said = describe_pack(opened)
        matrix = opened.matrix("embed_tokens.weight")
    assert "head" not in said["parts"]
    assert said["parts"]["embedding"]["read_per_token"] == matrix.nbytes + matrix.plain().shape[1]
    assert said["parts"]["mlp"]["read_per_token"] == said["parts"]["mlp"]["bytes"] > 0


@pytest.mark.parametrize("name", ["checkpoint", "no-tokenizer", "tied"])
def test_info_of_a_checkpoint_foretells_its_pack(models: Path, name: str) -> None:
    with Pack.open(models / f"{name}.pack") as opened:
        made = describe_pack(opened)
    foretold = describe_checkpoint(models / name)
    own = {"kind", "path", "hash", "source_bytes", "engine_version", "expert_stride_bytes", "files"}
    assert {k: v for k, v in foretold.items() if k not in own} == {k: v for k, v in made.items() if k not in own}
    assert foretold["file_bytes"] == (models / f"{name}.pack").stat().st_size
    assert sorted(foretold["files"].items()) == sorted(made["files"].items())


def test_info_prints_tables_and_json(models: Path, pack: Path, capsys: pytest.CaptureFixture) -> None:
    status, out, err = run(capsys, "info", pack, "--check")
    assert (status, err) == (0, "")
    for text in ("qwen3_5_moe_text", "default format", "q4_0", "experts", "delta net", "recurrent state", "check: ok"):
        assert text in out
    with Pack.open(pack) as opened:
        assert opened.hash in out
    assert "check: ok" not in run(capsys, "info", pack)[1]
    status, out, _ = run(capsys, "info", pack, "--json")
    assert status == 0
    with Pack.open(pack) as opened:
        assert json.loads(out) == json.loads(json.dumps(describe_pack(opened)))
    assert "a q4_0 pack of it" in run(capsys, "info", models / "checkpoint")[1]


def test_check_names_the_damaged_tensor(pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    damaged = bytearray(pack.read_bytes())
    with Pack.open(pack) as opened:
        at = opened._start + opened._entries[blob_name(2)].begin + 100
    damaged[at] ^= 1
    (tmp_path / "m").write_bytes(damaged)
    assert run(capsys, "info", tmp_path / "m")[0] == 0
    assert_one_line_error(*run(capsys, "info", tmp_path / "m", "--check"), blob_name(2))


def test_left_out_counts_by_part() -> None:
    assert left_out(["mtp.fc.weight", "model.visual.a", "model.visual.b", "lm_head.weight"]) == \
        "mtp 1, visual 2, lm_head.weight 1"
    assert left_out([]) == "nothing"


# generate

def answer_of(engine: Engine, ids: list[int], reasoning_open: bool = False, **settings) -> tuple[str, str]:
    """Answer and reasoning of a fresh session."""
    own = json.loads(engine.pack.files()["generation_config.json"])
    params = SamplingParams.from_generation_config(own, **settings)
    pieces = list(engine.generate(ids, params, reasoning_open=reasoning_open))
    return "".join(p.text for p in pieces), "".join(p.reasoning for p in pieces)


def chat_ids(engine: Engine, *messages: tuple[str, str], **options) -> list[int]:
    template = chat.find_template(engine.pack.files())
    return chat.encode(engine.tokenizer, template, [{"role": r, "content": c} for r, c in messages], **options)


def test_a_prompt_becomes_a_user_turn(pack: Path, capsys: pytest.CaptureFixture) -> None:
    engine = Engine.load(pack)
    ids = chat_ids(engine, ("system", "be"), ("user", "hi"), enable_thinking=False)
    text, _ = answer_of(engine, ids, seed=5, max_tokens=12)
    status, out, err = run(capsys, "generate", "-m", pack, "-p", "hi", "--system", "be", "--no-think", "--seed", "5",
                           "--max-tokens", "12")
    assert (status, out) == (0, text + "\n")
    assert re.fullmatch(r"qwen3_5_moe_text, q4_0, \d+ kB mapped, .*numa (off|interleave on) [^,]+, [a-z0-9+]+, "
                        r"threads \d+ of \d+ cores?, hyper-threads off.*\n", err)


def test_a_copy_in_locked_memory_says_the_same(pack: Path, capsys: pytest.CaptureFixture,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[int] = []
    monkeypatch.setattr(memory, "check_lock_limit", locked.append)  # the limit of who runs the tests may be smaller
    monkeypatch.setattr(memory, "lock", lambda data, kernel: locked.append(data.size))
    asked = ("generate", "-m", pack, "--ids", "1,2,3", "--max-tokens", "5", "--temp", "0")
    plain = run(capsys, *asked)
    status, out, err = run(capsys, *asked, "--load", "resident", "--mlock", "--hyper-threads", "--numa", "off")
    assert (status, out) == plain[:2] == (0, out)
    assert locked == [pack.stat().st_size] * 2
    assert re.search(r" kB resident, locked, numa off, .*, hyper-threads (on|not present)", err)


def test_sampling_follows_the_model_and_flags_override_it(pack: Path, capsys: pytest.CaptureFixture) -> None:
    engine = Engine.load(pack)
    ids = engine.tokenizer.encode("The wind")
    outputs = set()
    for flags, settings in (([], {}), (["--temp", "0"], {"temperature": 0.0}),
                            (["--temp", "2", "--top-k", "0"], {"temperature": 2.0, "top_k": 0}),
                            (["--temp", "2", "--top-p", "0.5"], {"temperature": 2.0, "top_p": 0.5}),
                            (["--logit-bias", "300=9", "--logit-bias", "7=-inf"],
                             {"logit_bias": {300: 9.0, 7: -math.inf}}),
                            (["--repetition-penalty", "5"], {"repetition_penalty": 5.0}),
                            (["--presence-penalty", "9"], {"presence_penalty": 9.0}),
                            (["--frequency-penalty", "9"], {"frequency_penalty": 9.0}),
                            (["--min-p", "0.5"], {"min_p": 0.5})):
        _, out, _ = run(capsys, "generate", "-m", pack, "-p", "The wind", "--raw", "--seed", "6", "-n", "24", *flags)
        assert out == answer_of(engine, ids, seed=6, max_tokens=24, **settings)[0] + "\n"
        outputs.add(out)
    assert len(outputs) >= 7  # the settings did something: two may agree by chance


def test_stop_ends_the_text(pack: Path, capsys: pytest.CaptureFixture) -> None:
    line = ["generate", "-m", pack, "-p", "The wind", "--raw", "--seed", "1", "-n", "30", "--ignore-eos"]
    whole = run(capsys, *line)[1].rstrip("\n")
    stop = whole[len(whole) // 2 :][:2]
    assert whole.index(stop) > 0
    assert run(capsys, *line, "--stop", "never seen", "--stop", stop)[1] == whole[: whole.index(stop)] + "\n"


def test_reasoning_is_shown_only_when_asked(pack: Path, capsys: pytest.CaptureFixture) -> None:
    engine = Engine.load(pack)
    close = engine.tokenizer.id_of("</think>")
    line = ["generate", "-m", pack, "-p", "hi", "--temp", "0", "-n", "16", "--ignore-eos"]
    greedy = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
    answer, reasoning = answer_of(engine, chat_ids(engine, ("user", "hi")), True, **greedy)
    assert reasoning
    assert answer == ""
    status, out, err = run(capsys, *line)
    assert (status, out) == (0, "")
    assert err.splitlines()[1] == ("no answer: all 16 tokens went into reasoning (finish: length); see it with "
                                   "--show-reasoning, or use --no-think, or raise --max-tokens")
    assert run(capsys, *line, "--show-reasoning")[1] == f"<think>{reasoning}\n"

    # a bias that closes the reasoning after some tokens
    for bias in range(1, 40):
        answer, reasoning = answer_of(engine, chat_ids(engine, ("user", "hi")), True, **greedy,
                                      logit_bias={close: bias / 4})
        if answer:
            break
    assert reasoning
    biased = [*line, "--logit-bias", f"{close}={bias / 4}"]
    assert run(capsys, *biased)[1] == answer + "\n"
    assert run(capsys, *biased, "--show-reasoning")[1] == f"<think>{reasoning}</think>{answer}\n"


def test_ids_need_no_tokenizer(models: Path, capsys: pytest.CaptureFixture) -> None:
    engine = Engine.load(models / "no-tokenizer.pack")
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    expected = [piece.id for piece in engine.generate([1, 2, 3], params)]
    for text in ("1,2,3", "1 2 3", " 1, 2,3"):
        status, out, _ = run(capsys, "generate", "-m", models / "no-tokenizer.pack", "--ids", text, "-n", "9", *GREEDY,
                             "--ignore-eos")
        assert (status, out) == (0, ",".join(map(str, expected)) + "\n")


def test_a_directory_is_converted_once_into_the_cache(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                      capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("FERMI_CACHE", str(tmp_path))
    line = ["generate", "-m", models / "checkpoint", "--ids", "1,2", "-n", "4", *GREEDY, "--format", "q8_0"]
    first = run(capsys, *line)
    made = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert run(capsys, *line) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == made
    assert "q8_0" in first[2]


def test_tools_and_think_reach_the_template(pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                            capsys: pytest.CaptureFixture) -> None:
    seen = []
    encode = chat.encode
    monkeypatch.setattr(chat, "encode", lambda *args, **options: seen.append(options) or encode(*args, **options))
    tools = [{"type": "function", "function": {"name": "f"}}]
    (tmp_path / "tools.json").write_text(json.dumps(tools))
    line = ["generate", "-m", pack, "-p", "hi", "-n", "1"]
    for flags in (["--tools", tmp_path / "tools.json", "--think"], ["--no-think"], []):
        assert run(capsys, *line, *flags)[0] == 0
    assert [(o["tools"], o["enable_thinking"], o["add_generation_prompt"]) for o in seen] == [
        (tools, True, True), (None, False, True), (None, None, True)]


def test_a_prompt_from_stdin(pack: Path) -> None:
    line = ["generate", "-m", pack, "--raw", "-n", "8", *GREEDY]
    piped = CliRunner().invoke(cli.app, [*map(str, line), "-p", "-"], input="The wind")
    assert piped.exit_code == 0
    assert piped.stdout == CliRunner().invoke(cli.app, [*map(str, line), "-p", "The wind"]).stdout != "\n"


def test_timing_counts_tokens(pack: Path, capsys: pytest.CaptureFixture) -> None:
    err = run(capsys, "generate", "-m", pack, "--ids", "1,2,3", "-n", "5", *GREEDY, "--ignore-eos", "--timing")[2]
    status, timing, parts, snapshots = err.splitlines()
    assert re.search(r", loaded in \d+\.\d\d s$", status)
    speeds = r"prefill 3 of 3 tokens, [\d.]+ tok/s \| decode 4 tokens, [\d.]+ tok/s \| finish: length"
    assert re.fullmatch(speeds, timing)
    total, *ms = map(float, re.findall(r"(?<![\w.])\d+\.\d", parts))
    assert len(ms) >= 2
    assert max(ms) > 0
    assert sum(ms) == pytest.approx(total, abs=0.05 * len(ms) + 0.05)  # each is rounded to a tenth
    assert re.fullmatch(r"snapshots: 1 in [\d.]+ kB of [\d.]+ GB, 0 tokens of 0 prompts not evaluated again, "
                        r"1 saved in [\d.]+ ms, 0 restored in 0.0 ms, 0 evicted", snapshots)
    err = run(capsys, "generate", "-m", pack, "--ids", "1,2,3", "-n", "0", "--timing")[2]
    assert err.splitlines()[1] == "prefill 0 of 3 tokens, - tok/s | decode 0 tokens, - tok/s | finish: length"


# chat

def test_chat_answers_as_if_every_turn_were_the_first(pack: Path) -> None:
    engine = Engine.load(pack)
    history = [("system", "be")]
    expected = []
    for text in ("hello", "and you?", "oh"):
        history.append(("user", text))
        answer, _ = answer_of(engine, chat_ids(engine, *history, enable_thinking=False), temperature=0.0, max_tokens=10)
        history.append(("assistant", answer))
        expected.append(answer)
    line = ["generate", "-m", pack, "--chat", "--no-think", "--system", "be", "-n", "10", *GREEDY, "--timing"]
    result = CliRunner().invoke(cli.app, [str(word) for word in line],
                                input="hello\n\nand you?\noh\n/reset\nhello\n/quit\nnot read\n")
    assert result.exit_code == 0
    assert result.stdout == "".join(f"{text}\n" for text in [*expected, expected[0]])
    counts = [tuple(map(int, found)) for found in re.findall(r"prefill (\d+) of (\d+) tokens", result.stderr)]
    assert len(counts) == 4
    first, second, _, again = counts
    assert first[0] == first[1] == again[1]
    assert again[0] == 0
    # the second prompt shares with the first all that came before the answer
    shared = len(chat_ids(engine, *history[:2], enable_thinking=False, add_generation_prompt=False))
    assert second == (second[1] - shared, second[1])


def test_chat_ends_with_its_input_and_keeps_reasoning_out_of_the_answer(pack: Path) -> None:
    line = ["generate", "-m", str(pack), "--chat", "-n", "6", *GREEDY]
    result = CliRunner().invoke(cli.app, line, input="one\ntwo")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.count("no answer: all 6 tokens") == 2


def test_a_chat_that_outgrows_the_context_is_an_error(pack: Path) -> None:
    done = cli_process("generate", "-m", pack, "--chat", "--no-think", "-n", "4", "--ctx-size", "60", *GREEDY,
                       input="hello\nhello again, my friend\nhello\n")
    assert done.returncode == 2
    assert done.stdout.count("\n") >= 1
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "context of 60" in done.stderr


def test_timeline_reuses_a_prefix_bit_for_bit(pack: Path) -> None:
    engine = Engine.load(pack)
    timeline = Timeline(engine)

    def fed(ids: list[int], mark: int | None = None) -> int:
        timeline.mark = mark
        timeline.begin()
        assert timeline.prefill(ids).tobytes() == engine.session().prefill(ids).tobytes()
        return timeline.evaluated

    assert fed([1, 2, 3, 4], mark=2) == 4
    assert fed([1, 2, 3, 4, 5]) == 1  # goes on
    assert fed([1, 2, 3, 4, 5]) == 0  # the same again: its logits are kept
    assert fed([1, 2, 9]) == 1
    assert fed([1, 3, 9]) == 3  # parts before the mark: from the start
    timeline.decode(7)
    assert fed([1, 3, 9, 7, 8]) == 1
    assert fed([1, 2]) == 2  # at the mark itself no logits are kept
    assert fed([5], mark=1) == 1


# verify

def checks(*passed: bool) -> list[verify.Row]:
    return [verify.Row(f"stage_{i}", backend, "k*u", 2.5e-7 if good else 9e-6, 1e-6, 0.25 if good else 9.0,
                       "pass" if good else "FAIL", f"y[{i}]")
            for i, good in enumerate(passed) for backend in ("ssse3", "scalar")]


def test_verify_names_the_first_stage_that_diverges(monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture) -> None:
    asked = []
    rows = checks(True, False, False)
    monkeypatch.setattr(verify, "replay", lambda *args: asked.append(args[:2]) or rows)
    status, out, err = run(capsys, "verify", "--stage", "a", "--stage", "b", "--backend", "ssse3")
    assert (status, err) == (1, "first stage that diverges: stage_1 on ssse3: k*u 9e-06, limit 1e-06 (y[1])\n")
    assert asked == [("ssse3", ["a", "b"])]
    assert re.search(r"^ *stage +backend +metric +value +limit +ratio +verdict$", out, re.MULTILINE)
    assert re.search(r"^ *stage_0 +scalar +k\*u +2\.5e-07 +1e-06 +0\.25 +pass$", out, re.MULTILINE)
    assert re.search(r"^ *stage_2 +scalar +k\*u +9e-06 +1e-06 +9 +FAIL$", out, re.MULTILINE)
    status, out, _ = run(capsys, "verify", "--json")
    said = json.loads(out)
    assert (status, said["passed"], said["first_divergence"]) == (1, False, "stage_1")
    assert said["rows"][-1] == rows[-1]._asdict()
    assert asked[-1] == (None, None)
    rows[:] = checks(True)
    assert run(capsys, "verify", "--json")[0] == 0
    monkeypatch.setattr(verify, "formless", lambda backend: ["gdn_chunk", "embed"] if backend is None else [])
    status, out, err = run(capsys, "verify")
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == "all 2 checks passed; 2 stages have no form here, see --backend cuda, emulated"
    assert run(capsys, "verify", "--backend", "scalar")[1].splitlines()[-1] == "all 2 checks passed"
    assert run(capsys, "verify", "--stage", "rope")[1].splitlines()[-1] == "all 2 checks passed"


def test_verify_replays_a_stage_on_every_backend_of_this_cpu(monkeypatch: pytest.MonkeyPatch,
                                                             capsys: pytest.CaptureFixture) -> None:
    monkeypatch.delenv("FERMI_BACKEND", raising=False)
    status, out, err = run(capsys, "verify", "--stage", "swiglu", "--stage", "exp_f32", "--json")
    assert (status, err) == (0, "")
    assert [(row["stage"], row["backend"], row["verdict"]) for row in json.loads(out)["rows"]] == [
        (stage, backend, "pass") for stage in ("exp_f32", "swiglu") for backend in dispatch.supported()]


def test_verify_runs_the_gpus_kernels_where_it_is_asked_to(capsys: pytest.CaptureFixture) -> None:
    status, out, err = run(capsys, "verify", "--stage", "gdn_chunk", "--backend", "emulated", "--json")
    assert (status, err) == (0, "")
    (row,) = json.loads(out)["rows"]
    assert (row["stage"], row["backend"], row["verdict"]) == ("gdn_chunk", "emulated", "pass")
    status, out, err = run(capsys, "verify", "--stage", "gdn_chunk", "--backend", "scalar")
    assert (status, out) == (2, "")
    assert err == "error: stage gdn_chunk has no form for scalar; it runs on emulated, cuda\n"
    status, out, err = run(capsys, "verify", "--stage", "rope", "--backend", "gpu")
    assert (status, out) == (2, "")
    assert err.startswith("error: unknown backend 'gpu'")


def test_verify_names_the_first_tensor_over_its_limit(pack: Path, monkeypatch: pytest.MonkeyPatch,
                                                      capsys: pytest.CaptureFixture) -> None:
    rows = [against.Row("embed", 0.0, 0.0, 0.0, 0), against.Row("layers.2.conv", 2e-6, 3e-6, 1e-6, 0),
            against.Row("layers.2.router_ids", 1, 2, 0, 3), against.Row("logits", math.inf, 1e-7, 1e-6, 0)]
    monkeypatch.setattr(against, "against", lambda engine, dump: rows)
    status, out, err = run(capsys, "verify", "--model", pack, "--against", "x")
    assert (status, err) == (1, "first tensor over its limit: layer 2, layers.2.conv: error 2e-06, limit 1e-06\n")
    assert re.search(r"^ *embed +0 +0 +0 +0 +0 +pass$", out, re.MULTILINE)
    assert re.search(r"^ *layers\.2\.conv +2e-06 +3e-06 +1e-06 +2 +0 +FAIL$", out, re.MULTILINE)
    assert re.search(r"^ *logits +inf +1e-07 +1e-06 +inf +0 +FAIL$", out, re.MULTILINE)
    status, out, _ = run(capsys, "verify", "--model", pack, "--against", "x", "--json")
    said = json.loads(out)
    assert (status, said["passed"], said["first_divergence"]) == (1, False, "layers.2.conv")
    assert said["rows"][3] == {"tensor": "logits", "fed": None, "free": 1e-7, "limit": 1e-6, "skipped": 0,
                               "passed": False}
    del rows[1:]
    status, out, err = run(capsys, "verify", "--model", pack, "--against", "x")
    assert (status, out.splitlines()[-1], err) == (0, "all 1 tensors within their limits", "")


# what is printed while it runs

class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_and_in_a_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    with report.progress("working") as step:
        step(1, 4, "a [b] tensor")
    assert capsys.readouterr() == ("", "")  # too short for a line
    monkeypatch.setenv("TERM", "xterm")
    screen = Terminal()
    with contextlib.redirect_stderr(screen), report.progress("working") as step:
        step(500, 2000, "a [b] tensor")
        step(1500, 2000, "a [b] tensor")
    assert "working" in screen.getvalue()
    assert "1.50 kB of 2.00 kB" in screen.getvalue()
    assert "[b]" in screen.getvalue()


def test_plain_progress_speaks_at_intervals() -> None:
    now, lines = [0.0], []
    step = report.plain_progress("reading", "tokens", lines.append, lambda: now[0])
    for second in range(12):
        now[0] = float(second)
        step(second, 40, "x")
    assert lines == ["reading: 12% (5 of 40 tokens) x", "reading: 25% (10 of 40 tokens) x"]


def test_sizes_have_three_digits() -> None:
    expected = {0: "0 B", 999: "999 B", 1000: "1.00 kB", 9994: "9.99 kB", 9996: "10.0 kB", 99_940: "99.9 kB",
                99_960: "100 kB", 999_499: "999 kB", 999_500: "1.00 MB", 35_107_000_000: "35.1 GB", 10**16: "10000 TB"}
    assert {count: report.size(count) for count in expected} == expected


def test_json_holds_no_infinity(capsys: pytest.CaptureFixture) -> None:
    report.json_document({"ratio": math.inf, "rows": [(1, math.nan, 0.5)]})
    assert json.loads(capsys.readouterr().out) == {"ratio": None, "rows": [[1, None, 0.5]]}


def test_tables_in_a_pipe_keep_long_names_whole(capsys: pytest.CaptureFixture) -> None:
    name = "layers.12.linear_attn.in_proj_qkv.weight" * 2
    report.table("", ("name", "n"), [(name, 1), ("[bold]x", 2)])
    out = capsys.readouterr().out
    assert name in out
    assert "[bold]x" in out
    assert not re.search(r" $", out, re.MULTILINE)
