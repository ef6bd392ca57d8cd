"""Runs of a layer's halves and of whole prefills on sm_20 over weights given as arrays: the other family of runs.py."""

from __future__ import annotations

import numpy as np

from fermi_engine import kernels
from fermi_engine.compare import Arrays
from fermi_engine.gpu.prefill import HybridPrefill
from fermi_engine.gpu.resident import Resident
from fermi_engine.kernels.dispatch import supported
from fermi_engine.kernels.sm20_attention import DeviceCache
from fermi_engine.model.attention import RotaryTables
from fermi_engine.model.decoder import Decoder
from fermi_engine.model.gpu_layers import Activations, BlockOnDevice, DeltaOnDevice, DeviceWeights, Kernels
from fermi_engine.model.gpu_weights import DenseWeights, ExpertWeights
from fermi_engine.stages.array_weights import ArrayWeights
from fermi_engine.stages.device_run import DeviceRun
from fermi_engine.stages.runs import named_state
from fermi_engine.state import HybridState


class _Layer:
    """Layer 0 of the arrays on a device, and x [T, H] before it."""

    def __init__(self, run: DeviceRun, a: Arrays, start: int = 0) -> None:
        self._run, self._weights = run, ArrayWeights(a)
        self.config, tokens = self._weights.config, len(a["x"])
        plan, rotary = Activations(self.config, tokens), RotaryTables(self.config)
        arrays = plan.within(run.empty(plan.nbytes, dtype=np.uint8, aligned=True).buffer)
        positions = a.get("positions", np.zeros((3, tokens), np.int32))
        for name, host in (("x", a["x"]), ("positions", positions), ("inv_freq", rotary.inv_freq), ("axis", rotary.axis)):
            arrays[name].upload(run.device, np.ascontiguousarray(host), run.stream)
        self.block = BlockOnDevice(self.config, Kernels(run.device, run.stream), arrays, tokens, start)
        self.block.tables()
        self.dense = self._dense()

    def _dense(self) -> DeviceWeights:
        weights = DenseWeights(self._weights, 0)
        memory = self._run.empty(weights.nbytes, dtype=np.uint8, aligned=True).buffer
        for offset, piece in weights.pieces():
            self._run.device.h2d(memory, piece, self._run.stream, offset)
        return weights.within(memory)

    def feed_forward(self) -> None:
        """The second half of the layer."""
        self.block.route(self.dense)
        self.block.shared(self.dense)
        if self.config.num_experts:
            experts = ExpertWeights(self._weights, 0)
            self.block.routed(*experts.within(self._run.put(experts.host, aligned=True).buffer))
        self.block.finish()

    def y(self) -> np.ndarray:
        """x as it is now."""
        return self._run.get(self.block["x"])


def delta_net_block(run: DeviceRun, a: Arrays) -> Arrays:
    """See runs.delta_net_block."""
    layer = _Layer(run, a)
    arrays = {name: run.empty(*shape, aligned=True) for name, shape in DeltaOnDevice.shapes(layer.config).items()}
    for name, host in (("conv", a["conv"]), ("state", a["recurrent"])):
        arrays[name].upload(run.device, host, run.stream)
    state = DeltaOnDevice.of(arrays)
    layer.block.mixer(layer.dense, state)
    return {"y": layer.y(), "conv": run.get(state.conv), "recurrent": run.get(state.final)}


def attention_block(run: DeviceRun, a: Arrays) -> Arrays:
    """See runs.attention_block."""
    past, end = len(a["past_k"]), len(a["past_k"]) + len(a["x"])
    layer = _Layer(run, a, past)
    shape = layer.config.num_key_value_heads, end + 3, layer.config.head_dim
    rows = [np.full(shape, np.nan, np.float32) for _ in "kv"]
    for array, known in zip(rows, (a["past_k"], a["past_v"]), strict=True):
        array[:, :past] = known.transpose(1, 0, 2)
    cache = DeviceCache(*(run.put(array, aligned=True) for array in rows))
    layer.block.mixer(layer.dense, cache)
    kept = {name: run.get(array)[:, :end].transpose(1, 0, 2).copy() for name, array in vars(cache).items()}
    return {"y": layer.y(), **kept}


def moe_block(run: DeviceRun, a: Arrays) -> Arrays:
    """See runs.moe_block."""
    layer = _Layer(run, a)
    layer.feed_forward()
    return {"ids": run.get(layer.block["ids"]), "weights": run.get(layer.block["weights"]), "y": layer.y()}


def mlp_block(run: DeviceRun, a: Arrays) -> Arrays:
    """See runs.mlp_block."""
    layer = _Layer(run, a)
    layer.feed_forward()
    return {"y": layer.y()}


def prefill(run: DeviceRun, a: Arrays) -> Arrays:
    """See runs.prefill. The CPU gathers embedding rows and keeps the state, as it does for a session."""
    weights = ArrayWeights(a)
    decoder = Decoder(weights, kernels.get(supported()[0], 1), "f32")
    state = HybridState.fresh(decoder.config, int(a["page_tokens"]))
    gpu = HybridPrefill(run.device, weights, decoder, note=lambda text: None)
    for piece in np.split(a["ids"], a["cuts"]):
        hidden = gpu.run(piece, state)
    gpu.close()
    return {"hidden": hidden, **named_state(state)}


def decode(run: DeviceRun, a: Arrays) -> Arrays:
    """See runs.decode. The model lives on the device, with our own products."""
    weights, cut = ArrayWeights(a), int(a["cut"])
    decoder = Decoder(weights, kernels.get(supported()[0], 1), "f32")
    state = HybridState.fresh(decoder.config, int(a["page_tokens"]))
    resident = Resident(run.device, weights, decoder, gemm="own", note=lambda text: None)
    rows = [resident.prefill(a["ids"][:cut], state), *(resident.decode(int(token), state) for token in a["ids"][cut:])]
    resident.fetch(state)
    resident.close()
    return {"logits": np.stack(rows), **named_state(state)}
