"""Builds llama.cpp for two instruction sets and times it on a GGUF file, to compare this engine with.

    python tools/bench/peers.py --build --builds DIR
    python tools/bench/peers.py --gguf FILE --builds DIR --threads 1 2 --prefill 128 512 --decode 32 --json OUT

Variants: `ssse3` (compiled for SSE4.2, no AVX), `avx2` (AVX2, FMA, F16C, BMI2; weights repacked at load into a second
copy) and `avx2-plain` (the same build without repacking). Each runs in a process of its own with the Python of its
build. The file is read once before, so that it lies in the page cache. A prefill is one call on random tokens, its rate
from the median of the repetitions; decode is one call a token, behind the first prefill, its rate from the median over
the single tokens; sampling is in neither.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a script, which puts this folder on the path instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from fermi_engine import report
from fermi_engine.errors import FermiError

VERSION = "0.3.36"  # of llama-cpp-python; its llama.cpp knows the architecture qwen35moe
WORKER = Path(__file__).with_name("llama_worker.py")
READ_BYTES = 16 << 20
OFF = ("NATIVE", "BLAS", "AVX_VNNI", "AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16",
       "AMX_TILE", "AMX_INT8", "AMX_BF16")
AVX2_SETS = ("AVX", "AVX2", "FMA", "F16C", "BMI2")
# Set in a caller's environment, these would change how the peer is compiled or how its threads wait.
DROPPED = ("OMP_", "GOMP_", "KMP_", "GGML_", "LLAMA_", "CMAKE_", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "PYTHON")

Record = dict[str, Any]


class PeerError(FermiError):
    """A peer that cannot be built or run."""


@dataclass(frozen=True)
class Build:
    """One build of llama.cpp: the instruction sets beyond SSE4.2 that the compiler may use, by ggml's names."""

    name: str
    sets: tuple[str, ...]

    @property
    def cmake_flags(self) -> list[str]:
        """Exact options given to CMake; everything not named stays at its default (OpenMP and repacking on)."""
        chosen = {"SSE42": True, **{name: name in self.sets for name in AVX2_SETS}, **dict.fromkeys(OFF, False)}
        return ["-DCMAKE_BUILD_TYPE=Release", "-DLLAVA_BUILD=OFF",
                *(f"-DGGML_{name}={'ON' if on else 'OFF'}" for name, on in chosen.items())]

    def check(self, system_info: str) -> None:
        """PeerError unless llama.cpp itself reports these instruction sets and no others of the AVX family."""
        found = set(re.findall(r"(\w+) = 1", system_info))
        avx = {name for name in found if name in AVX2_SETS or name.startswith(("AVX", "AMX"))}
        if "SSSE3" not in found or avx != set(self.sets):
            raise PeerError(f"build {self.name} reports {system_info.strip()!r}, expected SSSE3 and of the AVX family "
                            f"{', '.join(self.sets) or 'nothing'}; delete its folder and run --build again")


BUILDS = {build.name: build for build in (Build("ssse3", ()), Build("avx2", AVX2_SETS))}
VARIANTS = {"ssse3": ("ssse3", True), "avx2": ("avx2", True), "avx2-plain": ("avx2", False)}  # build, repack


