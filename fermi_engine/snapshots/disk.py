"""Snapshots on disk: a directory of snapshot files that outlives the process, shared with others, as the tier below memory.

The files are the only record: what is there is found by reading their headers, again when the directory has changed, each header
once. Saving happens in a thread of its own that reads the arrays of the snapshot where they are; looking up and loading in the
caller's. Whatever goes wrong with a file costs a warning and a snapshot, nothing else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import RLock

from fermi_engine.background import Background
from fermi_engine.config import ModelConfig
from fermi_engine.errors import SnapshotError
from fermi_engine.report import note as say
from fermi_engine.report import size
from fermi_engine.snapshots import directory as snapshot_directory
from fermi_engine.snapshots import files as snapshot_files
from fermi_engine.snapshots.cache import Snapshot, Stored
from fermi_engine.snapshots.directory import SUFFIX, NoRoom
from fermi_engine.snapshots.files import Info, SnapshotFile
from fermi_engine.snapshots.prefix import NumericPath, Prefix

QUEUE_BYTES = 1 << 30  # of snapshots that may wait for the disk; a single one may be larger
NAME_DIGITS = 40  # of the digest: names need not be proof against forgery, loading compares all tokens
SETTLED_NS = 1_000_000_000  # a directory changed later than that may change again within one tick of its clock

Stamp = tuple[int, int, int]  # inode, bytes, time of last use in ns


@dataclass(frozen=True)
class DiskStats:
    """Counts since the tier was opened: files saved and their bytes, not taken (declined: no room in queue or budget, or there
    already), refused by the disk, removed for room, loaded; seconds of saving (in the background) and of loading."""

    saved: int = 0
    saved_bytes: int = 0
    declined: int = 0
    failed: int = 0
    evicted: int = 0
    loaded: int = 0
    unusable: int = 0
    save_s: float = 0.0
    load_s: float = 0.0


@dataclass(frozen=True)
class _Entry:
    """A file of the directory: what its name stood for when it was looked at, and what is in it, None for what is of no use."""

    stamp: Stamp
    info: Info | None


class DiskTier:
    """snapshots.Tier over a directory, for one model and numeric path; any number of them may share the directory."""

    def __init__(self, directory: Path, budget: int, config: ModelConfig, numeric: NumericPath, kv_block: int,
                 note: Callable[[str], None] = say, queue_bytes: int = QUEUE_BYTES) -> None:
        """budget: most bytes of all files in the directory, whoever wrote them. kv_block: page size that states are loaded with.
        note: takes a warning. Raises SnapshotError where the directory cannot be made."""
        self.directory, self.budget, self.numeric = directory, budget, numeric
        self._config, self._kv_block, self._note = config, kv_block, note
        self.stats = DiskStats()
        self._entries: dict[str, _Entry] = {}
        self._guests: set[str] = set()
        self._scanned: tuple | None = None  # time stamps of the directory and of the guests when they were looked at
        self._said: set[str] = set()  # warnings that were given
        self._lock = RLock()  # of the entries and counts
        self.background = Background(queue_bytes)
        try:
            snapshot_directory.make_private(directory)
        except OSError as err:
            raise SnapshotError(f"cannot use {directory} for snapshots: {snapshot_directory.reason(err)}") from None

    def line(self) -> str:
        """What it has done, for a report."""
        s = self.stats
        return (f"snapshots on disk: {s.loaded} loaded in {s.load_s:.3f} s, {s.saved} saved ({size(s.saved_bytes)}) in "
                f"{s.save_s:.3f} s, {s.evicted} removed, {s.declined} not taken, {s.failed + s.unusable} failed")

    # looking up and loading

    def longest(self, prefix: Prefix) -> Stored | None:
        """The longest snapshot that `prefix` can go on from, as snapshots.Tier says."""
        with self._lock:
            self._refresh()
            infos = [(name, entry.info) for name, entry in self._entries.items() if entry.info is not None]
        fits = [(name, info) for name, info in infos if info.position + (not info.has_logits) <= len(prefix)]
        digests = prefix.digests({info.position for _, info in fits})
        found = [(info.position, name) for name, info in fits if digests[info.position] == info.digest]
        if not found:
            return None
        position, name = max(found)
        info = dict(fits)[name]
        return Stored(position, snapshot_files.memory_bytes(info, self._config, self._kv_block), (name, prefix))

    def load(self, stored: Stored) -> Snapshot | None:
        """The snapshot with every byte proven; None, with a warning unless it has gone, where it is unusable."""
        name, prefix = stored.handle
        path, start = self.directory / name, time.perf_counter()
        try:
            snapshot = snapshot_files.read_snapshot(path, self._config, self.numeric, self._kv_block)
            if snapshot.position != stored.position or not snapshot.prefix.agrees(prefix, stored.position):
                snapshot = None  # replaced since it was found, or another prefix with the same digest
        except FileNotFoundError:
            snapshot = None  # another process has removed it
        except SnapshotError as err:
            snapshot = None
            self._warn(name, f"{err}; it is left as it is")
        with self._lock:
            if snapshot is None:
                if name in self._entries:
                    self._entries[name] = replace(self._entries[name], info=None)
                self._count(unusable=1)
            else:
                self._count(loaded=1, load_s=time.perf_counter() - start)
                _touch(path)
        return snapshot

    def also(self, name: str) -> None:
        """Look into a file that is no part of the cache, too: `name` is relative to the directory. It is never removed."""
        with self._lock:
            self._guests.add(name)

    def infos(self) -> list[Info]:
        """What there is for this model and numeric path, in no order."""
        with self._lock:
            self._refresh()
            return [entry.info for entry in self._entries.values() if entry.info is not None]

    def _refresh(self, is_due: bool = False) -> None:
        """Read the headers of files that are new or other than they were, if the directory has changed. is_due: in any case, to
        learn what others have used since."""
        changed_ns, guests = _changed_ns(self.directory), list(self._guest_stamps())
        is_settled = time.time_ns() - changed_ns > SETTLED_NS
        if (changed_ns, guests) == self._scanned and is_settled and not is_due:
            return
        before, found, bad = self._entries, {}, []
        for name, stamp in (*_listing(self.directory), *guests):
            entry = before.get(name)
            found[name] = entry if entry and entry.stamp == stamp else self._looked_at(name, stamp, bad)
        self._entries, self._scanned = found, (changed_ns, guests)
        if bad:
            count = f"{len(bad)} of its {len(found)} files are" if len(bad) > 1 else "one of its files is"
            self._note(f"snapshots in {self.directory}: {count} of no use here and left alone: {bad[0]}")

    def _guest_stamps(self) -> Iterator[tuple[str, Stamp]]:
        for name in self._guests:
            with suppress(OSError):
                yield name, _stamp((self.directory / name).lstat())

    def _looked_at(self, name: str, stamp: Stamp, bad: list[str]) -> _Entry:
        info = None
        try:
            info = snapshot_files.read_info(self.directory / name)
            snapshot_files.check_path(info, self.numeric)
        except FileNotFoundError:
            pass
        except SnapshotError as err:
            if info is None or self._scanned is None:  # files of others come and go while one runs: told at the start only
                bad.append(str(err))
            info = None
        return _Entry(stamp, info)

    # saving

    def put(self, snapshot: Snapshot, release: Callable[[], None]) -> None:
        """Save it in the background, unless too many bytes wait already; returns at once.

        Boundaries stay in memory: each file would hold the whole state and all keys and values again, for an edit that comes
        within a process's life.
        """
        job, nbytes = partial(self._save, snapshot), snapshot_files.tensor_bytes(snapshot)
        if snapshot.kind == "block" or not self.budget:
            release()
            self._count(declined=1)
        elif not self.background.offer(job, nbytes, release):
            self._count(declined=1)

    def flush(self) -> None:
        """Return when everything put so far is on disk or was given up."""
        self.background.flush()

    def _save(self, snapshot: Snapshot) -> None:
        start = time.perf_counter()
        try:
            name = self._free_name(snapshot)
            if name is None:
                self._count(declined=1)
                return
            file = SnapshotFile(snapshot)
            snapshot_directory.write_file(self.directory / name, file.nbytes, file.write, self._make_room)
        except NoRoom as err:
            self._count(declined=1)
            self._warn("no room", str(err))
        except OSError as err:
            self._count(failed=1)
            self._warn("disk", f"snapshots are not saved to {self.directory}: {snapshot_directory.reason(err)}")
        else:
            self._count(saved=1, saved_bytes=file.nbytes, save_s=time.perf_counter() - start)

    def _free_name(self, snapshot: Snapshot) -> str | None:
        """What its file is to be called; None where it is there already. A damaged file keeps its name."""
        stem = snapshot.prefix.digest().hex()[:NAME_DIGITS]
        with self._lock:
            self._refresh()
            for name in (f"{stem}{SUFFIX}", f"{stem}-1{SUFFIX}"):
                entry = self._entries.get(name)
                if entry is None or (entry.info and snapshot.logits is not None and not entry.info.has_logits):
                    return name
                if entry.info is not None:
                    _touch(self.directory / name)
                    return None
        return None

    def _make_room(self, nbytes: int) -> None:
        """Remove what is worth least until `nbytes` more fit; NoRoom where that is not to be had."""
        if nbytes > self.budget:
            raise NoRoom(f"a snapshot of {size(nbytes)} is over --snapshot-disk {size(self.budget)}: it is not saved; raise it")
        with self._lock:
            self._refresh(is_due=True)
            excess = snapshot_directory.used_bytes(self.directory) + nbytes - self.budget
            victims, freed = [], 0
            for name, entry in by_worth((name, entry) for name, entry in self._entries.items() if name not in self._guests):
                if freed >= excess:
                    break
                victims.append(name)
                freed += entry.stamp[1]
            if freed < excess:
                raise NoRoom(f"{self.directory} is full of files of other models or versions: raise --snapshot-disk "
                             f"{size(self.budget)}, or remove them")
            for name in victims:
                (self.directory / name).unlink(missing_ok=True)
                del self._entries[name]
            self._count(evicted=len(victims))

    # what is told

    def _count(self, **more: float) -> None:
        with self._lock:
            self.stats = replace(self.stats, **{name: getattr(self.stats, name) + n for name, n in more.items()})

    def _warn(self, what: str, text: str) -> None:
        """Once for each `what`."""
        with self._lock:
            if what in self._said:
                return
            self._said.add(what)
        self._note(text)


def by_worth(entries: Iterable[tuple[str, _Entry]]) -> list[tuple[str, _Entry]]:
    """Own files in the order in which they make room: by the time of last use, roots after all others."""
    usable = [(name, entry) for name, entry in entries if entry.info is not None]
    return sorted(usable, key=lambda item: (item[1].info.kind == "root", item[1].stamp[2]))


def _changed_ns(directory: Path) -> int:
    try:
        return directory.stat().st_mtime_ns
    except OSError:
        return -1


def _listing(directory: Path) -> list[tuple[str, Stamp]]:
    """Names of snapshot files with their stamps; a directory that cannot be read has none."""
    found = []
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith(SUFFIX) and not entry.name.startswith("."):
                with suppress(FileNotFoundError):
                    found.append((entry.name, _stamp(entry.stat(follow_symlinks=False))))
    return found


def _stamp(stat: os.stat_result) -> Stamp:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _touch(path: Path) -> None:
    """The time of last use is the file's time stamp, for all processes."""
    with suppress(OSError):
        os.utime(path, follow_symlinks=False)
