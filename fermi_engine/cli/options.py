"""Options that several commands share, as typer reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fermi_engine.config import MOST_THREADS

Backend = Annotated[str | None, typer.Option("--backend", metavar="B", show_default=False,
                                             help="Force a backend; default: FERMI_BACKEND, else the best.")]
Threads = Annotated[int | None, typer.Option("--threads", "-t", metavar="N", show_default=False,
                                             max=MOST_THREADS,
                                             help="Default: physical cores within affinity and CPU quota.")]
Activations = Annotated[str, typer.Option(metavar="q8_0|f32", help="q8_0: integer products; f32: dequantised weights.")]
Pin = Annotated[bool, typer.Option("--pin", help="Hold each thread on one core of its own.")]
KVFormat = Annotated[str, typer.Option(metavar="f32|f16|q8_0", help="Format of the key/value cache.")]
HyperThreads = Annotated[bool, typer.Option("--hyper-threads", help="Default --threads to all logical CPUs.")]
Numa = Annotated[str | None, typer.Option(metavar="interleave|local|off", show_default=False,
                                          help="Memory nodes to use; default: interleave where there are several.")]
Load = Annotated[str, typer.Option(metavar="mmap|resident", help="Use the pack in place, or copy it into memory.")]
HugePages = Annotated[bool, typer.Option("--huge-pages", help="Insist on 2 MiB pages, reading the pack anew where needed.")]
Mlock = Annotated[bool, typer.Option("--mlock", help="Read all weights first and keep them from being paged out.")]
Prefill = Annotated[str, typer.Option(metavar="cpu|gpu|auto", help="Who reads prompts; auto: the GPU where it is faster.")]
Device = Annotated[str, typer.Option(metavar="cuda|emulated", help="The GPU; emulated runs its kernels on the CPU.")]
Vram = Annotated[str | None, typer.Option(metavar="SIZE", show_default=False,
                                          help="Most GPU memory, such as 6GiB; default: what is free.")]
ExpertSlots = Annotated[int, typer.Option(metavar="N", help="Layers whose experts are on the GPU at a time.")]
Gemm = Annotated[str | None, typer.Option(metavar="own|vendor", show_default=False,
                                          help="Dense products on the GPU: own kernels, or cuBLAS (default of --decode gpu).")]
Decode = Annotated[str, typer.Option(metavar="cpu|gpu", help="gpu: a dense model wholly on the GPU, prefill included.")]
Vision = Annotated[str, typer.Option("--vision", metavar="cpu|gpu|auto",
                                     help="Who encodes images; auto: the GPU with --prefill gpu or --decode gpu.")]
SnapshotRam = Annotated[str | None, typer.Option("--snapshot-ram", metavar="SIZE", show_default=False,
                                                 help="Memory for states that later prompts go on from, such as 2GiB; 0: none.")]
SnapshotDir = Annotated[Path | None, typer.Option("--snapshot-dir", metavar="DIR", show_default=False,
                                                  help="Keep them on disk, too, for later runs.")]
SnapshotDisk = Annotated[str, typer.Option("--snapshot-disk", metavar="SIZE", help="Most bytes of the files there.")]
SessionName = Annotated[str | None, typer.Option("--session", metavar="NAME", show_default=False,
                                                 help="Go on from where the session of that name stands, and keep it.")]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout in place of tables.")]
