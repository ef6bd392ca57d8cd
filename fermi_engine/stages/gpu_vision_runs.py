"""Runs of vision towers and their parts on sm_20 over weights given as arrays: the other family of vision_runs.py."""

from __future__ import annotations

import dataclasses

import numpy as np

from fermi_engine.compare import Arrays
from fermi_engine.gpu.stream import HostMemory
from fermi_engine.gpu.vision import GpuVision
from fermi_engine.model import gpu_vision_towers as towers
from fermi_engine.model.gpu_vision import TowerOnDevice, VisionArena, VisionWeights, tiles_of
from fermi_engine.model.vision import Grid, raster_to_blocks
from fermi_engine.placement import Ledger
from fermi_engine.stages.array_weights import ArrayTensors
from fermi_engine.stages.device_run import DeviceRun
from fermi_engine.stages.vision_runs import patch_grids, vision_config
from fermi_engine.vision.config import VisionConfig


def _part(run: DeviceRun, a: Arrays, only: str) -> tuple[TowerOnDevice, list[Grid]]:
    """A tower with the tensors `only`, with our own products, x in its residual stream, and the grids."""
    config, grids = vision_config(a), patch_grids(a)
    block, arena = VisionWeights(ArrayTensors(a), config, only), VisionArena(config, len(a["x"]), len(tiles_of(grids)))
    memory = run.empty(block.nbytes, dtype=np.uint8, aligned=True).buffer
    for offset, piece in block.pieces():
        run.device.h2d(memory, piece, run.stream, offset)
    arrays = arena.within(run.empty(arena.nbytes, dtype=np.uint8, aligned=True).buffer)
    for name, host in (("x", a["x"]), ("tiles", tiles_of(grids)), ("windows", raster_to_blocks(grids).astype(np.int32))):
        if name in arrays:
            arrays[name].upload(run.device, host, run.stream, name)
    return TowerOnDevice(config, run.rows, run.vision, block.within(memory), arrays), grids


def qwen_block(run: DeviceRun, a: Arrays) -> Arrays:
    """See vision_runs.qwen_block."""
    tower, grids = _part(run, a, "visual.blocks.0.")
    towers.qwen_block(tower, 0, towers.views(tower, "tiles", grids), (run.put(a["cos"]), run.put(a["sin"])))
    return {"y": run.get(tower.x)}


def minicpm_layer(run: DeviceRun, a: Arrays) -> Arrays:
    """See vision_runs.minicpm_layer."""
    tower, grids = _part(run, a, "vision_tower.encoder.layers.0.")
    towers.encoder_layer(tower, 0, towers.views(tower, "tiles", grids))
    return {"y": run.get(tower.x)}


def window_merger(run: DeviceRun, a: Arrays) -> Arrays:
    """See vision_runs.window_merger."""
    tower, _ = _part(run, a, "vision_tower.vit_merger.")
    towers.merge_windows(tower)
    return {"y": run.get(tower.x)}


def _tower(run: DeviceRun, a: Arrays, config: VisionConfig) -> GpuVision:
    host = HostMemory(run.device, lambda text: None)
    return GpuVision(run.device, ArrayTensors(a), config, Ledger(run.device), host, "own")


def qwen_tower(run: DeviceRun, a: Arrays) -> Arrays:
    """See vision_runs.qwen_tower."""
    seen: Arrays = {}
    config = vision_config(a)
    tower = _tower(run, a, config)
    y = tower.forward(a["patches"], patch_grids(a), seen.__setitem__)
    tower.release()
    tower.host.close()
    return {"blocks": seen[f"blocks.{config.num_hidden_layers - 1}"], "y": y}


def minicpm_tower(run: DeviceRun, a: Arrays) -> Arrays:
    """See vision_runs.minicpm_tower; mode "4x" a view at a time."""
    out, config = {}, vision_config(a)
    for mode, most_rows in (("16x", 1 << 14), ("4x", 1)):
        images = dataclasses.replace(config.images, downsample_mode=mode)
        tower = _tower(run, a, dataclasses.replace(config, images=images))
        tower.most_rows = most_rows
        out[mode] = tower.forward(a["patches"], patch_grids(a))
        tower.release()
        tower.host.close()
    return out
