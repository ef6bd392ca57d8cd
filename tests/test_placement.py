"""The ledger and the plan: limits that hold, numbers that add up, and one clear line where nothing fits."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fermi_engine import placement
from fermi_engine.errors import DeviceError, DeviceMemoryError
from fermi_engine.kernels.emulated import EmulatedDevice
from fermi_engine.placement import Demand, Ledger, blocks_of, plan, rounded

KIB = 1024


def handed_out(device: EmulatedDevice) -> int:
    return device.total_bytes - device.free_bytes


def test_the_ledger_counts_what_the_device_hands_out():
    device = EmulatedDevice(total_bytes=64 * KIB)
    ledger = Ledger(device)
    assert ledger.limit == 64 * KIB
    first, second = ledger.alloc(1000, "first"), ledger.alloc(257, "second")
    assert ledger.used == handed_out(device) == 1024 + 512
    assert ledger.held() == {"first": 1000, "second": 257}
    ledger.free(first)
    assert ledger.used == handed_out(device) == 512
    assert ledger.peak == 1536
    ledger.free(second)
    assert ledger.held() == {}


def test_the_limit_is_hard_and_the_device_is_not_asked():
    device = EmulatedDevice(total_bytes=64 * KIB)
    ledger = Ledger(device, 2 * KIB)
    ledger.alloc(KIB, "weights")
    calls = device.faults.calls["alloc"]
    with pytest.raises(DeviceMemoryError, match=r"keys takes 1025 bytes .* 1024 of the 2048 allowed are left; raise --vram"):
        ledger.alloc(KIB + 1, "keys")
    assert device.faults.calls["alloc"] == calls
    assert ledger.used == KIB
    ledger.alloc(KIB, "keys")
    assert Ledger(device, 1 << 40).limit == device.free_bytes


def test_a_scope_frees_what_it_took_also_after_an_error():
    device = EmulatedDevice(total_bytes=64 * KIB)
    ledger = Ledger(device)
    kept = ledger.alloc(256, "kept")
    with ledger.scope():
        ledger.alloc(KIB, "inside")
    assert ledger.held() == {"kept": 256}
    for only_after_errors in (False, True):
        device.faults.fail("alloc", 2)
        with pytest.raises(DeviceMemoryError):
            take_two(ledger, only_after_errors)
        assert handed_out(device) == ledger.used == 256
    with ledger.scope(only_after_errors=True):
        ledger.alloc(KIB, "stays")
    assert ledger.held() == {"kept": 256, "stays": KIB}
    ledger.free(kept)


def take_two(ledger: Ledger, only_after_errors: bool) -> None:
    with ledger.scope(only_after_errors):
        ledger.alloc(KIB, "one")
        ledger.alloc(KIB, "two")


def test_a_scope_on_a_broken_device_passes_the_first_error_on():
    device = EmulatedDevice(total_bytes=64 * KIB)
    ledger = Ledger(device)


    def work() -> None:
        with ledger.scope():
            ledger.alloc(KIB, "inside")
            device.close()
            raise DeviceError("first")

    with pytest.raises(DeviceError, match="first"):
        work()
    assert ledger.used == 0


def test_what_is_large_enough_stays_and_the_rest_makes_room():
    device = EmulatedDevice(total_bytes=64 * KIB)
    ledger = Ledger(device, 10 * KIB)
    first = ledger.settle({"weights": 4 * KIB, "keys": 2 * KIB, "scratch": KIB})
    calls = device.faults.calls["alloc"]
    again = ledger.settle({"weights": 4 * KIB, "keys": KIB})  # smaller: what is there will do
    assert again == {name: first[name] for name in ("weights", "keys")}
    assert device.faults.calls["alloc"] == calls
    more = ledger.settle({"weights": 4 * KIB, "keys": KIB, "states": 5 * KIB})  # no room for the larger keys
    assert more["weights"] is first["weights"]
    assert ledger.held() == {"weights": 4 * KIB, "keys": KIB, "states": 5 * KIB}
    assert ledger.used == handed_out(device) == ledger.peak == 10 * KIB
    larger = ledger.settle({"weights": 4 * KIB, "keys": 3 * KIB})
    assert larger["keys"].nbytes == 3 * KIB
    device.faults.fail("alloc", 2)
    with pytest.raises(DeviceMemoryError, match="injected"):
        ledger.settle({"weights": 4 * KIB, "states": KIB, "scratch": KIB})
    assert ledger.held() == {"weights": 4 * KIB}
    with pytest.raises(DeviceMemoryError, match="raise --vram"):
        ledger.settle({"weights": 4 * KIB, "states": 7 * KIB})
    ledger.settle({})
    assert handed_out(device) == ledger.used == 0


@given(st.integers(0, 5000), st.integers(1, 5000), st.sampled_from([64, 128, 256, 4096]))
def test_blocks_lie_at_absolute_positions(start, count, size):
    blocks = blocks_of(start, start + count, size)
    assert blocks[0][0] == start
    assert blocks[-1][1] == start + count
    assert all(end == begin for (_, end), (begin, _) in pairwise(blocks))
    assert all(end % size == 0 for _, end in blocks[:-1])
    assert all(0 < end - begin <= size for begin, end in blocks)


def demand(layers=8, experts=200_000, dense=30_000, states=5_000, kv=9_000, per_token=1_000):
    return Demand((dense,) * layers, (experts,) * layers, states, kv, lambda tokens: per_token * tokens)


def test_a_plan_with_room_keeps_everything_and_cuts_nothing():
    found = plan(demand(), 100, 1047, 10_000_000)
    assert found.blocks == ((100, 1047),)
    assert found.resident == 8
    assert found.slots == 2
    assert found.streamed_bytes == 8 * 200_000
    assert found.total == sum(map(rounded, found.sizes.values()))
    assert not any(name.startswith("dense weights, slot") for name in found.sizes)


def test_layers_are_given_up_before_the_prompt_is_cut_while_that_copies_less():
    whole = plan(demand(), 0, 947, 10_000_000).total
    tight = plan(demand(), 0, 947, whole - 1)
    assert tight.blocks == ((0, 947),)
    assert tight.resident == 5  # two slots of dense weights take the place of the three layers given up, with a rest
    assert tight.total <= whole - 1
    costly = plan(demand(dense=400_000, experts=1_000), 0, 947, 8 * 400_256 + 500_000)
    assert costly.resident == 8
    assert costly.most_tokens == 448
    assert costly.streamed_bytes == 3 * 8 * 1_000


@pytest.mark.parametrize("slots", [1, 2, 3])
@given(limit=st.integers(300_000, 4_000_000), start=st.integers(0, 300), count=st.integers(1, 3000))
def test_a_plan_never_passes_its_limit(slots, limit, start, count):
    tokens = max(end - begin for begin, end in blocks_of(start, start + count, 64))
    smallest = (200_192 + 30_208) * slots + 5_120 + 9_216 + rounded(1_000 * tokens)
    if smallest > limit:  # one short prompt may still fit with all layers resident, which take no slots for dense weights
        resident = 200_192 * slots + 8 * 30_208 + 5_120 + 9_216 + rounded(1_000 * tokens)
        with pytest.raises(DeviceMemoryError, match=f"{limit} are allowed") if resident > limit else nullcontext():
            plan(demand(), start, start + count, limit, slots)
        return
    found = plan(demand(), start, start + count, limit, slots)
    assert found.total <= limit
    assert (found.blocks[0][0], found.blocks[-1][1]) == (start, start + count)
    assert found.slots == slots
    assert sum(name.startswith("experts, slot") for name in found.sizes) == slots


def test_a_prompt_longer_than_kernels_count_is_cut():
    found = plan(demand(per_token=1), 0, 40_000, 1 << 40)
    assert found.most_tokens <= placement.MOST_TOKENS
    assert len(found.blocks) == 3


def test_what_does_not_fit_is_refused_with_the_numbers():
    with pytest.raises(DeviceMemoryError) as caught:
        plan(demand(), 7, 107, 400_000)
    text = str(caught.value)
    assert text.startswith("GPU prefill of 100 tokens from position 7 takes at least ")
    for part in ("states 5120", "keys and values 9216", "activations 57088", "experts 400384", "dense weights 60416",
                 "400000 are allowed", "raise --vram", "lower --expert-slots from 2", "--prefill cpu"):
        assert part in text
    assert "\n" not in text


def test_a_dense_model_has_no_expert_slots():
    found = plan(demand(experts=0), 0, 100, 300_000)
    assert not any(name.startswith("experts") for name in found.sizes)
    assert 0 < found.resident < 8
    assert "dense weights, slot 1" in found.sizes
