"""Measures prefill and decode of a model on the real engine, against what the machine could do at best.

Every figure comes with what it is made of: bytes by kind, multiply-adds, the read rate of the pack itself before and after.
Token ids are random, so that routers choose varied experts. Sampling is not part of a decoded token here.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fermi_engine import roofline, verify
from fermi_engine.engine import Engine
from fermi_engine.errors import RequestError, VerifyError
from fermi_engine.info import describe_pack
from fermi_engine.pack import Pack
from fermi_engine.report import Progress
from fermi_engine.session import Session, Snapshot
from fermi_engine.snapshots.prefix import Prefix
from fermi_engine.state import DeltaState, HybridState, KVPages

WARM_TOKENS = 2  # decoded before the clock runs: the first records the calls of a token
FIRST_TEXT = "The wind took the letters from the table"
FIRST_IDS = "1,2,3,4,5,6,7,8"
OTHER = "other (Python, gaps)"


@dataclass(frozen=True)
class Plan:
    """What to measure: prompt lengths, tokens decoded after each context, and how often. An empty tuple leaves a part out."""

    prefill: tuple[int, ...] = (128,)
    decode: int = 32
    context: tuple[int, ...] = (128,)
    repeat: int = 3
    timing: bool = False
    seed: int = 0


def check_stages(backends: Iterable[str]) -> list[str]:
    """Replay every golden stage on the backends; their names. VerifyError, one line, when a stage is red."""
    names: list[str] = []
    for backend in backends:
        rows = verify.replay(backend)
        red = verify.first_divergence(rows)
        if red is not None:
            raise VerifyError(f"stage {red.stage} is red on {backend} ({red.metric} {red.value:.3g}, limit {red.limit:.3g}): "
                              "the speed of wrong results means nothing; see `fermi-engine verify`")
        names = [row.stage for row in rows]
    return names


def measure(engine: Engine, plan: Plan, progress: Progress | None = None) -> dict[str, Any]:
    """Run the plan on `engine`; everything is JSON-ready. Raises RequestError where a length exceeds the context.

    Rates are per second, times in seconds, sizes in bytes. The pack is read once before, unless memory cannot hold it.
    Integer peaks: the fastest dot loop of this CPU, and that of the instruction set the products really use.
    """
    report = progress or (lambda done, total, name: None)
    rng, threads = np.random.default_rng(plan.seed), engine.kernels.threads
    mapped = engine.pack.mapped
    if (available_bytes() or mapped.size) >= mapped.size:
        roofline.run_pattern("roofline_read_plain", mapped[: mapped.size // roofline.UNIT * roofline.UNIT],
                             roofline.CHUNKS[-1], threads)
    before = roofline.streaming_read(mapped, threads, report=report)
    peak = roofline.integer_peak(threads)
    prefill = [_prefill(engine, length, plan, rng, report) for length in plan.prefill]
    decode = [_decode(engine, context, plan, rng, report) for context in plan.context] if plan.decode else []
    after = roofline.streaming_read(mapped, threads, report=report)
    best = max(before.bytes_per_s, after.bytes_per_s)
    for row in decode:
        row["share_of_roofline"] = row["bytes_per_s"] / best
    if engine.options.activations == "q8_0":  # else no integer product is made
        own = peak.get(engine.kernels.backends["gemm_q4_0_q8_0"])
        for row in prefill:
            row["share_of_integer_peak"] = row["macs_per_s"] / max(peak.values()) if peak else None
            row["share_of_own_peak"] = row["macs_per_s"] / own if own else None
    return {"threads": threads, "prefill": prefill, "decode": decode, "integer_peak_macs_per_s": peak,
            "roofline": {"before": before._asdict(), "after": after._asdict()}}


def _prefill(engine: Engine, length: int, plan: Plan, rng: np.random.Generator, report: Progress) -> dict[str, Any]:
    ids = rng.integers(0, engine.config.vocab_size, length).tolist()
    seconds = []
    for done in range(plan.repeat):
        report(done, plan.repeat, f"prefill of {length}")
        session = engine.session()
        seconds.append(_seconds(lambda session=session: session.prefill(ids)))
    middle = statistics.median(seconds)
    per_token, head = weight_macs(engine.pack)
    row = {"tokens": length, "tokens_per_s": length / middle, **_spread(seconds),
           "macs_per_s": (length * per_token + head) / middle}
    if plan.timing:
        session = engine.session()
        row["timing"] = breakdown(engine, lambda: session.prefill(ids))
    return row


def _decode(engine: Engine, context: int, plan: Plan, rng: np.random.Generator, report: Progress) -> dict[str, Any]:
    """Tokens after a synthetic context; repeats go on in the same session, so the context grows by what is decoded."""
    session = engine.session()
    synthetic_context(session, context, rng)
    ids = rng.integers(0, engine.config.vocab_size, WARM_TOKENS + plan.decode * (plan.repeat + plan.timing)).tolist()
    for token in ids[:WARM_TOKENS]:
        session.decode(token)
    seconds, at = [], WARM_TOKENS
    for done in range(plan.repeat):
        report(done, plan.repeat, f"decode at {context}")
        seconds += [_seconds(lambda token=token: session.decode(token)) for token in ids[at : at + plan.decode]]
        at += plan.decode
    middle = statistics.median(seconds)
    mean_context = context + (WARM_TOKENS + at - 1) / 2
    sizes = bytes_per_token(engine.pack, session.state, mean_context)
    row = {"context": [context, session.position], "tokens": len(seconds), "tokens_per_s": 1 / middle, **_spread(seconds),
           "bytes_per_token": sizes, "bytes_per_s": sum(sizes.values()) / middle,
           "macs_per_s": sum(weight_macs(engine.pack)) / middle, "memory": memory(engine.pack, session.state)}
    if plan.timing:
        rest = ids[at:]
        row["timing"] = breakdown(engine, lambda: [session.decode(token) for token in rest], len(rest))
    return row


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    return {"median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds)}


def breakdown(engine: Engine, call: Callable[[], Any], runs: int = 1) -> dict[str, Any]:
    """Seconds of `call` by op, divided by `runs`; OTHER is what is missing to the total, so that the parts add up."""
    engine.kernels.clock.start()
    call()
    ops, total = engine.kernels.clock.stop()
    parts = {**ops, OTHER: total - sum(ops.values())}
    return {"total_s": total / runs, "parts_s": {name: seconds / runs for name, seconds in parts.items()}}


def weight_macs(pack: Pack) -> tuple[int, int]:
    """Multiply-adds with weights that a token costs in the layers, and those of the head (once a prefill, each decoded
    token). Attention over the cache and the delta rule's state are not weights."""
    c, parts = pack.config, describe_pack(pack)["parts"]
    counts = {part: row["weights"] for part, row in parts.items()}
    head = counts.pop("head", counts["embedding"])
    del counts["embedding"], counts["norms"]
    if c.num_experts:
        counts["experts"] = counts["experts"] // c.num_experts * c.num_experts_per_tok
    return sum(counts.values()), head


