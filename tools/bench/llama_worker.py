"""Times llama.cpp inside the Python that has it; tools/bench/peers.py starts this file there and reads its output.

    PYTHON llama_worker.py '{"gguf": FILE, "repack": true, "threads": [1, 2], "prefill": [128], "decode": 32, ...}'

Needs nothing but llama-cpp-python. Each line of standard output is one JSON record: `load`, `prefill`, `decode` or
`memory`; times are seconds by the monotonic clock. llama.cpp's own log goes to standard error.
"""

from __future__ import annotations

import json
import math
import random
import re
import sys
import time
from typing import Any

import llama_cpp as api

WARM_PREFILL, WARM_DECODE = 16, 3  # tokens that pay for first touches and are not counted
LOG: list[str] = []


@api.llama_log_callback
def _log(_level: int, text: bytes, _data: Any) -> None:
    line = text.decode("utf-8", "replace")
    LOG.append(line.strip())
    sys.stderr.write(line)


def emit(kind: str, **fields: Any) -> None:
    """One record on standard output."""
    print(json.dumps({"kind": kind, **fields}), flush=True)


def load(job: dict[str, Any]) -> Any:
    """The model, memory-mapped; `repack` allows a second copy of the weights in another layout."""
    settings = api.llama_model_default_params()
    settings.n_gpu_layers = 0
    settings.load_mode = api.LLAMA_LOAD_MODE_MMAP_MLOCK if job["mlock"] else api.LLAMA_LOAD_MODE_MMAP
    settings.use_extra_bufts = job["repack"]
    start = time.monotonic()
    model = api.llama_model_load_from_file(job["gguf"].encode(), settings)
    seconds = time.monotonic() - start
    if not model:
        raise SystemExit("llama.cpp cannot load the file: " + next((x for x in LOG if "rror" in x), "no reason given"))
    buffers = [line for line in LOG if re.search("buffer size|load_mode", line)]
    emit("load", seconds=seconds, buffers=buffers, system_info=api.llama_print_system_info().decode())
    return model


class Timeline:
    """One llama.cpp context whose tokens are drawn at random, so that each takes experts of its own."""

    def __init__(self, model: Any, job: dict[str, Any]) -> None:
        """Room for the longest prefill and the decoded tokens after it; one batch holds a whole prefill."""
        self._vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        self._draw = random.Random(job["seed"])
        settings = api.llama_context_default_params()
        longest = max([*job["prefill"], WARM_PREFILL])
        settings.n_ctx = longest + job["decode"] + WARM_DECODE
        settings.n_batch = longest
        self.context = api.llama_init_from_model(model, settings)
        if not self.context:
            raise SystemExit(f"llama.cpp has no room for a context of {settings.n_ctx} tokens")

    def clear(self) -> None:
        """Forget all tokens and states."""
        api.llama_memory_clear(api.llama_get_memory(self.context), True)

    def step(self, count: int) -> float:
        """Seconds for `count` more tokens in one call, the last one's logits included."""
        ids = (api.llama_token * count)(*(self._draw.randrange(self._vocab) for _ in range(count)))
        batch = api.llama_batch_get_one(ids, count)
        start = time.monotonic()
        status = api.llama_decode(self.context, batch)
        api.llama_synchronize(self.context)
        seconds = time.monotonic() - start
        if status:
            raise SystemExit(f"llama_decode of {count} tokens failed with status {status}")
        return seconds

    def finite(self) -> bool:
        """Whether the last token's logits are all numbers."""
        logits = api.llama_get_logits_ith(self.context, -1)
        return all(math.isfinite(logits[i]) for i in range(self._vocab))


def measure(timeline: Timeline, job: dict[str, Any], threads: int) -> None:
    """Prefill of each length, then decode behind the first one (behind the warm-up where none is asked for)."""
    api.llama_set_n_threads(timeline.context, threads, threads)
    timeline.clear()
    timeline.step(WARM_PREFILL)
    for tokens in reversed(job["prefill"]):  # the first length comes last: decode continues from it
        seconds = []
        for _ in range(job["repeats"]):
            timeline.clear()
            seconds.append(timeline.step(tokens))
        emit("prefill", threads=threads, tokens=tokens, seconds=seconds)
    if job["decode"]:
        for _ in range(WARM_DECODE):
            timeline.step(1)
        seconds = [timeline.step(1) for _ in range(job["decode"])]
        context = (job["prefill"] or [WARM_PREFILL])[0]
        emit("decode", threads=threads, context=context, seconds=seconds, finite=timeline.finite())


def memory() -> dict[str, int]:
    """Bytes resident now, the anonymous and the mapped part of them, and the highest so far, from /proc."""
    names = {"VmRSS": "resident", "RssAnon": "anonymous", "RssFile": "mapped", "VmHWM": "peak"}
    with open("/proc/self/status", encoding="utf-8") as file:
        fields = dict(line.split(":", 1) for line in file)
    return {short: 1024 * int(fields[name].split()[0]) for name, short in names.items()}


def main() -> None:
    """Run the job that the first argument describes."""
    job = json.loads(sys.argv[1])
    api.llama_log_set(_log, None)
    api.llama_backend_init()
    model = load(job)
    timeline = Timeline(model, job)
    for threads in job["threads"]:
        measure(timeline, job, threads)
    emit("memory", **memory())


if __name__ == "__main__":
    main()
