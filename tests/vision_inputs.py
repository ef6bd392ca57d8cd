"""Inputs of the vision stages: small towers by sizes, patch grids, images, prompts with images."""

from __future__ import annotations

import math

import numpy as np

from fermi_engine.compare import Arrays
from fermi_engine.stages.vision_runs import VISION, vision_array
from fermi_engine.vision.config import MINICPM, QWEN, VisionConfig, stored_shapes
from fermi_engine.vision.plans import MiniCpmImages, QwenImages, Resize, plan
from tests.strategies import Draws, scalar
from tests.tiny_models import whole_model

IMAGE_TOKEN = 3
Grids = tuple[tuple[int, int], ...]


def qwen_config(layers: int, heads: int, head_dim: int, mlp: int, patch: int, side: int, out: int) -> VisionConfig:
    return VisionConfig(QWEN, layers, heads * head_dim, mlp, heads, patch, 2, out, side, 1e-6, -1, IMAGE_TOKEN,
                        QwenImages(patch_size=patch))


def minicpm_config(layers: int, heads: int, head_dim: int, mlp: int, patch: int, side: int, out: int,
                   insert: int) -> VisionConfig:
    return VisionConfig(MINICPM, layers, heads * head_dim, mlp, heads, patch, 1, out, side, 1e-6, insert, IMAGE_TOKEN,
                        MiniCpmImages(patch_size=patch))


def weights(d: Draws, config: VisionConfig, prefix: str = "") -> Arrays:
    """Tensors whose names start with `prefix`: norm weights of both signs, biases that count, positions as large as patches."""
    found: Arrays = {VISION: vision_array(config)}
    for name, shape in stored_shapes(config).items():
        if not name.startswith(prefix):
            continue
        if len(shape) == 1:
            norm = "norm" in name and name.endswith("weight")
            found[name] = d.uniform(0.5, 1.5, *shape) * (1 - 2 * d.integers(0, 2, *shape)).astype(np.float32) if norm \
                else d.normal(*shape, scale=0.3)
        else:
            found[name] = d.normal(*shape, scale=1.0 if "pos" in name else 1 / math.sqrt(shape[1]))
    return found


def _grid_array(grids: Grids) -> np.ndarray:
    return np.array(grids, np.int64)


def _count(grids: Grids) -> int:
    return sum(height * width for height, width in grids)


def layer_norm_rows(d: Draws, rows: int, n: int, edge: str, offset: float) -> Arrays:
    """offset: what all elements have in common, many times what differs."""
    x = d.signed_edge(edge, rows, n) + np.float32(offset)
    return {"x": x, "w": d.normal(n), "b": d.normal(n), "eps": scalar(1e-6)}


def window_operands(d: Draws, windows: int, window: int, heads: int, head_dim: int, edge: str) -> Arrays:
    shape = windows * window, heads, head_dim
    sharp = np.float32(12 if edge == "sharp" else 1)
    return {"q": d.normal(*shape), "k": d.normal(*shape) * sharp, "v": d.signed_edge(edge, *shape), "window": scalar(window),
            "scale": scalar(1 / math.sqrt(head_dim))}


def view_operands(d: Draws, lengths: tuple[int, ...], heads: int, head_dim: int, edge: str) -> Arrays:
    """Views end to end."""
    rows = window_operands(d, 1, sum(lengths), heads, head_dim, edge)
    del rows["window"]
    return {**rows, "lengths": np.array(lengths, np.int64)}


def residual_rows(d: Draws, rows: int, n: int, edge: str) -> Arrays:
    return {"x": d.signed_edge(edge, rows, n), "y": d.normal(rows, n), "b": d.normal(n)}


def rope_rows(d: Draws, tokens: int, heads: int, half: int, edge: str) -> Arrays:
    angles = d.uniform(-3, 3, tokens, half).astype(np.float64)
    cos, sin = (f(angles).astype(np.float32) for f in (_cosine, _sine))
    width = 3 * heads * 2 * half
    return {"x": d.signed_edge(edge, tokens, width), "b": d.normal(width), "cos": cos, "sin": sin}


def position_operands(d: Draws, tokens: int, n: int, table: int, taps: int, edge: str) -> Arrays:
    return {"x": d.signed_edge(edge, tokens, n), "b": d.normal(n), "table": d.normal(table, n),
            "rows": d.integers(0, table, tokens, taps).astype(np.int32), "weights": d.uniform(0, 1, tokens, taps)}


def group_residuals(d: Draws, rows: int, group: int, n: int, edge: str) -> Arrays:
    return {**groups(d, rows, group, n, edge), "y": d.normal(rows, n), "b": d.normal(n)}


def bias_rows(d: Draws, rows: int, n: int, edge: str) -> Arrays:
    return {"x": d.signed_edge(edge, rows, n), "b": d.normal(n)}


