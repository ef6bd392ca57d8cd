"""Vision towers of real size on a modern NVIDIA card: time by stage, share of cuBLAS's float32 rate, error against float64.

    python tools/lab/vision_h200.py [--device cuda|emulated] [--towers minicpm-v-4.6,qwen3.6-35b-a3b] [--gemm vendor,own]
                                    [--format f32] [--vram 6442450944] [--small] [--skip-check]

Random weights at full shape. Images: of MiniCPM one view and a large image, ten views; of Qwen one of 1024 x 1024 pixels. For
each: host time of an encode from patches in memory to embeddings in memory, device time by stage and by kernel, launches, the
ledger's peak. The check holds embeddings against the reference in float64 on the card, beside torch's float32 (TF32 off), whose
time is printed, too. --small: towers of two layers and small images, to try the script.
Exit status 1: an error beyond twice torch's or the published ones, a peak beyond the limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

import numpy as np

with suppress(ImportError):
    import torch  # brings cuBLAS to machines without an installed CUDA

if not __package__:  # run as a script, which puts this folder on the path instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from fermi_engine import report
from fermi_engine.errors import FermiError
from fermi_engine.formats import FORMATS, Matrix
from fermi_engine.gpu.stream import HostMemory
from fermi_engine.gpu.vision import GpuVision
from fermi_engine.kernels.gpu import Device, open_device
from fermi_engine.placement import Ledger
from fermi_engine.vision.config import QWEN, VisionConfig, stored_shapes
from reference import vision_minicpm, vision_qwen
from tools.bench.geometries import TOWERS
from tools.lab.hybrid_h200 import SGEMM_SIZE, print_kernels, sgemm_rate

PUBLISHED = {"one": 1.4e-5, "several": 1.2e-4}  # largest errors per element of another engine's tower
RUNS = 5
IMAGES = {"one view": [(32, 32)], "ten views": [(28, 36)] * 10}, {"1024 x 1024": [(64, 64)]}
SMALL = {"one view": [(8, 8)], "ten views": [(4, 8)] * 10}, {"1024 x 1024": [(8, 8)]}
Grids = list[tuple[int, int]]


class RandomTensors:
    """A tower's tensors at full shape, drawn once: norms about 1, matrices that keep a row's length; matrices in `form`."""

    def __init__(self, config: VisionConfig, form: str) -> None:
        rng, self._form = np.random.default_rng(7), form
        self.arrays: dict[str, np.ndarray] = {}
        for name, shape in stored_shapes(config).items():
            array = rng.standard_normal(shape, np.float32)
            if len(shape) == 1:
                array *= 0.1
                array += np.float32("norm" in name and name.endswith("weight"))
            else:
                array *= np.float32(1.0 if "pos" in name else shape[1] ** -0.5)
            self.arrays[name] = array

    def vector(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def matrix(self, name: str) -> Matrix:
        """Stored; its array then holds what it stands for."""
        array = self.arrays[name]
        stored = Matrix.from_f32(array, self._form if array.shape[1] % 32 == 0 else "f32")
        if stored.format != "f32":
            row = FORMATS[stored.format]
            self.arrays[name] = row.dequantize(row.quantize(array))
        return stored


def flop(c: VisionConfig, grids: Grids) -> float:
    """Floating-point operations of an encode: products and attention."""
    shapes, total, rows = stored_shapes(c), 0.0, sum(h * w for h, w in grids)
    pairs, merged = sum((h * w) ** 2 for h, w in grids), c.images.patches_per_token == 16
    for name, shape in shapes.items():
        if len(shape) < 2 or "pos" in name:
            continue
        behind = merged and (name.startswith("merger.") or _layer(name) > c.insert_layer_id >= 0)
        count = rows // 4 if behind else rows
        if name.startswith(("merger.", "visual.merger.")) or ("vit_merger.linear" in name and merged):
            count //= 4
        total += 2.0 * count * shape[0] * shape[1] * ("vit_merger" not in name or merged)
    for layer in range(c.num_hidden_layers):
        total += 4.0 * c.hidden_size * (pairs / 16 if merged and layer > c.insert_layer_id >= 0 else pairs)
    return total


def _layer(name: str) -> int:
    return next((int(part) for part in name.split(".") if part.isdecimal()), -1) if "layers." in name else -1


def encode(tower: GpuVision, what: str, patches: np.ndarray, grids: Grids, sgemm: float) -> np.ndarray:
    """Prints times; embeddings of the last run."""
    device, seconds, stages = tower.device, [], []
    for run in range(RUNS + 1):
        start = time.perf_counter()
        rows = tower.forward(patches, grids)
        if run:
            seconds.append(time.perf_counter() - start)
            stages.append(dict(tower.last.seconds))
    device.start_trace()
    tower.forward(patches, grids)
    spans, work = device.end_trace(), flop(tower.config, grids)
    launches = sum(span.engine == "compute" for span in spans)
    computing = [sum(found.values()) - found["patches"] for found in stages]
    middle = median(computing)
    print(f"{tower.config.family}, {what}, {len(patches)} patches, {tower.gemm}: {1e3 * median(seconds):.2f} ms on the host, "
          f"device {1e3 * middle:.2f} ms for {work / 1e12:.3f} Tflop = {work / middle / 1e12:.2f} Tflop/s = "
          f"{work / middle / sgemm:.1%} of sgemm; {launches} launches; peak {tower.ledger.peak} bytes", flush=True)
    print("  " + ", ".join(f"{name} {1e3 * median(s[name] for s in stages):.2f} ms" for name in stages[0]), flush=True)
    print_kernels(spans)
    return rows


@contextmanager
def on_card(name: str) -> Iterator[None]:
    """torch's default device, without TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.no_grad(), torch.device(name):
        yield


