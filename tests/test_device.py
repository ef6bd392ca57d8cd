"""The device protocol: one suite for every implementation. `cuda` runs where a GPU and pycuda are; `-m gpu` demands them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fermi_engine.errors import DeviceError, DeviceMemoryError
from fermi_engine.kernels import cuda, gpu, schedule, selftest
from fermi_engine.kernels.emulated import EmulatedDevice
from fermi_engine.kernels.gpu import Work, open_device
from tests.devices import no_cuda, on_devices


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    on_devices(metafunc, "device", ("emulated", "emulated-shuffled"))


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "cuda":
        opened = open_device("cuda")
    else:
        opened = open_device("emulated", seed=7 if "shuffled" in request.param else None)
    yield opened
    opened.close()


@pytest.mark.gpu
def test_the_suite_runs_on_a_card(request: pytest.FixtureRequest) -> None:
    if "gpu" not in request.config.getoption("-m") and no_cuda():
        pytest.skip(f"the device suite ran on the emulated device only: {no_cuda()}")
    assert no_cuda() is None


def sequence(n: int, start: int = 0) -> np.ndarray:
    return (np.arange(start, start + n) % 251).astype(np.uint8)


def upload(device: Any, array: np.ndarray, stream: Any, name: str = "buffer") -> Any:
    buffer = device.alloc(array.nbytes, name)
    device.h2d(buffer, array, stream)
    return buffer


def download(device: Any, buffer: Any, stream: Any, nbytes: int | None = None) -> np.ndarray:
    out = np.zeros(nbytes or buffer.nbytes, np.uint8)
    device.d2h(out, buffer, stream)
    return out


# every device


def test_the_self_test_passes(device: Any) -> None:
    selftest.check(device)


@pytest.mark.parametrize("pinned", [False, True])
def test_copies_reach_their_place(device: Any, pinned: bool) -> None:
    stream = device.stream("test")
    buffer = device.alloc(1000)
    source = device.pinned(300) if pinned else np.empty(300, np.uint8)
    target = device.pinned(300) if pinned else np.empty(300, np.uint8)
    source[:], target[:] = sequence(300), 0
    device.memset(buffer, 9, 1000, stream)
    device.h2d(buffer, source, stream, offset=411)
    device.d2h(target, buffer, stream, offset=411)
    stream.synchronize()
    np.testing.assert_array_equal(target, source)
    expected = np.full(1000, 9, np.uint8)
    expected[411:711] = sequence(300)
    np.testing.assert_array_equal(download(device, buffer, stream), expected)


def test_a_part_of_pinned_memory_and_other_types_and_shapes_copy(device: Any) -> None:
    stream = device.stream("test")
    memory = device.pinned(4096)
    floats = memory[1024:2048].view(np.float32).reshape(16, 16)
    floats[:] = np.arange(256, dtype=np.float32).reshape(16, 16)
    buffer = upload(device, floats, stream)
    stream.synchronize()
    np.testing.assert_array_equal(download(device, buffer, stream).view(np.float32), np.arange(256))


def test_copies_within_the_device(device: Any) -> None:
    stream = device.stream("test")
    a, b = upload(device, sequence(512), stream), upload(device, sequence(512, 100), stream)
    device.d2d(b, a, 100, stream, dst_offset=7, src_offset=50)
    device.d2d(b, b, 100, stream, dst_offset=300, src_offset=200)
    expected = sequence(512, 100)
    expected[7:107] = sequence(512)[50:150]
    expected[300:400] = expected[200:300]
    np.testing.assert_array_equal(download(device, b, stream), expected)


def test_copies_of_nothing_are_allowed_up_to_the_end(device: Any) -> None:
    stream, buffer, nothing = device.stream("test"), device.alloc(64), np.empty(0, np.uint8)
    device.h2d(buffer, nothing, stream, offset=64)
    device.d2h(nothing, buffer, stream, offset=64)
    device.d2d(buffer, buffer, 0, stream, dst_offset=64, src_offset=64)
    device.memset(buffer, 1, 0, stream, offset=64)
    with pytest.raises(ValueError, match="bytes 65"):
        device.h2d(buffer, nothing, stream, offset=65)


def test_pageable_memory_may_be_overwritten_after_the_call(device: Any) -> None:
    stream = device.stream("test")
    source = sequence(1 << 16)
    buffer = device.alloc(source.nbytes)
    device.h2d(buffer, source, stream)
    source[:] = 0
    np.testing.assert_array_equal(download(device, buffer, stream), sequence(1 << 16))


def test_events_order_streams_and_measure_time(device: Any) -> None:
    one, two = device.stream("one"), device.stream("two")
    source = device.pinned(1 << 20)
    source[:] = 5
    buffer, copied = device.alloc(1 << 20), device.alloc(1 << 20)
    begin, end, never = device.event(), device.event(), device.event()
    two.wait(never)  # no wait
    begin.record(one)
    device.h2d(buffer, source, one)
    end.record(one)
    two.wait(end)
    device.d2d(copied, buffer, 1 << 20, two)
    out = download(device, copied, two)
    assert (out == 5).all()
    end.synchronize()
    assert 0 < end.seconds_since(begin) < 10


def test_an_event_stands_for_its_last_record(device: Any) -> None:
    one, two = device.stream("one"), device.stream("two")
    event, buffer = device.event(), device.alloc(64)
    event.record(one)
    device.memset(buffer, 1, 64, one)
    event.record(one)
    two.wait(event)
    device.memset(buffer, 2, 64, two)
    assert (download(device, buffer, two) == 2).all()
    device.synchronize()


def test_memory_is_counted_and_given_back(device: Any) -> None:
    before = device.free_bytes
    assert 0 < before <= device.total_bytes
    buffers = [device.alloc(8 << 20, f"b{i}") for i in range(3)]
    assert before - device.free_bytes >= 3 * (8 << 20) - (4 << 20)  # a driver hands memory out in pages of its own
    assert all(buffer.address % 256 == 0 for buffer in buffers)
    for buffer in buffers:
        device.free(buffer)
    assert device.free_bytes >= before - (4 << 20)


def test_memory_that_is_not_there_is_one_clear_line(device: Any) -> None:
    nbytes = device.total_bytes + 1
    with pytest.raises(DeviceMemoryError, match=rf"alloc of {nbytes} bytes for 'experts'.* out of memory") as caught:
        device.alloc(nbytes, "experts")
    assert "\n" not in str(caught.value)
    stream = device.stream("test")
    assert (download(device, upload(device, sequence(64), stream), stream) == sequence(64)).all()


def test_pin_and_unpin(device: Any) -> None:
    stream = device.stream("test")
    array = np.zeros(1 << 20, np.uint8)
    device.pin(array)
    array[:] = 3
    buffer = upload(device, array, stream)
    stream.synchronize()
    with pytest.raises(DeviceError, match=r"page-locking 4096 bytes failed: some of them are page-locked already"):
        device.pin(array[4096:8192])
    device.unpin(array)
    device.pin(array)  # and again
    device.unpin(array)
    with pytest.raises(ValueError, match="unpin of memory that is not page-locked"):
        device.unpin(array)
    assert (download(device, buffer, stream) == 3).all()
    memory = device.pinned(100)
    device.unpin(memory)


def test_wrong_arguments_are_refused(device: Any) -> None:
    stream = device.stream("test")
    buffer, gone = device.alloc(100, "here"), device.alloc(100, "gone")
    device.free(gone)
    with pytest.raises(ValueError, match="'gone' is not, or no longer"):
        device.memset(gone, 0, 1, stream)
    with pytest.raises(ValueError, match="'gone' is not, or no longer"):
        device.free(gone)
    with pytest.raises(ValueError, match=r"bytes 90\.\.101 of buffer 'here', which has 100"):
        device.h2d(buffer, sequence(11), stream, offset=90)
    with pytest.raises(ValueError, match="overlap"):
        device.d2d(buffer, buffer, 20, stream, dst_offset=10)
    with pytest.raises(TypeError, match="C-contiguous"):
        device.h2d(buffer, sequence(20)[::2], stream)
    with pytest.raises(ValueError, match="alloc of 0 bytes"):
        device.alloc(0)
    with pytest.raises(ValueError, match="no entry point 'no_such'"):
        device.launch("no_such", (1, 1, 1), (1, 1, 1), {}, stream)
    with pytest.raises(ValueError, match="n missing or unknown"):
        device.launch("selftest", (1, 1, 1), (256, 1, 1), {"x": buffer, "y": buffer, "f": buffer}, stream)
    with pytest.raises(ValueError, match=r"selftest: argument y is 0x10, which lies in no buffer"):
        device.launch("selftest", (1, 1, 1), (256, 1, 1), {"x": buffer, "y": 16, "f": buffer, "n": 1}, stream)


def test_fermis_limits_hold_on_every_device(device: Any) -> None:
    stream, buffer = device.stream("test"), device.alloc(4096)
    args = {"x": buffer, "y": buffer, "f": buffer, "n": 1}
    with pytest.raises(DeviceError, match=r"launch of selftest with grid \(65536, 1, 1\) .*: grid.x is 65536"):
        device.launch("selftest", (65536, 1, 1), (256, 1, 1), args, stream)
    with pytest.raises(DeviceError, match="1024 bytes of static and 48129 of dynamic shared memory"):
        device.launch("selftest", (1, 1, 1), (256, 1, 1), args, stream, shared_bytes=48129)


@pytest.mark.parametrize(("kind", "nth"), [("alloc", 1), ("alloc", 3), ("pinned", 1), ("pinned", 2), ("copy", 2), ("launch", 1)])
def test_failures_can_be_injected(device: Any, kind: str, nth: int) -> None:
    stream = device.stream("test")
    buffer = device.alloc(4096)
    args = {"x": buffer, "y": buffer.at(1024), "f": buffer.at(2048), "n": 1}
    calls = {"alloc": lambda: device.alloc(100, "victim"), "pinned": lambda: device.pinned(100),
             "copy": lambda: device.h2d(buffer, sequence(100), stream),
             "launch": lambda: device.launch("selftest", (1, 1, 1), (256, 1, 1), args, stream)}
    device.faults.fail(kind, nth)
    for _ in range(nth - 1):
        calls[kind]()
    expected = DeviceMemoryError if kind in ("alloc", "pinned") else DeviceError
    with pytest.raises(expected, match="failure injected by a test"):
        calls[kind]()
    calls[kind]()  # once only
    device.synchronize()


def launch_add(device: Any, a: Any, b: Any, y: Any, n: int, stream: Any) -> None:
    device.launch("add", (1, 1, 1), (256, 1, 1), {"a": a, "b": b, "y": y, "n": n}, stream)


def test_what_is_recorded_runs_when_it_is_replayed(device: Any) -> None:
    stream, n = device.stream("test"), 40
    total, one = (upload(device, np.full(n, value, np.float32), stream, "array") for value in (0, 1))
    with device.record() as recording:
        launch_add(device, total, one, total, n, stream)
        launch_add(device, total, total, total, n, stream)
        with pytest.raises(ValueError, match="within record"):
            device.h2d(one, np.zeros(n, np.float32), stream)
    assert len(recording) == 2
    got = np.empty(n, np.float32)
    for expected in (0.0, 2.0, 6.0):
        device.d2h(got, total, stream)
        assert (got == expected).all()
        device.replay(recording, stream)
    stream.synchronize()


@pytest.mark.parametrize("nth", [1, 2])
def test_a_replayed_launch_can_fail(device: Any, nth: int) -> None:
    """The launches before it have run, those behind it have not."""
    stream, n = device.stream("test"), 40
    total, one = (upload(device, np.full(n, value, np.float32), stream, "array") for value in (0, 1))
    with device.record() as recording:
        for _ in range(2):
            launch_add(device, total, one, total, n, stream)
    device.faults.fail("launch", nth)
    with pytest.raises(DeviceError, match=r"launch of add with grid .* failed: failure injected by a test"):
        device.replay(recording, stream)
    got = np.empty(n, np.float32)
    device.d2h(got, total, stream)
    assert (got == nth - 1).all()
    device.replay(recording, stream)
    device.d2h(got, total, stream)
    assert (got == nth + 1).all()


@pytest.mark.parametrize("b_transposed", [True, False])
@pytest.mark.parametrize(("m", "n", "k", "pad"), [(1, 1, 1, 0), (5, 7, 33, 0), (64, 48, 96, 4)])
def test_the_vendors_sgemm(device: Any, b_transposed: bool, m: int, n: int, k: int, pad: int) -> None:
    stream = device.stream("test")
    rng = np.random.default_rng(m)
    a, c = rng.standard_normal((m, k + pad), np.float32), np.full((m, n + pad), 7, np.float32)
    b = rng.standard_normal((n, k + pad) if b_transposed else (k, n + pad), np.float32)
    on_device = [upload(device, array, stream) for array in (a, b, c)]
    try:
        device.sgemm(m, n, k, *on_device, stream, b_transposed=b_transposed, lda=k + pad, ldb=b.shape[1], ldc=n + pad)
    except DeviceError as err:
        if "not available" not in str(err):
            raise
        pytest.skip(str(err))
    got = download(device, on_device[2], stream).view(np.float32).reshape(c.shape)
    a64, b64 = a[:, :k].astype(np.float64), (b[:, :k].T if b_transposed else b[:, :n]).astype(np.float64)
    limit = 1.01 * k * 2.0**-24 * (np.abs(a64) @ np.abs(b64))  # k products, at most k roundings on each one's way
    assert (np.abs(got[:, :n] - a64 @ b64) <= limit).all()
    assert (got[:, n:] == 7).all()


def test_sgemm_stays_inside_its_buffers(device: Any) -> None:
    stream, buffer = device.stream("test"), device.alloc(4 * 16, "small")
    with pytest.raises(ValueError, match="sgemm: argument c needs 80 bytes from byte 0 of 'small', which has 64"):
        device.sgemm(5, 4, 2, buffer, buffer, buffer, stream)
    with pytest.raises(ValueError, match="rows of a have 2 floats and start every 1"):
        device.sgemm(2, 2, 2, buffer, buffer, buffer, stream, lda=1)


def test_a_trace_has_every_operation(device: Any) -> None:
    one, two = device.stream("one"), device.stream("two")
    source, buffer = device.pinned(1 << 20), device.alloc(1 << 20)
    source[:] = 0
    device.start_trace()
    device.h2d(buffer, source, one, label="weights")
    device.memset(buffer, 0, 100, two)
    device.launch("selftest", (1, 1, 1), (256, 1, 1), {"x": buffer, "y": buffer.at(4096), "f": buffer.at(8192), "n": 256}, one,
                  work=Work(flops=1e6), label="kernel")
    spans = device.end_trace()
    assert {(s.label, s.stream, s.engine) for s in spans} == {
        ("weights", "one", "h2d"), ("memset buffer", "two", "compute"), ("kernel", "one", "compute")}
    assert all(0 <= s.begin_s <= s.end_s < 10 for s in spans)
    by_label = {s.label: s for s in spans}
    assert by_label["weights"].nbytes == 1 << 20
    assert by_label["weights"].end_s <= by_label["kernel"].begin_s + 1e-6
    device.h2d(buffer, source, one)
    device.start_trace()
    assert device.end_trace() == []


def test_facts_name_the_device(device: Any) -> None:
    selftest.check(device)
    facts = device.facts()
    assert device.name in facts["device"]
    assert facts["kernels"]


def test_a_closed_device_does_nothing(device: Any) -> None:
    stream = device.stream("test")
    device.close()
    with pytest.raises(DeviceError, match="closed"):
        device.alloc(10)
    with pytest.raises(DeviceError, match="closed"):
        device.synchronize()
    with pytest.raises(DeviceError, match="closed"):
        stream.synchronize()
    device.close()


@pytest.mark.parametrize(("protocol", "kinds"), [
    (gpu.Device, (EmulatedDevice, cuda.CudaDevice)), (gpu.Stream, (schedule.EmulatedStream, cuda.CudaStream)),
    (gpu.Event, (schedule.EmulatedEvent, cuda.CudaEvent))])
def test_every_device_has_the_methods_of_the_protocol(protocol: type, kinds: tuple[type, ...]) -> None:
    methods = {name: value for name, value in vars(protocol).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert methods
    for kind in kinds:
        for name, method in methods.items():
            assert list(inspect.signature(getattr(kind, name)).parameters) == list(inspect.signature(method).parameters)


# the self-test itself


@pytest.mark.parametrize(("what", "damage"), [
    ("integers", lambda y, f: y.__setitem__(7, y[7] + 1)),
    ("division", lambda y, f: f.__setitem__((5, 0), np.nextafter(f[5, 0], 9))),
    ("fused multiply-add", lambda y, f: f.__setitem__((slice(None), 2), f[:, 2] * np.float32(1 + 2**-23))),
    ("conversion of halves", lambda y, f: f.__setitem__((np.abs(f[:, 3]) < 2.0**-14, 3), 0)),
])
def test_the_self_test_names_what_is_wrong(what: str, damage: Any) -> None:
    x = selftest.inputs()
    y, f = selftest.expected(x)
    selftest._compare("a card", x, y, f)
    damage(y, f)
    with pytest.raises(DeviceError, match=rf"the self-test on a card came out wrong: {what} in \d+ of 845 elements; "):
        selftest._compare("a card", x, y, f)


def test_a_card_that_fails_the_self_test_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "CudaDevice", EmulatedDevice)
    monkeypatch.setattr(selftest, "expected", lambda x: (x, np.zeros((len(x), 4), np.float32)))
    with pytest.raises(DeviceError, match="the self-test on emulated sm_20 came out wrong"):
        open_device("cuda")
