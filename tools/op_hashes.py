"""Runs every CPU op over fixed shapes and prints one hash per op and backend; any machine must print the same lines.

    python tools/op_hashes.py [--backend NAME ...]

Inputs come from an integer generator (no NumPy transcendental function), so they are the same bits everywhere. Lines of
two backends differ in the backend's name only: compare scalar with ssse3, or a run under `qemu-x86_64 -cpu Westmere`
with a native one.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable

import numpy as np

from fermi_engine import kernels
from fermi_engine.formats import Experts, Matrix
from fermi_engine.kernels import dispatch
from fermi_engine.kernels.cpu import KV_FORMATS, CpuKernels
from fermi_engine.state import KVPages

LENGTHS = (1, 4, 15, 16, 17, 63, 64, 100)


class Draw:
    """Reproducible arrays in [-1, 1) by 32-bit integers."""

    def __init__(self, seed: int) -> None:
        self.words = np.random.Generator(np.random.PCG64(seed))

    def f32(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> np.ndarray:
        whole = self.words.integers(-(2**23), 2**23, shape, dtype=np.int64)
        return (whole.astype(np.float32) * np.float32(2.0**-23) * np.float32(scale) + np.float32(shift)).astype(
            np.float32
        )

    def ids(self, high: int, *shape: int) -> np.ndarray:
        return self.words.integers(0, high, shape, dtype=np.int64).astype(np.int32)


def _maps(k: CpuKernels, d: Draw) -> dict[str, list[np.ndarray]]:
    wide = d.f32(4099, scale=90.0)
    tiny = d.f32(513, scale=1e-30)
    return {
        "exp_f32": [k.exp_f32(wide), k.exp_f32(tiny)],
        "log1p_f32": [k.log1p_f32(np.abs(wide)), k.log1p_f32(d.f32(513, scale=0.999)), k.log1p_f32(tiny)],
        "sin_f32": [k.sin_f32(wide), k.sin_f32(wide * np.float32(1000))],
        "cos_f32": [k.cos_f32(wide), k.cos_f32(wide * np.float32(1000))],
        "add": [k.add(wide, wide[::-1].copy())],
        "gelu_tanh": [k.gelu_tanh(wide), k.gelu_tanh(d.f32(4099, scale=16.0)), k.gelu_tanh(tiny)],
        "gelu_erf": [k.gelu_erf(wide), k.gelu_erf(d.f32(4099, scale=16.0)), k.gelu_erf(tiny)],
    }


def _rows(k: CpuKernels, d: Draw) -> dict[str, list[np.ndarray]]:
    out: dict[str, list[np.ndarray]] = {
        name: [] for name in ("rms_norm", "layer_norm", "gated_rms_norm", "l2_norm", "swiglu", "sigmoid_mul", "gemm_f32",
                              "add_bias", "group_mean")
    }
    for n in LENGTHS:
        x, w, z = d.f32(5, n, scale=9.0), d.f32(n), d.f32(5, n, scale=30.0)
        out["rms_norm"].append(k.rms_norm(x, w, 1e-6))
        out["gated_rms_norm"].append(k.gated_rms_norm(x, z, w, 1e-6))
        out["l2_norm"].append(k.l2_norm(np.concatenate([x, z, x], axis=1), n, 2, n, 1e-6, 0.125))
        out["swiglu"].append(k.swiglu(np.concatenate([z, x], axis=1)))
        out["sigmoid_mul"].append(k.sigmoid_mul(x, np.concatenate([x, z], axis=1), n))
        out["gemm_f32"].append(k.gemm_f32(x, d.f32(n + 2, n)))
        out["layer_norm"].append(k.layer_norm(x, w, z[0].copy(), 1e-6))
        out["add_bias"].append(k.add_bias(z, w))
        out["group_mean"].append(k.group_mean(d.f32(12, n), 4))
    return out


def _matrices(k: CpuKernels, d: Draw) -> dict[str, list[np.ndarray]]:
    out: dict[str, list[np.ndarray]] = {"quantize_q8_0": [], "dequantize_f16": []}
    for rows, n, tokens in ((1, 32, 3), (7, 64, 1), (8, 96, 2), (9, 256, 5), (33, 512, 4), (64, 2048, 9)):
        x = d.f32(tokens, n, scale=7.0)
        x[0, :32] = 0
        q = k.quantize_q8_0(x)
        out["quantize_q8_0"] += list(q)
        weights = d.f32(rows, n, scale=0.05)
        for name in ("q4_0", "q8_0"):
            w = Matrix.from_f32(weights, name)
            out.setdefault(f"dequantize_{name}", []).append(k.dequantize(w, ids=d.ids(rows, 4)))
            isums = np.empty((tokens, rows, n // 32), np.int32)
            source = d.ids(tokens, tokens + 1)
            out.setdefault(f"gemm_{name}_q8_0", []).extend(
                [k.matmul_q8(f"gemm_{name}_q8_0", q, w, isums), isums, k.matmul_q8(f"gemm_{name}_q8_0", q, w, source=source)]
            )
            one = k.quantize_q8_0(x[-1:])
            out.setdefault(f"gemv_{name}_q8_0", []).append(k.matmul_q8(f"gemv_{name}_q8_0", one, w))
        out["dequantize_f16"].append(k.dequantize(Matrix.from_f32(weights, "f16")))
    return out


def _delta(k: CpuKernels, d: Draw) -> dict[str, list[np.ndarray]]:
    out: dict[str, list[np.ndarray]] = {"gdn_gates": [], "conv1d_silu": [], "gdn_recurrent": []}
    for tokens, k_heads, v_heads, dk, dv in (
        (1, 1, 1, 4, 5),
        (3, 2, 4, 16, 24),
        (9, 2, 6, 33, 17),
        (5, 1, 2, 128, 128),
    ):
        channels = 2 * k_heads * dk + v_heads * dv
        tail = d.f32(3, channels)
        mixed = k.conv1d_silu(d.f32(tokens, channels, scale=4.0), d.f32(4, channels), tail)
        out["conv1d_silu"] += [mixed, tail]
        g, beta = k.gdn_gates(
            d.f32(tokens, v_heads, scale=25.0),
            d.f32(tokens, v_heads, scale=9.0),
            d.f32(v_heads, scale=3.0),
            d.f32(v_heads),
        )
        out["gdn_gates"] += [g, beta]
        q = k.l2_norm(mixed, 0, k_heads, dk, 1e-6, 0.1)
        key = k.l2_norm(mixed, k_heads * dk, k_heads, dk, 1e-6, 1.0)
        state = d.f32(v_heads, dk, dv)
        out["gdn_recurrent"] += [k.gdn_recurrent(q, key, mixed, 2 * k_heads * dk, g, beta, state), state]
    return out


def _attention(k: CpuKernels, d: Draw) -> dict[str, list[np.ndarray]]:
    out: dict[str, list[np.ndarray]] = {"rope_tables": [], "rope": [], "kv_append": [], "attention": [], "full_attention": []}
    for start, tokens, heads, kv_heads, head_dim, page in (
        (0, 1, 1, 1, 8, 4),
        (62, 5, 4, 2, 24, 7),
        (130, 9, 6, 2, 64, 16),
        (200, 3, 8, 2, 256, 64),
        (1020, 9, 4, 2, 32, 100),
    ):
        half = head_dim // 8
        positions = np.ascontiguousarray(np.broadcast_to(np.arange(start, start + tokens, dtype=np.int32), (3, tokens)))
        cos, sin = k.rope_tables(positions, np.abs(d.f32(half)), d.ids(3, half))
        out["rope_tables"] += [cos, sin]
        q = k.rope(d.f32(tokens, heads, head_dim, scale=3.0), cos, sin)
        out["rope"].append(q.copy())
        key, value = (d.f32(start + tokens, kv_heads, head_dim) for _ in range(2))
        for format in KV_FORMATS[: 3 if head_dim % 32 == 0 else 2]:
            cache = KVPages(kv_heads, page, head_dim, format)
            cache.reserve(start + tokens)
            k.kv_append(cache, np.zeros(1, np.int64), key, value)
            out["kv_append"] += [*cache.keys, *cache.values]
            out["attention"].append(k.attention(q, cache, np.array([start], np.int64), 0.25))
    for tokens, heads, head_dim, window in ((1, 1, 8, 1), (8, 3, 20, 4), (70, 2, 72, 70), (260, 2, 72, 130)):
        q, key, value = (d.f32(tokens, heads, head_dim, scale=2.0) for _ in range(3))
        out["full_attention"].append(k.full_attention(q, key, value, window, 0.25))
    return out


def _experts(k: CpuKernels, d: Draw) -> dict[str, list[np.ndarray]]:
    out: dict[str, list[np.ndarray]] = {"router_topk": [], "expert_rows": [], "moe_combine": []}
    for tokens, experts, top, n in ((1, 1, 1, 8), (5, 16, 2, 33), (4, 256, 8, 64), (3, 7, 7, 5)):
        logits = np.round(d.f32(tokens, experts, scale=6.0))  # whole numbers: ties in every row
        ids, weights = k.router_topk(logits.astype(np.float32), top)
        out["router_topk"] += [ids, weights]
        work = k.expert_rows(ids, experts)
        out["expert_rows"] += list(work)
        out["moe_combine"].append(
            k.moe_combine(d.f32(tokens * top, n), work.row_of, weights, d.f32(tokens, n), d.f32(tokens, 1, scale=5.0))
        )
    return out


def _grouped(k: CpuKernels, d: Draw) -> dict[str, list[np.ndarray]]:
    out: dict[str, list[np.ndarray]] = {"grouped_gemm_q4_0_q8_0": [], "grouped_gemm_q8_0_q8_0": []}
    for tokens, experts, top, rows, n in ((1, 4, 2, 9, 32), (6, 5, 3, 20, 256), (17, 3, 2, 8, 1024)):
        ids, _ = k.router_topk(d.f32(tokens, experts), top)
        work = k.expert_rows(ids, experts)
        q, gathered = k.quantize_q8_0(d.f32(tokens, n, scale=7.0)), k.quantize_q8_0(d.f32(tokens * top, n, scale=7.0))
        weights = d.f32(experts, rows, n, scale=0.05)
        for name in ("q4_0", "q8_0"):
            matrices = Experts.join([Matrix.from_f32(one, name) for one in weights])
            found = out[f"grouped_gemm_{name}_q8_0"]
            found += [k.grouped_gemm(q, matrices, work, False), k.grouped_gemm(gathered, matrices, work, True)]
    return out


GROUPS: tuple[Callable[[CpuKernels, Draw], dict[str, list[np.ndarray]]], ...] = (
    _maps,
    _rows,
    _matrices,
    _delta,
    _attention,
    _experts,
    _grouped,
)


def hashes(backend: str) -> dict[str, str]:
    """Op -> hash of all its results on the fixed shapes."""
    k = kernels.get(backend, threads=1)
    found: dict[str, str] = {}
    for seed, group in enumerate(GROUPS):
        for op, results in group(k, Draw(seed)).items():
            digest = hashlib.blake2b(digest_size=16)
            for array in results:
                digest.update(np.ascontiguousarray(array).tobytes())
            found[op] = digest.hexdigest()
    missing = set(dispatch.ops()) - set(found)
    if missing:
        raise SystemExit(f"no fixed shapes for {', '.join(sorted(missing))}: add them to tools/op_hashes.py")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", action="append", help="default: every backend this CPU can run")
    for backend in parser.parse_args().backend or dispatch.supported():
        for op, value in sorted(hashes(backend).items()):
            print(f"{backend:8s} {op:18s} {value}")


if __name__ == "__main__":
    main()
