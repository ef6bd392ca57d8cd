"""Times the sm_20 GEMM kernels on a modern NVIDIA GPU, from PTX through the driver's compiler, beside cuBLAS.

    python tools/lab/sm20_gemm_bench.py [--kernels kernels.json] [--registers 0,64] kernels.ptx ...

Needs torch (for cuBLAS in plain float32, TF32 off) and pycuda. Every kernel is first held, to the bit, against the
first f32 kernel on expanded weights, and that one against float64; then it is timed: the median of ten launches by
events, after two more. Kernels are those of csrc/sm20, or those of a table {name: {"format", "grouped", "rows",
"cols", "threads"}} in a JSON file. --registers adds copies of each kernel that the driver's compiler holds to so many
registers (0: as it likes).
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pycuda.autoprimaryctx  # noqa: F401  (the context that torch uses too)
import pycuda.driver as cuda
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from fermi_engine.formats import FORMATS, Matrix

DEVICE = "cuda"
BLOCK_BYTES = {"q4_0": 144, "q8_0": 272}
DENSE = ((3840, 3840, 3840), (947, 8192, 2048), (947, 2048, 4096), (947, 2048, 512), (947, 1024, 2048),
         (947, 512, 2048), (947, 32, 2048), (96, 4096, 2048), (1, 4096, 2048))
EXPERTS = 128
GROUPED = ((59, 1024, 2048), (59, 2048, 512), (7, 1024, 2048), (130, 1024, 2048), (-59, 1024, 2048), (-59, 2048, 512))
# rows of each expert, n, k; negative: uneven rows of that mean


@dataclass(frozen=True)
class Kernel:
    """One compiled entry point and the tile its grid is made of."""

    name: str
    format: str
    grouped: bool
    rows: int
    cols: int
    threads: int
    function: cuda.Function

    def launch(self, grid_rows: int, n: int, *words) -> None:
        """Starts it; `words` are the struct's members, 8 bytes each: tensors, None or integers."""
        values = [0 if w is None else w.data_ptr() if isinstance(w, torch.Tensor) else int(w) for w in words]
        self.function(np.array(values, np.int64), block=(self.threads, 1, 1), grid=(-(-n // self.cols), grid_rows))


def shipped() -> dict:
    """The kernels of csrc/sm20."""
    table = {"gemm_f32_any": {"format": "f32", "grouped": False, "rows": 64, "cols": 64, "threads": 256}}
    for suffix, rows, cols, threads in (("", 64, 128, 256), ("_small", 32, 64, 128)):
        for format in ("f32", "q4_0", "q8_0"):
            tile = {"format": format, "rows": rows, "cols": cols, "threads": threads}
            table[f"gemm_{format}{suffix}"] = tile | {"grouped": False}
            table[f"grouped_gemm_{format}{suffix}"] = tile | {"grouped": True}
    return table


def load(paths: list[Path], table: dict, registers: list[int]) -> list[Kernel]:
    """The kernels of `table` that the PTX files hold, one copy for each register limit."""
    kernels = {}
    for limit in registers:
        for path in paths:
            ptx = path.read_text()
            if limit:
                ptx = re.sub(r"^(\.maxntid.*)$", rf"\1\n.maxnreg {limit}", ptx, flags=re.MULTILINE)
            module = cuda.module_from_buffer(ptx.encode())
            for name in re.findall(r"\.entry (\w+)", ptx):
                if name in table:
                    label = name + (f"/{limit}" if limit else "")
                    label += f"@{path.stem}" if label in kernels else ""
                    kernels[label] = Kernel(label, function=module.get_function(name), **table[name])
    return list(kernels.values())


def stored_weights(format: str, rows: int, k: int) -> torch.Tensor:
    """Random weights as the kernels read them: f32 [rows, k], or stored groups with scales near 0.01."""
    if format == "f32":
        return torch.randn(rows, k, device=DEVICE)
    groups = torch.randint(0, 256, (-(-rows // 8), k // 32, BLOCK_BYTES[format]), dtype=torch.uint8, device=DEVICE)
    groups[..., :16] = (0.01 + 0.001 * torch.randn(*groups.shape[:2], 8, device=DEVICE)).half().view(torch.uint8)
    return groups


def expanded(format: str, stored: torch.Tensor, rows: int) -> torch.Tensor:
    """The floats that stored weights stand for."""
    if format == "f32":
        return stored
    flat = stored.cpu().numpy().reshape(len(stored), -1)
    return torch.from_numpy(Matrix(format, rows, stored.shape[1] * 32, flat).dequantize()).to(DEVICE)


def tile_list(first: list[int], tile_rows: int) -> torch.Tensor:
    """What grouped_tiles makes."""
    tiles = [(hit, row) for hit, (a, b) in enumerate(pairwise(first)) for row in range(a, b, tile_rows)]
    return torch.tensor([len(tiles), *sum(tiles, ())], dtype=torch.int32, device=DEVICE)


def row_counts(m: int) -> list[int]:
    """Rows of each expert: m, or for negative m uneven numbers of mean -m, the largest about 10 times the median."""
    if m >= 0:
        return [m] * EXPERTS
    popularity = np.exp(np.random.default_rng(1).standard_normal(EXPERTS))
    return np.random.default_rng(2).multinomial(-m * EXPERTS, popularity / popularity.sum()).tolist()


def run_dense(kernel: Kernel, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor,
              source: torch.Tensor | None = None) -> None:
    """y = x[source] W^T."""
    m, n = y.shape
    kernel.launch(-(-m // kernel.rows), n, x, source, w, y, x.shape[1], n, m, n, x.shape[1])


def run_grouped(kernel: Kernel, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, first: torch.Tensor,
                tiles: torch.Tensor) -> None:
    """Rows first[i]..first[i+1] of y from the same rows of x and matrix i of w."""
    n, k = y.shape[1], x.shape[1]
    kernel.launch((len(tiles) - 1) // 2, n, x, None, w, None, first, tiles, y, k, n, w[0].nbytes, n, k)


def check(kernels: list[Kernel]) -> dict[str, bool]:
    """Whether each kernel gives the bits of the first f32 kernel on the expanded weights; odd sizes and tails."""
    reference = next(kernel for kernel in kernels if kernel.format == "f32")
    first = [0, 1, 97, 194, 224, 227]
    m, n, k = first[-1], 200, 128
    x = torch.randn(m, k, device=DEVICE)
    source = torch.randint(0, m, (m,), dtype=torch.int32, device=DEVICE)
    right = {}
    for kernel in kernels:
        y, expected = torch.full((2, m, n), torch.nan, device=DEVICE)
        if kernel.grouped:
            w = torch.stack([stored_weights(kernel.format, n, k) for _ in first[1:]])
            ends = torch.tensor(first, dtype=torch.int32, device=DEVICE)
            run_grouped(kernel, x, w, y, ends, tile_list(first, kernel.rows))
            for i, (a, b) in enumerate(pairwise(first)):
                run_dense(reference, x[a:b].contiguous(), expanded(kernel.format, w[i], n), expected[a:b])
        else:
            stored = stored_weights(kernel.format, n, k)
            w = expanded(kernel.format, stored, n)
            run_dense(kernel, x, stored, y, source)
            run_dense(reference, x[source.long()], w, expected)
            exact = x[source.long()].double() @ w.double().T
            magnitude = x[source.long()].double().abs() @ w.double().abs().T
            assert bool(((expected - exact).abs() <= k * 2.0**-24 * magnitude).all()), kernel.name
        right[kernel.name] = bool((y.view(torch.int32) == expected.view(torch.int32)).all())
    return right


def median_s(run) -> float:
    """Seconds of the middle one of ten runs on the default stream."""
    times = []
    for _ in range(12):
        begin, end = cuda.Event(), cuda.Event()
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.time_till(end) / 1e3)
    return sorted(times[2:])[5]


def time_dense(kernels: list[Kernel]) -> dict[str, list[float]]:
    """TFLOP/s at each DENSE shape, cuBLAS first."""
    rates = {"cuBLAS": []} | {kernel.name: [] for kernel in kernels if not kernel.grouped}
    for m, n, k in DENSE:
        x, y = torch.randn(m, k, device=DEVICE), torch.empty(m, n, device=DEVICE)
        weights = {format: stored_weights(format, n, k) for format in FORMATS if format != "f16"}
        rates["cuBLAS"].append(2e-12 * m * n * k / median_s(functools.partial(torch.mm, x, weights["f32"].T, out=y)))
        for kernel in kernels:
            if not kernel.grouped:
                seconds = median_s(functools.partial(run_dense, kernel, x, weights[kernel.format], y))
                rates[kernel.name].append(2e-12 * m * n * k / seconds)
    return rates


def time_grouped(kernels: list[Kernel]) -> dict[str, list[float]]:
    """TFLOP/s at each GROUPED shape."""
    rates = {kernel.name: [] for kernel in kernels if kernel.grouped}
    for m, n, k in GROUPED:
        ends = [0, *np.cumsum(row_counts(m)).tolist()]
        x, y = torch.randn(ends[-1], k, device=DEVICE), torch.empty(ends[-1], n, device=DEVICE)
        first = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        for format in BLOCK_BYTES:
            w = torch.stack([stored_weights(format, n, k) for _ in range(EXPERTS)])
            for kernel in kernels:
                if kernel.grouped and kernel.format == format:
                    tiles = tile_list(ends, kernel.rows)
                    seconds = median_s(functools.partial(run_grouped, kernel, x, w, y, first, tiles))
                    rates[kernel.name].append(2e-12 * ends[-1] * n * k / seconds)
    return rates


def report(title: str, shapes: tuple, rates: dict[str, list[float]], kernels: list[Kernel],
           right: dict[str, bool]) -> str:
    """A table of TFLOP/s, one kernel a line."""
    registers = {kernel.name: kernel.function.num_regs for kernel in kernels}
    lines = [f"{title:34} regs bits  " + " ".join(f"{'x'.join(map(str, shape)):>14}" for shape in shapes)]
    for name, row in rates.items():
        verdict = {True: "same", False: "WRONG", None: "-"}[right.get(name)]
        lines.append(f"{name:34} {registers.get(name, 0):4} {verdict:5} " + " ".join(f"{rate:14.2f}" for rate in row))
    return "\n".join(lines)


def main() -> int:
    """Checks and times what the command line names; 1 if a kernel's bits were wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", type=Path)
    parser.add_argument("--registers", default="0")
    parser.add_argument("--check", action="store_true", help="only the bits, for runs under a sanitizer")
    parser.add_argument("ptx", nargs="+", type=Path)
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(1)
    table = json.loads(arguments.kernels.read_text()) if arguments.kernels else shipped()
    kernels = load(arguments.ptx, table, [int(limit) for limit in arguments.registers.split(",")])
    right = check(kernels)
    if arguments.check:
        print("\n".join(f"{name}: {'same bits' if same else 'WRONG'}" for name, same in right.items()))
        return 0 if all(right.values()) else 1
    print(torch.cuda.get_device_name(), flush=True)
    print(report("TFLOP/s, dense, m x n x k", DENSE, time_dense(kernels), kernels, right), flush=True)
    print(report(f"TFLOP/s, {EXPERTS} experts, m each x n x k", GROUPED, time_grouped(kernels), kernels, right))
    return 0 if all(right.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
