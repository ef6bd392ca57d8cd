"""Conversations under a name, which go on in another process: what was said, the tokens it became, and the state after them.

A session is one snapshot file in the folder `sessions` of a snapshot directory, with the conversation in its metadata. It is the
user's: no budget removes it, and until a new one is whole on disk the old one stays. Where the state is of no use, because the
engine or its settings have changed since, the conversation goes on all the same, from its first token.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fermi_engine.background import Background
from fermi_engine.errors import RequestError, SnapshotError
from fermi_engine.report import quoted
from fermi_engine.snapshots import directory as snapshot_directory
from fermi_engine.snapshots import files as snapshot_files
from fermi_engine.snapshots.cache import Snapshot
from fermi_engine.snapshots.disk import DiskTier
from fermi_engine.snapshots.files import Info, SnapshotFile

FOLDER = "sessions"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = "conversation"  # in the metadata


@dataclass(frozen=True)
class Record:
    """What was said. ids: all tokens up to the end of the last answer, the last of them perhaps not evaluated yet. messages: the
    turns of a chat, None where token ids or plain text were continued. tools: their descriptions, None without any. images: in
    order, of each its `file`, the `digest` of what was made of it, and the number of the `message` that shows it."""

    ids: list[int]
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    images: list[dict[str, Any]] = field(default_factory=list)


def default_directory() -> Path:
    """$FERMI_SNAPSHOTS, else `fermi_engine` under $XDG_STATE_HOME or ~/.local/state: sessions are no cache."""
    chosen = os.environ.get("FERMI_SNAPSHOTS")
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(chosen) if chosen else Path(base) / "fermi_engine"


def check_name(name: str) -> str:
    """The name, if it is one: a file of that name lies in the folder and nowhere else. RequestError, one line."""
    if NAME.fullmatch(name) is None:
        raise RequestError(f"--session {quoted(name)} is no name: give 1 to 64 letters, digits, dots, _ and -, beginning with a "
                           "letter or digit")
    return name


class NamedSession:
    """A session held by this process. `record` is None before the first answer."""

    def __init__(self, tier: DiskTier, name: str) -> None:
        """Opens or begins the session `name` in the directory of `tier`, which will find its state.

        Raises RequestError for what is no name, SnapshotError with one line for a session that is another model's, in use,
        damaged, no regular file, or in a place that cannot be used.
        """
        self.name, self._tier = check_name(name), tier
        self.record: Record | None = None
        self._background = Background(0)  # takes one at a time, always
        self._failure: str | None = None
        folder = tier.directory / FOLDER
        self.path = folder / f"{name}{snapshot_directory.SUFFIX}"
        try:
            snapshot_directory.make_private(folder)
            if folder.is_symlink() or self.path.is_symlink():
                raise SnapshotError(f"session {name!r}: {folder if folder.is_symlink() else self.path} is a link, which may lead "
                                    "out of the directory; remove it or choose another name")
            self._lock = os.open(folder / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as err:
            raise SnapshotError(f"session {name!r} cannot be kept in {folder}: {snapshot_directory.reason(err)}") from None
        try:
            self._open()
        except BaseException:
            os.close(self._lock)
            raise

    def _open(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SnapshotError(f"session {self.name!r} is in use by another process; wait for it, or choose another name"
                                ) from None
        try:
            info = snapshot_files.read_info(self.path)
        except FileNotFoundError:
            return
        except SnapshotError as err:
            raise SnapshotError(f"session {self.name!r} cannot be read: {err}; remove that file or choose another name") from None
        self._check_model(info)
        self.record = _record(self.name, info)
        self._tier.also(f"{FOLDER}/{self.path.name}")

    def _check_model(self, info: Info) -> None:
        its, mine = info.numeric.pack_hash, self._tier.numeric.pack_hash
        if its != mine:
            raise SnapshotError(f"session {self.name!r} belongs to another model (pack {its[:12]}, this is {mine[:12]}); "
                                "continue it with that model or choose another name")

    def save(self, snapshot: Snapshot, record: Record) -> None:
        """Have the session stand there, in the background; `close` says whether that went well."""
        self.record = record
        file = SnapshotFile(snapshot, {_KEY: json.dumps(asdict(record))})
        self._tier.also(f"{FOLDER}/{self.path.name}")
        self._background.flush()  # no more than one state waits
        self._background.offer(lambda: self._write(file))

    def _write(self, file: SnapshotFile) -> None:
        try:
            snapshot_directory.write_file(self.path, file.nbytes, file.write)
        except OSError as err:
            self._failure = f"session {self.name!r} was not saved and stands where it stood: {snapshot_directory.reason(err)}"
        else:
            self._failure = None

    def close(self) -> None:
        """Wait until all is on disk, and let others have the session. SnapshotError where the last answer was not saved."""
        self._background.flush()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        if self._failure:
            raise SnapshotError(self._failure)


def _record(name: str, info: Info) -> Record:
    """From a file's metadata; nothing there is believed before it has the right form."""
    try:
        said = Record(**json.loads(info.extra[_KEY]))
        _check_list(said.ids, int)
        for part in (said.messages, said.tools, said.images):
            if part is not None:
                _check_list(part, dict)
        for message in said.messages or ():
            _check_list([message["role"], message.get("content"), message.get("reasoning_content", "")], str)
        for image in said.images:
            _check_list([image["file"], image["digest"]], str)
            _check_list([image["message"]], int)
            if len(image) > 3:
                raise ValueError
    except (KeyError, ValueError, TypeError, RecursionError):
        raise SnapshotError(f"session {name!r}: {info.path} holds a snapshot but no conversation; choose another name") from None
    return said


def _check_list(items: Sequence[Any], kind: type) -> None:
    if not isinstance(items, list) or not all(isinstance(item, kind) for item in items):
        raise TypeError
