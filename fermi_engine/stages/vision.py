"""Candidates of the stage table on sm_20: the kernels of the vision towers. Heads are padded with zeros to whole steps."""

from __future__ import annotations

import numpy as np

from fermi_engine.compare import Arrays
from fermi_engine.kernels.sm20_vision import GELUS, HEAD_DIM_STEP, WINDOW, view_tiles
from fermi_engine.stages.device_run import DeviceRun
from fermi_engine.stages.gpu import Candidate, launches


@launches("layer_norm")
def layer_norm(run: DeviceRun, a: Arrays) -> Arrays:
    out = run.empty(*a["x"].shape)
    run.vision.layer_norm(*(run.put(a[name]) for name in ("x", "w", "b")), float(a["eps"]), out)
    return {"y": run.get(out)}


def gelu(kind: str) -> Candidate:
    """Of floats in a row, without a bias."""
    def compute(run: DeviceRun, a: Arrays) -> Arrays:
        out = run.empty(1, a["x"].size)
        run.vision.gelu(kind, run.put(a["x"][None]), out)
        return {"y": run.get(out)[0]}
    return Candidate(compute, (kind,))


@launches(*GELUS)
def gelu_bias(run: DeviceRun, a: Arrays) -> Arrays:
    """Both, in place, behind a bias."""
    found = {kind: run.put(a["x"]) for kind in GELUS}
    for kind, x in found.items():
        run.vision.gelu(kind, x, x, run.put(a["b"]))
    return {kind: run.get(x) for kind, x in found.items()}


@launches("add_bias")
def add_bias(run: DeviceRun, a: Arrays) -> Arrays:
    x = run.put(a["x"])
    run.vision.add_bias(x, run.put(a["b"]))
    return {"x": run.get(x)}


@launches("add_bias_residual")
def add_bias_residual(run: DeviceRun, a: Arrays) -> Arrays:
    x = run.put(a["x"])
    run.vision.add_bias_residual(x, run.put(a["y"]), run.put(a["b"]))
    return {"x": run.get(x)}


@launches("add_bias_rope")
def add_bias_rope(run: DeviceRun, a: Arrays) -> Arrays:
    x, heads = run.put(a["x"]), a["x"].shape[1] // 6 // a["cos"].shape[1]
    run.vision.add_bias_rope(x, *(run.put(a[name]) for name in ("b", "cos", "sin")), heads)
    return {"x": run.get(x)}


@launches("add_positions")
def add_positions(run: DeviceRun, a: Arrays) -> Arrays:
    """By weights, and the first tap as it is."""
    bias, table, rows = (run.put(a[name]) for name in ("b", "table", "rows"))
    weighted, plain = run.put(a["x"]), run.put(a["x"])
    run.vision.add_positions(weighted, bias, table, rows, run.put(a["weights"]))
    run.vision.add_positions(plain, bias, table, run.put(a["rows"][:, :1]))
    return {"weighted": run.get(weighted), "plain": run.get(plain)}


@launches("group_mean")
def group_mean(run: DeviceRun, a: Arrays) -> Arrays:
    out = run.empty(len(a["x"]) // int(a["group"]), a["x"].shape[1])
    run.vision.group_mean(run.put(a["x"]), out)
    return {"y": run.get(out)}


@launches("group_mean")
def mean_residual(run: DeviceRun, a: Arrays) -> Arrays:
    y = run.put(a["y"])
    run.vision.group_mean(run.put(a["x"]), y, run.put(a["b"]))
    return {"y": run.get(y)}


def _side_by_side(a: Arrays) -> tuple[np.ndarray, int]:
    """q, k and v [T, heads, D] as rows [T, 3 * heads * D'], and D', a multiple of 8."""
    parts = [np.pad(a[name], ((0, 0), (0, 0), (0, -a[name].shape[2] % HEAD_DIM_STEP))) for name in "qkv"]
    return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1), parts[0].shape[2]


def _attended(run: DeviceRun, a: Arrays, lengths: list[int] | None) -> Arrays:
    """Inside views of these lengths, or inside windows of 4."""
    rows, dim = _side_by_side(a)
    (tokens, heads, head_dim), qkv = a["q"].shape, run.put(rows, aligned=True)
    out = run.empty(tokens, heads * dim, aligned=True)
    if lengths is None:
        run.vision.window_attention(qkv, heads, float(a["scale"]), out)
    else:
        run.vision.full_attention(qkv, heads, run.put(view_tiles(lengths)), float(a["scale"]), out)
    return {"o": run.get(out).reshape(tokens, heads, dim)[..., :head_dim].copy()}


@launches("full_attention")
def full_attention(run: DeviceRun, a: Arrays) -> Arrays:
    """Windows of any one length."""
    return _attended(run, a, [int(a["window"])] * (len(a["q"]) // int(a["window"])))


@launches("full_attention")
def view_attention(run: DeviceRun, a: Arrays) -> Arrays:
    """Views of `lengths` end to end."""
    return _attended(run, a, a["lengths"].tolist())


@launches("window_attention")
def window_attention(run: DeviceRun, a: Arrays) -> Arrays:
    """Windows of four."""
    if int(a["window"]) != WINDOW:
        raise ValueError(f"windows of {int(a['window'])}")
    return _attended(run, a, None)
