"""What no stage of the table covers: threads after a fork, and values that are not finite on their way to the sampler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fermi_engine import Engine, EngineConfig, FermiError, SamplingParams, kernels
from fermi_engine.convert import convert
from fermi_engine.formats import Matrix
from fermi_engine.kernels import dispatch
from tools.make_checkpoint import make_checkpoint

ROOT = Path(__file__).resolve().parent.parent
# Turns by 90 degrees in place tell how often each item ran: none may be lost, none run twice. Callers, numbers of threads, of
# steps, of items and grains are random; a fork comes in between, also while another thread is inside a call.
STRESS = """
import os, signal, threading
import numpy as np
from fermi_engine import kernels
from fermi_engine.kernels import dispatch
from tests.test_pool_and_nan import Turns

CALLS = 20000

def run(seed, calls):
    random, turns = np.random.RandomState(seed), Turns(80)
    for i in range(calls):
        steps = [(int(random.randint(0, 81)), int(random.choice((1, 2, 7, 50)))) for _ in range(random.randint(1, 9))]
        threads = int(random.randint(1, 9))
        assert turns.run(steps, threads) <= threads, (seed, i, steps)
        assert turns.are_right(), (seed, i, steps)

def in_child(calls):
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a child that hangs ends by itself
        run(os.getpid(), calls)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "a child hung or crashed"

