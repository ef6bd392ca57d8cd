"""Prunes a large pack with `fermi-engine reap` and holds it to what it promises: memory, kept bytes, router rows.

    python tools/bench/prune.py PACK --keep 128 -o DST [--tokens 256]

Calibration is random ids: what the scores say means nothing here, how the program behaves does. Prints the peak of anonymous
memory (what is resident beyond the files), and whether every kept expert has its bytes. tools/bench/make_pack.py makes the pack.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

if not __package__:  # run as a script, which puts this folder on the path instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from fermi_engine import report
from fermi_engine.compression.reap import SCORES_SUFFIX
from fermi_engine.pack import Pack, blob_name

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 2 << 30  # of anonymous memory
POLL_S = 0.05


def run(line: list[str]) -> tuple[int, dict[str, int], float]:
    """Exit status, peaks of memory by kind in bytes, and seconds."""
    start, peaks = time.perf_counter(), dict.fromkeys(("RssAnon", "RssFile", "VmHWM"), 0)
    with subprocess.Popen([sys.executable, "-m", "fermi_engine.cli.app", *line], cwd=ROOT) as process:
        while process.poll() is None:
            for kind, value in _memory(process.pid).items():
                peaks[kind] = max(peaks[kind], value)
            time.sleep(POLL_S)
    return process.returncode, peaks, time.perf_counter() - start


def _memory(pid: int) -> dict[str, int]:
    try:
        rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = (row.split() for row in rows)
    return {row[0][:-1]: int(row[1]) * 1024 for row in fields if row[0][:-1] in ("RssAnon", "RssFile", "VmHWM")}


def same_bytes(src: Path, dst: Path, scores: Path) -> int:
    """How many bytes of experts, router rows and other tensors the new pack shares with the old; AssertionError where not."""
    kept = [row["kept"] for row in json.loads(scores.read_text())["layers"]]
    counted = 0
    with Pack.open(src) as old, Pack.open(dst) as new:
        for name in new.names:
            layer = int(name.split(".")[1]) if name.startswith("layers.") else 0
            if name == blob_name(layer):
                for place, expert in enumerate(kept[layer]):
                    for a, b in zip(new.expert(layer, place), old.expert(layer, expert), strict=True):
                        assert np.array_equal(a.data, b.data), (name, expert)
                        counted += a.nbytes
            elif name.endswith(".mlp.gate.weight"):
                assert np.array_equal(new.vector(name), old.vector(name)[kept[layer]]), name
                counted += new.vector(name).nbytes
            else:
                assert np.array_equal(*(pack.matrix(name).data if name in pack.matrix_names else pack.vector(name)
                                        for pack in (new, old))), name
                counted += new.matrix(name).nbytes if name in new.matrix_names else new.vector(name).nbytes
    return counted


def main() -> int:
    """The command line; 1 where a promise is not kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pack", type=Path)
    parser.add_argument("--keep", type=int, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=256, help="of calibration")
    o = parser.parse_args()
    with Pack.open(o.pack) as pack:
        vocabulary = pack.config.vocab_size
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "ids.jsonl"
        ids = np.random.default_rng(0).integers(0, vocabulary, o.tokens).tolist()
        text.write_text(json.dumps({"ids": ids}) + "\n")
        line = ["reap", "-m", str(o.pack), "--calibration", str(text), "--keep", str(o.keep), "-o", str(o.output)]
        status, peaks, seconds = run(line)
    if status:
        return status
    print(", ".join(f"{kind} {report.size(value)}" for kind, value in peaks.items()), f"at most; {seconds:.0f} s")
    scores = o.output.with_name(o.output.name + SCORES_SUFFIX)
    print(f"{report.size(same_bytes(o.pack, o.output, scores))} of weights are the same bytes")
    return int(peaks["RssAnon"] > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