def environment() -> dict[str, str]:
    """The caller's environment without what would change the peer, and NumPy's own threads off."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(DROPPED)}
    return {**kept, "OPENBLAS_NUM_THREADS": "1"}


def python_of(builds: Path, name: str) -> Path:
    """Interpreter of a finished build. PeerError where there is none."""
    python = builds / name / "venv" / "bin" / "python"
    if not python.exists() or not (builds / name / "build.json").is_file():
        raise PeerError(f"build {name} is not in {builds}; make it with: "
                        f"python tools/bench/peers.py --build --builds {builds}")
    return python


def _call(*command: str | Path) -> None:
    """Run a step with its output on the terminal. PeerError when it fails."""
    try:
        subprocess.run(command, check=True, env=environment())
    except FileNotFoundError as err:
        raise PeerError(f"{command[0]} not found; building llama.cpp needs cmake and a C++ compiler "
                        "(Debian: apt install cmake g++ ninja-build)") from err
    except subprocess.CalledProcessError as err:
        shown = " ".join(map(str, command[:4]))
        raise PeerError(f"{shown} ... failed with status {err.returncode}; its messages are above; "
                        "--build goes on where it stopped") from err


def sources(builds: Path) -> Path:
    """Unpacked source package, downloaded by pip where it is not there yet."""
    folder = builds / "src" / f"llama_cpp_python-{VERSION}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        _call(sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--dest", folder.parent,
              f"llama-cpp-python=={VERSION}")
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            shutil.unpack_archive(f"{folder}.tar.gz", scratch)
            os.replace(Path(scratch) / folder.name, folder)
    return folder


def make_build(builds: Path, build: Build, jobs: int) -> None:
    """Compile, and install the Python package beside it in a virtual environment; steps already done are quick."""
    source, home = sources(builds), builds / build.name
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    _call("cmake", "-S", source, "-B", home / "build", *generator, *build.cmake_flags)
    _call("cmake", "--build", home / "build", "--target", "llama", "--parallel", str(jobs))
    if not (home / "venv" / "bin" / "pip").exists():
        _call(sys.executable, "-m", "venv", home / "venv")
    _call(home / "venv" / "bin" / "pip", "install", "--quiet", source,
          "-C", "cmake.define.LLAMA_BUILD=OFF", "-C", "cmake.define.LLAVA_BUILD=OFF")
    library = next((home / "venv" / "lib").glob("python3*/site-packages/llama_cpp")) / "lib"
    library.mkdir(exist_ok=True)
    for file in (home / "build" / "bin").glob("lib*.so*"):
        shutil.copy2(file, library / file.name)
    facts = {"llama_cpp_python": VERSION, "cmake_flags": build.cmake_flags, "compiler": _compiler(home / "build")}
    (home / "build.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _compiler(folder: Path) -> str:
    cache = (folder / "CMakeCache.txt").read_text(encoding="utf-8").splitlines()
    path = next((line.split("=", 1)[1] for line in cache if line.startswith("CMAKE_CXX_COMPILER:")), "c++")
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return (done.stdout.splitlines() or [path])[0]


def warm_cache(path: Path) -> None:
    """Read the file once. PeerError where it cannot be read."""
    try:
        with path.open("rb", buffering=0) as file:
            while file.read(READ_BYTES):
                pass
    except OSError as err:
        raise PeerError(f"{path} cannot be read ({err.strerror}); write one with tools/bench/make_gguf.py") from err


def warn_if_tight(path: Path, variant: str) -> None:
    """Say so where the page cache and a repacked copy do not fit in memory together: times would include the disk."""
    need = path.stat().st_size * (2 if variant == "avx2" else 1)
    with open("/proc/meminfo", encoding="utf-8") as file:
        free = next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    if free < need:
        report.note(f"peers: {variant} wants {report.size(need)} of memory and {report.size(free)} is available; "
                    "its times may include the disk")


def records(python: Path, job: Record) -> Iterator[Record]:
    """What the worker reports, line by line. PeerError with its last words when it fails."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        with subprocess.Popen([python, WORKER, json.dumps(job)], stdout=subprocess.PIPE, stderr=log, text=True,
                              env=environment()) as process:
            try:
                for line in process.stdout or ():
                    yield json.loads(line)
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            log.seek(0)
            lines = log.read().strip().splitlines() or ["nothing"]
            raise PeerError(f"llama.cpp on {job['gguf']} ended with status {process.returncode}; "
                            f"it said: {lines[-1].strip()}")


def with_rate(record: Record) -> Record:
    """A prefill or decode record with `tok_s`, from the median of its seconds; others as they are."""
    if record["kind"] not in ("prefill", "decode"):
        return record
    return {**record, "tok_s": record.get("tokens", 1) / statistics.median(record["seconds"])}


def run_variant(builds: Path, variant: str, job: Record, told: Callable[[str], None]) -> Record:
    """All records of one variant, with what its build was made from.

    Raises PeerError for a missing or wrong build, a worker that fails, and logits that are no numbers.
    """
    name, repack = VARIANTS[variant]
    python = python_of(builds, name)
    facts = json.loads((builds / name / "build.json").read_text(encoding="utf-8"))
    found: list[Record] = []
    for record in map(with_rate, records(python, {**job, "repack": repack})):
        found.append(record)
        if record["kind"] == "load":
            BUILDS[name].check(record["system_info"])
        if not record.get("finite", True):
            raise PeerError(f"{variant} gave logits that are no numbers on {job['gguf']}; write the file anew")
        told(f"{variant}: {describe(record)}")
    return {"variant": variant, "build": facts, "repack": repack, "records": found}


