"""Candidates of the stage table on sm_20: the kernels of one token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fermi_engine.compare import Arrays
from fermi_engine.kernels.device_arrays import DeviceArray, DeviceMatrix
from fermi_engine.kernels.sm20_attention import DeviceCache
from fermi_engine.kernels.sm20_token import TokenKernels, argmax_work, attention_work
from fermi_engine.stages.array_weights import matrix_of
from fermi_engine.stages.device_run import DeviceRun
from fermi_engine.stages.gpu import Candidate, launches


class _Wide(TokenKernels):
    """Products of a matrix alone in the form for large ones, however few rows it has."""

    def is_wide(self, matrices: Sequence[tuple[DeviceMatrix, DeviceArray]]) -> bool:
        return True


def token_gemv(format: str) -> Candidate:
    """`y`: the norm's row times w, added to `before`, and `other` times w2 beside it; `swiglu`: of both; `wide`: x times w in
    the form for large matrices, which float32 has not."""
    def compute(run: DeviceRun, a: Arrays) -> Arrays:
        kernels, x, norm, eps = TokenKernels(run.device, run.stream), run.put(a["x"]), run.put(a["norm"]), float(a["eps"])
        w, w2 = (run.matrix(matrix_of(format, a[name])) for name in ("w", "w2"))
        out = {"y": run.put(a["before"]), "other": run.put(a["before"]), "swiglu": run.empty(w.rows), "plain": run.empty(w.rows)}
        kernels.gemv(x, [(w, out["y"]), (w2, out["other"])], norm, eps, add=True)
        kernels.gemv_swiglu(x, w, w2, out["swiglu"], norm, eps)
        kernels.gemv(x, [(w, out["plain"])])
        if format != "f32":
            out["wide"] = run.empty(w.rows)
            _Wide(run.device, run.stream).gemv(x, [(w, out["wide"])])
        return {name: run.get(y) for name, y in out.items()}
    wide = () if format == "f32" else ("token_gemv_wide",)
    return Candidate(compute, ("token_gemv", "token_gemv_swiglu", *wide))


@launches("gdn_token")
def gdn_token(run: DeviceRun, a: Arrays) -> Arrays:
    names = ("qkv", "z", "a", "b", "weight", "A_log", "dt_bias", "norm", "tail", "state")
    up = {name: run.put(a[name], aligned=True) for name in names}
    out = run.empty(a["z"].size, aligned=True)
    TokenKernels(run.device, run.stream).gdn_token(
        **up, out=out, k_heads=int(a["k_heads"]), l2_eps=float(a["eps"]), norm_eps=float(a["eps"]), q_scale=float(a["scale"]))
    return {"y": run.get(out), "tail": run.get(up["tail"]), "state": run.get(up["state"])}


@launches("kv_append", "token_attention_prepare", "token_attention_part", "token_attention_merge")
def token_attention(run: DeviceRun, a: Arrays) -> Arrays:
    """Over a cache with NaN behind the past positions; `k`, `v`: what stands at the token's place afterwards."""
    (past, kv_heads, dim), heads, capacity = a["past_k"].shape, len(a["query_gate"]), len(a["past_k"]) + 1 + int(a["spare"])
    cache = DeviceCache(*(run.empty(kv_heads, capacity, dim, aligned=True) for _ in "kv"))
    if past:
        run.tokens.kv_append(cache, 0, run.put(a["past_k"]), run.put(a["past_v"]))
    work = {name: run.empty(*shape, aligned=True) for name, shape in attention_work(heads, dim, capacity).items()}
    up = [run.put(a[name], aligned=True) for name in ("query_gate", "key", "value", "q_norm", "k_norm")]
    out, position = run.empty(heads, dim, aligned=True), run.put(np.array([past], np.int32))
    TokenKernels(run.device, run.stream).attention(
        *up, (run.put(a["cos"]), run.put(a["sin"])), position, cache, work, out, float(a["eps"]), float(a["scale"]))
    return {"y": run.get(out), "k": run.get(cache.k)[:, past].copy(), "v": run.get(cache.v)[:, past].copy()}


@launches("argmax_part", "argmax_join")
def argmax(run: DeviceRun, a: Arrays) -> Arrays:
    work = {name: run.empty(*shape, dtype=np.int32 if "index" in name else np.float32) for name, shape in argmax_work().items()}
    index = run.empty(1, dtype=np.int32)
    TokenKernels(run.device, run.stream).argmax(run.put(a["x"]), work, index)
    return {"index": run.get(index)}
