"""Streams and events of the emulated device, and the scheduler that runs their operations in any order CUDA allows.

Operations are held back when they are given. What is guaranteed is kept: the order within a stream, waits for events, and
that whatever the host synchronises with has happened. Everything else is the scheduler's choice, drawn from the seed: a
missing wait then changes results for some seeds. Seed None runs every operation at once, in the order given.

Beside the order of execution stands a simulated clock. Its times follow from the order in which operations were given
(engines serve them first come, first served, as on a card with one hardware queue), not from the seed.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fermi_engine.errors import DeviceError
from fermi_engine.kernels.gpu import DeviceBuffer, Span

EAGERNESS = (0.0, 0.0, 0.3, 0.8)  # chance that something runs when the host gives an operation
GREED = (0.0, 0.3, 1.0)  # chance that a waiting host lets something run that it does not wait for


@dataclass(frozen=True)
class Rates:
    """Speeds of the simulated card: a C2075 on PCIe 2.0, copies in bytes/s, arithmetic in flop/s, launch overhead in s."""

    h2d: float = 6.0e9
    d2h: float = 6.0e9
    memory: float = 120.0e9
    flops: float = 0.5e12
    launch_s: float = 5.0e-6


@dataclass(eq=False)
class Operation:
    """One entry of a stream. `after` is the operation that an event stands for, where this one waits for an event."""

    label: str
    stream: EmulatedStream
    run: Callable[[], None] | None
    buffers: tuple[DeviceBuffer, ...] = ()
    arrays: tuple[int, ...] = ()  # addresses of pinned host memory
    after: Operation | None = None
    end_s: float = 0.0
    done: bool = False


class EmulatedEvent:
    """See gpu.Event."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.recorded: Operation | None = None

    def record(self, stream: EmulatedStream) -> None:
        self.recorded = self._scheduler.give(stream, "event", None)

    def synchronize(self) -> None:
        self._scheduler.alive()
        if self.recorded is not None:
            self._scheduler.reach(self.recorded)

    def seconds_since(self, earlier: EmulatedEvent) -> float:
        for event in (self, earlier):
            if event.recorded is None or not event.recorded.done:
                raise DeviceError("time between events that were not both recorded and reached")
        return self.recorded.end_s - earlier.recorded.end_s


class EmulatedStream:
    """See gpu.Stream."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self.name = name
        self._scheduler = scheduler
        self.queue: deque[Operation] = deque()
        self.last: Operation | None = None
        self.end_s = 0.0
        self.priority = 0.0

    def wait(self, event: EmulatedEvent) -> None:
        if event.recorded is not None:
            self._scheduler.give(self, "wait", None, after=event.recorded)

    def synchronize(self) -> None:
        self._scheduler.alive()
        if self.last is not None:
            self._scheduler.reach(self.last)


@dataclass
class Scheduler:
    """Holds operations back and runs them. One per device; `alive` raises once the device works no more."""

    seed: int | None
    rates: Rates
    alive: Callable[[], None]

    def __post_init__(self) -> None:
        self.streams: list[EmulatedStream] = []
        self.trace: list[Span] | None = None
        self.host_s = 0.0
        self._engine_s: dict[str, float] = {}
        self._random = random.Random(self.seed)
        self._eagerness = self._random.choice(EAGERNESS)
        self._greed = self._random.choice(GREED)
        self._by_priority = self._random.random() < 0.5  # one stream runs as far ahead of the others as it may

    def stream(self, name: str) -> EmulatedStream:
        made = EmulatedStream(self, name)
        made.priority = self._random.random()
        self.streams.append(made)
        return made

    def give(self, stream: EmulatedStream, label: str, run: Callable[[], None] | None, *, engine: str = "",
             seconds: float = 0.0, nbytes: int = 0, buffers: tuple[DeviceBuffer, ...] = (), arrays: tuple[int, ...] = (),
             after: Operation | None = None) -> Operation:
        """Append an operation to `stream`; how long it takes counts for the clock only."""
        self.alive()
        operation = Operation(label, stream, run, buffers, arrays, after)
        self._time(operation, engine, seconds, nbytes)
        stream.queue.append(operation)
        stream.last = operation
        if self.seed is None:
            self._run(stream)
        else:
            while self._random.random() < self._eagerness and (ready := self._ready()):
                self._run(self._pick(ready))
        return operation

    def reach(self, operation: Operation) -> None:
        """Run what must have happened when the host has seen `operation` done, and perhaps more."""
        self.host_s = max(self.host_s, operation.end_s)
        while not operation.done:
            needed = {op.stream for op in self._needed(operation)}
            ready = self._ready()
            wanted = [stream for stream in ready if stream in needed]
            self._run(self._pick(ready if self._random.random() < self._greed else wanted))

    def drain(self) -> None:
        """Run everything."""
        self.host_s = max([self.host_s, *(stream.end_s for stream in self.streams)])
        while ready := self._ready():
            self._run(self._pick(ready))

    def forget(self) -> None:
        """Drop everything that has not run: after a failure the device does no more work."""
        for stream in self.streams:
            stream.queue.clear()

    def pending(self) -> Iterator[Operation]:
        """Operations that have not run."""
        return (operation for stream in self.streams for operation in stream.queue)

    def _ready(self) -> list[EmulatedStream]:
        return [s for s in self.streams if s.queue and (s.queue[0].after is None or s.queue[0].after.done)]

    def _needed(self, operation: Operation) -> list[Operation]:
        """`operation` and all that has to run before it."""
        found: dict[int, Operation] = {}
        todo = [operation]
        while todo:
            last = todo.pop()
            for earlier in last.stream.queue:
                if id(earlier) not in found and not earlier.done:
                    found[id(earlier)] = earlier
                    if earlier.after is not None and not earlier.after.done:
                        todo.append(earlier.after)
                if earlier is last:
                    break
        return list(found.values())

    def _pick(self, ready: list[EmulatedStream]) -> EmulatedStream:
        if self._by_priority:
            return max(ready, key=lambda stream: stream.priority)
        return self._random.choice(ready)

    def _run(self, stream: EmulatedStream) -> None:
        operation = stream.queue.popleft()
        if operation.run is not None:
            operation.run()
            operation.run = None  # lets go of the arrays
        operation.done = True

    def _time(self, operation: Operation, engine: str, seconds: float, nbytes: int) -> None:
        begin = max(operation.stream.end_s, self.host_s, operation.after.end_s if operation.after else 0.0)
        if engine:
            begin = max(begin, self._engine_s.get(engine, 0.0))
            self._engine_s[engine] = begin + seconds
            if self.trace is not None:
                self.trace.append(Span(operation.label, operation.stream.name, engine, begin, begin + seconds, nbytes))
        operation.end_s = operation.stream.end_s = begin + seconds
