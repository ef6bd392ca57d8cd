"""Dumps every named layer tensor of a reference forward over a pack, with the limit an engine must keep to.

    python tools/dump_reference.py --model PACK --ids 1,2,3 [--activations q8_0|f32] DUMP.safetensors

`fermi-engine verify --model PACK --against DUMP.safetensors` then feeds each layer the dump's input and names the first
layer and tensor over its limit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from safetensors.numpy import save  # noqa: E402

from fermi_engine.against import DUMP_FORMAT, DUMP_VERSION  # noqa: E402
from fermi_engine.errors import FermiError  # noqa: E402
from fermi_engine.pack import Pack  # noqa: E402
from reference.decoder import Decoder  # noqa: E402
from tools import oracle  # noqa: E402
from tools.noise import one_ulp  # noqa: E402

# Float32 engines differ from each other by rounding, and a rounding that moves an activation across the boundary between
# two 8-bit codes moves it by a whole quantum: rare, large and unpredictable. So the noise is sampled: the float32 reference
# runs once as it is and DRAWS times with its layer input moved by one unit in the last place. A layer holds a handful of
# such boundary cases for 10^4 activations (relative rounding error 1e-7 times 127 codes), so 16 draws meet them.
DRAWS = 16
FACTOR = 2.0  # an engine may err twice as much as the worst of those runs


class Collected(dict):
    """Named tensors of a run, as float64 or integers; `note` is its trace."""

    def note(self, name: str, value: torch.Tensor) -> None:
        self[name] = value.detach().double().numpy() if value.is_floating_point() else value.numpy()


def dump(pack: Pack, ids: list[int], activations: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Tensors of the dump: `ids`, per name `tensor.<name>` and `limit.<name>`, per MoE layer `margin.<i>`.

    The truth is the float64 reference, each layer fed the float32 rounding of the layer before it.
    """
    exact = oracle.decoder(pack, activations, torch.float64)
    single = exact.to(torch.float32)
    generator = np.random.Generator(np.random.PCG64(seed))
    out: dict[str, np.ndarray] = {"ids": np.array(ids, np.int32)}
    positions = torch.arange(len(ids)).expand(3, -1)
    x = exact.embed(torch.tensor(ids)).float()
    _note(out, "embed", x.double().numpy(), 0.0)
    for i in range(pack.config.num_hidden_layers):
        truth = _layer(exact, i, x, positions)
        runs = [_layer(single, i, x, positions)]
        runs += [_layer(single, i, _one_ulp(x, generator), positions) for _ in range(DRAWS)]
        _note_layer(out, i, truth, runs, pack.config.num_experts_per_tok)
        x = torch.from_numpy(truth[f"layers.{i}.output"]).float()
    truth, runs = _head(exact, x), [_head(single, x)] + [_head(single, _one_ulp(x, generator)) for _ in range(DRAWS)]
    for name, value in truth.items():
        _note(out, name, value, _worst(value, [run[name] for run in runs]))
    return out


def _one_ulp(x: torch.Tensor, generator: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(one_ulp(x.numpy(), generator))


def _layer(model: Decoder, i: int, x: torch.Tensor, positions: torch.Tensor) -> Collected:
    trace = Collected()
    with torch.no_grad():
        model.forward_layer(i, x.to(model.dtype), model.initial_state()[i], *model.rope_tables(positions), trace.note)
    return trace


def _head(model: Decoder, x: torch.Tensor) -> Collected:
    trace = Collected()
    with torch.no_grad():
        model.head(x.to(model.dtype), trace.note)
    return trace


def _note_layer(out: dict[str, np.ndarray], i: int, truth: Collected, runs: list[Collected], top_k: int) -> None:
    logits = f"layers.{i}.router_logits"
    counted = slice(None)
    if logits in truth:
        noise = FACTOR * _worst(truth[logits], [run[logits] for run in runs])
        ordered = np.sort(truth[logits], axis=1)[:, ::-1]
        full = top_k >= ordered.shape[1]
        margin = np.full(len(ordered), np.inf) if full else ordered[:, top_k - 1] - ordered[:, top_k]
        out[f"margin.{i}"] = margin.astype(np.float32)
        counted = margin > 2 * noise  # two logits may move towards each other
    for name, value in truth.items():
        if name.endswith("router_ids"):
            out[f"tensor.{name}"] = value.astype(np.int32)
            continue
        routed = name.rsplit(".", 1)[-1] in ("router_weights", "ffn", "output")
        rows = counted if routed else slice(None)
        _note(out, name, value, _worst(value[rows], [run[name][rows] for run in runs]))


def _worst(truth: np.ndarray, runs: list[np.ndarray]) -> float:
    return max((float(np.abs(run - truth).max()) for run in runs if truth.size), default=0.0)


def _note(out: dict[str, np.ndarray], name: str, truth: np.ndarray, noise: float) -> None:
    """The truth is stored in float32: its own rounding, half a unit in the last place, joins the limit."""
    rounding = float(np.abs(truth).max(initial=0.0)) * 2.0**-24
    out[f"tensor.{name}"] = np.ascontiguousarray(truth, np.float32)
    out[f"limit.{name}"] = np.array([FACTOR * noise + rounding])


def metadata(pack: Pack, activations: str) -> dict[str, str]:
    """What the dump says of itself."""
    return {
        "format": DUMP_FORMAT,
        "version": DUMP_VERSION,
        "pack": pack.hash,
        "activations": activations,
        "versions": json.dumps({"torch": torch.__version__, "numpy": np.__version__}),
    }


def write(path: Path, pack: Pack, ids: list[int], activations: str) -> Path:
    """Write the dump of one forward, whole or not at all."""
    tensors = dump(pack, ids, activations)
    part = path.with_name(path.name + ".part")
    part.write_bytes(save(tensors, metadata=metadata(pack, activations)))
    os.replace(part, path)
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, type=Path, help="a pack")
    parser.add_argument("--ids", required=True, help="token ids, comma separated")
    parser.add_argument("--activations", choices=("q8_0", "f32"), default="q8_0")
    parser.add_argument("dump", type=Path)
    args = parser.parse_args()
    try:
        write(args.dump, Pack.open(args.model), [int(i) for i in args.ids.split(",")], args.activations)
    except FermiError as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
