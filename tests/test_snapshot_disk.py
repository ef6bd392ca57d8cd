"""The directory of snapshots: what is found after a restart, what room it takes, and that nothing on the disk can do harm."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from fermi_engine import Engine, EngineConfig
from fermi_engine.convert import convert
from fermi_engine.errors import SnapshotError
from fermi_engine.snapshots import directory as snapshot_directory
from fermi_engine.snapshots import disk as snapshot_disk
from fermi_engine.snapshots import sealed_file
from fermi_engine.snapshots.cache import Snapshot
from fermi_engine.snapshots.disk import DiskTier
from fermi_engine.snapshots.files import SnapshotFile
from fermi_engine.snapshots.prefix import Prefix
from tests.test_snapshot_files import SIZES, forged, ids_for, numeric, raw, save, snapshot_of
from tools.make_checkpoint import make_checkpoint

ROOT = Path(__file__).resolve().parents[1]
PLENTY = 1 << 30
KILLS = 20


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    directory = tmp_path_factory.mktemp("disk")
    return convert(make_checkpoint(directory / "checkpoint", seed=6, key_dim=32, **SIZES), directory / "model.pack")


@pytest.fixture(scope="module")
def engine(pack):
    return Engine.load(pack, config=EngineConfig(threads=1))


@pytest.fixture(scope="module")
def some(engine):
    """Snapshots of five sequences of 20 tokens that have nothing in common, all of one size."""
    return [snapshot_of(engine, ids_for(engine, 20, seed)) for seed in range(5)]


def tier(engine: Engine, directory: Path, budget: int = PLENTY, notes: list[str] | None = None, **options) -> DiskTier:
    said = [] if notes is None else notes
    return DiskTier(directory, budget, engine.config, numeric(engine), engine.options.kv_block, said.append, **options)


class Releases(list):
    """Counts how often each snapshot was given back."""

    def put(self, into: DiskTier, snapshot: Snapshot) -> None:
        self.append(0)
        place = len(self) - 1

        def release() -> None:
            self[place] += 1

        into.put(snapshot, release)


def put_all(into: DiskTier, *snapshots: Snapshot) -> None:
    released = Releases()
    for snapshot in snapshots:
        released.put(into, snapshot)
        into.flush()
    assert released == [1] * len(snapshots)


def found(at: DiskTier, prefix: Prefix) -> Snapshot | None:
    stored = at.longest(prefix)
    return None if stored is None else at.load(stored)


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.name != snapshot_directory._LOCK)


def longer(engine: Engine, snapshot: Snapshot) -> Prefix:
    return Prefix([*snapshot.tokens, 1], numeric(engine))


# finding


def test_snapshots_are_there_after_a_restart(engine, some, tmp_path):
    first = tier(engine, tmp_path)
    put_all(first, *some)
    assert (first.stats.saved, first.stats.saved_bytes) == (5, sum(path.stat().st_size for path in files(tmp_path)))
    notes = []
    second = tier(engine, tmp_path, notes=notes)
    for snapshot in some:
        assert raw(found(second, longer(engine, snapshot))) == raw(snapshot)
    assert second.stats.loaded == 5
    assert notes == []


def test_the_longest_beginning_is_found(engine, tmp_path):
    ids = ids_for(engine, 40)
    held = {count: snapshot_of(engine, ids[:count], with_logits=count != 30) for count in (1, 10, 30)}
    at = tier(engine, tmp_path)
    put_all(at, *held.values())

    def position(*tokens):
        stored = at.longest(Prefix(tokens, numeric(engine)))
        return stored and stored.position

    assert position(*ids) == 30
    assert position(*ids[:31]) == 30
    assert position(*ids[:30]) == 10  # all of it counts only where its logits are there
    assert position(*ids[:10]) == 10
    assert position(*ids[:9], ids[9] ^ 1, *ids[10:]) == 1
    assert position(ids[0] ^ 1, *ids[1:]) is None
    assert at.longest(Prefix(ids, dataclasses.replace(numeric(engine), activations="f32"))) is None


def test_what_another_process_saves_is_found(engine, some, tmp_path):
    mine, other = tier(engine, tmp_path), tier(engine, tmp_path)
    assert found(mine, longer(engine, some[0])) is None
    put_all(other, some[0])
    assert raw(found(mine, longer(engine, some[0]))) == raw(some[0])
    files(tmp_path)[0].unlink()
    assert mine.longest(longer(engine, some[0])) is None


def test_a_snapshot_that_is_there_is_not_written_again(engine, some, tmp_path):
    at = tier(engine, tmp_path)
    put_all(at, some[0])
    before = files(tmp_path)[0].stat()
    put_all(at, some[0])
    put_all(tier(engine, tmp_path), some[0])
    assert files(tmp_path)[0].stat().st_ino == before.st_ino
    assert (at.stats.saved, at.stats.declined) == (1, 1)


def test_logits_join_a_snapshot_that_had_none(engine, some, tmp_path):
    at = tier(engine, tmp_path)
    put_all(at, dataclasses.replace(some[0], logits=None))
    assert at.longest(some[0].prefix) is None
    put_all(at, some[0])
    assert len(files(tmp_path)) == 1
    assert raw(found(at, some[0].prefix)) == raw(some[0])


def test_boundaries_are_left_to_memory(engine, some, tmp_path):
    at = tier(engine, tmp_path)
    put_all(at, dataclasses.replace(some[0], kind="block"))
    assert files(tmp_path) == []
    assert at.stats.declined == 1


def test_the_headers_are_read_once(engine, some, tmp_path, monkeypatch):
    put_all(tier(engine, tmp_path), *some)
    read, seen = snapshot_disk.snapshot_files.read_info, []
    monkeypatch.setattr(snapshot_disk.snapshot_files, "read_info", lambda path: seen.append(path) or read(path))
    at = tier(engine, tmp_path)
    for _ in range(3):
        at.longest(longer(engine, some[0]))
    assert len(seen) == len(some)


def test_a_directory_is_made_for_its_owner_only(engine, some, tmp_path):
    directory = tmp_path / "a" / "b"
    put_all(tier(engine, directory), some[0])
    assert directory.stat().st_mode & 0o777 == 0o700
    assert files(directory)[0].stat().st_mode & 0o777 == 0o600


def test_a_directory_that_cannot_be_made(engine, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SnapshotError, match=r"cannot use .*/file/x for snapshots: Not a directory; .*--snapshot-dir"):
        tier(engine, tmp_path / "file" / "x")


# what does not belong there


def spoil(engine: Engine, directory: Path, outside: Path) -> list[str]:
    """One of everything that is of no use, beside what may be there; their names."""
    other = dataclasses.replace(numeric(engine), pack_hash="ab" * 32)
    ids = ids_for(engine, 7)
    good = save(directory / "a-good.safetensors", snapshot_of(engine, ids))
    data = good.read_bytes()
    for name, content in (("b-short", data[:-1]), ("c-header", data[:100]), ("d-empty", b""), ("e-noise", os.urandom(5000)),
                          ("f-flipped", data[:50] + bytes([data[50] ^ 1]) + data[51:])):
        (directory / f"{name}.safetensors").write_bytes(content)
    safetensors.numpy.save_file({"a": np.zeros(3, np.float32)}, directory / "g-foreign.safetensors")
    save(directory / "h-pack.safetensors", snapshot_of(engine, ids, prefix=Prefix(ids, other)))
    forged(directory / "i-version.safetensors", engine, metadata={"format_version": "77"})
    save(outside, snapshot_of(engine, ids))
    (directory / "j-link.safetensors").symlink_to(outside)
    (directory / "k-directory.safetensors").mkdir()
    os.mkfifo(directory / "l-pipe.safetensors")
    good.unlink()
    return [path.name for path in files(directory) if path.name[1] == "-"]


def test_files_of_no_use_cost_one_warning_and_stay(engine, some, tmp_path):
    directory = tmp_path / "snapshots"
    put_all(tier(engine, directory), some[0])
    bad = spoil(engine, directory, tmp_path / "outside.safetensors")
    before = {name: (directory / name).lstat() for name in bad}
    notes = []
    at = tier(engine, directory, notes=notes)
    for _ in range(3):
        assert raw(found(at, longer(engine, some[0]))) == raw(some[0])
        assert at.longest(Prefix(ids_for(engine, 8), numeric(engine))) is None
    put_all(at, *some)
    assert len(notes) == 1
    assert f"{len(bad)} of its {len(bad) + 1} files are of no use here and left alone: " in notes[0]
    assert any(name in notes[0] for name in bad)
    assert "\n" not in notes[0]
    assert {name: (directory / name).lstat() for name in bad} == before


def test_files_of_others_that_come_later_are_not_worth_a_word(engine, some, tmp_path):
    notes = []
    at = tier(engine, tmp_path, notes=notes)
    assert at.longest(some[0].prefix) is None
    other = dataclasses.replace(numeric(engine), kv_format="f16")
    save(tmp_path / "other.safetensors", dataclasses.replace(some[0], prefix=Prefix(some[0].tokens, other)))
    assert at.longest(some[0].prefix) is None
    assert notes == []
    (tmp_path / "noise.safetensors").write_bytes(b"x" * 99)
    assert at.longest(some[0].prefix) is None
    assert len(notes) == 1
    assert "one of its files is of no use" in notes[0]
    assert "noise.safetensors" in notes[0]


def test_a_wrong_byte_is_noticed_before_the_state_is_used(engine, tmp_path):
    """The header is right, a tensor is not: that snapshot is passed over, the shorter one serves, and a new one can be saved."""
    ids = ids_for(engine, 30)
    whole, part = snapshot_of(engine, ids), snapshot_of(engine, ids[:12])
    notes = []
    at = tier(engine, tmp_path, notes=notes)
    put_all(at, whole)
    path = files(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    put_all(at, part)
    for again in range(2):
        stored = at.longest(longer(engine, whole))
        if again == 0:
            assert stored.position == 30
            assert at.load(stored) is None
            stored = at.longest(longer(engine, whole))
        assert stored.position == 12
        assert raw(at.load(stored)) == raw(part)
    assert len(notes) == 1
    assert "damaged: tensor" in notes[0]
    put_all(at, whole)
    assert raw(found(at, longer(engine, whole))) == raw(whole)
    assert path.read_bytes() == data


def test_a_file_that_vanishes_is_a_miss(engine, some, tmp_path):
    notes = []
    at = tier(engine, tmp_path, notes=notes)
    put_all(at, some[0])
    stored = at.longest(longer(engine, some[0]))
    files(tmp_path)[0].unlink()
    assert at.load(stored) is None
    assert at.longest(longer(engine, some[0])) is None
    assert notes == []


def test_a_directory_that_vanishes_is_a_miss(engine, some, tmp_path):
    notes = []
    at = tier(engine, tmp_path / "x", notes=notes)
    put_all(at, some[0])
    stored = at.longest(longer(engine, some[0]))
    for path in (tmp_path / "x").iterdir():
        path.unlink()
    (tmp_path / "x").rmdir()
    assert at.load(stored) is None
    assert at.longest(longer(engine, some[0])) is None
    put_all(at, some[1])
    put_all(at, some[2])
    assert at.stats.failed == 2
    assert len(notes) == 1
    assert "No such file or directory" in notes[0]


def test_tokens_are_compared_and_not_only_their_digest(engine, some, tmp_path, monkeypatch):
    """A snapshot under the digest of another prefix is no hit."""
    at = tier(engine, tmp_path)
    put_all(at, some[0])
    monkeypatch.setattr(Prefix, "digest", lambda self, position=None: bytes(32))
    monkeypatch.setattr(Prefix, "digests", lambda self, positions: {position: bytes(32) for position in positions})
    at = tier(engine, tmp_path / "x")
    put_all(at, some[0])
    assert at.load(at.longest(longer(engine, some[1]))) is None


# room


class Watch:
    """The most bytes that the directory held at any call that changes it."""

    def __init__(self, directory: Path, monkeypatch) -> None:
        self.directory, self.peak = directory, 0
        for name in ("posix_fallocate", "replace", "unlink", "pwrite", "fsync"):
            monkeypatch.setattr(os, name, self._watched(getattr(os, name)))

    def _watched(self, call):
        def watched(*args, **options):
            self.look()
            done = call(*args, **options)
            self.look()
            return done
        return watched

    def look(self) -> None:
        self.peak = max(self.peak, held_bytes(self.directory))


def held_bytes(directory: Path) -> int:
    total = 0
    for entry in os.scandir(directory):
        try:
            total += entry.stat(follow_symlinks=False).st_size
        except FileNotFoundError:
            continue
    return total


@pytest.mark.parametrize("places", [1, 2.5, 3.999])
def test_the_budget_holds_at_every_instant(engine, some, tmp_path, monkeypatch, places):
    budget = int(places * SnapshotFile(some[0]).nbytes)
    at = tier(engine, tmp_path, budget)
    watch = Watch(tmp_path, monkeypatch)
    for snapshot in [*some, *some[::-1], some[2]]:
        put_all(at, snapshot)
        assert raw(found(at, longer(engine, snapshot))) == raw(snapshot)
    assert 0 < watch.peak <= budget
    assert len(files(tmp_path)) == int(places)
    assert at.stats.evicted >= 5 - int(places)


def test_a_budget_below_one_snapshot_saves_none_and_says_so_once(engine, some, tmp_path):
    notes = []
    at = tier(engine, tmp_path, SnapshotFile(some[0]).nbytes - 1, notes)
    put_all(at, *some)
    assert files(tmp_path) == []
    assert len(notes) == 1
    assert "over --snapshot-disk" in notes[0]


def test_a_file_that_another_process_is_writing_counts(engine, some, tmp_path):
    one = SnapshotFile(some[0]).nbytes
    at = tier(engine, tmp_path, int(2.5 * one))
    put_all(at, some[0])
    with open(tmp_path / ".other.safetensors.1.0.fermi-snapshot-part", "wb") as part:
        fcntl.flock(part, fcntl.LOCK_EX)
        part.truncate(one)
        put_all(at, some[1])
        assert len(files(tmp_path)) == 2
        assert at.longest(longer(engine, some[0])) is None


def test_files_of_others_count_and_are_not_removed_for_room(engine, some, tmp_path):
    other = dataclasses.replace(numeric(engine), pack_hash="ab" * 32)
    theirs = save(tmp_path / "theirs.safetensors", dataclasses.replace(some[0], prefix=Prefix(some[0].tokens, other)))
    one = SnapshotFile(some[0]).nbytes
    notes = []
    at = tier(engine, tmp_path, int(2.5 * one), notes)
    put_all(at, some[1], some[2])
    assert theirs in files(tmp_path)
    assert len(files(tmp_path)) == 2
    assert found(at, longer(engine, some[1])) is None
    at = tier(engine, tmp_path, int(1.5 * one), notes)
    files(tmp_path)[0 if files(tmp_path)[1] == theirs else 1].unlink()
    put_all(at, some[3])
    assert files(tmp_path) == [theirs]
    assert "full of files of other models" in notes[-1]


def test_roots_and_what_was_used_lately_stay(engine, some, tmp_path):
    root = dataclasses.replace(some[0], kind="root")
    budget = int(3.5 * SnapshotFile(some[0]).nbytes)
    at = tier(engine, tmp_path, budget)
    for age, snapshot in enumerate((root, some[1], some[2])):
        put_all(at, snapshot)
        path = max(files(tmp_path), key=lambda path: path.stat().st_mtime_ns)
        os.utime(path, (time.time() - 1000 + age, time.time() - 1000 + age))
    assert found(tier(engine, tmp_path), longer(engine, some[1])) is not None  # used by another process
    put_all(at, some[3])
    kept = [snapshot for snapshot in (root, *some[1:4]) if at.longest(longer(engine, snapshot)) is not None]
    assert kept == [root, some[1], some[3]]


# the disk refuses


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_refuses_costs_one_warning_and_nothing_old(engine, some, tmp_path, monkeypatch, call, code):
    notes = []
    at = tier(engine, tmp_path, notes=notes)
    put_all(at, some[0])
    before = files(tmp_path)
    with monkeypatch.context() as refusing:
        def refuse(*args, **options):
            raise OSError(code, os.strerror(code))

        refusing.setattr(os, call, refuse)
        put_all(at, *some[1:])
    assert at.stats.failed == 4
    assert files(tmp_path) == before
    assert len(notes) == 1
    assert f"not saved to {tmp_path}: {os.strerror(code)}; " in notes[0]
    assert raw(found(at, longer(engine, some[0]))) == raw(some[0])
    put_all(at, some[1])  # and it goes on when the disk does
    assert raw(found(at, longer(engine, some[1]))) == raw(some[1])


def test_a_real_limit_on_file_size_is_met_without_damage(pack, tmp_path):
    done = child(pack, tmp_path, """
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, resource.RLIM_INFINITY))
        at.put(make(20), lambda: print("released"))
        at.flush()
        print(at.stats.failed, notes[0], sorted(os.listdir(directory)))
        """)
    assert done.stdout.splitlines()[0] == "released"
    assert "File too large; make room" in done.stdout
    assert done.stdout.rstrip().endswith(f"['{snapshot_directory._LOCK}']")


def test_the_file_is_on_disk_before_it_has_its_name(engine, some, tmp_path, monkeypatch):
    """That a machine that loses its power keeps the order cannot be tried here; that the calls come in this order can."""
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, real=real: (
            calls.append((name, os.path.isdir(f"/proc/self/fd/{args[0]}") if name == "fsync" else None)), real(*args))[1])
    put_all(tier(engine, tmp_path), some[0])
    assert calls == [("fsync", False), ("replace", None), ("fsync", True)]


# in the background


def test_put_returns_at_once_and_gives_back_each_snapshot_once(engine, some, tmp_path):
    at = tier(engine, tmp_path)
    released = Releases()
    with snapshot_directory.locked(tmp_path):  # the writer cannot begin
        start = time.perf_counter()
        for snapshot in some:
            released.put(at, snapshot)
        assert time.perf_counter() - start < 1
        assert released == [0] * 5
    at.flush()
    assert released == [1] * 5
    assert at.stats.saved == 5


def test_no_more_bytes_wait_than_the_queue_may_hold(engine, some, tmp_path):
    one = SnapshotFile(some[0]).nbytes
    for room, taken in ((1, 1), (2.5 * one, 2)):  # one is always taken
        directory = tmp_path / str(room)
        at = tier(engine, directory, queue_bytes=int(room))
        released = Releases()
        with snapshot_directory.locked(directory):
            for snapshot in some:
                released.put(at, snapshot)
            assert released == [0] * taken + [1] * (5 - taken)
        at.flush()
        assert released == [1] * 5
        assert (at.stats.saved, at.stats.declined) == (taken, 5 - taken)


def test_what_the_session_does_next_does_not_reach_the_file(engine, tmp_path):
    """Keys and values are read from shared pages while the session goes on."""
    session = engine.session()
    ids = ids_for(engine, 100)
    session.prefill(ids[:70])
    snapshot = session.snapshot()
    expected = raw(snapshot)
    at = tier(engine, tmp_path)
    released = Releases()
    with snapshot_directory.locked(tmp_path):
        released.put(at, snapshot)
        for token in ids[70:]:
            session.decode(token)
    at.flush()
    assert raw(found(at, session.prefix)) == expected


def test_a_process_that_ends_saves_first(pack, tmp_path, engine):
    child(pack, tmp_path, "at.put(make(20), lambda: None)")
    assert found(tier(engine, tmp_path), Prefix([*ids_for(engine, 20), 1], numeric(engine))) is not None


# several processes

CHILD = """
import os, resource, sys
from pathlib import Path
from fermi_engine import Engine, EngineConfig
from tests.test_snapshot_disk import PLENTY, ids_for, raw, snapshot_of, tier, found, Prefix, numeric
engine = Engine.load({pack!r}, config=EngineConfig(threads=1))
directory, notes = Path({directory!r}), []
at = tier(engine, directory, {budget}, notes)
def make(count, seed=0):
    return snapshot_of(engine, ids_for(engine, count, seed))
