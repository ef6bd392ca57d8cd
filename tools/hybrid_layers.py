"""One layer at a time on the GPU and the CPU, both fed the same input from an empty state, against the reference.

The truth is the float64 reference; the limit twice the worst error of the reference in float32: as it is, and with the
layer's input moved by one unit in the last place, DRAWS times (as tools/dump_reference.py has it). That counts the roundings
within the layer, which moving the input of the engine itself does not: sums of 2048 products round 2048 times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fermi_engine.gpu.state import DeviceState
from fermi_engine.kernels.cpu import CpuKernels
from fermi_engine.kernels.gpu import Device, DeviceBuffer, Stream
from fermi_engine.model.decoder import Decoder, Positions
from fermi_engine.model.gpu_layers import Activations, BlockOnDevice, DeltaOnDevice, Kernels
from fermi_engine.model.gpu_weights import DenseWeights, ExpertWeights
from fermi_engine.model.weights import SomeLayers, silent
from fermi_engine.pack import Pack
from fermi_engine.state import DeltaState, HybridState
from reference import decoder as reference
from tools import oracle
from tools.noise import one_ulp

DRAWS = 16
FACTOR = 2.0
Arrays = dict[str, np.ndarray]
Room = Callable[[int, str], DeviceBuffer]  # bytes, name


@dataclass(frozen=True)
class Truth:
    """What the reference makes of a layer: `arrays` in float64 are output [T, H] and conv [taps-1, C], recurrent [HV, K, V] or
    k, v [T, HK, D]; `noise` is the largest float32 error of each; `decided` [T] are tokens whose router had a choice that
    rounding cannot change, the only ones whose output counts."""

    arrays: Arrays
    noise: Mapping[str, float]
    decided: np.ndarray

    def errors(self, got: Mapping[str, Any]) -> dict[str, float]:
        """Largest error of each array."""
        rows = {name: self.decided if name == "output" else slice(None) for name in self.arrays}
        return {name: float(np.abs(np.asarray(got[name], np.float64) - right)[rows[name]].max(initial=0.0))
                for name, right in self.arrays.items()}

    def limits(self) -> dict[str, float]:
        """What an engine's errors may be."""
        return {name: FACTOR * noise for name, noise in self.noise.items()}


def truth(pack: Pack, layer: int, x: np.ndarray, draws: int = DRAWS) -> Truth:
    """The reference on the input x float32 [T, H]."""
    exact = oracle.decoder(pack, "f32", torch.float64, layer)
    right, logits = _reference(exact, layer, x)
    single, generator = exact.to(torch.float32), np.random.default_rng(layer)
    runs = [_reference(single, layer, moved) for moved in (x, *(one_ulp(x, generator) for _ in range(draws)))]
    decided, top_k = np.ones(len(x), bool), pack.config.num_experts_per_tok
    if logits is not None and top_k < pack.config.num_experts:
        worst = max(np.abs(moved - logits).max() for _, moved in runs)
        ordered = np.sort(logits, axis=1)[:, ::-1]
        decided = ordered[:, top_k - 1] - ordered[:, top_k] > 2 * FACTOR * worst  # two logits may move towards each other
    errors = [Truth(right, {}, decided).errors(arrays) for arrays, _ in runs]
    return Truth(right, {name: max(error[name] for error in errors) for name in right}, decided)


def _reference(model: reference.Decoder, layer: int, x: np.ndarray) -> tuple[Arrays, np.ndarray | None]:
    """Output and state of a layer, and its router's logits if it has one."""
    seen: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        tables = model.rope_tables(torch.arange(len(x)).expand(3, -1))
        state = model.initial_state()[layer]
        out, state = model.forward_layer(layer, torch.from_numpy(x).to(model.dtype), state, *tables, seen.__setitem__)
    logits = seen.get(f"layers.{layer}.router_logits")
    arrays = {name: array.double().numpy() for name, array in {"output": out, **state}.items()}
    return arrays, None if logits is None else logits.double().numpy()


