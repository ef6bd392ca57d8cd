"""The command line: convert, generate, eval, reap, calibrate, verify, bench, doctor, info.

Only typer and rich are imported to answer --help; each command imports what it needs, after the CPU has been checked.
Exit status: 0 done; 1 a check failed; 2 a mistake or an unusable file, told in one line; 130 interrupted; 141 the
reader of the output went away. Any other exception is a defect and shows its traceback.
"""

from __future__ import annotations

import sys

FAILED, MISTAKE, INTERRUPTED, READER_GONE = 1, 2, 130, 141

try:  # what follows takes most of the time of a short command: Ctrl-C must not show a traceback meanwhile
    import errno
    import os
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Annotated

    import typer

    import fermi_engine
    from fermi_engine import report
    from fermi_engine.cli import measure as cli_measure
    from fermi_engine.cli.options import (
        Activations,
        Backend,
        Decode,
        Device,
        ExpertSlots,
        Gemm,
        HugePages,
        HyperThreads,
        Json,
        KVFormat,
        Load,
        Mlock,
        Numa,
        Pin,
        Prefill,
        SessionName,
        SnapshotDir,
        SnapshotDisk,
        SnapshotRam,
        Threads,
        Vision,
        Vram,
    )
    from fermi_engine.errors import FermiError, RequestError
except KeyboardInterrupt:
    if sys.stderr is not None:
        print("interrupted", file=sys.stderr)
    sys.exit(INTERRUPTED)

PROGRAM = "fermi-engine"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # only a write can meet these

app = typer.Typer(name=PROGRAM, add_completion=False, help="Hybrid Gated-DeltaNet MoE models on old CPUs and GPUs, "
                  "every stage checked against a reference.", pretty_exceptions_enable=False, rich_markup_mode=None,
                  context_settings={"help_option_names": ["-h", "--help"]})
# typer brings its own click or uses the installed one; the base of its errors is the same by name
_ClickException = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def main() -> None:
    """Entry point of the console script."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's would spin on our cores while it is imported
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Run one command line, given without the program's name; returns the exit status."""
    try:
        _prepare_streams()
        status = _invoke(argv)
        sys.stdout.flush()
        return status
    except FermiError as err:
        return _fail(str(err))
    except BrokenPipeError:
        _drop_output()
        return READER_GONE
    except OSError as err:
        return _fail(_os_error(err))
    except (KeyboardInterrupt, typer.Abort):
        report.note("interrupted")
        return INTERRUPTED


def _prepare_streams() -> None:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started the program; also keeps its descriptor from files
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - it lives as long as we do
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if hasattr(stream, "reconfigure"):  # text that the terminal's encoding lacks must not end a run
            stream.reconfigure(errors=errors)


def _invoke(argv: Sequence[str]) -> int:
    command = typer.main.get_command(app)
    try:
        with command.make_context(PROGRAM, list(argv)) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except _ClickException as err:
        context = getattr(err, "ctx", None)
        return _fail(f"{err.format_message()}; see {context.command_path if context else PROGRAM} --help")
    return 0


def _fail(message: str) -> int:
    try:
        report.note("error: " + " ".join(message.splitlines()))
        sys.stdout.flush()
    except OSError:
        _drop_output()
    return MISTAKE


def _os_error(err: OSError) -> str:
    """One line for what no part of the program foresaw; without a name it was one of the standard streams."""
    problem = err.strerror or str(err)
    if err.filename is not None:
        return f"{problem}: {err.filename}; check the path, and that you may use it"
    if err.errno in _FULL:
        return f"{problem} (while writing output); make room, or send the output elsewhere"
    return f"{problem} (on standard input or output); check where they lead"


