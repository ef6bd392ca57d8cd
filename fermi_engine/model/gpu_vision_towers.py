"""Both vision towers over GPU kernels: the maths of vision_minicpm.py and vision_qwen.py, launch by launch.

A plan holds a batch's index tables on the host; `upload` arrays by name go into the arena before `forward` gives the launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fermi_engine.kernels.device_arrays import DeviceArray
from fermi_engine.model.attention import inv_freq
from fermi_engine.model.gpu_vision import Attend, Mark, TowerOnDevice, tiles_of, unmarked
from fermi_engine.model.vision import Grid, block_order, raster_to_blocks
from fermi_engine.model.vision_minicpm import WINDOW, position_ids
from fermi_engine.model.vision_qwen import position_taps
from fermi_engine.vision.config import PROJECTOR_EPS, QWEN, QWEN_THETA, VisionConfig


def tables(c: VisionConfig, grids: Sequence[Grid]) -> dict[str, np.ndarray]:
    """What a batch of views needs in the arena beside its patches, by name."""
    return _qwen_tables(c, grids) if c.family == QWEN else _minicpm_tables(c, grids)


def forward(tower: TowerOnDevice, grids: Sequence[Grid], patches: DeviceArray, out: DeviceArray, mark: Mark = unmarked) -> None:
    """patches [N, patch_width], which begin where the arena's `wide` does -> embeddings out [tokens, out_hidden_size].

    mark(name, array) behind every stage, named as the traces of the CPU's towers.
    """
    run = _qwen if tower.config.family == QWEN else _minicpm
    run(tower, grids, patches, out, mark)


def _by_fours(x: DeviceArray) -> DeviceArray:
    """Four rows side by side."""
    rows, n = x.shape
    return x.reshape(rows // WINDOW, WINDOW * n)


# MiniCPM


def _halved(grids: Sequence[Grid]) -> list[Grid]:
    return [(height // 2, width // 2) for height, width in grids]


def _minicpm_tables(c: VisionConfig, grids: Sequence[Grid]) -> dict[str, np.ndarray]:
    found: dict[str, Any] = {"rows": position_ids(c.table_side, grids)[:, None], "tiles": tiles_of(grids)}
    if c.images.patches_per_token == 16:
        found["windows"] = raster_to_blocks(grids)
        grids = _halved(grids)
        found["small_tiles"] = tiles_of(grids)
    found["blocks"] = raster_to_blocks(grids)
    return {name: np.ascontiguousarray(array, np.int32) for name, array in found.items()}


def _minicpm(t: TowerOnDevice, grids: Sequence[Grid], patches: DeviceArray, out: DeviceArray, mark: Mark) -> None:
    c, stem = t.config, "vision_tower.embeddings"
    t.embed(f"{stem}.patch_embedding", f"{stem}.position_embedding.weight", patches, t["rows"])
    mark("embed", t.x)
    attend = views(t, "tiles", grids)
    for i in range(c.num_hidden_layers):
        encoder_layer(t, i, attend)
        mark(f"layers.{i}", t.x)
        if c.images.patches_per_token == 16 and i == c.insert_layer_id:
            merge_windows(t)
            grids = _halved(grids)
            attend = views(t, "small_tiles", grids)
            mark("vit_merger", t.x)
    t.norm("vision_tower.post_layernorm", c.layer_norm_eps, t.x, t.u)
    t.swap(t.u, t.x)
    mark("post_layernorm", t.x)
    t.reordered(t["blocks"].rows(0, t.x.shape[0]))
    joined, u = _by_fours(t.x), _by_fours(t.u)
    t.norm("merger.mlp.0.pre_norm", PROJECTOR_EPS, joined, u)
    t.project(u, "merger.mlp.0.linear_1", "merger.mlp.0.linear_2", out)
    mark("merger", out)


def encoder_layer(t: TowerOnDevice, index: int, attend: Attend) -> None:
    """A layer of MiniCPM's over x."""
    name = f"vision_tower.encoder.layers.{index}"
    t.attention(f"{name}.layer_norm1", f"{name}.self_attn.qkv_proj", f"{name}.self_attn.out_proj", attend)
    t.mlp(f"{name}.layer_norm2", f"{name}.mlp.fc1", f"{name}.mlp.fc2")


def views(t: TowerOnDevice, tiles: str, grids: Sequence[Grid]) -> Attend:
    """Attention inside views of these grids."""
    count = len(tiles_of(grids))
    return t.views(t[tiles].rows(0, count), [height * width for height, width in grids])


def merge_windows(t: TowerOnDevice) -> None:
    """The four tokens of each window attend to each other, then become one: x [N, H] -> [N / 4, H]."""
    name, rows = "vision_tower.vit_merger", t.x.shape[0]
    t.reordered(t["windows"].rows(0, rows))
    t.attention(f"{name}.layer_norm1", f"{name}.self_attn.qkv_proj", f"{name}.self_attn.out_proj", t.windows)
    joined, u = _by_fours(t.x), _by_fours(t.u)
    t.norm(f"{name}.pre_norm", t.config.layer_norm_eps, joined, u)
    merged = t.u.rows(0, rows // WINDOW)
    t.inner(u, f"{name}.linear_1", f"{name}.linear_2", "gelu_tanh", merged)
    t.add_means(t.x, merged, f"{name}.linear_2")
    t.swap(merged, t.x.rows(0, rows // WINDOW))


# Qwen


def _qwen_tables(c: VisionConfig, grids: Sequence[Grid]) -> dict[str, np.ndarray]:
    rows, weights = position_taps(c.table_side, grids)
    places = np.concatenate([np.stack(block_order(*grid)) for grid in grids], axis=1)
    positions = np.concatenate([np.zeros_like(places[:1]), places])  # the kernel's axes are time, row, column
    quarter = c.head_dim // 4
    return {"rows": np.ascontiguousarray(rows, np.int32), "weights": np.ascontiguousarray(weights, np.float32),
            "tiles": tiles_of(grids), "positions": np.ascontiguousarray(positions, np.int32),
            "inv_freq": np.tile(inv_freq(2 * quarter, QWEN_THETA), 2), "axis": np.repeat(np.array([1, 2], np.int32), quarter)}


def _qwen(t: TowerOnDevice, grids: Sequence[Grid], patches: DeviceArray, out: DeviceArray, mark: Mark) -> None:
    t.embed("visual.patch_embed.proj", "visual.pos_embed.weight", patches, t["rows"], t["weights"])
    mark("embed", t.x)
    rope, attend = t.rope_tables(), views(t, "tiles", grids)
    for i in range(t.config.num_hidden_layers):
        qwen_block(t, i, attend, rope)
        mark(f"blocks.{i}", t.x)
    u = t.norm("visual.merger.norm", t.config.layer_norm_eps, t.x, t.u)
    t.project(_by_fours(u), "visual.merger.linear_fc1", "visual.merger.linear_fc2", out)
    mark("merger", out)


def qwen_block(t: TowerOnDevice, index: int, attend: Attend, rope: tuple[DeviceArray, DeviceArray]) -> None:
    """A block of Qwen's over x; rope: cos, sin [N, head_dim / 2]."""
    name = f"visual.blocks.{index}"
    t.attention(f"{name}.norm1", f"{name}.attn.qkv", f"{name}.attn.proj", attend, rope)
    t.mlp(f"{name}.norm2", f"{name}.mlp.linear_fc1", f"{name}.mlp.linear_fc2")