def describe(record: Record) -> str:
    """One line about a record."""
    kind = record["kind"]
    if kind == "load":
        return f"loaded in {record['seconds']:.1f} s"
    if kind == "memory":
        return f"{report.size(record['resident'])} resident, {report.size(record['anonymous'])} of it anonymous"
    where = f"{record['tokens']} tokens" if kind == "prefill" else f"behind {record['context']} tokens"
    return f"{record['threads']} threads, {kind} {where}: {record['tok_s']:.2f} tok/s"


def table(results: list[Record]) -> Any:
    """A rich table: one row for each variant and thread count."""
    from rich.table import Table

    lengths = sorted({r["tokens"] for result in results for r in result["records"] if r["kind"] == "prefill"})
    shown = Table("variant", "threads", *(f"prefill {n}, tok/s" for n in lengths), "decode, tok/s", "load, s",
                  "resident", title=f"llama.cpp of llama-cpp-python {VERSION}")
    for result in results:
        whole = {r["kind"]: r for r in result["records"] if r["kind"] in ("load", "memory")}
        timed = [r for r in result["records"] if "tok_s" in r]
        for threads in dict.fromkeys(r["threads"] for r in timed):
            rates = {r.get("tokens"): f"{r['tok_s']:.2f}" for r in timed if r["threads"] == threads}
            shown.add_row(result["variant"], str(threads), *(rates.get(n, "-") for n in [*lengths, None]),
                          f"{whole['load']['seconds']:.1f}", report.size(whole["memory"]["resident"]))
    return shown


def _cpu() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()


def compare(arguments: argparse.Namespace) -> None:
    """Time the chosen variants, print the table, write the JSON document after each variant."""
    variants = arguments.only or list(VARIANTS)
    for variant in variants:
        python_of(arguments.builds, VARIANTS[variant][0])
    job = {"gguf": str(arguments.gguf), "threads": arguments.threads, "prefill": arguments.prefill,
           "decode": arguments.decode, "repeats": arguments.repeats, "seed": arguments.seed,
           "mlock": arguments.mlock}
    document = {**job, "gguf_bytes": 0, "cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "results": []}
    for variant in variants:
        warm_cache(arguments.gguf)
        warn_if_tight(arguments.gguf, variant)
        document["gguf_bytes"] = arguments.gguf.stat().st_size
        document["results"].append(run_variant(arguments.builds, variant, job, report.note))
        if arguments.json:
            arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    report.console(sys.stdout).print(table(document["results"]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--builds", required=True, type=Path, metavar="DIR", help="folder of the two builds")
    parser.add_argument("--build", action="store_true", help="make both builds there (with --only: that one) and stop")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time (default: cores)")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="model to time")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, help="variants to run (default: all)")
    parser.add_argument("--threads", nargs="+", type=int, default=[1], metavar="N", help="thread counts (default 1)")
    parser.add_argument("--prefill", nargs="*", type=int, default=[128], metavar="P",
                        help="prompt lengths (default 128; none after the option: decode only)")
    parser.add_argument("--decode", type=int, default=32, metavar="D", help="tokens decoded one by one (default 32)")
    parser.add_argument("--repeats", type=int, default=3, metavar="R", help="times each prefill is run (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the random tokens (default 0)")
    parser.add_argument("--mlock", action="store_true", help="forbid the system to page the mapped weights out")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all figures to this file")
    return parser


def _check(arguments: argparse.Namespace) -> None:
    if not arguments.build and arguments.gguf is None:
        raise PeerError("no model to time; give --gguf FILE (tools/bench/make_gguf.py writes one), or --build")
    counts = [*arguments.threads, *arguments.prefill, arguments.repeats, arguments.jobs]
    if min(counts) < 1 or arguments.decode < 0:
        raise PeerError("--threads, --prefill, --repeats and --jobs count from 1, --decode from 0; correct the number")


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        _check(arguments)
        if arguments.build:
            chosen = {VARIANTS[variant][0] for variant in arguments.only or VARIANTS}
            for name in sorted(chosen):
                make_build(arguments.builds.absolute(), BUILDS[name], arguments.jobs)
        else:
            compare(arguments)
    except FermiError as err:
        print(f"peers: {err}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