def on_cpu(pack: Pack, kernels: CpuKernels, layer: int, x: np.ndarray) -> Arrays:
    """The same arrays by the engine's CPU path with float32 activations."""
    cut = SomeLayers(pack, (layer,))
    decoder = Decoder(cut, kernels, "f32")
    state = HybridState.fresh(cut.config, 64)
    state.reserve(len(x))
    part = state.layers[0]
    out = decoder.layers[0].forward(kernels, x, part, Positions.of(decoder, 0, len(x)), "f32", silent)
    if isinstance(part, DeltaState):
        return {"output": out, "conv": part.conv, "recurrent": part.recurrent}
    return {"output": out, **dict(zip("kv", part.filled(len(x)), strict=True))}


def on_gpu(pack: Pack, kernels: CpuKernels, layer: int, x: np.ndarray, device: Device) -> Arrays:
    """The same by the GPU's kernels; what is allocated is freed again."""
    cut, stream = SomeLayers(pack, (layer,)), device.stream("layer")
    with _memory(device) as room:
        block = _block(cut, kernels, x, device, stream, room)
        buffers = [room(nbytes, "state") if nbytes else None for nbytes in DeviceState.nbytes(cut.config, len(x))]
        state = DeviceState(cut.config, len(x), *buffers)
        state.upload(device, stream, HybridState.fresh(cut.config, 64))
        _run(cut, block, state.layers[0], device, stream, room)
        found = {name: _down(device, array, stream) for name, array in _parts(block, state.layers[0]).items()}
    return {name: array.transpose(1, 0, 2) if name in "kv" else array for name, array in found.items()}


@contextmanager
def _memory(device: Device) -> Iterator[Room]:
    """Allocations that end with the block."""
    owned: list[DeviceBuffer] = []

    def room(nbytes: int, name: str) -> DeviceBuffer:
        owned.append(device.alloc(nbytes, name))
        return owned[-1]

    yield room
    for buffer in owned:
        device.free(buffer)


def _block(cut: SomeLayers, kernels: CpuKernels, x: np.ndarray, device: Device, stream: Stream, room: Room) -> BlockOnDevice:
    """x and what belongs to its positions, on the device."""
    plan = Activations(cut.config, len(x))
    arrays = plan.within(room(plan.nbytes, "activations"))
    rotary = Decoder(cut, kernels, "f32").rotary
    positions = np.ascontiguousarray(np.broadcast_to(np.arange(len(x), dtype=np.int32), (3, len(x))))
    for part, host in (("x", x), ("positions", positions), ("inv_freq", rotary.inv_freq), ("axis", rotary.axis)):
        arrays[part].upload(device, host, stream)
    return BlockOnDevice(cut.config, Kernels(device, stream), arrays, len(x), 0)


def _run(cut: SomeLayers, block: BlockOnDevice, state: Any, device: Device, stream: Stream, room: Room) -> None:
    """The layer, its weights copied here."""
    dense = DenseWeights(cut, 0)
    memory = room(dense.nbytes, "dense")
    for offset, piece in dense.pieces():
        device.h2d(memory, piece, stream, offset)
    w = dense.within(memory)
    block.tables()
    block.mixer(w, state)
    block.route(w)
    block.shared(w)
    if cut.config.num_experts:
        experts = ExpertWeights(cut, 0)
        memory = room(experts.nbytes, "experts")
        device.h2d(memory, experts.host, stream)
        block.routed(*experts.within(memory))
    block.finish()


def _parts(block: BlockOnDevice, state: Any) -> dict[str, Any]:
    if isinstance(state, DeltaOnDevice):
        return {"output": block["x"], "conv": state.conv, "recurrent": state.final}
    return {"output": block["x"], "k": state.k, "v": state.v}


def _down(device: Device, array: Any, stream: Any) -> np.ndarray:
    out = np.empty(array.shape, np.float32)
    array.download(device, out, stream)
    return out
