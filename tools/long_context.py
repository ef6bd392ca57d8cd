"""Ten thousand tokens: attention by blocks against the whole matrix, and codes hidden at depths 0.1 to 0.9 through the GPU.

    python tools/long_context.py [--backend cuda|emulated|avx2|ssse3|scalar] [--tokens 10000] [--contexts 4] [--checkpoint DIR]

Attention: the GPU's kernels for many tokens and for one, or the CPU's over a cache and inside a view, at several lengths, against
the softmax of the full matrix of scores (reference.attention.attend) in float64; the limit is twice the error that the same in
float32 makes on the same inputs. Needles, where the backend is a GPU: the questions of tools/tiny_tasks.py to a trained
checkpoint's Q4_0 pack, each prompt through the GPU's prefill from the longest snapshot, answered greedily by the CPU. Exit status
1 where a limit is exceeded or a code that the CPU finds is missed.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

if not __package__:  # run as a script, which puts this folder on the path instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fermi_engine import report
from fermi_engine.config import EngineConfig
from fermi_engine.convert import convert
from fermi_engine.engine import Engine
from fermi_engine.errors import FermiError
from fermi_engine.kernels import dispatch
from fermi_engine.kernels.cpu import CpuKernels
from fermi_engine.kernels.sm20_attention import DeviceCache
from fermi_engine.kernels.sm20_token import TokenKernels, attention_work
from fermi_engine.sampling import SamplingParams
from fermi_engine.stages.device_run import DeviceRun
from fermi_engine.stages.table import CPU_BACKENDS, opened
from fermi_engine.state import KVPages
from reference import rope, vision
from reference.attention import attend
from reference.norms import rms_norm
from tools.tiny_tasks import DEPTHS, Encoder, Sample, check, drawn_row

ROOT = Path(__file__).resolve().parents[1]
LENGTHS = (1000, 3000, 10000)
EPS = 1e-6
KINDS = ("flat", "sharp", "rising")
FACTOR = 2.0
SEED = 5  # apart from the contexts that training and tools/tiny_accuracy.py look at
SPARE_TOKENS = 16  # that a wrong answer may be longer than the right one
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Sizes:
    """Of queries [rows, heads, dim] over keys and values [length, kv_heads, dim]."""

    rows: int
    heads: int
    kv_heads: int
    dim: int


SMALL, FULL = Sizes(6, 4, 2, 64), Sizes(256, 8, 2, 256)


@dataclass(frozen=True)
class Error:
    """Largest errors of a kernel, and of PyTorch in float32, to float64."""

    kernel: str
    length: int
    kind: str
    found: float
    torch: float

    @property
    def passed(self) -> bool:
        """Whether the kernel is within its limit."""
        return self.found <= FACTOR * self.torch

    def line(self) -> str:
        """For a table."""
        return (f"{self.kernel:7} {self.length:6} positions, {self.kind:6}: {self.found:.2e}, torch {self.torch:.2e}, "
                f"{self.found / self.torch:.2f} times{'' if self.passed else '  OVER THE LIMIT'}")


def operands(length: int, kind: str, sizes: Sizes) -> Arrays:
    """q [rows, HQ, D], the last tokens, and k, v [length, HK, D]. kind: `flat`: thousands of positions count alike; `sharp`: most
    of the weight lies on one position, in the middle; `rising`: scores rise, so that every block has a new maximum."""
    rng = np.random.default_rng(length + len(kind))
    q = rng.standard_normal((sizes.rows, sizes.heads, sizes.dim))
    k, v = (rng.standard_normal((length, sizes.kv_heads, sizes.dim)) for _ in "kv")
    if kind == "flat":
        k *= 0.1
    along = q[0, :: sizes.heads // sizes.kv_heads]  # what each key head's first query looks for
    along = along / np.linalg.norm(along, axis=-1, keepdims=True) * sizes.dim**0.5
    if kind == "sharp":
        k[length // 2] = along * 3
    if kind == "rising":
        k += along * np.linspace(-1, 1, length)[:, None, None]
    return {name: array.astype(np.float32) for name, array in (("q", q), ("k", k), ("v", v))}


def in_a_view(length: int, kind: str, sizes: Sizes) -> Arrays:
    """The same with as many heads as key heads; the queries are those of the first tokens of a view, who see all of it."""
    return operands(length, kind, replace(sizes, heads=sizes.kv_heads))


def tensors(a: Arrays, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.from_numpy(array).to(dtype) for array in a.values()]


def many_tokens(run: DeviceRun, a: Arrays) -> np.ndarray:
    """The kernel that prefill launches."""
    q, k, v = a.values()
    cache = DeviceCache(*(run.put(np.ascontiguousarray(x.transpose(1, 0, 2))) for x in (k, v)))
    out = run.empty(*q.shape)
    run.tokens.attention(run.put(q), cache, len(k) - len(q), 1 / math.sqrt(q.shape[2]), out, run.empty(*q.shape))
    return run.get(out)


def for_one_token(length: int, kind: str, sizes: Sizes) -> Arrays:
    """The last token's query and gate [HQ, 2 D], key and value [HK, D] before their norms, the cache before it, cos and sin."""
    rng = np.random.default_rng(length)
    a = operands(length, kind, sizes)
    gate, norms = rng.standard_normal((sizes.heads, sizes.dim)), rng.standard_normal((2, sizes.dim)) * 0.1
    angles = rng.uniform(0, 1, sizes.dim // 8)
    found = {"query_gate": np.concatenate([a["q"][0], gate], axis=1), "key": a["k"][-1], "value": a["v"][-1],
             "q_norm": norms[0], "k_norm": norms[1], "k": a["k"][:-1], "v": a["v"][:-1], "cos": np.cos(angles),
             "sin": np.sin(angles)}
    return {name: np.ascontiguousarray(array, np.float32) for name, array in found.items()}


def by_definition(query_gate: torch.Tensor, key: torch.Tensor, value: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor,
                  k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """What the kernels for one token compute: [HQ, D]."""
    q, gate = query_gate.chunk(2, dim=-1)
    tables = cos[None], sin[None]
    q = rope.rotate(rms_norm(q, q_norm, EPS)[None], *tables)
    key = rope.rotate(rms_norm(key, k_norm, EPS)[None], *tables)
    return attend(q, torch.cat([k, key]), torch.cat([v, value[None]]))[0] * torch.sigmoid(gate)


def one_token(run: DeviceRun, a: Arrays) -> np.ndarray:
    """The kernels that a decoded token launches; the cache has room for more."""
    (heads, width), past = a["query_gate"].shape, len(a["k"])
    capacity = past + 70
    rows = [np.zeros((a["k"].shape[1], capacity, width // 2), np.float32) for _ in "kv"]
    for row, name in zip(rows, "kv", strict=True):
        row[:, :past] = a[name].transpose(1, 0, 2)
    cache, out = DeviceCache(*map(run.put, rows)), run.empty(heads, width // 2)
    work = {name: run.empty(*shape) for name, shape in attention_work(heads, width // 2, capacity).items()}
    up = {name: run.put(a[name]) for name in ("query_gate", "key", "value", "q_norm", "k_norm", "cos", "sin")}
    TokenKernels(run.device, run.stream).attention(
        up["query_gate"], up["key"], up["value"], up["q_norm"], up["k_norm"], (up["cos"], up["sin"]),
        run.put(np.array([past], np.int32)), cache, work, out, EPS, 1 / math.sqrt(width // 2))
    return run.get(out)


def through_cache(k: CpuKernels, a: Arrays) -> np.ndarray:
    """The CPU's kernel for tokens of a text."""
    start, (_, kv_heads, dim) = len(a["k"]) - len(a["q"]), a["k"].shape
    cache = KVPages(kv_heads, 64, dim)
    cache.reserve(len(a["k"]))
    k.kv_append(cache, np.zeros(1, np.int64), a["k"], a["v"])
    return k.attention(a["q"], cache, np.array([start], np.int64), 1 / math.sqrt(dim))


class FirstItems(CpuKernels):
    """Kernels that compute so many items and leave the others."""

    def __init__(self, k: CpuKernels, items: int) -> None:
        super().__init__(dispatch.table(k.backends["full_attention"]), k.threads)
        self.items = items

    def _run(self, op: str, struct: str, items: int, grain: int, fields: dict[str, Any]) -> None:
        super()._run(op, struct, min(items, self.items), grain, fields)


def inside_view(k: CpuKernels, a: Arrays) -> np.ndarray:
    """The CPU's kernel for patches, of the first ones of a view."""
    rows, heads, dim = a["q"].shape
    queries = np.zeros_like(a["k"])
    queries[:rows] = a["q"]
    return FirstItems(k, rows * heads).full_attention(queries, a["k"], a["v"], len(queries), 1 / math.sqrt(dim))[:rows]


@dataclass(frozen=True)
class Kernel:
    """How inputs are made, what a kernel gives for them, and what that should be."""

    name: str
    draw: Callable[[int, str, Sizes], Arrays]
    operate: Callable[[Any, Arrays], np.ndarray]
    define: Callable[..., torch.Tensor]


ON_GPU = (Kernel("prefill", operands, many_tokens, attend), Kernel("token", for_one_token, one_token, by_definition))
ON_CPU = (Kernel("cache", operands, through_cache, attend), Kernel("view", in_a_view, inside_view, vision.attend))


def errors(backend: str, lengths: Sequence[int] = LENGTHS, sizes: Sizes = FULL) -> list[Error]:
    """All kernels of a backend at all lengths and kinds."""
    found = []
    with opened(backend) as run:
        for length in lengths:
            for kind in KINDS:
                for kernel in ON_CPU if backend in CPU_BACKENDS else ON_GPU:
                    inputs = kernel.draw(length, kind, sizes)
                    exact, single = (kernel.define(*tensors(inputs, dtype)).numpy() for dtype in (torch.float64, torch.float32))
                    far = [float(np.abs(got - exact).max()) for got in (kernel.operate(run, inputs), single)]
                    found.append(Error(kernel.name, length, kind, *far))
    return found


def answered(engine: Engine, encoder: Encoder, samples: Sequence[Sample]) -> list[bool]:
    """Which samples a greedy answer is right for."""
    found = []
    for sample in samples:
        params = SamplingParams(temperature=0, max_tokens=len(encoder.answer(sample)) + SPARE_TOKENS)
        found.append(check(sample, "".join(piece.text for piece in engine.generate(encoder.prompt(sample), params))))
    return found


def needles(checkpoint: Path, tokens: int, contexts: int, engines: dict[str, EngineConfig],
            every: int = 1) -> dict[str, np.ndarray]:
    """By engine: whether each code is found, bool [contexts, depths]. every: leave out depths but the first of so many."""
    encoder = Encoder.from_directory(checkpoint)
    rows = [drawn_row("held", SEED, index, encoder.measure, tokens)[::every] for index in range(contexts)]
    with tempfile.TemporaryDirectory() as folder:
        pack = convert(checkpoint, Path(folder) / "model.pack", "q4_0")
        opened = {name: Engine.load(pack, config=config) for name, config in engines.items()}
        return {name: np.array([answered(engine, encoder, row) for row in rows]) for name, engine in opened.items()}


def by_depth(found: np.ndarray) -> str:
    """Shares for a table."""
    return f"{found.mean():.1%} " + " ".join(f"{d:.1f}:{s:.0%}" for d, s in zip(DEPTHS, found.mean(0), strict=True))


def main(argv: list[str] | None = None) -> int:
    """The command line; 1 where a limit is exceeded, 2 for a mistake, told in one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("cuda", "emulated", *CPU_BACKENDS), default="cuda")
    parser.add_argument("--tokens", type=int, default=10000)
    parser.add_argument("--contexts", type=int, default=4)
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "golden" / "tiny")
    parser.add_argument("--only", choices=("attention", "needles"))
    args = parser.parse_args(argv)
    try:
        return _judged(args)
    except (FermiError, OSError) as err:
        report.note(f"error: {err}")
        return 2


def _judged(args: argparse.Namespace) -> int:
    """Prints what is found; -> exit status."""
    passed = True
    if args.only != "needles":
        found = errors(args.backend, sizes=SMALL if args.backend == "emulated" else FULL)
        print(*(error.line() for error in found), sep="\n", flush=True)
        passed = all(error.passed for error in found)
    if args.only != "attention" and args.backend not in CPU_BACKENDS:
        start = time.perf_counter()
        ways = {"GPU prefill": EngineConfig(prefill="gpu", device=args.backend), "CPU": EngineConfig()}
        hits = needles(args.checkpoint, args.tokens, args.contexts, ways)
        print(*(f"needles in {args.tokens} tokens, {name}: {by_depth(right)}" for name, right in hits.items()),
              f"{time.perf_counter() - start:.0f} s", sep="\n")
        passed &= bool((hits["GPU prefill"] >= hits["CPU"]).all())
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