"""


def child_code(pack: Path, directory: Path, code: str, budget: int = PLENTY) -> list[str]:
    lines = "\n".join(line[8:] if line.startswith(" " * 8) else line for line in code.splitlines())
    return [sys.executable, "-c", CHILD.format(pack=str(pack), directory=str(directory), budget=budget) + lines]


def child(pack: Path, directory: Path, code: str) -> subprocess.CompletedProcess:
    done = subprocess.run(child_code(pack, directory, code), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_two_processes_write_and_read_one_directory_at_once(pack, engine, some, tmp_path):
    """Each puts, evicts and loads for itself; all that anybody loads is right, and the budget holds for both together."""
    budget = int(4.5 * SnapshotFile(some[0]).nbytes)
    code = """
        import random, time
        order = random.Random(os.getpid())
        made = [make(20, seed) for seed in range(8)]
        bytes_of, loaded = [raw(snapshot) for snapshot in made], 0
        print("ready", flush=True)
        sys.stdin.readline()
        end = time.monotonic() + 60
        while min(loaded, at.stats.saved, at.stats.evicted) < 40 and time.monotonic() < end:
            at.put(made[order.randrange(8)], lambda: None)
            one = order.randrange(8)
            back = found(at, Prefix([*made[one].tokens, 1], numeric(engine)))
            if back is not None:
                assert raw(back) == bytes_of[one], one
                loaded += 1
        at.flush()
        assert not notes, notes
        print(min(loaded, at.stats.saved, at.stats.evicted))
        """
    both = [subprocess.Popen(child_code(pack, tmp_path, code, budget), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
    peak = 0
    while any(process.poll() is None for process in both):
        with snapshot_directory.locked(tmp_path):  # a listing beside a rename may count a file twice
            peak = max(peak, held_bytes(tmp_path))
        time.sleep(0.001)
    for process in both:
        out, err = process.communicate()
        assert process.returncode == 0, err
        assert int(out) >= 40
    assert 0 < peak <= budget
    assert all(path.name.endswith(".safetensors") for path in files(tmp_path))


def write_for_ever(at: DiskTier, made: list[Snapshot], ready) -> None:
    sealed_file.CHUNK_BYTES = 1000  # many writes, so that the end comes inside of one
    ready.send(True)
    while True:
        for snapshot in made:
            at.put(snapshot, lambda: None)
            at.flush()
            for path in files(at.directory):  # all but the first, which is the old one
                if path.name.startswith(made[0].prefix.digest().hex()[:10]):
                    continue
                path.unlink()


def test_kill_9_at_random_moments_of_saving(engine, some, tmp_path, monkeypatch):
    """Nothing wrong is loaded afterwards, nothing old is lost, and what the dead left in the way is cleared."""
    monkeypatch.setattr(snapshot_directory, "STALE_S", -1.0)
    notes = []
    put_all(tier(engine, tmp_path), some[0])
    order, fork = random.Random(7), get_context("fork")
    unfinished = 0
    for _ in range(KILLS):
        parent, own = fork.Pipe()
        process = fork.Process(target=write_for_ever, args=(tier(engine, tmp_path), some, own))
        process.start()
        assert parent.recv()
        time.sleep(order.uniform(0, 0.1))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        unfinished += any(path.name.startswith(".") for path in files(tmp_path))
        at = tier(engine, tmp_path, notes=notes)
        assert raw(found(at, longer(engine, some[0]))) == raw(some[0])
        for snapshot in some[1:]:
            back = found(at, longer(engine, snapshot))
            assert back is None or raw(back) == raw(snapshot)
        put_all(at, some[1])
        assert not any(path.name.startswith(".") for path in files(tmp_path))
    assert unfinished > 0, "all kills came between saves"
    assert notes == []


def test_only_own_files_that_nobody_holds_are_cleared(engine, some, tmp_path):
    old = time.time() - 2 * snapshot_directory.STALE_S
    names = {"dead": ".x.safetensors.1.0.fermi-snapshot-part", "held": ".y.safetensors.1.0.fermi-snapshot-part",
             "young": ".z.safetensors.1.0.fermi-snapshot-part", "other": ".x.safetensors.part", "hidden": ".x.safetensors"}
    for key, name in names.items():
        (tmp_path / name).write_bytes(b"x")
        if key != "young":
            os.utime(tmp_path / name, (old, old))
    with open(tmp_path / names["held"]) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        put_all(tier(engine, tmp_path), some[0])
        assert {path.name for path in files(tmp_path) if path.name.startswith(".")} == set(names.values()) - {names["dead"]}
