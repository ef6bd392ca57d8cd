"""Candidates of the stage table on sm_20: weight rows as floats and every product, in each of its tiles."""

from __future__ import annotations

import numpy as np

from fermi_engine.compare import Arrays
from fermi_engine.formats import FORMATS, Matrix
from fermi_engine.kernels.device_arrays import DeviceArray, DeviceExperts, DeviceMatrix
from fermi_engine.kernels.gpu_kernels import ANY_TILE, LARGE_TILE, SMALL_TILE, GpuKernels
from fermi_engine.stages.array_weights import matrix_of
from fermi_engine.stages.device_run import DeviceRun
from fermi_engine.stages.gpu import Candidate, launches

TILES = {"large": LARGE_TILE, "small": SMALL_TILE, "any": ANY_TILE}
SUFFIXES = {"large": "", "small": "_small", "any": "_any"}  # of entry points


def _rows(run: DeviceRun, w: Matrix, a: Arrays) -> Arrays:
    """Rows from `first` on, and those of `ids`."""
    coded = FORMATS[w.format].lanes > 1  # codes become floats four at a time
    rows, picked = (run.empty(count, w.cols, aligned=coded) for count in (w.rows - int(a["first"]), len(a["ids"])))
    matrix = run.matrix(w)
    run.rows.rows(matrix, rows, first=int(a["first"]))
    run.rows.rows(matrix, picked, run.put(a["ids"]))
    return {"rows": run.get(rows), "picked": run.get(picked)}


def dequantize(format: str) -> Candidate:
    """Plain bytes w uint8 [rows, bytes] through the stored layout."""
    return Candidate(lambda run, a: _rows(run, matrix_of(format, a["w"]), a), (f"dequantize_{format}",))


@launches("embed")
def embed(run: DeviceRun, a: Arrays) -> Arrays:
    return _rows(run, matrix_of("f32", a["w"]), a)


def _wide(run: DeviceRun, rows: int, columns: int, column: int) -> DeviceArray:
    return run.put(np.full((rows, columns + column + 1), 7, np.float32))


@launches("gemm_f32_any", "gemm_f32_small")
def gemm_f32(run: DeviceRun, a: Arrays) -> Arrays:
    """Also into the columns from `column` on of a wider result, whose other columns stay 7."""
    (tokens, rows), w = (len(a["x"]), len(a["w"])), run.matrix(matrix_of("f32", a["w"]))
    y, wide = run.empty(tokens, rows), _wide(run, tokens, rows, int(a["column"]))
    run.rows.gemm(run.put(a["x"]), w, y)
    run.rows.gemm(run.put(a["x"]), w, wide, int(a["column"]))
    return {"y": run.get(y), "wide": run.get(wide)}


class _Tiled(GpuKernels):
    """Products in one kind of tile, whatever their shape."""

    def __init__(self, run: DeviceRun, kind: str) -> None:
        super().__init__(run.device, run.stream)
        self._kind = kind

    def _gemm_tile(self, m: int, x: DeviceArray, w: DeviceMatrix) -> tuple[str, tuple[int, int, int]]:
        return f"gemm_{w.format}{SUFFIXES[self._kind]}", TILES[self._kind]


def tiles(format: str) -> Candidate:
    """A product in large tiles into the columns from `column` on of a wider result, whose other columns stay 7; in small
    tiles of the rows that `source` names; and, float32 only, in tiles that take any address."""
    kinds = ("large", "small", "any") if format == "f32" else ("large", "small")

    def compute(run: DeviceRun, a: Arrays) -> Arrays:
        w, x, source = run.matrix(matrix_of(format, a["w"])), run.put(a["x"], aligned=True), run.put(a["source"])
        out = {"large": _wide(run, len(a["x"]), w.rows, int(a["column"])), "small": run.empty(len(a["source"]), w.rows)}
        _Tiled(run, "large").gemm(x, w, out["large"], int(a["column"]))
        _Tiled(run, "small").gemm(x, w, out["small"], source=source)
        if format == "f32":
            crooked = run.put(np.append(np.float32(0), a["x"].reshape(-1)), aligned=True)
            out["any"] = run.empty(len(a["x"]), w.rows)
            _Tiled(run, "any").gemm(DeviceArray.within(crooked.buffer, a["x"].shape, np.float32, 4), w, out["any"])
        return {name: run.get(y) for name, y in out.items()}
    return Candidate(compute, tuple(f"gemm_{format}{SUFFIXES[kind]}" for kind in kinds))