def _drop_output() -> None:
    """Point stdout and stderr nowhere, so that nothing fails again when they are flushed at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except (OSError, ValueError):  # replaced by something without a descriptor
            continue


def _version(wanted: bool) -> None:
    if wanted:
        print(f"{PROGRAM} {fermi_engine.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _top(context: typer.Context, version: Annotated[bool, typer.Option(
        "--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def _check_cpu() -> None:
    from fermi_engine.kernels import dispatch

    dispatch.check_cpu()


@app.command()
def convert(
    src: Annotated[Path, typer.Argument(metavar="SRC", show_default=False, help="Hugging Face checkpoint directory.")],
    dst: Annotated[Path | None, typer.Argument(metavar="DST", show_default=False, help="Pack file to write.")] = None,
    format: Annotated[str, typer.Option(metavar="q4_0|q8_0|f16|f32", help="Format of the weight matrices.")] = "q4_0",
    rules: Annotated[str | None, typer.Option(metavar="PATTERN=FORMAT,...", show_default=False,
                                              help="Formats by name, for example *.experts.*=q8_0; sensitive=5% spends "
                                                   "so many bytes where they matter most.")] = None,
    scales: Annotated[str, typer.Option(metavar="plain|mse", help="q4_0 scales as ggml's, or of least error.")] = "plain",
    moments: Annotated[Path | None, typer.Option(metavar="FILE", show_default=False,
                                                 help="With --scales mse: least error of the products, as measured by "
                                                      "fermi-engine calibrate.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DST where it exists.")] = False,
    show_rules: Annotated[bool, typer.Option("--show-rules", help="Only print each tensor's format.")] = False,
) -> None:
    """Convert a checkpoint directory into a pack.

    An interrupted conversion goes on where it was when the same command runs again.
    """
    _check_cpu()
    from fermi_engine.cli import files as cli_files

    if show_rules:
        cli_files.show_rules(src, format, rules)
    elif dst is None:
        raise RequestError("DST is missing: name the pack file to write, for example model.safetensors")
    else:
        cli_files.convert(src, dst, format, rules, overwrite, scales, moments)


@app.command()
def generate(
    model: Annotated[Path, typer.Option("--model", "-m", metavar="M", show_default=False,
                                        help="Pack, or checkpoint directory (converted once into the cache).")],
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", metavar="TEXT", show_default=False,
                                               help="One user turn; - reads it from stdin.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Talk: one message a line; /reset, /quit.")] = False,
    ids: Annotated[str | None, typer.Option(metavar="1,2,3", show_default=False,
                                            help="Continue token ids and print token ids.")] = None,
    image: Annotated[list[Path] | None, typer.Option("--image", metavar="FILE", show_default=False,
                                                     help="Shown before the first prompt. Repeatable.")] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", show_default=False, help="System message.")] = None,
    tools: Annotated[Path | None, typer.Option(metavar="FILE.json", show_default=False,
                                               help="Tool descriptions, a JSON list.")] = None,
    think: Annotated[bool | None, typer.Option("--think/--no-think", show_default=False,
                                               help="Reason first or not; default: as the template does.")] = None,
    show_reasoning: Annotated[bool, typer.Option("--show-reasoning", help="Print the reasoning, too.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, no chat template.")] = False,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", "-n", "--n-predict", metavar="N", show_default=False,
                                                   help="Most tokens to generate.")] = None,
    temp: Annotated[float | None, typer.Option("--temp", "--temperature", metavar="X", show_default=False,
                                               help="0 takes the likeliest token.")] = None,
    top_k: Annotated[int | None, typer.Option(metavar="K", show_default=False, help="0 keeps all.")] = None,
    top_p: Annotated[float | None, typer.Option(metavar="P", show_default=False)] = None,
    min_p: Annotated[float | None, typer.Option(metavar="P", show_default=False)] = None,
    presence_penalty: Annotated[float | None, typer.Option(metavar="X", show_default=False)] = None,
    frequency_penalty: Annotated[float | None, typer.Option(metavar="X", show_default=False)] = None,
    repetition_penalty: Annotated[float | None, typer.Option(metavar="X", show_default=False)] = None,
    logit_bias: Annotated[list[str] | None, typer.Option(metavar="ID=V", show_default=False,
                                                         help="Added to a logit; -inf bans. Repeatable.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", show_default=False, help="Same seed, same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", show_default=False,
                                                   help="End before this text. Repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end of the turn.")] = False,
    format: Annotated[str | None, typer.Option(metavar="q4_0|q8_0|f16|f32", show_default=False,
                                               help="For a checkpoint directory; default q4_0.")] = None,
    threads: Threads = None,
    backend: Backend = None,
    ctx_size: Annotated[int | None, typer.Option("--ctx-size", "-c", metavar="N", show_default=False,
                                                 help="Longest sequence; default: the model's own.")] = None,
    activations: Activations = "q8_0",
    kv_format: KVFormat = "f32",
    pin: Pin = False,
    hyper_threads: HyperThreads = False,
    numa: Numa = None,
    load: Load = "mmap",
    huge_pages: HugePages = False,
    mlock: Mlock = False,
    prefill: Prefill = "cpu",
    device: Device = "cuda",
    vram: Vram = None,
    expert_slots: ExpertSlots = 2,
    gemm: Gemm = None,
    decode: Decode = "cpu",
    vision: Vision = "auto",
    snapshot_ram: SnapshotRam = None,
    snapshot_dir: SnapshotDir = None,
    snapshot_disk: SnapshotDisk = "16GiB",
    session: SessionName = None,
    timing: Annotated[bool, typer.Option("--timing", help="Print times and tokens per second to stderr.")] = False,
) -> None:
    """Generate text from a prompt, a chat or token ids.

    Sampling settings not given here are those of the model's generation_config.json.
    """
    _check_cpu()
    from fermi_engine import tokenizer_ahead

    parsed = tokenizer_ahead.begin(Path(model)) if ids is None else None
    from fermi_engine.cli import generate as cli_generate
    from fermi_engine.config import EngineConfig
    from fermi_engine.sizes import parse_budget, parse_bytes

    sampling = {
        "max_tokens": max_tokens, "temperature": temp, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "presence_penalty": presence_penalty, "frequency_penalty": frequency_penalty,
        "repetition_penalty": repetition_penalty, "logit_bias": cli_generate.parse_bias(logit_bias or ()),
        "seed": seed, "stop": tuple(stop) if stop else None, "ignore_eos": ignore_eos or None,
    }
    options = EngineConfig(activations=activations, backend=backend, threads=threads, ctx_size=ctx_size, kv_format=kv_format,
                           pin=pin, hyper_threads=hyper_threads, numa=numa, load=load, huge_pages=huge_pages, mlock=mlock,
                           prefill=prefill, device=device, vram=parse_bytes("--vram", vram),
                           expert_slots=expert_slots, gemm=gemm, decode=decode, vision=vision,
                           snapshot_ram=parse_budget("--snapshot-ram", snapshot_ram), snapshot_dir=snapshot_dir,
                           snapshot_disk=parse_budget("--snapshot-disk", snapshot_disk))
    cli_generate.run(cli_generate.Request(
        model, prompt, chat, ids, tuple(image or ()), system, tools, think, show_reasoning, raw, timing, format, sampling,
        options, parsed, session))


app.command("eval")(cli_measure.evaluate)
app.command()(cli_measure.reap)
app.command()(cli_measure.calibrate)


@app.command()
def verify(
    stage: Annotated[list[str] | None, typer.Option(metavar="NAME", show_default=False,
                                                    help="Only this stage. Repeatable.")] = None,
    backend: Annotated[str | None, typer.Option(metavar="B", show_default=False,
                                                help="Force one: avx2, ssse3, scalar; emulated, cuda: GPU kernels.")] = None,
    model: Annotated[Path | None, typer.Option("--model", "-m", metavar="M", show_default=False,
                                               help="With --against: the model to compare.")] = None,
    against: Annotated[Path | None, typer.Option(metavar="DUMP", show_default=False,
                                                 help="Compare layer by layer with a dump of the reference.")] = None,
    activations: Activations = "q8_0",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Check every stage against stored results of the reference.

    On every backend this CPU runs, or the forced one; `emulated` runs the GPU's kernels on the CPU, `cuda` on the card.
    Exit status 1: a stage failed.
    """
    _check_cpu()
    from fermi_engine.cli import verify as cli_verify

    if (model is None) != (against is None):
        raise RequestError("--model and --against belong together: a model, and a dump of the reference for it")
    if model is not None and stage:
        raise RequestError("--stage chooses stored results to check; it has no meaning with --against")
    if model is not None:
        passed = cli_verify.against(model, against, backend, activations, threads, as_json)
    else:
        passed = cli_verify.stages(backend, stage or [], as_json)
    if not passed:
        raise typer.Exit(FAILED)