def bytes_per_token(pack: Pack, state: HybridState, context: float) -> dict[str, float]:
    """Bytes a decoded token moves: weights as stored (chosen experts only), recurrent state and conv tail read and written,
    keys and values of `context` tokens and its own read."""
    sizes = {"weights": describe_pack(pack)["read_bytes_per_token"], "recurrent": 0, "conv": 0, "kv": 0.0}
    for layer in state.layers:
        if isinstance(layer, DeltaState):
            sizes["recurrent"] += 2 * layer.recurrent.nbytes
            sizes["conv"] += 2 * layer.conv.nbytes
        else:
            sizes["kv"] += 2 * layer.kv_heads * layer.row_bytes * (context + 1)
    return sizes


def memory(pack: Pack, state: HybridState) -> dict[str, int | None]:
    """Resident bytes of this process now, and what of them the pack and `state` account for."""
    status = _fields(Path("/proc/self/status"))
    states = sum(layer.nbytes if isinstance(layer, KVPages) else layer.conv.nbytes + layer.recurrent.nbytes
                 for layer in state.layers)
    return {"resident": status.get("VmRSS"), "anonymous": status.get("RssAnon"), "file": status.get("RssFile"),
            "shared_fairly": _fields(Path("/proc/self/smaps_rollup")).get("Pss"),
            "pack": pack.mapped.size, "state_and_kv": states}


