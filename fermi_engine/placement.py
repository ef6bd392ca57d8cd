"""What lives in device memory: a ledger that no allocation passes by, and a plan that is made before any work.

The plan for a prefill holds two or more slots for the weights that are streamed, the states, the keys and values, the
activations of one token block, and as many layers' dense weights as there is room for beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

from fermi_engine.errors import DeviceError, DeviceMemoryError
from fermi_engine.kernels.gpu import Device, DeviceBuffer

ALIGNMENT = 256  # bytes that an allocation is rounded up to, as devices do
BLOCK_STEP = 64  # tokens; blocks are multiples of it
MOST_TOKENS = 16384  # of a block: kernels count a block's elements in 31 bits


def rounded(nbytes: int) -> int:
    """Bytes that an allocation of `nbytes` takes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Ledger:
    """Every allocation on a device by name, held to `limit` bytes; `used` and `peak` count rounded bytes.

    limit None: what is free on the card now. A limit above what is free is lowered to that.
    """

    def __init__(self, device: Device, limit: int | None = None) -> None:
        self.device = device
        self.limit = device.free_bytes if limit is None else min(limit, device.free_bytes)
        self.used = self.peak = 0
        self._held: dict[int, DeviceBuffer] = {}

    def alloc(self, nbytes: int, name: str) -> DeviceBuffer:
        """Device memory. DeviceMemoryError, before the device is asked, when it would pass the limit."""
        if self.used + rounded(nbytes) > self.limit:
            raise DeviceMemoryError(f"{name} takes {nbytes} bytes of device memory, {self.limit - self.used} of the "
                                    f"{self.limit} allowed are left; raise --vram, or run with --prefill cpu")
        buffer = self.device.alloc(nbytes, name)
        self._held[buffer.address] = buffer
        self.used += rounded(nbytes)
        self.peak = max(self.peak, self.used)
        return buffer

    def free(self, buffer: DeviceBuffer) -> None:
        """Give one back; the device must be done with it."""
        self.device.free(buffer)
        self._forget(buffer)

    def settle(self, sizes: Mapping[str, int]) -> dict[str, DeviceBuffer]:
        """Have a buffer of at least so many bytes by name, and no others. What is there already and large enough stays, with
        its content, as long as all fits; the rest is given back first, for which the device must be idle. DeviceMemoryError
        as `alloc`, and nothing new stays."""
        spare, kept = self.limit - sum(map(rounded, sizes.values())), {}
        for buffer in list(self._held.values()):
            excess = rounded(buffer.nbytes) - rounded(sizes.get(buffer.name, 0))
            if buffer.name in sizes and 0 <= excess <= max(spare, 0):
                spare -= excess
                kept[buffer.name] = buffer
        for buffer in [buffer for buffer in self._held.values() if kept.get(buffer.name) is not buffer]:
            self.free(buffer)
        with self.scope(only_after_errors=True):
            return kept | {name: self.alloc(nbytes, name) for name, nbytes in sizes.items() if name not in kept}

    def holds(self, buffer: DeviceBuffer) -> bool:
        """Whether this very buffer is allocated, and not another that has its address by now."""
        return self._held.get(buffer.address) is buffer

    def held(self) -> dict[str, int]:
        """Bytes by name of all that is allocated now."""
        return {buffer.name: buffer.nbytes for buffer in self._held.values()}

    @contextmanager
    def scope(self, only_after_errors: bool = False) -> Iterator[None]:
        """What is allocated within is freed at the end, once the device is idle; also after an error, unless the device
        is so broken that it frees nothing."""
        before = set(self._held)
        try:
            yield
        except BaseException:
            try:
                self._free_since(before)
            except DeviceError:  # the first error tells more
                for address in set(self._held) - before:
                    self._forget(self._held[address])
            raise
        if not only_after_errors:
            self._free_since(before)

    def _free_since(self, before: set[int]) -> None:
        self.device.synchronize()
        for address in set(self._held) - before:
            self.free(self._held[address])

    def _forget(self, buffer: DeviceBuffer) -> None:
        del self._held[buffer.address]
        self.used -= rounded(buffer.nbytes)


@dataclass(frozen=True)
class Demand:
    """Bytes of a prefill: `dense` weights and `experts` of each layer (0 without experts), `states` of all layers, `kv` of all
    positions up to the end of the prompt, `activations` of a block by its tokens, and `expanded`, scratch for one matrix of
    weights as float32 (0 where no product wants it). `stops`: states at positions inside, on their way to the host."""

    dense: tuple[int, ...]
    experts: tuple[int, ...]
    states: int
    kv: int
    activations: Callable[[int], int]
    expanded: int = 0
    stops: int = 0