def references(config: VisionConfig, tensors: RandomTensors, images: dict[str, tuple[np.ndarray, Grids]],
               where: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By image, the reference's embeddings in float64 and in float32; prints the time of the latter."""
    found: dict[str, list[np.ndarray]] = {name: [] for name in images}
    kind = vision_qwen.QwenVision if config.family == QWEN else vision_minicpm.MiniCpmVision
    more = () if config.family == QWEN else ("16x",)
    for dtype in (torch.float64, torch.float32):
        with on_card(where):
            params = {name.removeprefix("visual."): torch.from_numpy(array).to(where).to(dtype)
                      for name, array in tensors.arrays.items()}
            model = kind(config, params)
            for name, (patches, grids) in images.items():
                given = torch.from_numpy(patches).to(where)
                for _ in range(2):
                    start = time.perf_counter()
                    rows = model.forward(given, grids, *more).cpu()
                    seconds = time.perf_counter() - start
                found[name].append(rows.numpy())
                print(f"torch {str(dtype).removeprefix('torch.')}, {name}: {1e3 * seconds:.2f} ms", flush=True)
            del params, model
        if where != "cpu":
            torch.cuda.empty_cache()
    return {name: (exact, single) for name, (exact, single) in found.items()}


def check(what: str, rows: np.ndarray, exact: np.ndarray, single: np.ndarray, several: bool) -> bool:
    """Whether the error is at most twice torch's and below the published; prints both."""
    ours, theirs = rows - exact, single - exact
    norms = [float(np.linalg.norm(error) / np.linalg.norm(exact)) for error in (ours, theirs)]
    limit = PUBLISHED["several" if several else "one"]
    print(f"  {what}: largest error {np.abs(ours).max():.2e}, torch float32 {np.abs(theirs).max():.2e}, published {limit:.1e}; "
          f"relative norms {norms[0]:.2e}, {norms[1]:.2e}; values up to {np.abs(exact).max():.2f}", flush=True)
    return norms[0] <= 2 * norms[1] and float(np.abs(ours).max()) < limit


def measure(device: Device, name: str, args: argparse.Namespace, sgemm: float) -> bool:
    """One tower, each way of its products."""
    config = TOWERS[name]
    if args.small:
        config = dataclasses.replace(config, num_hidden_layers=2, hidden_size=96, intermediate_size=128, num_attention_heads=4,
                                     insert_layer_id=min(config.insert_layer_id, 0), table_side=8)
    start, tensors = time.perf_counter(), RandomTensors(config, args.format)
    for stored in stored_shapes(config):  # so that the reference has the values that matrices stand for
        if args.format != "f32" and stored.endswith(".weight") and tensors.arrays[stored].ndim == 2 and "pos" not in stored:
            tensors.matrix(stored)
    print(f"{name}: {sum(array.size for array in tensors.arrays.values()) / 1e6:.1f} M weights drawn in "
          f"{time.perf_counter() - start:.1f} s", flush=True)
    rng = np.random.default_rng(5)
    chosen = (SMALL if args.small else IMAGES)[config.family == QWEN]
    images = {what: (rng.uniform(-1, 1, (sum(h * w for h, w in grids), config.patch_width)).astype(np.float32), grids)
              for what, grids in chosen.items()}
    known = {} if args.skip_check else references(config, tensors, images, "cuda" if args.device == "cuda" else "cpu")
    good = True
    for gemm in args.gemm.split(","):
        ledger, host = Ledger(device, args.vram), HostMemory(device, report.note)
        start = time.perf_counter()
        tower = GpuVision(device, tensors, config, ledger, host, gemm)
        tower._loaded()
        tower.stream.synchronize()
        seconds = time.perf_counter() - start
        print(f"{name}, {tower.gemm}: weights of {ledger.used} bytes on the card in {seconds:.2f} s", flush=True)
        for what, (patches, grids) in images.items():
            rows = encode(tower, what, patches, grids, sgemm)
            good &= what not in known or check(what, rows, *known[what], len(grids) > 1)
        good &= ledger.peak <= args.vram
        tower.release()
        host.close()
    return good


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "emulated"), default="cuda")
    parser.add_argument("--towers", default="minicpm-v-4.6,qwen3.6-35b-a3b")
    parser.add_argument("--gemm", default="vendor,own")
    parser.add_argument("--format", choices=("f32", "q8_0", "q4_0"), default="f32")
    parser.add_argument("--vram", type=int, default=6 << 30)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--skip-check", action="store_true", help="leave out the comparison with torch")
    args = parser.parse_args()
    try:
        device = open_device(args.device)
        sgemm = sgemm_rate(device, 128 if args.small else SGEMM_SIZE)
        print(f"{device.name}: sgemm {sgemm / 1e12:.2f} Tflop/s", flush=True)
        found = [measure(device, name, args, sgemm) for name in args.towers.split(",")]
        device.close()
        return 0 if all(found) else 1
    except FermiError as err:
        report.note(f"error: {err}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