def available_bytes() -> int | None:
    """Memory that could be had without swapping, page cache included; None where the system does not say."""
    return _fields(Path("/proc/meminfo")).get("MemAvailable")


def _fields(path: Path) -> dict[str, int]:
    """`Name:  123 kB` lines in bytes; empty where there is no such file."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3 and words[2] == "kB"}


def synthetic_context(session: Session, tokens: int, rng: np.random.Generator) -> None:
    """Put `session` where `tokens` tokens have gone in without computing them: random ids, states, keys and values.

    For timing only: what it says afterwards means nothing, but costs what it would cost after a real prompt. The pages
    of a layer repeat one random page. RequestError where the context does not hold that many.
    """
    engine, c = session.engine, session.engine.config
    if tokens > engine.context:
        raise RequestError(f"a context of {tokens} tokens exceeds the model's {engine.context}; choose a smaller one")
    empty = HybridState.fresh(c, engine.options.kv_block, engine.options.kv_format)
    empty.position = tokens
    session.restore(Snapshot(Prefix(rng.integers(0, c.vocab_size, tokens), session.path), empty))
    session.state.reserve(tokens)
    for layer in session.state.layers:
        if isinstance(layer, KVPages):
            _fill_pages(layer, tokens, rng)
        else:
            layer.conv[...] = rng.standard_normal(layer.conv.shape)
            layer.recurrent[...] = rng.standard_normal(layer.recurrent.shape) / 8


def _fill_pages(layer: KVPages, tokens: int, rng: np.random.Generator) -> None:
    for pages in (layer.keys, layer.values):
        values = rng.standard_normal((layer.kv_heads, layer.page_tokens, layer.head_dim), np.float32)
        rows = _kv_rows(values, layer.format)
        for i, page in enumerate(pages):
            used = min(layer.page_tokens, tokens - i * layer.page_tokens)
            page[:, :used] = rows[:, :used]


def _kv_rows(values: np.ndarray, format: str) -> np.ndarray:
    """float32 [..., D] as the cache stores rows, uint8 [..., row bytes] (csrc/kernels.h, kv_append)."""
    if format != "q8_0":
        return values.astype("<f4" if format == "f32" else "<f2").view(np.uint8)
    codes = np.clip(np.rint(values * 32), -127, 127).astype(np.int8).view(np.uint8)
    d = np.full((*values.shape[:-1], values.shape[-1] // 32), 1 / 32, np.float16).view(np.uint8)
    return np.concatenate([codes, d], axis=-1)


def first_token(engine: Engine) -> float:
    """Seconds from starting `fermi-engine generate` in a process of its own to the first output of a short prompt.

    Same pack, backend, activations and threads as `engine`. RequestError with that program's own words where it fails.
    """
    prompt = ["--raw", "--prompt", FIRST_TEXT] if engine.has_tokenizer else ["--ids", FIRST_IDS]
    backend = ["--backend", engine.options.backend] if engine.options.backend else []
    command = [sys.executable, "-m", "fermi_engine.cli.app", "generate", "--model", str(engine.pack.path.absolute()), *prompt,
               "--threads", str(engine.kernels.threads), "--activations", engine.options.activations, *backend,
               "--max-tokens", "4", "--temp", "0", "--ignore-eos"]
    start = time.perf_counter()
    with subprocess.Popen(command, cwd=Path(__file__).parents[1], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as child:
        first = child.stdout.read(1)
        seconds = time.perf_counter() - start
        _, said = child.communicate()
    if not first or child.returncode:
        words = said.decode(errors="replace").strip().splitlines() or ["no output"]
        raise RequestError(f"generating a first token failed: {words[-1]}; see `fermi-engine generate`")
    return seconds
