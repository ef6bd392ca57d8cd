"""What a snapshot file costs: saving and loading against a plain copy of its bytes, scanning a directory of them, and what the
token loop feels of a save.

    python tools/lab/snapshot_disk_bench.py PACK DIRECTORY [--tokens 2048]

PACK gives the geometry (its weights are read for the token loop only); DIRECTORY is on the disk to be measured, and is emptied of
what is written there.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from fermi_engine import Engine, EngineConfig  # noqa: E402
from fermi_engine.config import ModelConfig  # noqa: E402
from fermi_engine.snapshots import directory as snapshot_directory  # noqa: E402
from fermi_engine.snapshots import files as snapshot_files  # noqa: E402
from fermi_engine.snapshots.cache import Snapshot  # noqa: E402
from fermi_engine.snapshots.disk import DiskTier  # noqa: E402
from fermi_engine.snapshots.files import SnapshotFile  # noqa: E402
from fermi_engine.snapshots.prefix import NumericPath, Prefix  # noqa: E402
from fermi_engine.state import DeltaState, HybridState  # noqa: E402

REPEATS, FILES, DECODED = 5, 200, 40
KV_BLOCK = 64


def synthetic(config: ModelConfig, numeric: NumericPath, tokens: int, seed: int = 0) -> Snapshot:
    """A snapshot of random bytes."""
    rng = np.random.default_rng(seed)
    state = HybridState.fresh(config, KV_BLOCK, numeric.kv_format)
    state.reserve(tokens)
    state.position = tokens
    for layer in state.layers:
        arrays = (layer.conv, layer.recurrent) if isinstance(layer, DeltaState) else (*layer.keys, *layer.values)
        for array in arrays:
            array.reshape(-1).view(np.uint8)[:] = rng.integers(0, 256, array.nbytes, np.uint8)
    logits = rng.standard_normal(config.vocab_size).astype(np.float32)
    return Snapshot(Prefix(rng.integers(0, config.vocab_size, tokens), numeric), state, logits)


def best_s(call: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Least seconds of several calls; `before` each, untimed."""
    seconds = []
    for _ in range(REPEATS):
        before()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def forget(path: Path) -> None:
    """Have the next read come from the disk."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain_write(path: Path, data: np.ndarray) -> None:
    with open(path, "wb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())


def plain_read(path: Path, nbytes: int) -> None:
    data = np.empty(nbytes, np.uint8)
    with open(path, "rb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.readinto(view) :]


def files(config: ModelConfig, numeric: NumericPath, directory: Path, tokens: int) -> Snapshot:
    """Saving and loading one file."""
    snapshot = synthetic(config, numeric, tokens)
    path, copy = directory / "one.safetensors", directory / "plain"
    nbytes = SnapshotFile(snapshot).nbytes
    data = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)

    def save() -> None:
        file = SnapshotFile(snapshot)
        snapshot_directory.write_file(path, file.nbytes, file.write)

    def load() -> None:
        snapshot_files.read_snapshot(path, config, numeric, KV_BLOCK)

    print(f"{tokens} tokens, {nbytes / 1e6:.1f} MB")
    for name, ours, plain in (
        ("save", best_s(save), best_s(lambda: plain_write(copy, data))),
        ("load, cached", best_s(load), best_s(lambda: plain_read(copy, nbytes))),
        ("load, from disk", best_s(load, lambda: forget(path)), best_s(lambda: plain_read(copy, nbytes), lambda: forget(copy))),
    ):
        print(f"{name:16} {ours:.3f} s, plain {plain:.3f} s, ratio {ours / plain:.2f}; {nbytes / ours / 1e6:.0f} MB/s")
    path.unlink()
    copy.unlink()
    return snapshot


def scan(config: ModelConfig, numeric: NumericPath, directory: Path) -> None:
    """A directory of many files, their data holes."""
    one = SnapshotFile(synthetic(config, numeric, 16))
    first = directory / "0.safetensors"
    snapshot_directory.write_file(first, one.nbytes, one.write)
    data = first.read_bytes()
    for number in range(1, FILES):
        (directory / f"{number}.safetensors").write_bytes(data)
    prefix = Prefix([1, 2, 3], numeric)

    def look() -> None:
        DiskTier(directory, 1 << 40, config, numeric, KV_BLOCK).longest(prefix)

    tier = DiskTier(directory, 1 << 40, config, numeric, KV_BLOCK)
    tier.longest(prefix)
    time.sleep(1.1)
    print(f"{FILES} files: first look {1e3 * best_s(look):.1f} ms, later {1e3 * best_s(lambda: tier.longest(prefix)):.2f} ms")
    for path in directory.glob("*.safetensors"):
        path.unlink()


def loop(engine: Engine, numeric: NumericPath, directory: Path, tokens: int) -> None:
    """Seconds of decoded tokens with and without a save beside them, in turns."""
    session = engine.session()
    session.prefill([1, 2, 3, 4])
    for _ in range(5):
        session.decode(5)
    tier = DiskTier(directory, 1 << 40, engine.config, numeric, KV_BLOCK)
    alone, beside = [], []
    for turn in range(4):
        snapshot = synthetic(engine.config, numeric, tokens, turn)
        put_s = 0.0
        for step in range(DECODED):
            start = time.perf_counter()
            if step == DECODED // 2:
                tier.put(snapshot, lambda: None)
                put_s = time.perf_counter() - start
            busy = tier.background._thread is not None
            session.decode(6)
            (beside if busy else alone).append(time.perf_counter() - start)
        tier.flush()
    for name, seconds in (("alone", alone), ("beside a save", beside)):
        median, most = 1e3 * statistics.median(seconds), 1e3 * max(seconds)
        print(f"token {name}: median {median:.1f} ms, most {most:.1f} ms ({len(seconds)})")
    print(f"put returns in {1e6 * put_s:.0f} us; {tier.line()}")
    for path in directory.glob("*.safetensors"):
        path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pack", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    args = parser.parse_args()
    args.directory.mkdir(parents=True)
    engine = Engine.load(args.pack, config=EngineConfig(snapshot_ram=0))
    numeric = NumericPath.of(engine.pack_hash, engine.options)
    files(engine.config, numeric, args.directory, args.tokens)
    scan(engine.config, numeric, args.directory)
    loop(engine, numeric, args.directory, args.tokens)


if __name__ == "__main__":
    main()
