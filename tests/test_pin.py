"""Pinned threads: each worker on its CPU, the caller on its own inside a call only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fermi_engine.errors import BackendError

ROOT = Path(__file__).resolve().parents[1]
CPUS = sorted(os.sched_getaffinity(0))
STEPS = """
import json, os, sys, threading
import numpy as np
from fermi_engine import kernels
from fermi_engine.kernels.threads import default_threads

cpus, first = json.loads(sys.argv[1])
own = threading.get_native_id()

def masks():
    tasks = {int(task): sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}
    return [tasks.pop(own)] + sorted(mask for task, mask in tasks.items() if task not in before)

k = kernels.get(None, len(cpus))
before = {int(task) for task in os.listdir("/proc/self/task")} - {own}
x = np.ones((4096, 64), np.float32)
if first == "workers first":
    k.add(x, x)
k.pin(cpus)
found = []
with k.held():
    k.add(x, x)
    found.append(masks())
found.append(masks())
k.pin([])
with k.held():
    k.add(x, x)
    found.append(masks())
print(json.dumps(found))
"""


@pytest.mark.parametrize("first", ["workers first", "pin first"])
def test_threads_stay_where_they_are_put(first: str) -> None:
    cpus = CPUS[::-1][:4]
    code = [sys.executable, "-c", STEPS, json.dumps([cpus, first])]
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    run = subprocess.run(code, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    inside, after, unpinned = json.loads(run.stdout)
    workers = sorted([cpu] for cpu in cpus[1:])
    assert inside == [[cpus[0]], *workers]
    assert after == [CPUS, *workers]
    assert unpinned == [CPUS] * len(cpus)


def test_a_cpu_that_is_not_there() -> None:
    """Refused when there is a worker to put on it, in a process of its own, for the pool is one for all."""
    code = ("import numpy as np; from fermi_engine import kernels; k = kernels.get(None, 2); x = np.ones((4096, 64), "
            "np.float32); k.add(x, x); k.pin([0, 1023])")
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert f"{BackendError.__name__}: --pin: CPUs [0, 1023] are refused (Invalid argument)" in run.stderr
