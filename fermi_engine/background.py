"""Work for the disk that nobody waits for: one thread, jobs in order, a bound on the bytes that they hold."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable


class Background:
    """Runs jobs one after another. The thread exists while there are any, so that it keeps no process alive, and a process that
    ends does them first."""

    def __init__(self, most_bytes: int) -> None:
        """most_bytes: that waiting jobs may hold together; a single one may hold more."""
        self._most_bytes = most_bytes
        self._jobs: deque[tuple[Callable[[], None], int, Callable[[], None]]] = deque()
        self._held = 0  # bytes of the jobs, the one in progress included
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def offer(self, job: Callable[[], None], nbytes: int = 0, done: Callable[[], None] = lambda: None) -> bool:
        """Take a job that holds `nbytes`, if there is room for it. `done` is called when the job has let go of them, from the
        thread and with nothing locked; at once where it is not taken."""
        with self._changed:
            is_taken = not self._held or self._held + nbytes <= self._most_bytes
            if is_taken:
                self._jobs.append((job, nbytes, done))
                self._held += nbytes
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="disk")
                    self._thread.start()
        if not is_taken:
            done()
        return is_taken

    def flush(self) -> None:
        """Return when every job taken so far has been done."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._thread = None
                    self._changed.notify_all()
                    return
                job, nbytes, done = self._jobs.popleft()
            try:
                job()
            except Exception:  # a defect: it is shown, and the other jobs are done all the same
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), self._thread)))
            del job  # what it holds is free before that is said
            with self._changed:
                self._held -= nbytes
            done()
