"""Runs of vision towers, their parts, and prompts with images over weights given as arrays. NumPy and Pillow only.

Each function maps kernels and named arrays to named arrays, as the stage table wants it. Patch grids come as int64 [views, 2].
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

import numpy as np

from fermi_engine.compare import Arrays
from fermi_engine.kernels.cpu import CpuKernels
from fermi_engine.model.decoder import Decoder, ImageTokens
from fermi_engine.model.vision_minicpm import EncoderLayer, MiniCpmVision, WindowMerger, position_ids
from fermi_engine.model.vision_qwen import QwenBlock, QwenVision, position_rows, rotary_tables
from fermi_engine.stages.array_weights import ArrayTensors, ArrayWeights
from fermi_engine.state import HybridState
from fermi_engine.vision.config import VisionConfig
from fermi_engine.vision.patches import prepare
from fermi_engine.vision.plans import MiniCpmImages, QwenImages
from fermi_engine.vision.prompt import image_slots, mrope_positions

VISION = "vision"  # the array that holds a tower's configuration as JSON text


def vision_array(config: VisionConfig) -> np.ndarray:
    """The configuration as JSON text, uint8."""
    return np.frombuffer(json.dumps(config.to_dict(), sort_keys=True).encode(), np.uint8)


def vision_config(a: Mapping[str, np.ndarray]) -> VisionConfig:
    """The inverse."""
    return VisionConfig.from_dict(json.loads(a[VISION].tobytes()))


def patch_grids(a: Arrays) -> list[tuple[int, int]]:
    """Height and width of each view."""
    return [(int(height), int(width)) for height, width in a["grids"]]


def image_patches(k: CpuKernels, a: Arrays) -> Arrays:
    """pixels uint8 [H, W, 3] prepared for both families, whose limits scale with `qwen_patch` and `minicpm_patch` -> patches
    float32, and the grids int64 [views, 2]."""
    q, m = int(a["qwen_patch"]), int(a["minicpm_patch"])
    wanted = {"qwen": QwenImages(patch_size=q, min_pixels=16 * q * q, max_pixels=100 * q * q),
              "minicpm": MiniCpmImages(patch_size=m, scale_resolution=8 * m, max_slice_nums=4)}
    made = {name: prepare(a["pixels"], settings) for name, settings in wanted.items()}
    grids = {f"{name}_grids": np.array(image.grids, np.int64) for name, image in made.items()}
    return {**{name: image.patches for name, image in made.items()}, **grids}


def vision_positions(k: CpuKernels, a: Arrays) -> Arrays:
    """Positions of patches and of text: table [N, H] (Qwen's, read bilinearly), cos, sin [N, D/2], buckets int64 [N]
    (MiniCPM's), and text int32 [3, T] of `ids`, with the position that follows."""
    config, grids = vision_config(a), patch_grids(a)
    cos, sin = rotary_tables(k, config.head_dim, grids)
    text, following = mrope_positions(a["ids"], config.image_token_id, grids)
    return {"table": position_rows(k, a["table"], grids), "cos": cos, "sin": sin,
            "buckets": position_ids(config.table_side, grids), "text": text, "following": np.array([following])}


def qwen_block(k: CpuKernels, a: Arrays) -> Arrays:
    """x [N, H] of images `grids` through block 0, turned by cos, sin [N, D/2] -> y [N, H]."""
    lengths = [height * width for height, width in patch_grids(a)]
    return {"y": QwenBlock(ArrayTensors(a), vision_config(a), 0).forward(k, a["x"], (a["cos"], a["sin"]), lengths, "f32")}


def minicpm_layer(k: CpuKernels, a: Arrays) -> Arrays:
    """x [N, H] of views `grids` through layer 0 -> y [N, H]."""
    lengths = [height * width for height, width in patch_grids(a)]
    return {"y": EncoderLayer(ArrayTensors(a), vision_config(a), 0).forward(k, a["x"], lengths, "f32")}


def window_merger(k: CpuKernels, a: Arrays) -> Arrays:
    """x [N, H] of views `grids` in raster order -> y [N / 4, H]."""
    return {"y": WindowMerger(ArrayTensors(a), vision_config(a)).forward(k, a["x"], patch_grids(a), "f32")}


def qwen_tower(k: CpuKernels, a: Arrays) -> Arrays:
    """patches [N, width] of images `grids` -> their embeddings y [N / 4, out], and what goes into the merger, blocks [N, H]."""
    seen: Arrays = {}
    config = vision_config(a)
    y = QwenVision(ArrayTensors(a), config, k, "f32").forward(a["patches"], patch_grids(a), seen.__setitem__)
    return {"blocks": seen[f"blocks.{config.num_hidden_layers - 1}"], "y": y}


def minicpm_tower(k: CpuKernels, a: Arrays) -> Arrays:
    """patches [N, width] of views `grids` -> their embeddings in mode "16x" [N / 16, out] and "4x" [N / 4, out]."""
    out, config = {}, vision_config(a)
    for mode in ("16x", "4x"):
        images = dataclasses.replace(config.images, downsample_mode=mode)
        tower = MiniCpmVision(ArrayTensors(a), dataclasses.replace(config, images=images), k, "f32")
        out[mode] = tower.forward(a["patches"], patch_grids(a))
    return out


def image_prompt(k: CpuKernels, a: Arrays) -> Arrays:
    """ids [T] among which `image_token` stands for rows [n, H] of images `grids`, then `after` int32 [D] one at a time
    -> logits [T + D, vocab]. The first `cut` ids go in first; float32 activations."""
    decoder, ids, token = Decoder(ArrayWeights(a), k, "f32"), a["ids"], int(a["image_token"])
    axes, following = mrope_positions(ids, token, patch_grids(a))
    slots = image_slots(ids, token, len(a["rows"]))
    state, logits = HybridState.fresh(decoder.config, 4), []
    for begin, end in ((0, int(a["cut"])), (int(a["cut"]), len(ids))):
        first, last = np.searchsorted(slots, (begin, end))
        part = ImageTokens(np.ascontiguousarray(axes[:, begin:end]), slots[first:last] - begin, a["rows"][first:last])
        logits.append(decoder.logits(decoder.hidden(ids[begin:end], state, images=part)))
    shift = following - len(ids)
    logits += [decoder.logits(decoder.hidden(np.array([token], np.int32), state, shift=shift)) for token in a["after"]]
    return {"logits": np.concatenate(logits)}
