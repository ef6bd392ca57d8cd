"""Weights on their way to the device: from page-locked memory at once, else through a small page-locked ring, into slots that
are refilled while the layer before computes."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from fermi_engine import pages
from fermi_engine.errors import DeviceError, DeviceMemoryError
from fermi_engine.kernels.gpu import Device, DeviceBuffer, Event, Stream
from fermi_engine.model.gpu_weights import DenseWeights, ExpertWeights

RING_CHUNKS = 4
RING_BYTES = 8 << 20  # of a chunk
PAGE_BYTES = 4096


class HostMemory:
    """Copies weights to the device. Experts are page-locked where they lie when they are first copied. What is not locked goes
    through a ring of page-locked chunks, and without even those straight from pageable memory; `note` is told once when the
    system has refused. The bytes that arrive are the same."""

    def __init__(self, device: Device, note: Callable[[str], None]) -> None:
        self._device, self._note = device, note
        self._locked: dict[int, np.ndarray] = {}
        self._refused = False
        self._ring: list[tuple[np.ndarray, Event]] | None = None
        self._next = 0
        self._staging = np.empty(0, np.uint8)
        self.copied_bytes = 0

    def lock(self, host: np.ndarray) -> None:
        """Page-lock uint8 `host`, if the system lets us and has let us so far."""
        if self._refused or host.ctypes.data in self._locked:
            return
        try:
            _lock(self._device, host)
            self._locked[host.ctypes.data] = host
        except DeviceMemoryError as err:
            self._refuse(err)

    def _refuse(self, err: DeviceMemoryError) -> None:
        if not self._refused:
            self._refused = True
            self._note(f"warning: {err}; weights go to the GPU through a small buffer: same results, slower; --load resident and "
                       "`ulimit -l unlimited` let them be page-locked")

    def staging(self, nbytes: int) -> np.ndarray:
        """Uint8 memory [>= nbytes] for what comes back, page-locked if the system lets us; kept from call to call."""
        if self._staging.nbytes < nbytes and not self._refused:
            if self._staging.nbytes:
                self._device.unpin(self._staging)
                self._staging = np.empty(0, np.uint8)
            try:
                self._staging = self._device.pinned(nbytes)
            except DeviceMemoryError as err:
                self._refuse(err)
        return self._staging if self._staging.nbytes >= nbytes else np.empty(nbytes, np.uint8)

    def _chunks(self) -> list[tuple[np.ndarray, Event]]:
        """The ring, made when it is first needed."""
        if self._ring is None:
            self._ring = []
            try:
                while len(self._ring) < RING_CHUNKS:
                    self._ring.append((self._device.pinned(RING_BYTES), self._device.event()))
            except DeviceMemoryError as err:
                self._refuse(err)
        return self._ring

    def copy(self, buffer: DeviceBuffer, offset: int, host: np.ndarray, stream: Stream, label: str, locked: np.ndarray) -> None:
        """Uint8 `host`, which lies within what was given to `lock` as `locked`, to byte `offset` of the buffer."""
        self.copied_bytes += host.nbytes
        ring = [] if locked.ctypes.data in self._locked else self._chunks()
        if not ring:
            self._device.h2d(buffer, host, stream, offset, label)
            return
        for begin in range(0, host.nbytes, RING_BYTES):
            piece = host[begin : begin + RING_BYTES]
            chunk, free = ring[self._next % len(ring)]
            self._next += 1
            free.synchronize()
            chunk[: piece.nbytes] = piece
            self._device.h2d(buffer, chunk[: piece.nbytes], stream, offset + begin, label)
            free.record(stream)

    def close(self) -> None:
        """Unlock everything; no copy may be under way."""
        staging = [self._staging] if self._staging.nbytes else []
        for array in (*staging, *self._locked.values(), *(chunk for chunk, _ in self._ring or ())):
            with suppress(DeviceError):
                self._device.unpin(array)
        self._locked.clear()
        self._staging = np.empty(0, np.uint8)
        self._ring = None


def _lock(device: Device, host: np.ndarray) -> None:
    """CUDA locks pages for writing, so a read-only copy in memory is opened for as long as the call takes. A mapped file cannot
    be, and is refused."""
    if host.flags.writeable or host.ctypes.data % PAGE_BYTES:
        device.pin(host)
        return
    opened = False
    try:
        with suppress(OSError):
            pages.SYSTEM.region("mprotect", host, mmap.PROT_READ | mmap.PROT_WRITE)
            opened = True
        device.pin(host)
    finally:
        if opened:
            pages.SYSTEM.region("mprotect", host, mmap.PROT_READ)


class Slots:
    """Two or more places on the device for a layer's streamed weights, filled in the order of steps, one step a layer of a
    block. Events order the two streams: a copy waits until the slot's last user is done, a user waits for the copy."""

    def __init__(self, device: Device, host: HostMemory, copies: Stream, compute: Stream, count: int) -> None:
        self.count = count
        self._host, self._copies, self._compute = host, copies, compute
        self._dense: list[DeviceBuffer | None] = [None] * count
        self._experts: list[DeviceBuffer | None] = [None] * count
        self._filled = [[device.event() for _ in range(count)] for _ in ("dense", "experts")]
        self._done: list[Event] = [device.event() for _ in range(count)]

    def give(self, slot: int, dense: DeviceBuffer | None, experts: DeviceBuffer | None) -> None:
        """The memory of a slot."""
        self._dense[slot], self._experts[slot] = dense, experts

    @property
    def ahead(self) -> int:
        """How many steps before its use a slot is filled. The copy waits for the step before the one that is under way, so
        that a host that has to wait for the copy has given the device work to do meanwhile."""
        return max(1, self.count - 1)

    def fill_dense(self, step: int, weights: DenseWeights, label: str) -> None:
        """Copy a layer's dense weights."""
        slot = step % self.count
        self._copies.wait(self._done[slot])
        for offset, piece in weights.pieces():
            self._host.copy(self._dense[slot], offset, piece, self._copies, label, piece)
        self._filled[0][slot].record(self._copies)

    def fill_experts(self, step: int, weights: ExpertWeights, label: str, only: np.ndarray | None = None) -> None:
        """Copy a layer's experts, or those of ids `only`, each to its own place."""
        slot = step % self.count
        self._host.lock(weights.host)
        self._copies.wait(self._done[slot])
        pieces = [(0, weights.host)] if only is None else [weights.piece(int(expert)) for expert in only]
        for offset, piece in pieces:
            self._host.copy(self._experts[slot], offset, piece, self._copies, label, weights.host)
        self._filled[1][slot].record(self._copies)

    def dense(self, step: int, weights: DenseWeights) -> dict[str, Any]:
        """The dense weights of a step, for launches from now on."""
        self._compute.wait(self._filled[0][step % self.count])
        return weights.within(self._dense[step % self.count])

    def experts(self, step: int, weights: ExpertWeights) -> tuple[Any, Any]:
        """gate_up and down of a step's experts, for launches from now on."""
        self._compute.wait(self._filled[1][step % self.count])
        return weights.within(self._experts[step % self.count])

    def done(self, step: int) -> Event:
        """No launch after this point of the compute stream uses the step's slot. The event stands for it until the slot's next
        step is done."""
        self._done[step % self.count].record(self._compute)
        return self._done[step % self.count]