def groups(d: Draws, rows: int, group: int, n: int, edge: str) -> Arrays:
    return {"x": d.signed_edge(edge, rows * group, n), "group": scalar(group)}


def image(d: Draws, height: int, width: int, qwen_patch: int, minicpm_patch: int) -> Arrays:
    """Noise on a slope, so that resizing clips and does not only average; and the sizes both families want it in."""
    pixels = d.integers(0, 256, height, width, 3) // 2 + np.linspace(0, 127, width).astype(np.int64)[:, None]
    q, m = qwen_patch, minicpm_patch
    plans = (plan(height, width, QwenImages(patch_size=q, min_pixels=16 * q * q, max_pixels=100 * q * q)),
             plan(height, width, MiniCpmImages(patch_size=m, scale_resolution=8 * m, max_slice_nums=4)))
    steps: list[Resize] = [step for steps in plans for step in steps]
    return {"pixels": pixels.astype(np.uint8), "qwen_patch": scalar(q), "minicpm_patch": scalar(m),
            "steps": np.array(steps, np.int64)}


def positions(d: Draws, grids: Grids, side: int, head_dim: int, hidden: int, text: int) -> Arrays:
    config = qwen_config(1, 2, head_dim, 8, 4, side, 8)
    ids = []
    for height, width in grids:
        ids += [*d.integers(IMAGE_TOKEN + 1, 40, text).tolist(), *[IMAGE_TOKEN] * (height * width // 4)]
    ids += d.integers(IMAGE_TOKEN + 1, 40, text).tolist()
    return {VISION: vision_array(config), "table": d.normal(side * side, hidden), "grids": _grid_array(grids),
            "ids": np.array(ids, np.int32)}


def qwen_block(d: Draws, grids: Grids, heads: int, head_dim: int, mlp: int) -> Arrays:
    config = qwen_config(1, heads, head_dim, mlp, 4, 2, 8)
    angles = d.uniform(-3, 3, _count(grids), head_dim // 2)
    cos, sin = (f(angles.astype(np.float64)).astype(np.float32) for f in (_cosine, _sine))
    return {**weights(d, config, "visual.blocks."), "grids": _grid_array(grids), "cos": cos, "sin": sin,
            "x": d.normal(_count(grids), config.hidden_size)}


def _cosine(x: np.ndarray) -> np.ndarray:
    """Taylor: NumPy's own changes its last bits with the CPU."""
    return sum((-1) ** n * x ** (2 * n) / math.factorial(2 * n) for n in range(12))


def _sine(x: np.ndarray) -> np.ndarray:
    return sum((-1) ** n * x ** (2 * n + 1) / math.factorial(2 * n + 1) for n in range(12))


def minicpm_layer(d: Draws, grids: Grids, heads: int, head_dim: int, mlp: int) -> Arrays:
    config = minicpm_config(1, heads, head_dim, mlp, 4, 2, 8, 0)
    return {**weights(d, config, "vision_tower.encoder."), "grids": _grid_array(grids),
            "x": d.normal(_count(grids), config.hidden_size)}


def window_merger(d: Draws, grids: Grids, heads: int, head_dim: int, mlp: int) -> Arrays:
    config = minicpm_config(1, heads, head_dim, mlp, 4, 2, 8, 0)
    return {**weights(d, config, "vision_tower.vit_merger."), "grids": _grid_array(grids),
            "x": d.normal(_count(grids), config.hidden_size)}


def qwen_tower(d: Draws, grids: Grids, **sizes: int) -> Arrays:
    config = qwen_config(**sizes)
    return {**weights(d, config), "grids": _grid_array(grids), "patches": d.uniform(-1, 1, _count(grids), config.patch_width)}


def minicpm_tower(d: Draws, grids: Grids, layers: int, insert: int, **sizes: int) -> Arrays:
    config = minicpm_config(layers, insert=min(insert, layers - 1), **sizes)
    return {**weights(d, config), "grids": _grid_array(grids), "patches": d.uniform(-1, 1, _count(grids), config.patch_width)}


def image_prompt(d: Draws, grids: Grids, text: int, cut: int, after: int, **sizes: object) -> Arrays:
    """A small model and a prompt of text and images; rows of images as large as embeddings of text."""
    model = whole_model(d, tokens=1, cut=0, page_tokens=4, **sizes)
    vocab, hidden = model["embed_tokens.weight"].shape
    ids = positions(d, grids, 2, 8, 2, text)["ids"] % vocab
    rows = d.normal(_count(grids) // 4, hidden)
    del model["ids"], model["cut"], model["page_tokens"]
    return {**model, "ids": ids.astype(np.int32), "image_token": scalar(IMAGE_TOKEN), "grids": _grid_array(grids), "rows": rows,
            "cut": scalar(1 + cut % (len(ids) - 1)), "after": d.integers(IMAGE_TOKEN + 1, vocab, after).astype(np.int32)}
