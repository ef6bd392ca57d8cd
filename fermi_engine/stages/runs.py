"""Runs of whole mixers, feed-forward parts and small models over weights given as arrays. NumPy only.

Each function maps kernels and named arrays to named arrays, as the stage table wants it. Inputs stay as they are: what
a layer changes in place is copied first, into memory that comes from the kernels like every output.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from fermi_engine import generate
from fermi_engine.compare import Arrays
from fermi_engine.config import EngineConfig, ModelConfig
from fermi_engine.kernels.cpu import CpuKernels
from fermi_engine.model.attention import GatedAttention, RotaryTables
from fermi_engine.model.decoder import Decoder
from fermi_engine.model.gated_delta_net import GatedDeltaNet
from fermi_engine.model.moe import DenseMLP, SparseMoE
from fermi_engine.model.weights import silent
from fermi_engine.session import Session
from fermi_engine.snapshots.cache import SnapshotCache
from fermi_engine.stages.array_weights import ArrayWeights
from fermi_engine.state import DeltaState, HybridState, KVPages

DIGEST_BYTES = 32
CACHE_BYTES = 1 << 30  # for snapshots of a small model: plenty


def own(k: CpuKernels, array: np.ndarray) -> np.ndarray:
    """A copy that a kernel may change."""
    copy = k.empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def gated_delta_net(k: CpuKernels, a: Arrays) -> Arrays:
    """x [T, H] through layer 0's Gated DeltaNet after state `conv` and `recurrent` -> y [T, H] and the new state."""
    state = DeltaState(own(k, a["conv"]), own(k, a["recurrent"]))
    y = GatedDeltaNet(ArrayWeights(a), 0).forward(k, k.activations(a["x"]), state, "f32", silent)
    return {"y": y, "conv": state.conv, "recurrent": state.recurrent}


def gated_attention(k: CpuKernels, a: Arrays) -> Arrays:
    """x [T, H] at positions int32 [3, T], after past_k, past_v [P, HKV, D] in pages of `page_tokens` -> y [T, H], and
    k, v of all P + T positions."""
    weights = ArrayWeights(a)
    start, tokens = len(a["past_k"]), len(a["x"])
    cache = KVPages(weights.config.num_key_value_heads, int(a["page_tokens"]), weights.config.head_dim)
    cache.reserve(start + tokens)
    if start:
        k.kv_append(cache, np.zeros(1, np.int64), a["past_k"], a["past_v"])
    tables = RotaryTables(weights.config).at(k, a["positions"])
    y = GatedAttention(weights, 0).forward(k, k.activations(a["x"]), cache, np.array([start], np.int64), tables, "f32", silent)
    keys, values = cache.filled(start + tokens)
    return {"y": y, "k": keys, "v": values}


def sparse_moe(k: CpuKernels, a: Arrays) -> Arrays:
    """x [T, H] through layer 0's experts -> y [T, H], and the router's choice ids, weights [T, k]."""
    seen: Arrays = {}
    y = SparseMoE(ArrayWeights(a), 0).forward(k, k.activations(a["x"]), "f32", seen.__setitem__)
    return {"ids": seen["router_ids"], "weights": seen["router_weights"], "y": y}


def dense_mlp(k: CpuKernels, a: Arrays) -> Arrays:
    """x [T, H] through layer 0's dense SwiGLU -> y [T, H]."""
    return {"y": DenseMLP(ArrayWeights(a), "layers.0.mlp.").forward(k, k.activations(a["x"]), "f32", silent)}


def delta_net_block(k: CpuKernels, a: Arrays) -> Arrays:
    """x [T, H] + Gated DeltaNet of norm(x) -> y [T, H]; state as in gated_delta_net."""
    out = gated_delta_net(k, {**a, "x": _normed(k, a, "input_layernorm")})
    return {**out, "y": k.add(a["x"], out["y"])}


def attention_block(k: CpuKernels, a: Arrays) -> Arrays:
    """x [T, H] + gated attention of norm(x) -> y [T, H]; cache as in gated_attention."""
    out = gated_attention(k, {**a, "x": _normed(k, a, "input_layernorm")})
    return {**out, "y": k.add(a["x"], out["y"])}


def moe_block(k: CpuKernels, a: Arrays) -> Arrays:
    """x [T, H] + the experts' of norm(x) -> y [T, H], and the router's choice."""
    out = sparse_moe(k, {**a, "x": _normed(k, a, "post_attention_layernorm")})
    return {**out, "y": k.add(a["x"], out["y"])}


def mlp_block(k: CpuKernels, a: Arrays) -> Arrays:
    """x [T, H] + dense SwiGLU of norm(x) -> y [T, H]."""
    return {"y": k.add(a["x"], dense_mlp(k, {**a, "x": _normed(k, a, "post_attention_layernorm")})["y"])}


def _normed(k: CpuKernels, a: Arrays, which: str) -> np.ndarray:
    weights = ArrayWeights(a)
    return k.rms_norm(a["x"], weights.vector(f"layers.0.{which}.weight"), weights.config.rms_norm_eps)


def prefill(k: CpuKernels, a: Arrays) -> Arrays:
    """ids [T] in pieces that end at `cuts` -> hidden row [1, H] of the last token and the final state, `state.<part>`."""
    model = Decoder(ArrayWeights(a), k, "f32")
    state = HybridState.fresh(model.config, int(a["page_tokens"]))
    for piece in np.split(a["ids"], a["cuts"]):
        hidden = model.hidden(piece, state)
    return {"hidden": hidden[-1:].copy(), **named_state(state)}


def named_state(state: HybridState) -> Arrays:
    """Every part of a state but its position, `state.<part>`."""
    return {f"state.{name}": np.ascontiguousarray(value) for name, value in state.arrays().items() if name != "position"}


