"""Work in the background: in order, bounded in bytes, given back once, done before the process ends."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import weakref
from threading import Event, RLock, current_thread, main_thread

from fermi_engine.background import Background


def test_jobs_run_in_order_in_one_other_thread():
    background, done, threads = Background(100), [], set()
    for number in range(50):
        assert background.offer(lambda number=number: (done.append(number), threads.add(current_thread())))
    background.flush()
    assert done == list(range(50))
    assert main_thread() not in threads
    assert background._thread is None  # nothing is kept alive


def test_bytes_that_wait_are_bounded_and_given_back():
    background, gate, given = Background(100), Event(), []
    assert background.offer(gate.wait, 500, lambda: given.append("large"))  # one is always taken
    assert not background.offer(lambda: None, 1, lambda: given.append("refused"))
    assert given == ["refused"]
    gate.set()
    background.flush()
    assert background.offer(lambda: None, 60, lambda: given.append("first"))
    background.flush()
    assert given == ["refused", "large", "first"]


def test_what_a_job_holds_is_free_before_that_is_said():
    class Held:
        pass

    held, alive, background = Held(), [], Background(10)
    reference = weakref.ref(held)
    background.offer(lambda held=held: None, 1, lambda: alive.append(reference()))
    del held
    background.flush()
    assert alive == [None]


def test_done_may_take_a_lock_that_an_offer_is_made_under():
    """As the cache does: it offers with its lock held, and being given memory back takes that lock."""
    lock, background, gate = RLock(), Background(100), Event()

    def done() -> None:
        with lock:
            pass

    background.offer(gate.wait, 1, done)
    with lock:
        gate.set()
        time.sleep(0.05)  # the first job is over and waits for the lock
        background.offer(lambda: None, 1, done)
    background.flush()


def test_a_defect_in_one_job_is_shown_and_does_not_stop_the_others(monkeypatch):
    shown, background, done = [], Background(100), []
    monkeypatch.setattr(threading, "excepthook", lambda args: shown.append((args.exc_type, args.thread.name)))
    background.offer(lambda: 1 / 0, 1, lambda: done.append("failed"))
    background.offer(lambda: done.append("job"), 1, lambda: done.append("next"))
    background.flush()
    assert done == ["failed", "job", "next"]
    assert shown == [(ZeroDivisionError, "disk")]


def test_a_process_that_ends_does_its_jobs_first():
    code = ("import time\nfrom fermi_engine.background import Background\nb = Background(9)\n"
            "b.offer(lambda: time.sleep(0.2))\nb.offer(lambda: print('done'))")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "done\n"