@app.command()
def bench(
    model: Annotated[Path, typer.Option("--model", "-m", metavar="M", show_default=False,
                                        help="Pack, or checkpoint directory (converted once into the cache).")],
    threads: Annotated[list[str] | None, typer.Option("--threads", "-t", metavar="N,...", show_default=False,
                                                      help="Thread counts to measure; default: physical cores.")] = None,
    prefill: Annotated[list[str] | None, typer.Option(metavar="P,...", show_default=False,
                                                      help="Prompt lengths; default 128, 0 leaves prefill out.")] = None,
    decode: Annotated[int, typer.Option(metavar="D", min=0, max=1 << 20,
                                        help="Tokens decoded in each repeat; 0 leaves decode out.")] = 32,
    context: Annotated[list[str] | None, typer.Option(metavar="C,...", show_default=False,
                                                      help="Tokens before the decoded ones; default 128.")] = None,
    repeat: Annotated[int, typer.Option(metavar="R", min=1, max=1000, help="Medians are over this many.")] = 3,
    kv_format: KVFormat = "f32",
    backend: Backend = None,
    activations: Activations = "q8_0",
    timing: Annotated[bool, typer.Option("--timing", help="Also where the time goes, op by op.")] = False,
    pin: Pin = False,
    hyper_threads: HyperThreads = False,
    numa: Numa = None,
    load: Load = "mmap",
    huge_pages: HugePages = False,
    mlock: Mlock = False,
    as_json: Json = False,
) -> None:
    """Measure prefill and decode, and the machine's limits beside them.

    Refuses where a stage of the backends in use is red. Random token ids, no sampling; contexts are synthetic.
    """
    _check_cpu()
    from fermi_engine.bench import Plan
    from fermi_engine.cli import bench as cli_bench
    from fermi_engine.config import EngineConfig

    lengths = tuple(n for n in cli_bench.parse_counts("--prefill", prefill or ["128"]) if n)
    plan = Plan(lengths, decode, cli_bench.parse_counts("--context", context or ["128"]), repeat, timing)
    options = EngineConfig(activations=activations, backend=backend, kv_format=kv_format, pin=pin,
                           hyper_threads=hyper_threads, numa=numa, load=load, huge_pages=huge_pages, mlock=mlock)
    cli_bench.run(model, plan, cli_bench.parse_counts("--threads", threads or ()), options, as_json)


@app.command()
def doctor() -> None:
    """Show what this machine offers and what is missing.

    CPU, backends and the ops they run, threads, memory, cache. Exit status 1: the engine cannot run here.
    """
    from fermi_engine.doctor import examine

    found = examine()
    report.facts("", found.facts)
    if found.backends:
        rows = [(name, len(ops), " ".join(ops)) for name, ops in found.backends.items()]
        report.table("", ("backend", "ops", "which"), rows, right=("ops",))
    for text in found.missing:
        print(f"missing: {text}")
    for text in found.problems:
        report.note(f"problem: {text}")
    if found.problems:
        raise typer.Exit(FAILED)


@app.command()
def info(
    model: Annotated[Path, typer.Argument(metavar="MODEL", show_default=False, help="Pack or checkpoint directory.")],
    check: Annotated[bool, typer.Option("--check", help="Read every byte: checksums, finite values.")] = False,
    as_json: Json = False,
) -> None:
    """Show a model's configuration, sizes and formats.

    Also the bytes that a generated token reads, and those of state it leaves.
    """
    _check_cpu()
    from fermi_engine.cli import files as cli_files

    cli_files.info(model, check, as_json)


if __name__ == "__main__":
    main()
