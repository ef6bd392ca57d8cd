"""The commands that measure a model over texts: eval, reap, calibrate. As cli.py, this imports nothing heavy by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fermi_engine import report
from fermi_engine.cli.options import Activations, Backend, Json, KVFormat, Threads


def evaluate(
    model: Annotated[list[Path], typer.Option("--model", "-m", metavar="M", show_default=False,
                                              help="Pack or checkpoint directory. Repeatable: a row each.")],
    text: Annotated[list[Path], typer.Option(metavar="FILE", show_default=False,
                                             help="Text, or .jsonl with text, messages or ids a line. Repeatable.")],
    against: Annotated[Path | None, typer.Option(metavar="BASE", show_default=False,
                                                 help="Compare with this model; a directory is taken as f32.")] = None,
    by: Annotated[str | None, typer.Option(metavar="class|kind|tensor", show_default=False,
                                           help="Where the loss comes from: parts put into BASE one at a time.")] = None,
    window: Annotated[int | None, typer.Option(metavar="N", min=2, show_default=False,
                                               help="Tokens read from an empty state; default 2048.")] = None,
    format: Annotated[str | None, typer.Option(metavar="q4_0|q8_0|f16|f32", show_default=False,
                                               help="For a checkpoint directory as M; default q4_0.")] = None,
    threads: Threads = None,
    backend: Backend = None,
    activations: Activations = "q8_0",
    kv_format: KVFormat = "f32",
    as_json: Json = False,
) -> None:
    """Measure perplexity, and what a model loses against another.

    Divergence both ways, agreement on the likeliest token, by position. An interrupted run goes on where it was when the
    same command runs again.
    """
    _check_cpu()
    from fermi_engine.cli import evaluate as cli_eval
    from fermi_engine.config import EngineConfig

    options = EngineConfig(activations=activations, backend=backend, threads=threads, kv_format=kv_format)
    cli_eval.run(cli_eval.Request(model, text, against, by, window, format, as_json, options))


def reap(
    model: Annotated[Path, typer.Option("--model", "-m", metavar="SRC", show_default=False,
                                        help="Pack, or checkpoint directory; DST becomes the same kind.")],
    keep: Annotated[int, typer.Option(metavar="N", show_default=False, help="Experts of each layer that stay.")],
    out: Annotated[Path, typer.Option("--output", "-o", metavar="DST", show_default=False, help="What to write.")],
    calibration: Annotated[list[Path] | None, typer.Option(
        metavar="FILE", show_default=False, help="Text, or .jsonl with text, messages or ids a line. Repeatable.")] = None,
    scores: Annotated[Path | None, typer.Option(metavar="FILE", show_default=False,
                                                help="Scores of an earlier run (DST.reap.json), in place of measuring.")] = None,
    generate: Annotated[int, typer.Option(metavar="N", min=0, help="Tokens that the model adds to each document.")] = 0,
    window: Annotated[int | None, typer.Option(metavar="N", min=2, show_default=False,
                                               help="Tokens read from an empty state; default 2048.")] = None,
    format: Annotated[str | None, typer.Option(metavar="q4_0|q8_0|f16|f32", show_default=False,
                                               help="To measure a checkpoint directory in; default q4_0.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a pack DST where it exists.")] = False,
    threads: Threads = None,
    backend: Backend = None,
    activations: Activations = "q8_0",
) -> None:
    """Leave out the experts that matter least (REAP).

    Saliency is measured while the model reads the calibration text and, with --generate, its own continuations. Kept
    experts keep their bytes; scores and choice go into DST.reap.json. An interrupted run goes on where it was.
    """
    _check_cpu()
    from fermi_engine.cli import reap as cli_reap
    from fermi_engine.compression.reap import Request
    from fermi_engine.config import EngineConfig

    options = EngineConfig(activations=activations, backend=backend, threads=threads)
    cli_reap.run(Request(model, keep, out, calibration or (), scores, generate, window, format, overwrite, options))


def calibrate(
    model: Annotated[Path, typer.Option("--model", "-m", metavar="M", show_default=False,
                                        help="Pack (f32 or q8_0), or checkpoint directory, of the model to convert.")],
    calibration: Annotated[list[Path], typer.Option(
        metavar="FILE", show_default=False, help="Text, or .jsonl with text, messages or ids a line. Repeatable.")],
    out: Annotated[Path, typer.Option("--output", "-o", metavar="DST", show_default=False, help="Moments file to write.")],
    generate: Annotated[int, typer.Option(metavar="N", min=0, help="Tokens that the model adds to each document.")] = 0,
    window: Annotated[int | None, typer.Option(metavar="N", min=2, show_default=False,
                                               help="Tokens read from an empty state; default 2048.")] = None,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Of moments held at a time; less takes more passes.")] = "2GiB",
    format: Annotated[str, typer.Option(metavar="q4_0|q8_0|f16|f32", help="To measure a checkpoint directory in.")] = "q8_0",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DST where it exists.")] = False,
    threads: Threads = None,
    backend: Backend = None,
    activations: Activations = "q8_0",
) -> None:
    """Measure what the matrices of a model read, for convert --scales mse.

    An interrupted run goes on where it was when the same command runs again.
    """
    _check_cpu()
    from fermi_engine.compression.calibrate import Request
    from fermi_engine.compression.calibrate import calibrate as measure
    from fermi_engine.config import EngineConfig
    from fermi_engine.sizes import parse_bytes

    options = EngineConfig(activations=activations, backend=backend, threads=threads)
    with report.progress("measuring", "tokens") as progress:
        said = measure(Request(model, calibration, out, generate, window, parse_bytes("--memory", memory), format, overwrite,
                               options), progress)
    print(f"{out}: {report.size(out.stat().st_size)}, second moments over {said['tokens']} tokens of {said['documents']} "
          "documents")


def _check_cpu() -> None:
    from fermi_engine.kernels import dispatch

    dispatch.check_cpu()