def gemv_rows(format: str) -> Candidate:
    """Of the rows in order, and of those that `source` names."""
    def compute(run: DeviceRun, a: Arrays) -> Arrays:
        w, x, source = run.matrix(matrix_of(format, a["w"])), run.put(a["x"], aligned=True), run.put(a["source"])
        y, picked = run.empty(len(a["x"]), w.rows), run.empty(len(a["source"]), w.rows)
        run.tokens.gemv_rows(x, w, y)
        run.tokens.gemv_rows(x, w, picked, source)
        return {"y": run.get(y), "picked": run.get(picked)}
    return Candidate(compute, (f"gemv_rows_{format}",))


@launches("grouped_tiles")
def grouped_tiles(run: DeviceRun, a: Arrays) -> Arrays:
    """The list as far as it goes, for both tile heights."""
    found = {}
    for name, (tile_rows, _, _) in (("large", LARGE_TILE), ("small", SMALL_TILE)):
        bound = len(a["first"]) - 1 + int(a["first"][-1]) // tile_rows
        made = run.get(_tile_list(run, a, bound, tile_rows))
        found[name] = made[: 1 + 2 * min(max(made[0], 0), bound)]
    return found


def _tile_list(run: DeviceRun, a: Arrays, bound: int, tile_rows: int) -> DeviceArray:
    made = run.empty(1 + 2 * bound, dtype=np.int32)
    run.rows.grouped_tiles(run.put(a["first"]), run.put(a["hits"]), made, tile_rows)
    return made


def grouped_gemm(format: str) -> Candidate:
    """w uint8 [E, rows, bytes] with `gap` bytes 0xff after each expert. `tokens`: rows that the work's source names, in large
    tiles, experts in slots in falling order; `rows`: in the order of the work, in small tiles."""
    def compute(run: DeviceRun, a: Arrays) -> Arrays:
        count, slots = len(a["w"]), np.arange(len(a["w"]), dtype=np.int32)
        x, first, source = run.put(a["x"], aligned=True), run.put(a["first"]), run.put(a["source"])
        out = {}
        for name, order, tile in (("tokens", slots[::-1], LARGE_TILE), ("rows", slots, SMALL_TILE)):
            experts = _experts(run, format, a["w"][order], int(a["gap"]))
            made = _tile_list(run, a, min(count, len(a["source"])) + len(a["source"]) // tile[0], tile[0])
            y, slot = run.empty(len(a["source"]), experts.rows), run.put(order[np.maximum(a["hit"], 0)])
            run.rows.grouped_gemm(x, experts, first, made, y, source if name == "tokens" else None, slot, tile is SMALL_TILE)
            out[name] = run.get(y)
        return out
    return Candidate(compute, ("grouped_tiles", f"grouped_gemm_{format}", f"grouped_gemm_{format}_small"))


def _experts(run: DeviceRun, format: str, plain: np.ndarray, gap: int) -> DeviceExperts:
    matrices = [matrix_of(format, one) for one in plain]
    first = matrices[0]
    data = np.full((len(matrices), first.nbytes + gap), 0xFF, np.uint8)
    for row, matrix in zip(data, matrices, strict=True):
        row[: first.nbytes] = matrix.data.reshape(-1)
    held = run.put(data.reshape(-1), aligned=True)
    return DeviceExperts(format, len(matrices), first.rows, first.cols, first.nbytes + gap, held)