@dataclass(frozen=True)
class Plan:
    """How a prefill fits. blocks: positions (begin, end) that go through all layers together. resident: how many layers, from
    the first on, keep their dense weights on the device. sizes: bytes of each buffer, in the order they are allocated; resident
    layers by their own. streamed_bytes: weights that the call copies, experts counted whole; resident ones stay from call to call
    and count nothing."""

    limit: int
    blocks: tuple[tuple[int, int], ...]
    resident: int
    slots: int
    sizes: dict[str, int] = field(repr=False)
    streamed_bytes: int

    @property
    def total(self) -> int:
        """Bytes on the device, rounded as allocations are."""
        return sum(map(rounded, self.sizes.values()))

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest block."""
        return max(end - begin for begin, end in self.blocks)


def blocks_of(start: int, end: int, size: int) -> tuple[tuple[int, int], ...]:
    """Positions start..end cut at multiples of `size`, so that the cut does not depend on where a call begins."""
    edges = [start, *range((start // size + 1) * size, end, size), end]
    return tuple(pairwise(edges))


def plan(demand: Demand, start: int, end: int, limit: int, slots: int = 2, token_block: int | None = None) -> Plan:
    """The plan for positions start..end within `limit` bytes: of all that fit the one that streams the fewest bytes, with the
    fewest blocks among equals.

    Every further block copies all experts again and a layer that is not resident its dense weights, so layers are given up
    before the prompt is cut as long as that copies less. token_block: cut there and nowhere else.
    Raises DeviceMemoryError with the numbers when even the smallest does not fit.
    """
    fitting = [found for blocks in _cuts(start, end, token_block) if (found := _with_blocks(demand, blocks, limit, slots))]
    if not fitting:
        raise _refusal(demand, start, end, limit, slots, token_block)
    return min(fitting, key=lambda found: (found.streamed_bytes, len(found.blocks)))


def _cuts(start: int, end: int, token_block: int | None) -> list[tuple[tuple[int, int], ...]]:
    if token_block is not None:
        return [blocks_of(start, end, token_block)]
    whole = [((start, end),)] if end - start <= MOST_TOKENS else []
    largest = min(end - start - 1, MOST_TOKENS) // BLOCK_STEP * BLOCK_STEP
    sizes = sorted({max(BLOCK_STEP, largest // parts // BLOCK_STEP * BLOCK_STEP) for parts in range(1, 65)} | {BLOCK_STEP})
    return whole + [blocks_of(start, end, size) for size in sizes]


def _with_blocks(demand: Demand, blocks: tuple[tuple[int, int], ...], limit: int, slots: int) -> Plan | None:
    """With as many resident layers as fit; None when not even none do."""
    layers = len(demand.dense)
    for resident in range(layers, -1, -1):
        streamed = len(blocks) * (sum(demand.experts) + sum(demand.dense[resident:]))
        sizes = _sizes(demand, blocks, resident, min(slots, layers * len(blocks)))
        found = Plan(limit, blocks, resident, min(slots, layers * len(blocks)), sizes, streamed)
        if found.total <= limit:
            return found
    return None


def _sizes(demand: Demand, blocks: tuple[tuple[int, int], ...], resident: int, slots: int) -> dict[str, int]:
    tokens = max(end - begin for begin, end in blocks)
    sizes = {"states": demand.states, "keys and values": demand.kv, "activations": demand.activations(tokens),
             "expanded weights": demand.expanded, "states at boundaries": demand.stops}
    for what, most in (("experts", max(demand.experts)), ("dense weights", max(demand.dense[resident:], default=0))):
        sizes |= {f"{what}, slot {slot}": most for slot in range(slots)}
    sizes |= {resident_name(layer): demand.dense[layer] for layer in range(resident)}
    return {name: nbytes for name, nbytes in sizes.items() if nbytes}


def resident_name(layer: int) -> str:
    """Name of the buffer with a resident layer's dense weights."""
    return f"dense weights, layer {layer}"


def _refusal(demand: Demand, start: int, end: int, limit: int, slots: int, token_block: int | None) -> DeviceMemoryError:
    smallest = blocks_of(start, end, token_block or BLOCK_STEP)
    sizes = _sizes(demand, smallest, 0, slots)
    groups: dict[str, int] = {}
    for name, nbytes in sizes.items():
        groups[name.partition(",")[0]] = groups.get(name.partition(",")[0], 0) + rounded(nbytes)
    parts = ", ".join(f"{name} {nbytes}" for name, nbytes in groups.items())
    fewer = f"lower --expert-slots from {slots}, " if slots > 1 else ""
    return DeviceMemoryError(f"GPU prefill of {end - start} tokens from position {start} takes at least {sum(groups.values())} "
                             f"bytes of device memory ({parts}), {limit} are allowed: raise --vram, {fewer}shorten the prompt, "
                             "or run with --prefill cpu")
