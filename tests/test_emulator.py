"""The emulator: right kernels run right in any order, each planted fault is found, the device functions are accurate."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted import make_tree, sources_from

from fermi_engine.errors import DeviceError
from fermi_engine.kernels import emulator_build, sm20
from fermi_engine.kernels.emulated import EmulatedDevice
from fermi_engine.kernels.selftest import check

BLOCK = 128  # of planted.cu
ROOM = 2 * BLOCK
SEEDS = range(1, 9)
# Largest errors that math.cuh states, rounded up; (normal results, subnormal results, largest |x|).
ULP = {"exp": (1.0, 0.76, np.inf), "log1p": (0.501, 0.5, np.inf), "tanh": (1.5, 0.5, np.inf), "sin": (0.503, 0.5, np.inf),
       "cos": (0.503, 0.5, np.inf), "sigmoid": (2.5, 0.5, 87.0), "silu": (3.0, 0.5, 87.0), "softplus": (1.6, 0.76, 87.0),
       "rsqrt": (1.5, 0.5, np.inf)}
EXACT = {"exp": np.exp, "log1p": np.log1p, "tanh": np.tanh, "sin": np.sin, "cos": np.cos,
         "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "silu": lambda x: x / (1 + np.exp(-x)),
         "softplus": lambda x: np.log1p(np.exp(x)), "rsqrt": lambda x: 1 / np.sqrt(x)}
FUNCTIONS = tuple(EXACT)  # in the order of planted_math
# Where a branch, a clamp or a seam of an argument reduction lies.
CORNERS = (88.72284, -87.33655, -103.97208, 89.0, -104.0, 0.34657359, -1.0, -0.29289322, 0.41421356, 2.0**-29, 0.55, 20.0,
           0.78539816, 1.57079633, 3.14159265, 355.0, 103993.0, 2.0**24, 2.0**25, 3.0e38)


@pytest.fixture(scope="module", autouse=True)
def planted_sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    csrc = make_tree(tmp_path_factory.mktemp("planted"), "ENTRY(broken, broken, planted_args)\n",
                     broken='#include "fermi.cuh"\n} oops\n')
    with sources_from(csrc):
        yield csrc


def run(entry: str, mode: str = "plain", seed: int | None = None, grid: tuple[int, int, int] = (1, 1, 1),
        block: tuple[int, int, int] = (BLOCK, 1, 1), shared: int = 0, x: np.ndarray | None = None, same: bool = False,
        room: int = ROOM, **fields: int) -> np.ndarray:
    """y of a planted kernel: float32 [room], zeros before; x = 0, 1, 2, ... unless given; same: y is passed as x too."""
    device = EmulatedDevice(seed=seed, mode=mode)
    stream = device.stream("test")
    x = np.arange(room, dtype=np.float32) if x is None else x
    y = np.zeros(room, np.float32)
    on_device = [device.alloc(array.nbytes, name) for name, array in (("x", x), ("y", y), ("z", y))]
    for buffer, array in zip(on_device, (x, y, y), strict=True):
        device.h2d(buffer, array, stream)
    args = {"x": on_device[1 if same else 0], "y": on_device[1], "z": on_device[2], "n": 0, "offset": 0, "flag": 0, **fields}
    device.launch(entry, grid, block, args, stream, shared_bytes=shared)
    device.d2h(y, on_device[1], stream)
    device.close()
    return y


def only_with_gcc(what: str) -> None:
    if "clang" in emulator_build.compiler()[1]:
        pytest.skip(f"{what} needs g++ as the emulator's compiler")


def fails(match: str, entry: str, **more: Any) -> None:
    with pytest.raises(DeviceError, match=match) as caught:
        run(entry, **more)
    assert "\n" not in str(caught.value)
    assert entry in str(caught.value)


# right kernels


@pytest.mark.parametrize("mode", ["plain", "checked"])
def test_the_self_test_passes_in_every_order(mode: str) -> None:
    for seed in (None, *SEEDS):
        device = EmulatedDevice(seed=seed, mode=mode)
        check(device)
        device.close()


@pytest.mark.parametrize("mode", ["plain", "checked"])
def test_right_kernels_give_one_answer_in_every_order(mode: str) -> None:
    for seed in (None, *SEEDS):
        np.testing.assert_array_equal(run("planted_reverse", mode, seed)[:BLOCK], np.arange(BLOCK)[::-1])
        assert run("planted_warp_sum", mode, seed, block=(32, 1, 1))[0] == 31 * 16


@pytest.mark.parametrize("seed", [None, 5])
def test_every_thread_of_every_block_runs_once_and_knows_where_it_is(seed: int | None) -> None:
    grid, block = (3, 2, 5), (7, 3, 2)
    y = run("planted_where", seed=seed, grid=grid, block=block, room=30 * 42)
    np.testing.assert_array_equal(y, [b * 1000 + t for b in range(30) for t in range(42)])


def test_the_order_of_threads_and_blocks_follows_the_seed() -> None:
    last = {seed: run("planted_blocks", seed=seed, grid=(50, 1, 1), flag=2)[0] for seed in (None, *SEEDS)}
    assert last[None] == 49
    assert len(set(last.values())) > 4
    assert last[3] == run("planted_blocks", seed=3, grid=(50, 1, 1), flag=2)[0]


@pytest.mark.parametrize("seed", [None, 1])
def test_votes_count_the_block_and_the_warp(seed: int | None) -> None:
    x = np.where(np.arange(BLOCK) < 70, np.float32(1), np.float32(-1))
    np.testing.assert_array_equal(run("planted_votes", seed=seed, x=x)[:7], [70, 0, 1, 32, 32, 6, 0])
    np.testing.assert_array_equal(run("planted_votes", seed=seed, x=np.abs(x))[:3], [BLOCK, 1, 1])


# limits


@pytest.mark.parametrize(("more", "message"), [
    ({"block": (1025, 1, 1)}, r"block.x is 1025, sm_20 takes 1\.\.1024"),
    ({"block": (32, 33, 1)}, "1056 threads a block, sm_20 takes 1024"),
    ({"block": (1, 1, 65)}, r"block.z is 65, sm_20 takes 1\.\.64"),
    ({"block": (0, 1, 1)}, "block.x is 0"),
    ({"grid": (65536, 1, 1)}, r"grid.x is 65536, sm_20 takes 1\.\.65535"),
    ({"grid": (1, 1, 65536)}, "grid.z is 65536"),
    ({"grid": (1, 0, 1)}, "grid.y is 0"),
    ({"shared": 48 * 1024 - 4 * BLOCK + 1}, "512 bytes of static and 48641 of dynamic shared memory, sm_20 has 49152"),
])
def test_a_launch_beyond_the_card_is_refused(more: dict[str, Any], message: str) -> None:
    fails(message, "planted_shared", **more)


def test_a_launch_beyond_the_kernels_bounds_is_refused() -> None:
    fails("256 threads a block, the kernel is compiled for 128", "planted_votes", block=(256, 1, 1))


def test_the_largest_launches_are_taken() -> None:
    run("planted_where", block=(32, 32, 1), room=1024)
    run("planted_blocks", grid=(65535, 1, 1), block=(1, 1, 1), room=65535)
    run("planted_shared", shared=48 * 1024 - 4 * BLOCK)


def test_static_shared_memory_and_arguments_have_limits() -> None:
    fails("49156 bytes of static and 0 of dynamic", "planted_too_much")
    device = EmulatedDevice()
    y = device.alloc(4)
    with pytest.raises(DeviceError, match=r"planted_big_arguments.*: 4112 bytes of arguments, sm_20 takes 4096"):
        device.launch("planted_big_arguments", (1, 1, 1), (1, 1, 1), {"values": bytes(4096), "y": y, "n": 0},
                      device.stream("test"))


# planted faults


def test_a_missing_barrier_changes_the_answer() -> None:
    right = run("planted_reverse")
    wrong = [not np.array_equal(run("planted_reverse", seed=seed, flag=1), right) for seed in SEEDS]
    assert all(wrong)


def test_leaning_on_a_warp_changes_the_answer() -> None:
    wrong = [run("planted_warp_sum", seed=seed, block=(32, 1, 1), flag=1)[0] != 31 * 16 for seed in SEEDS]
    assert sum(wrong) >= len(wrong) - 1


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_a_missing_barrier_is_a_race_in_any_order(seed: int | None) -> None:
    fails(r"race on byte \d+ of 'tile': thread .* \(planted.cu:\d+\) .* with no barrier between", "planted_reverse",
          mode="checked", seed=seed, flag=1)
    fails("race on byte .* of 'part'", "planted_warp_sum", mode="checked", seed=seed, block=(32, 1, 1), flag=1)


@pytest.mark.parametrize("flag", [1, 2])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_blocks_that_touch_each_others_data_race(flag: int, seed: int | None) -> None:
    fails("race on byte .* of 'y': .* another block .* in the same launch", "planted_blocks", mode="checked", seed=seed,
          grid=(4, 1, 1), flag=flag, same=True)


@pytest.mark.parametrize(("flag", "name"), [(1, "tile"), (2, "y")])
def test_two_writes_to_one_element_race(flag: int, name: str) -> None:
    for seed in (None, 1):
        fails(f"race on byte 0 of '{name}': .* writes .* what thread .* wrote", "planted_clash", mode="checked", seed=seed,
              flag=flag)
    assert run("planted_clash", mode="checked", flag=3)[:2].tolist() == [2.0, 2.0]


def test_atomics_do_not_race_with_each_other() -> None:
    run("planted_blocks", mode="checked", grid=(4, 1, 1), flag=3)


@pytest.mark.parametrize(("flag", "message"), [
    (1, "__syncthreads in diverged code: thread .* in line .*, thread .* in line"),
    (2, "__syncthreads in diverged code: thread .* in line .*, thread .* in line"),
    (3, "__syncthreads in diverged code: thread .* waits .*, thread .* has left the kernel"),
    (4, "warp_ballot in diverged code"),
    (5, "warp_ballot in diverged code"),
    (6, "warp_ballot in diverged code"),
])
@pytest.mark.parametrize("seed", [None, 4])
def test_diverged_barriers_are_found(flag: int, message: str, seed: int | None) -> None:
    fails(message, "planted_diverge", flag=flag, seed=seed)


def test_a_write_beside_a_buffer_is_found() -> None:
    fails("wrote behind buffer 'y' of 1024 bytes", "planted_offset", offset=ROOM - BLOCK + 1)
    fails("wrote before buffer 'y' of 1024 bytes", "planted_offset", offset=-1)


def test_a_read_beside_a_buffer_gives_nan_and_is_found_when_checked() -> None:
    assert np.isnan(run("planted_offset", n=ROOM - BLOCK + 1)[BLOCK - 1])
    fails(r"reads 4 bytes outside every buffer, 0 bytes behind 'x' \(planted.cu", "planted_offset", mode="checked",
          n=ROOM - BLOCK + 1)
    fails("writes 4 bytes outside every buffer", "planted_offset", mode="checked", offset=-1)


def test_shared_memory_starts_as_nan() -> None:
    assert np.isnan(run("planted_shared", grid=(3, 1, 1))[:BLOCK]).all()
    assert np.isnan(run("planted_shared", flag=2, shared=4 * BLOCK)[:BLOCK]).all()


@pytest.mark.parametrize(("mode", "message"), [
    ("plain", "wrote behind its 512 bytes of dynamic shared memory"),
    ("checked", "writes 4 bytes at byte 512 of 'dynamic shared memory', which has 512"),
])
def test_a_write_beyond_dynamic_shared_memory_is_found(mode: str, message: str) -> None:
    fails(message, "planted_shared", mode=mode, flag=1, n=BLOCK, shared=4 * BLOCK)


@pytest.mark.parametrize("index", [{"n": 3, "offset": 1}, {"n": 4, "offset": 0}])
def test_an_index_beyond_a_shared_array_is_found(index: dict[str, int]) -> None:
    assert run("planted_index", mode="checked", n=3)[0] == 3.0
    fails(r"index \d+ lies outside its array \(planted.cu:\d+\)", "planted_index", mode="checked", **index)


def test_undefined_shifts_are_found() -> None:
    fails("shift by a negative count, or by the width", "planted_vector", mode="checked", n=32, block=(1, 1, 1))


def test_misaligned_vectors_are_found() -> None:
    only_with_gcc("the check of alignment")
    run("planted_vector", mode="checked", offset=4, block=(1, 1, 1))
    fails("is not aligned to what is read", "planted_vector", mode="checked", offset=1, block=(1, 1, 1))


@pytest.mark.parametrize("mode", ["plain", "checked"])
def test_a_wild_pointer_is_an_error_and_no_crash(mode: str) -> None:
    fails("memory fault|outside every buffer", "planted_fault", mode=mode, n=8)


def test_address_sanitizer_finds_an_overrun_within_shared_memory(planted_sources: Path, tmp_path: Path) -> None:
    only_with_gcc("mode asan")
    library = subprocess.run([*emulator_build.compiler()[0].split(), "-print-file-name=libasan.so"], capture_output=True,
                             text=True).stdout.strip()
    if not os.path.isabs(library):
        pytest.skip("the compiler has no libasan.so")
    script = tmp_path / "overrun.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
                      "from pathlib import Path\nfrom planted import sources_from\nimport test_emulator\n"
                      f"with sources_from(Path({str(planted_sources)!r})):\n"
                      "    test_emulator.run('planted_index', 'asan', n=3)\n    print('clean', flush=True)\n"
                      "    test_emulator.run('planted_index', 'asan', n=3, offset=1)\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True,
                          env={**os.environ, "LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0"})
    assert done.stdout == "clean\n"
    assert done.returncode != 0
    assert "global-buffer-overflow" in done.stderr
    assert "first" in done.stderr


# builds


def test_a_kernel_that_does_not_compile_is_one_line() -> None:
    device = EmulatedDevice()
    with pytest.raises(DeviceError, match=r"op 'broken' does not compile for the emulator: .*broken.cu:2:\d+: error") as caught:
        device.launch("broken", (1, 1, 1), (1, 1, 1), {"x": None, "y": None, "z": None, "n": 0, "offset": 0, "flag": 0},
                      device.stream("test"))
    assert "\n" not in str(caught.value)


def test_no_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    emulator_build.compiler.cache_clear()
    try:
        with pytest.raises(DeviceError, match=r"found no C\+\+ compiler; install g\+\+ or set CXX"):
            emulator_build.compiler()
    finally:
        emulator_build.compiler.cache_clear()


def test_a_build_is_kept_and_depends_on_its_sources(planted_sources: Path, monkeypatch: pytest.MonkeyPatch,
                                                    tmp_path: Path) -> None:
    monkeypatch.setenv("FERMI_CACHE", str(tmp_path / "cache"))
    header = planted_sources / "sm20" / "math.cuh"
    with sources_from(planted_sources):
        first = emulator_build.build("planted").path
        written = first.stat().st_mtime_ns
        emulator_build.build.cache_clear()
        assert emulator_build.build("planted").path == first
        assert first.stat().st_mtime_ns == written
        header.write_text(header.read_text() + "\n")
        emulator_build.build.cache_clear()
        assert emulator_build.build("planted").path != first


def test_arguments_are_checked_by_name_and_kind() -> None:
    with pytest.raises(ValueError, match="planted_args: offset missing or unknown"):
        sm20.pack_arguments("planted_args", {"x": None, "y": None, "z": None, "n": 0, "flag": 0})
    with pytest.raises(OverflowError):
        sm20.pack_arguments("planted_args", {"x": None, "y": None, "z": None, "n": 0, "offset": 0, "flag": 2**31})
    packed = sm20.pack_arguments("planted_args", {"x": 16, "y": None, "z": 32, "n": -1, "offset": 3, "flag": 4})
    assert packed == np.array([16, 0, 32, -1, 3, 4], "<i8").tobytes()
    assert sm20.unpack_pointers("planted_args", packed) == (16, 0, 32)


# device functions


def sweep(largest: float) -> np.ndarray:
    """Finite float32 of every exponent and sign up to `largest`, and those near each corner."""
    edges = [1, 2, (1 << 22) - 1, 1 << 22, (1 << 23) - 2, (1 << 23) - 1]
    mantissas = np.concatenate([np.arange(0, 1 << 23, 30011), edges]).astype(np.uint32)
    patterns = ((np.arange(512, dtype=np.uint32) << 23)[:, None] | mantissas).view(np.float32).ravel()
    near = (np.float32(CORNERS).view(np.int32)[:, None] + np.arange(-300, 301, dtype=np.int32)).view(np.float32).ravel()
    x = np.concatenate([patterns, near, -near])
    return x[np.isfinite(x) & (np.abs(x) <= largest)]


def apply(function: int, x: np.ndarray) -> np.ndarray:
    """A function of planted_math over x, by the emulator."""
    blocks = -(-len(x) // 256)
    assert blocks <= 65535
    return run("planted_math", x=x, room=len(x), grid=(blocks, 1, 1), block=(256, 1, 1), n=len(x), flag=function)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_device_functions_are_within_the_stated_ulp(name: str) -> None:
    normal, subnormal, largest = ULP[name]
    x = sweep(largest)
    got = apply(FUNCTIONS.index(name), x)
    with np.errstate(all="ignore"):
        exact = EXACT[name](x.astype(np.float64))
        rounded = exact.astype(np.float32)
    special = ~np.isfinite(rounded)
    np.testing.assert_array_equal(got[special], rounded[special])
    x, got, exact = x[~special], got[~special], exact[~special]
    _, exponent = np.frexp(exact)
    error = np.abs(got - exact) / np.ldexp(1.0, np.clip(exponent - 24, -149, 104))
    limit = np.where(np.abs(exact) < 2.0**-126, subnormal, normal)
    i = int(np.argmax(np.where(np.isnan(error), np.inf, error / limit)))
    assert error[i] <= limit[i], f"{name}({x[i]!r}) = {got[i]!r}, exact {exact[i]!r}: {error[i]:.3f} ulp"
    np.testing.assert_array_equal(np.signbit(got), np.signbit(exact))


@pytest.mark.parametrize(("name", "pairs"), [
    ("exp", [(np.inf, np.inf), (-np.inf, 0.0), (np.nan, np.nan), (-104.0, 0.0)]),
    ("log1p", [(np.inf, np.inf), (-1.0, -np.inf), (-1.5, np.nan), (np.nan, np.nan)]),
    ("tanh", [(np.inf, 1.0), (-np.inf, -1.0), (np.nan, np.nan), (-1e-45, -1e-45)]),
    ("sin", [(np.inf, np.nan), (np.nan, np.nan)]),
    ("cos", [(-np.inf, np.nan), (np.nan, np.nan)]),
    ("softplus", [(np.inf, np.inf), (-np.inf, 0.0), (np.nan, np.nan), (-90.0, np.exp(-90.0))]),
])
def test_device_functions_at_their_ends(name: str, pairs: list[tuple[float, float]]) -> None:
    x, expected = np.float32(pairs).T.copy()
    np.testing.assert_array_equal(apply(FUNCTIONS.index(name), x), expected)


def test_halves_convert_as_ieee_says() -> None:
    halves = np.arange(1 << 16, dtype=np.uint32)
    exact = halves.astype(np.uint16).view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(apply(9, halves.view(np.float32)), exact)
    exact = exact[np.isfinite(exact)]
    middle = np.concatenate([(exact[:-1] + exact[1:]) / 2, exact, np.float32([65519.99, 65520, 3e38, np.inf, -np.inf])])
    x = np.concatenate([middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))])  # and neighbours
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal(apply(10, x).view(np.uint32), expected)
