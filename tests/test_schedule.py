"""The adversarial scheduler: right programs give one result for every seed, a missing wait does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fermi_engine.errors import DeviceError
from fermi_engine.kernels.emulated import EmulatedDevice
from fermi_engine.kernels.gpu import Work
from fermi_engine.kernels.schedule import Rates

SEEDS = range(200)
EXPERTS, NBYTES = 6, 256


def stream_experts(seed: int | None, slots: int = 2, ready_wait: bool = True, free_wait: bool = True,
                   host_wait: bool = True) -> np.ndarray:
    """Experts through `slots` slots: copied on one stream, used (here: copied on) by another, fetched to pinned memory.

    Each of the three waits can be left out.
    """
    device = EmulatedDevice(seed=seed)
    copies, compute = device.stream("copies"), device.stream("compute")
    host = device.pinned(EXPERTS * NBYTES).reshape(EXPERTS, NBYTES)
    host[:] = np.arange(1, EXPERTS + 1)[:, None]
    result = device.pinned(EXPERTS * NBYTES)
    result[:] = 0
    buffers = [device.alloc(NBYTES, f"slot{i}") for i in range(slots)]
    out = device.alloc(EXPERTS * NBYTES, "out")
    ready, free = [device.event() for _ in buffers], [device.event() for _ in buffers]
    for expert in range(EXPERTS):
        slot = expert % slots
        if free_wait:
            copies.wait(free[slot])
        device.h2d(buffers[slot], host[expert], copies)
        ready[slot].record(copies)
        if ready_wait:
            compute.wait(ready[slot])
        device.d2d(out, buffers[slot], NBYTES, compute, dst_offset=expert * NBYTES)
        free[slot].record(compute)
    device.d2h(result, out, compute)
    if host_wait:
        compute.synchronize()
    seen = result.copy()
    device.close()
    return seen


EXPECTED = np.repeat(np.arange(1, EXPERTS + 1, dtype=np.uint8), NBYTES)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_right_program_gives_one_result_for_every_schedule(slots: int) -> None:
    for seed in (None, *SEEDS):
        np.testing.assert_array_equal(stream_experts(seed, slots), EXPECTED)


@pytest.mark.parametrize("missing", ["ready_wait", "free_wait", "host_wait"])
@pytest.mark.parametrize("slots", [1, 2])
def test_a_missing_wait_changes_the_result(missing: str, slots: int) -> None:
    wrong = sum(not np.array_equal(stream_experts(seed, slots, **{missing: False}), EXPECTED) for seed in SEEDS)
    assert wrong >= len(SEEDS) // 4
    np.testing.assert_array_equal(stream_experts(None, slots, **{missing: False}), EXPECTED)  # why tests need the seeds


def test_a_schedule_follows_its_seed() -> None:
    for seed in range(10):
        first = stream_experts(seed, ready_wait=False)
        np.testing.assert_array_equal(stream_experts(seed, ready_wait=False), first)


def seen_values(program: Any) -> set[int]:
    return {int(program(EmulatedDevice(seed=seed))) for seed in range(60)}


def test_a_pinned_source_overwritten_too_early_is_noticed() -> None:
    def program(device: Any, pinned: bool = True) -> int:
        stream, buffer, out = device.stream("s"), device.alloc(64), np.zeros(64, np.uint8)
        source = device.pinned(64) if pinned else np.empty(64, np.uint8)
        source[:] = 1
        device.h2d(buffer, source, stream)
        source[:] = 2
        device.d2h(out, buffer, stream)
        return out[0]

    assert seen_values(program) == {1, 2}
    assert seen_values(lambda device: program(device, pinned=False)) == {1}


def test_synchronising_one_stream_waits_for_no_other() -> None:
    def program(device: Any) -> int:
        one, two = device.stream("one"), device.stream("two")
        buffer, out = device.alloc(64), device.pinned(64)
        out[:] = 0
        device.memset(buffer, 1, 64, two)
        device.d2h(out, buffer, two)
        device.memset(buffer, 1, 0, one)
        one.synchronize()
        seen = out[0]
        two.synchronize()
        assert out[0] == 1
        return seen

    assert seen_values(program) == {0, 1}


def test_synchronising_an_event_waits_for_what_it_stands_for_only() -> None:
    def program(device: Any) -> int:
        stream, event = device.stream("s"), device.event()
        buffer, out = device.alloc(64), device.pinned(64)
        out[:] = 0
        device.memset(buffer, 1, 64, stream)
        device.d2h(out, buffer, stream)
        event.record(stream)
        device.memset(buffer, 2, 64, stream)
        device.d2h(out, buffer, stream)
        event.synchronize()
        return out[0]

    assert seen_values(program) == {1, 2}


@pytest.mark.parametrize("what", ["free", "unpin"])
def test_giving_memory_back_under_an_operation_is_refused(what: str) -> None:
    refused = 0
    for seed in range(40):
        device = EmulatedDevice(seed=seed)
        stream, buffer, source = device.stream("s"), device.alloc(64, "slot"), device.pinned(64)
        device.h2d(buffer, source, stream)
        give_back = (lambda d=device, b=buffer: d.free(b)) if what == "free" else (lambda d=device, s=source: d.unpin(s))
        if any(True for _ in device._scheduler.pending()):
            with pytest.raises(DeviceError, match="while 'slot' on stream 's' is under way"):
                give_back()
            refused += 1
            stream.synchronize()
        give_back()
    assert 10 < refused < 40


def test_a_write_to_freed_memory_is_found() -> None:
    device = EmulatedDevice()
    buffer = device.alloc(64, "slot")
    memory = device._memory[buffer.address]
    device.free(buffer)
    device.synchronize()
    memory.data[5] = 1
    with pytest.raises(DeviceError, match="buffer 'slot' of 64 bytes was written to after it had been freed"):
        device.synchronize()


def test_memory_starts_as_nan() -> None:
    device = EmulatedDevice()
    assert np.isnan(device.view(device.alloc(66).address, 64).view(np.float32)).all()


def test_a_failed_device_stays_failed() -> None:
    device = EmulatedDevice(seed=1)
    stream, buffer = device.stream("s"), device.alloc(4096, "x")
    args = {"x": buffer, "y": buffer, "f": buffer.at(4096 - 16), "n": 2}  # f needs 32 bytes
    message = r"launch of selftest with grid \(1, 1, 1\) and block \(256, 1, 1\) failed: wrote behind buffer 'x' of 4096 bytes"

    def use() -> None:
        device.launch("selftest", (1, 1, 1), (256, 1, 1), args, stream)
        device.synchronize()

    for action in (use, lambda: device.alloc(4), device.synchronize, lambda: device.memset(buffer, 0, 1, stream)):
        with pytest.raises(DeviceError, match=message):
            action()
    device.close()


# the simulated clock

RATES = Rates(h2d=1e9, d2h=1e9, memory=1e10, flops=1e9, launch_s=0.0)


def timeline(seed: int | None, streams: tuple[str, str]) -> list[Any]:
    """A copy and a kernel of 1 ms each, three times, on the given streams."""
    device = EmulatedDevice(seed=seed, rates=RATES)
    made = {name: device.stream(name) for name in dict.fromkeys(streams)}
    source, buffer, data = device.pinned(1_000_000), device.alloc(1_000_000), device.alloc(4096)
    args = {"x": data, "y": data.at(1024), "f": data.at(2048), "n": 64}
    device.start_trace()
    for _ in range(3):
        device.h2d(buffer, source, made[streams[0]], label="copy")
        device.launch("selftest", (1, 1, 1), (256, 1, 1), args, made[streams[1]], work=Work(flops=1e6), label="kernel")
    return device.end_trace()


def test_the_clock_shows_overlap_and_its_absence() -> None:
    overlapped, in_line = timeline(None, ("a", "b")), timeline(None, ("a", "a"))
    assert max(span.end_s for span in overlapped) == pytest.approx(3e-3)
    assert max(span.end_s for span in in_line) == pytest.approx(6e-3)
    assert [span.label for span in in_line] == ["copy", "kernel"] * 3
    assert all(span.end_s - span.begin_s == pytest.approx(1e-3) for span in overlapped)


def test_the_clock_does_not_depend_on_the_schedule() -> None:
    for seed in range(10):
        assert timeline(seed, ("a", "b")) == timeline(None, ("a", "b"))


def test_the_clock_counts_waits_for_events_and_for_the_host() -> None:
    device = EmulatedDevice(rates=RATES)
    one, two, event = device.stream("one"), device.stream("two"), device.event()
    source, buffer, back = device.pinned(1_000_000), device.alloc(1_000_000), device.pinned(1_000_000)
    device.start_trace()
    device.h2d(buffer, source, one)
    event.record(one)
    two.wait(event)
    device.d2h(back, buffer, two)
    two.synchronize()
    device.h2d(buffer, source, one)
    spans = device.end_trace()
    assert [(span.engine, round(span.begin_s * 1e3)) for span in spans] == [("h2d", 0), ("d2h", 1), ("h2d", 2)]
