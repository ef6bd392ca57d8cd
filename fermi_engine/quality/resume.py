"""Where a long measurement has got to, on disk: named arrays behind a checksum, replaced as a whole.

A measurement belongs to a key (what is measured, on what); a file of another key, or a damaged one, counts for nothing.
"""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from fermi_engine.errors import RequestError

KIND = "fermi-engine-progress"
INTERVAL_S = 20.0  # between two saves: what an interrupt by power costs at most; any other interrupt saves as it goes


def digest_of(*parts: Any) -> str:
    """A name for what is measured: arrays by their bytes, the rest by its JSON form."""
    running = blake2b(digest_size=16)
    for part in parts:
        data = part.tobytes() if isinstance(part, np.ndarray) else json.dumps(part, sort_keys=True).encode()
        running.update(len(data).to_bytes(8, "little") + data)
    return running.hexdigest()


class Resume:
    """One measurement's file. `path` None keeps nothing.

    Raises RequestError where the file cannot be written; an unreadable or foreign one is started over.
    """

    def __init__(self, path: Path | None, key: str, interval_s: float = INTERVAL_S,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self.key = path, key
        self._interval_s, self._clock, self._last = interval_s, clock, clock()

    def load(self) -> dict[str, np.ndarray] | None:
        """What was saved last under this key, or None."""
        try:
            head, _, body = self.path.read_bytes().partition(b"\n") if self.path else (b"", b"", b"")
            fields = json.loads(head)
            if fields != {"kind": KIND, "key": self.key, "blake2b": _hash(body)}:
                return None
            with np.load(io.BytesIO(body), allow_pickle=False) as stored:
                return dict(stored)
        except (OSError, ValueError, TypeError):
            return None

    def due(self) -> bool:
        """Whether the last save is so long ago that the next is worth its time."""
        return self.path is not None and self._clock() - self._last >= self._interval_s

    def save(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Replace what is stored, as a whole: under a name of its own first, on disk, then renamed."""
        if self.path is None:
            return
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        body = buffer.getvalue()
        head = json.dumps({"kind": KIND, "key": self.key, "blake2b": _hash(body)}).encode()
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(part, "wb") as file:
                file.write(head + b"\n" + body)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, self.path)
        except OSError as err:
            with suppress(OSError):
                part.unlink()
            raise RequestError(f"cannot keep progress in {self.path}: {err.strerror}; make room there, or choose another "
                               "place (FERMI_CACHE)") from None
        self._last = self._clock()

    def done(self) -> None:
        """The measurement is complete: its file goes."""
        if self.path is not None:
            with suppress(OSError):
                self.path.unlink()


def _hash(body: bytes) -> str:
    return blake2b(body, digest_size=32).hexdigest()