run(0, CALLS // 2)
for _ in range(3):
    in_child(200)
    run(1, 100)
failed = []
def caller(seed):
    try:
        run(seed, CALLS // 6)
    except BaseException as error:
        failed.append(error)
callers = [threading.Thread(target=caller, args=(seed,)) for seed in (2, 3, 4)]
for one in callers: one.start()
for _ in range(3): in_child(100)
for one in callers: one.join()
assert not failed, failed
print("done")
"""
FORKS = """
import os, signal
import numpy as np
from fermi_engine import kernels
k = kernels.get(threads=4)
x = np.ones((64, 4096), np.float32)
for _ in range(5):
    k.rms_norm(x, x[0], 1e-6)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a child that hangs ends by itself
        for _ in range(20):
            k.rms_norm(x, x[0], 1e-6)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "a child hung or crashed"
print("done")
"""


class Turns:
    """Pairs of numbers that the rope kernel turns by 90 degrees, and how often each should have been turned."""

    def __init__(self, items: int) -> None:
        module = dispatch.library()
        self.ffi, self.lib = module.ffi, module.lib
        self._kernel = dispatch.table("scalar")["rope"].pointer
        self._times = np.zeros(items, np.int64)
        self._x = np.stack([np.ones(items), np.zeros(items)], axis=1).astype(np.float32)
        self._cos, self._sin = np.zeros((items, 1), np.float32), np.ones((items, 1), np.float32)
        views = {name: self.ffi.from_buffer("float[]", getattr(self, f"_{name}")) for name in ("x", "cos", "sin")}
        self._args = self.ffi.new("rope_args *", {**views, "heads": 1, "head_dim": 2, "half": 1})

    def run(self, steps: list[tuple[int, int]], threads: int, elapsed: np.ndarray | None = None) -> int:
        """Turn the first n items in portions of `grain` for each (n, grain); what fermi_run_steps returns."""
        rows = self.ffi.new("fermi_step[]", [(self._kernel, self._args, n, grain) for n, grain in steps])
        for n, _ in steps:
            self._times[:n] += 1
        spent = self.ffi.NULL if elapsed is None else self.ffi.from_buffer("int64_t[]", elapsed)
        return self.lib.fermi_run_steps(rows, len(steps), threads, spent)

    def are_right(self) -> bool:
        """Whether every item was turned as often as it should have been, and after the turns before."""
        corners = np.array([[1, 0], [0, 1], [-1, 0], [0, -1]], np.float32)
        return np.array_equal(self._x, corners[self._times % 4])


def test_thousands_of_short_steps_lose_no_item():
    done = subprocess.run([sys.executable, "-c", STRESS], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "done\n", done.stderr


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("steps", [[], [(0, 1)], [(0, 1), (9, 2), (0, 3), (0, 1), (5, 1), (0, 9)], [(3, 1), (0, 1)]])
def test_steps_without_items_are_passed_over(steps, threads):
    turns, elapsed = Turns(9), np.full(len(steps) + 1, 7, np.int64)
    for _ in range(50):
        assert turns.run(steps, threads, elapsed) <= threads
        assert turns.are_right()
    assert elapsed[-1] == 7, "beyond the last step"
    assert all(spent > 7 for spent, (n, _) in zip(elapsed[:-1], steps, strict=True) if n)


SLEEPERS = """
import time
import numpy as np
from fermi_engine import kernels
k = kernels.get("scalar", threads=2)
x, w = np.ones((256, 512), np.float32), np.ones((512, 512), np.float32)
with k.record() as program:
    k.gemm_f32(x, w)
def took_part():
    return k._lib.fermi_run_steps(program._steps, 1, 2, k._ffi.NULL)
while took_part() < 2:  # until the second thread has started
    pass
for _ in range(100):
    time.sleep(0.005)
    if took_part() == 2:
        break
else:
    raise SystemExit("a second thread never took part")
"""


def test_threads_that_sleep_are_woken():
    """After a pause in which they must have gone to sleep; in one of many calls, since a busy machine may hold one up. In a
    process of its own: whoever is not woken waits for good."""
    done = subprocess.run([sys.executable, "-c", SLEEPERS], timeout=60, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("threads", [1, 2])
def test_the_times_of_steps_add_up_to_the_call(threads):
    """All but Python's share, and the longest of three steps is most of it; in the best of some runs, since the system may
    put the process aside anywhere."""
    k = kernels.get(threads=threads)
    x, w = np.ones((16, 512), np.float32), np.ones((2048, 512), np.float32)
    with k.record() as program:
        k.add(x, x)
        k.gemm_f32(x, w)
        k.add(x, x)
    program.run()
    shares = []
    for _ in range(20):
        k.clock.start()
        program.run()
        spent, wall = k.clock.stop()
        assert set(spent) == {"add", "gemm_f32"}
        assert sum(spent.values()) < wall
        shares.append((sum(spent.values()) / wall, spent["gemm_f32"] / sum(spent.values())))
    assert np.max(shares, axis=0).min() > 0.8


@pytest.mark.parametrize("threads", [1, 2])
def test_times_add_to_what_was_there(threads):
    turns, elapsed = Turns(20), np.full(3, 10**12, np.int64)
    turns.run([(20, 1)] * 3, threads, elapsed)
    assert (elapsed > 10**12).all()


def test_a_child_of_fork_has_threads_of_its_own():
    done = subprocess.run([sys.executable, "-c", FORKS], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "done\n", done.stderr


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 3, 31, 40])
def test_a_block_that_is_not_finite_is_marked(bad, at):
    x = np.random.default_rng(at).standard_normal((2, 96)).astype(np.float32)
    x[1, at] = bad
    w = Matrix.from_f32(np.ones((9, 96), np.float32), "q4_0")
    for backend in dispatch.supported():
        k = kernels.get(backend)
        q = k.quantize_q8_0(x)
        block = at // 32
        assert np.isnan(q.d[1, block])
        assert not q.codes[1, 32 * block : 32 * (block + 1)].any()
        assert q.sums[1, block] == 0
        assert np.isnan(q.d).sum() == 1
        y = k.matmul_q8("gemm_q4_0_q8_0", q, w)
        assert np.isfinite(y[0]).all()
        assert np.isnan(y[1]).all()


@pytest.mark.parametrize("activations", ["q8_0", "f32"])
@pytest.mark.parametrize("where", ["norm", "layers.0"])
def test_damage_in_a_weight_reaches_the_sampler(tmp_path, activations, where):
    pack = convert(make_checkpoint(tmp_path / "c", seed=4), tmp_path / "m.pack")
    engine = Engine.load(pack, config=EngineConfig(activations=activations))
    owner, name = (engine.decoder, "norm") if where == "norm" else (engine.decoder.layers[0], "input_layernorm")
    damaged = getattr(owner, name).copy()
    damaged[5] = np.nan
    setattr(owner, name, damaged)
    with pytest.raises(FermiError, match="logits hold NaN"):
        list(engine.generate([1, 2, 3], SamplingParams(max_tokens=2, temperature=0)))
