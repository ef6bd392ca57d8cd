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