def decode(k: CpuKernels, a: Arrays) -> Arrays:
    """ids [T], those before `cut` in one piece and each of the others by itself -> logits [T - cut + 1, vocab] after each piece,
    and the final state, `state.<part>`."""
    model, cut = Decoder(ArrayWeights(a), k, "f32"), int(a["cut"])
    state = HybridState.fresh(model.config, int(a["page_tokens"]))
    rows = [model.logits(model.hidden(a["ids"][:cut], state)[-1:])[0]]
    rows += [model.step(int(token), state) for token in a["ids"][cut:]]
    return {"logits": np.stack(rows), **named_state(state)}


def decoder(k: CpuKernels, a: Arrays) -> Arrays:
    """ids [T] in two pieces, the first of `cut` tokens -> logits [T, vocab] and the final state, `state.<part>`."""
    logits, state = _forward(k, a, "f32")
    return {"logits": logits, **named_state(state)}


def decoder_q4_0(k: CpuKernels, a: Arrays) -> Arrays:
    """The same over quantised weights with 8-bit activations -> logits [T, vocab], and a digest of logits and state.

    Whole-model limits against the reference are statistical here (compare.Divergence). What holds to the bit is that
    every backend, thread count and CPU gives the same run: a golden stores the digest that the scalar kernels gave.
    """
    logits, state = _forward(k, a, "q8_0")
    return {"logits": logits, "digest": digest(logits, state)}


def _forward(k: CpuKernels, a: Arrays, mode: str) -> tuple[np.ndarray, HybridState]:
    model = Decoder(ArrayWeights(a), k, mode)
    state = HybridState.fresh(model.config, int(a["page_tokens"]))
    pieces = [piece for piece in np.split(a["ids"], [int(a["cut"])]) if len(piece)]
    return np.concatenate([model.logits(model.hidden(piece, state)) for piece in pieces]), state


def digest(logits: np.ndarray, state: HybridState) -> np.ndarray:
    """blake2b over the bytes of logits and of every part of the state, uint8 [32]."""
    hash = blake2b(np.ascontiguousarray(logits).tobytes(), digest_size=DIGEST_BYTES)
    for name, value in sorted(state.arrays().items()):
        hash.update(name.encode() + np.ascontiguousarray(value).tobytes())
    return np.frombuffer(hash.digest(), np.uint8)


@dataclass(frozen=True)
class ArrayModel:
    """What a Session asks of an Engine, over weights given as arrays."""

    decoder: Decoder
    options: EngineConfig
    pack_hash: str = "arrays"
    gpu: Any = None  # prompts stay on the CPU
    is_resident: bool = False
    resident: Any = None  # the model on a GPU, where it is
    snapshots: SnapshotCache | None = None

    @property
    def config(self) -> ModelConfig:
        """Configuration of the model."""
        return self.decoder.config

    @property
    def context(self) -> int:
        """Most tokens a session accepts."""
        return self.config.max_position_embeddings


def model(k: CpuKernels, a: Arrays) -> ArrayModel:
    """The model of the arrays; blocks of 3 tokens and pages of 4, so that short prompts cross their borders."""
    return ArrayModel(Decoder(ArrayWeights(a), k, "q8_0"), EngineConfig(token_block=3, kv_block=4))


def uninterrupted(k: CpuKernels, a: Arrays) -> Arrays:
    """ids [T] in one go, told once for each of the T - 1 cuts: logits [T-1, T, vocab], digest of state [T-1, 32]."""
    session = Session(model(k, a))
    logits = session.logits(a["ids"])
    cuts = len(a["ids"]) - 1
    return {"logits": np.stack([logits] * cuts), "digest": np.stack([digest(logits[-1:], session.state)] * cuts)}


def resumed(k: CpuKernels, a: Arrays) -> Arrays:
    """For every cut: the tokens before it, an interruption, and the tokens after it one at a time. By turns the session is
    restored from a snapshot after other tokens, a new one is, a fork goes on, or a new session finds a snapshot in the cache.
    Outputs as `uninterrupted`."""
    engine, ids = model(k, a), a["ids"]
    engine = dataclasses.replace(engine, snapshots=SnapshotCache(CACHE_BYTES))
    logits, digests = [], []
    for cut in range(1, len(ids)):
        session = Session(engine)
        before = session.logits(ids[:cut])
        session, after = _interrupted(session, ids, cut)
        after += [session.decode(int(token)) for token in ids[cut + len(after) :]]
        logits.append(np.concatenate([before, after]))
        digests.append(digest(logits[-1][-1:], session.state))
    return {"logits": np.stack(logits), "digest": np.stack(digests)}


def _interrupted(session: Session, ids: np.ndarray, cut: int) -> tuple[Session, list[np.ndarray]]:
    """A session after the first `cut` tokens once more, and the logits of those that had to be evaluated to get there."""
    if cut % 4 == 2:
        fork = session.fork()
        session.prefill(ids[::-1])
        return fork, []
    if cut % 4 == 3:
        session.keep()
        session.prefill(ids[::-1])
        other = Session(session.engine)
        return other, [other.prompt(ids[: cut + 1])]
    snapshot = session.snapshot()
    session.prefill(ids[::-1])
    session = session if cut % 2 else Session(session.engine)
    session.restore(snapshot)
    return session, []


def greedy(k: CpuKernels, a: Arrays) -> Arrays:
    """The `count` likeliest ids after `ids`, one at a time, float32 activations."""
    engine = ArrayModel(Decoder(ArrayWeights(a), k, "f32"), EngineConfig(token_block=3, kv_block=4))
    made = generate.greedy(Session(engine), a["ids"].tolist(), int(a["count"]))
    return {"ids": np.array(made, np.int32)}
