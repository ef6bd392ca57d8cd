"""A vision tower on a GPU: weights uploaded once, views in batches through one arena, embeddings on the device or on the host.

Activations are float32: the CPU's equal is a tower with activations='f32'. All memory is the ledger's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from fermi_engine.errors import DeviceError, DeviceMemoryError
from fermi_engine.gpu.stream import HostMemory
from fermi_engine.kernels.device_arrays import DeviceArray
from fermi_engine.kernels.gpu import Device, DeviceBuffer, Event
from fermi_engine.kernels.gpu_kernels import GpuKernels
from fermi_engine.kernels.sm20_vendor import VendorKernels
from fermi_engine.kernels.sm20_vision import VisionKernels
from fermi_engine.model import gpu_vision_towers as towers
from fermi_engine.model.gpu_vision import Mark, TowerOnDevice, VisionArena, VisionWeights, tiles_of, unfit_tower
from fermi_engine.model.vision import Grid, check_patches
from fermi_engine.model.weights import Tensors, Trace, silent
from fermi_engine.placement import Ledger, rounded
from fermi_engine.vision.config import VisionConfig

MOST_ROWS = 16384  # patches of a batch, unless one view has more
WEIGHTS, EXPANDED, ARENA, ROWS = "vision weights", "expanded vision weights", "vision activations", "image embeddings"
OFFER = "raise --vram, or encode images on the CPU with --vision cpu"


@dataclass
class StageTimes:
    """Device times of an encode in seconds: patches (their copy), embed, layers, window merger, projector; batches, patches in
    the largest, and whose products."""

    gemm: str
    batches: int = 0
    most_rows: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def line(self) -> str:
        """For a report."""
        parts = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in self.seconds.items())
        count = f"{self.batches} batch{'es' if self.batches > 1 else ''}"
        return f"GPU, {count} of at most {self.most_rows} patches, products by {self.gemm}: {parts} ms"


class GpuVision:
    """One tower on one device. `last` tells where the time of the last encode went."""

    def __init__(self, device: Device, weights: Tensors, config: VisionConfig, ledger: Ledger, host: HostMemory,
                 gemm: str = "vendor", most_rows: int = MOST_ROWS, evict: Callable[[], None] | None = None) -> None:
        """gemm: products by our kernels (`own`) or by the vendor's sgemm (`vendor`). evict: gives back what else the ledger
        holds, all of it, where the tower has no room beside it. Raises DeviceError when the kernels cannot run this tower."""
        self.device, self.config, self.ledger, self.host, self.most_rows = device, config, ledger, host, most_rows
        self._block, self._evict = VisionWeights(weights, config), evict
        reason = unfit_tower(config, self._block.formats)
        if reason:
            raise DeviceError(f"the GPU cannot run this vision tower: {reason}, or run with --vision cpu")
        self.gemm = gemm if gemm == "own" else device.vendor()
        self.stream = device.stream("vision")
        self._buffer: DeviceBuffer | None = None
        self.last: StageTimes | None = None

    def forward(self, patches: np.ndarray, grids: Sequence[Grid], trace: Trace = silent) -> np.ndarray:
        """patches float32 [N, patch_width] of views end to end, grids (height, width) in patches -> embeddings on the host,
        float32 [tokens, out_hidden_size], a new array. trace: sees the arrays of each stage of each batch and waits for them.

        ValueError where patches and grids do not fit each other. Raises DeviceError, one line. It then holds no more memory than
        before, but for the tower's weights.
        """
        def marked(name: str, array: DeviceArray) -> None:
            trace(name, self._host(array))

        with self.encoded(patches, grids, None if trace is silent else marked) as rows:
            return self._host(rows)

    @contextmanager
    def encoded(self, patches: np.ndarray, grids: Sequence[Grid], mark: Mark | None = None) -> Iterator[DeviceArray]:
        """The same on the device, for as long as the context lasts. All work is done when it begins."""
        c = self.config
        check_patches(patches, grids, c.patch_width, 4 if c.images.patches_per_token == 16 else 2)
        if self._evict is not None and self._least(grids) > self.ledger.limit - self.ledger.used:
            self._evict()
        weights = self._loaded()
        with self.ledger.scope():
            batches, out = self._planned(grids)
            products, arena = self._products(), self._alloc(max(_arena(c, part).nbytes for part in batches), ARENA)
            self.last = StageTimes("own kernels" if self.gemm == "own" else self.gemm, len(batches), max(map(_patches, batches)))
            marks: list[tuple[str, Event]] = []
            first = done = 0
            for part in batches:
                count = _patches(part)
                tokens = count // c.images.patches_per_token
                self._batch(patches[first : first + count], part, arena, out.rows(done, tokens), (products, weights), marks, mark)
                first, done = first + count, done + tokens
            self.stream.synchronize()
            self._tell(marks)
            yield out

    def _batch(self, patches: np.ndarray, grids: Sequence[Grid], arena: DeviceBuffer, out: DeviceArray,
               model: tuple[GpuKernels, dict[str, Any]], marks: list[tuple[str, Event]], mark: Mark | None) -> None:
        """One batch's launches, an event behind every stage."""
        arrays = _arena(self.config, grids).within(arena)

        def passed(name: str, array: DeviceArray) -> None:
            marks.append((name, self._event()))
            if mark is not None:
                mark(name, array)

        marks.append(("", self._event()))
        tower = TowerOnDevice(self.config, model[0], VisionKernels(self.device, self.stream), model[1], arrays)
        for name, host in towers.tables(self.config, grids).items():
            arrays[name].rows(0, len(host)).upload(self.device, host, self.stream, name)
        given = tower.wide(*patches.shape)
        bytes_ = np.ascontiguousarray(patches, np.float32).reshape(-1).view(np.uint8)
        self.host.copy(given.buffer, given.offset, bytes_, self.stream, "patches", bytes_)
        marks.append(("patches", self._event()))
        towers.forward(tower, grids, given, out, passed)

    def _event(self) -> Event:
        event = self.device.event()
        event.record(self.stream)
        return event

    def _tell(self, marks: Sequence[tuple[str, Event]]) -> None:
        """Add up the times between marks by stage."""
        for (_, begin), (name, end) in pairwise(marks):
            if name:
                stage = _stage(name)
                self.last.seconds[stage] = self.last.seconds.get(stage, 0.0) + end.seconds_since(begin)

    # memory

    @property
    def is_loaded(self) -> bool:
        """Whether the weights are on the device."""
        return self._buffer is not None and self.ledger.holds(self._buffer)

    def _least(self, grids: Sequence[Grid]) -> int:
        """Bytes that the smallest batches take beside what is there."""
        c, tokens = self.config, _patches(grids) // self.config.images.patches_per_token
        sizes = [4 * tokens * c.out_hidden_size, max(_arena(c, [grid]).nbytes for grid in grids),
                 0 if self.is_loaded else self._block.nbytes, 0 if self.gemm == "own" else self._block.expanded_bytes]
        return sum(map(rounded, sizes))

    def _loaded(self) -> dict[str, Any]:
        """The tower's weights, copied where they are not on the device from an earlier call."""
        if not self.is_loaded:
            with self.ledger.scope(only_after_errors=True):
                self._buffer = self._alloc(self._block.nbytes, WEIGHTS)
                for offset, piece in self._block.pieces():
                    self.host.copy(self._buffer, offset, piece, self.stream, WEIGHTS, piece)
        return self._block.within(self._buffer)

    def _products(self) -> GpuKernels:
        if self.gemm == "own":
            return GpuKernels(self.device, self.stream)
        expanded = self._block.expanded_bytes
        scratch = DeviceArray.within(self._alloc(expanded, EXPANDED), (expanded // 4,)) if expanded else None
        return VendorKernels(self.device, self.stream, scratch)

    def _planned(self, grids: Sequence[Grid]) -> tuple[list[list[Grid]], DeviceArray]:
        """Views by batch, as many together as there is memory for, and the array for their embeddings."""
        c, total = self.config, _patches(grids)
        shape = total // c.images.patches_per_token, c.out_hidden_size
        out = DeviceArray.within(self._alloc(4 * shape[0] * shape[1], ROWS), shape)
        left = self.ledger.limit - self.ledger.used - rounded(0 if self.gemm == "own" else self._block.expanded_bytes)
        most = min(total, self.most_rows)
        while True:
            batches = _batches(grids, most)
            needed = max(rounded(_arena(c, part).nbytes) for part in batches)
            if needed <= left or most <= max(height * width for height, width in grids):
                return batches, out
            most //= 2

    def _alloc(self, nbytes: int, name: str) -> DeviceBuffer:
        """A buffer. DeviceMemoryError offers the CPU."""
        try:
            return self.ledger.alloc(nbytes, name)
        except DeviceMemoryError:
            left = self.ledger.limit - self.ledger.used
            raise DeviceMemoryError(f"{name} take {nbytes} bytes of device memory, {left} of the {self.ledger.limit} allowed are "
                                    f"left: {OFFER}") from None

    def release(self) -> None:
        """Give the weights back; the next encode copies them again."""
        if self.is_loaded:
            self.stream.synchronize()
            self.ledger.free(self._buffer)
        self._buffer = None

    def _host(self, array: DeviceArray) -> np.ndarray:
        found = np.empty(array.shape, array.dtype)
        array.download(self.device, found, self.stream)
        self.stream.synchronize()
        return found


def _arena(c: VisionConfig, grids: Sequence[Grid]) -> VisionArena:
    return VisionArena(c, _patches(grids), len(tiles_of(grids)))


def _patches(grids: Sequence[Grid]) -> int:
    return sum(height * width for height, width in grids)


def _batches(grids: Sequence[Grid], most: int) -> list[list[Grid]]:
    """Views in order, together as long as they have at most so many patches."""
    batches: list[list[Grid]] = []
    for grid in grids:
        if batches and _patches([*batches[-1], grid]) <= most:
            batches[-1].append(grid)
        else:
            batches.append([grid])
    return batches


def _stage(name: str) -> str:
    """What a report calls the stage behind which a mark stands."""
    if name.startswith(("layers.", "blocks.")):
        return "layers"
    return {"vit_merger": "window merger", "post_layernorm": "projector", "merger": "projector"}.get(name, name)
