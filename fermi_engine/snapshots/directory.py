"""A directory of files that several processes share: whole files only, under a budget of bytes that no instant exceeds.

A file grows under a hidden name that its writer holds locked, at full size from the start so that everybody counts it, and takes
its own name only when it is on disk. Whoever makes room, reserves it or publishes a file holds the lock. A hidden file
without a holder was left by a process that died; it is removed, and nothing else that was not asked for. Locks die with their
process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

SUFFIX = ".safetensors"
STALE_S = 60.0  # how old a hidden file without a holder must be
_PART = re.compile(r"\.[^/]+\.\d+\.\d+\.fermi-snapshot-part")
_LOCK = ".fermi-snapshot-lock"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_numbers = count()


def make_private(directory: Path) -> None:
    """Have the directory, for nobody else to read where it had to be made: what it holds is what was said. OSError as mkdir."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the directory against other processes and threads that want the same. OSError where locks do not work."""
    fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def used_bytes(directory: Path) -> int:
    """Bytes of all files with SUFFIX and of all that are on their way, stale ones removed; call it under `locked`."""
    total = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            is_part = _PART.fullmatch(entry.name) is not None
            if not (is_part or entry.name.endswith(SUFFIX)):
                continue
            with suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                if not (is_part and _removed_as_stale(entry, found.st_mtime)):
                    total += found.st_size
    return total


def _removed_as_stale(entry: os.DirEntry, mtime_s: float) -> bool:
    if not entry.is_file(follow_symlinks=False) or time.time() - mtime_s < STALE_S:
        return False
    fd = os.open(entry.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(entry.path)
    except OSError:  # its writer lives, or it is not ours to remove
        return False
    finally:
        os.close(fd)
    return True


class NoRoom(Exception):
    """A file does not fit the budget, whatever of ours is removed."""


def write_file(path: Path, nbytes: int, write: Callable[[int], None], make_room: Callable[[int], None] | None = None) -> None:
    """Have `write(descriptor)` fill a file of `nbytes` that then takes the name `path`, on disk and whole, or nothing.

    make_room(nbytes), called with the directory locked, sees to it that so many more bytes fit, or raises NoRoom.
    OSError where the disk refuses; what was there before stays then.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.{next(_numbers)}.fermi-snapshot-part")
    with locked(path.parent):
        if make_room is not None:
            make_room(nbytes)
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.posix_fallocate(fd, 0, nbytes)
        except BaseException:
            _drop(fd, part)
            raise
    try:
        write(fd)
        os.fsync(fd)
        with locked(path.parent):
            os.replace(part, path)
    except BaseException:
        _drop(fd, part)
        raise
    os.close(fd)
    _sync(path.parent)


def _drop(fd: int, part: Path) -> None:
    with suppress(OSError):
        os.unlink(part)
    os.close(fd)


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def reason(err: OSError) -> str:
    """An OSError in words, with the remedy."""
    remedy = "make room" if err.errno in _NO_SPACE else "check the directory"
    return f"{err.strerror or err}; {remedy}, or choose another with --snapshot-dir"
