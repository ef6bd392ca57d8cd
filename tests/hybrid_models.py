"""Small models that the GPU's kernels can run: the trained one and random ones of both families."""

from __future__ import annotations

from pathlib import Path

from fermi_engine import Engine, EngineConfig
from fermi_engine.convert import convert
from tools.hybrid_greedy import TINY
from tools.make_checkpoint import make_checkpoint

MODELS = ("trained", "moe", "moe-q8_0", "dense")


def float32_engines(folder: Path) -> dict[str, Engine]:
    """An engine for each of MODELS, its pack in `folder`, whose CPU path runs with float32 activations on one thread."""
    packs = {"trained": convert(TINY, folder / "trained.pack", "q4_0")}
    for family in ("moe", "dense"):
        checkpoint = make_checkpoint(folder / family, seed=8, family=family, layers=4, key_dim=32)
        packs[family] = convert(checkpoint, folder / f"{family}.pack", "q4_0")
    packs["moe-q8_0"] = convert(folder / "moe", folder / "q8.pack", "q8_0")
    return {name: Engine.load(path, config=EngineConfig(activations="f32", threads=1)) for name, path in packs.items()}
