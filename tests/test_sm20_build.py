"""Builds for the card: every op compiles for sm_20 within its rules, the PTX that ships is current, toolchains are chosen."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from planted import make_tree, sources_from

from fermi_engine.errors import DeviceError
from fermi_engine.kernels import ptx, sm20
from tools import check_sm20

needs_clang = pytest.mark.skipif(ptx.clang() is None, reason="no clang >= 14 here: nothing compiles for sm_20")
GOOD = """.version 3.2
.target sm_20
.address_size 64
.visible .entry kernel(
\t.param .align 8 .b8 kernel_param_0[32],
\t.param .u64 kernel_param_1
)
.maxntid 256, 1, 1
{
\t.reg .pred \t%p<3>;
\t.shared .align 4 .b8 _ZZ6kernelE4tile[1024];
\tld.param.u64 %rd1, [kernel_param_0+8];
LBB0_1: @%p1 bra LBB0_2; // shfl.down.b32
\t{ .reg .pred p; setp.ne.s32 p, %r1, 0; vote.ballot.b32 %r2, p; }
\tbar.sync \t0;
LBB0_2:
\tcvt.f32.f16 %f1, %rs1;
\tcvt.rn.f16.f32 %rs1, %f1;
\tmov.b16 %rs2, %rs1;
\tfma.rn.f32 %f2, %f1, %f1, %f1;
\tatom.add.u32 %r1, [%rd1], %r2;
\tsqrt.rn.f32 %f1, %f2;
\tld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];
\tret;
}
"""


def executable(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


# the check


def test_sound_ptx_is_accepted() -> None:
    assert check_sm20.violations(GOOD) == []
    assert check_sm20.entries(GOOD) == [check_sm20.Entry("kernel", 1024, 0, 40, 256)]


@pytest.mark.parametrize(("line", "message"), [
    ("shfl.down.b32 %r1, %r2, 1, 31;", "shfl.down.b32: sm_20 has no such instruction"),
    ("@%p1 shfl.sync.idx.b32 %r1|p, %r2, 1, 31, -1;", "shfl.sync.idx.b32: sm_20 has no such instruction"),
    ("ld.global.nc.f32 %f1, [%rd1];", "ld.global.nc.f32: loads through the texture path"),
    ("ld.global.nc.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];", "texture path"),
    ("dp4a.s32.s32 %r1, %r2, %r3, %r4;", "dp4a.s32.s32: sm_20 has no such instruction"),
    ("add.f16 %h1, %h2, %h3;", "add.f16: half-precision arithmetic"),
    ("fma.rn.f16x2 %r1, %r2, %r3, %r4;", "half-precision arithmetic"),
    ("lop3.b32 %r1, %r2, %r3, %r4, 0x80;", "lop3.b32: sm_20 has no such instruction"),
    ("shf.l.wrap.b32 %r1, %r2, %r3, %r4;", "shf.l.wrap.b32: sm_20 has no such instruction"),
    ("vote.sync.ballot.b32 %r1, %p1, -1;", "vote.sync.ballot.b32: synchronisation of named lanes"),
    ("bar.warp.sync -1;", "bar.warp.sync: synchronisation of named lanes"),
    ("activemask.b32 %r1;", "sm_20 has no such instruction"),
    ("atom.add.f64 %fd1, [%rd1], %fd2;", "atom.add.f64: atomics of newer cards"),
    ("{ .reg .b32 t; redux.sync.add.s32 t, %r1, -1; }", "redux.sync.add.s32: sm_20 has no such instruction"),
    ("ex2.approx.ftz.f32 %f1, %f2;", "ex2.approx.ftz.f32: approximate"),
    ("div.full.f32 %f1, %f2, %f3;", "div.full.f32: approximate"),
    ("mma.sync.aligned.m16n8k8.row.col.f32.tf32 {%f1}, {%r1}, {%r2}, {%f1};", "sm_20 has no such instruction"),
])
def test_what_the_card_lacks_is_found(line: str, message: str) -> None:
    found = check_sm20.violations(GOOD.replace("\tret;", f"\t{line}\n\tret;"))
    assert len(found) == 1
    assert message in found[0]


@pytest.mark.parametrize(("old", "new", "message"), [
    (".version 3.2", ".version 6.2", "PTX version 6.2: driver 390 takes up to 6.1"),
    (".target sm_20", ".target sm_30", "target sm_30 is not sm_20"),
    ("tile[1024]", "tile[49156]", "kernel: 49156 bytes of static shared memory, sm_20 has 49152"),
    ("param_0[32]", "param_0[4096]", "kernel: 4104 bytes of arguments, sm_20 has 4096"),
    (".maxntid 256, 1, 1", ".maxntid 256, 5, 1", "kernel: 1280 threads a block, sm_20 has 1024"),
])
def test_exceeded_limits_are_found(old: str, new: str, message: str) -> None:
    assert check_sm20.violations(GOOD.replace(old, new)) == [message]


def test_shared_variables_are_counted_where_they_stand() -> None:
    common = ".shared .align 16 .b8 helper[512];\n.extern .shared .align 16 .b8 fermi_dynamic_shared[];\n.shared .u32 flag;\n"
    second = GOOD[GOOD.index(".visible") :].replace("kernel", "other").replace("[1024]", "[2048]")
    text = GOOD.replace(".visible", f"{common}.visible", 1) + second
    assert [(entry.name, entry.shared) for entry in check_sm20.entries(text)] == [("kernel", 1540), ("other", 2564)]


def test_registers_and_spills_are_read(tmp_path: Path) -> None:
    report = ("ptxas info    : 0 bytes gmem\nptxas info    : Compiling entry function 'kernel' for 'sm_35'\n"
              "ptxas info    : Function properties for kernel\n"
              "    24 bytes stack frame, 16 bytes spill stores, 8 bytes spill loads\n"
              "ptxas info    : Used 63 registers, 360 bytes cmem[0]\n")
    (tmp_path / "report").write_text(report)
    fake = executable(tmp_path / "ptxas", f'cp "$6" {tmp_path}/seen; cat {tmp_path}/report')
    assert check_sm20.usage(GOOD, fake) == {"kernel": check_sm20.Usage(63, 24, 16, 8)}
    assert "maxntid" not in (tmp_path / "seen").read_text()  # it would override --maxrregcount
    with pytest.raises(DeviceError, match="ptxas rejects it: no good"):
        check_sm20.usage(GOOD, executable(tmp_path / "bad", "echo no good >&2; exit 1"))


def test_the_real_ptxas_reads_it() -> None:
    ptxas = check_sm20.find_ptxas()
    if ptxas is None or ptx.clang() is None:
        pytest.skip("no ptxas of CUDA 11.8 (or no clang) here: registers and spills are not estimated")
    use = check_sm20.usage(check_sm20.compiled("selftest"), ptxas)["selftest"]
    assert 8 < use.registers < 32
    assert (use.stores, use.loads) == (0, 0)


# the ops


@needs_clang
@pytest.mark.parametrize("op", sm20.ops())
def test_every_op_keeps_the_cards_rules(op: str) -> None:
    text = check_sm20.compiled(op)
    assert check_sm20.violations(text) == []
    assert check_sm20.undeclared(op, text) == []


def test_every_source_file_is_an_op_with_entry_points() -> None:
    assert sorted(path.stem for path in (sm20.csrc() / "sm20").glob("*.cu")) == sorted(sm20.ops())


def test_the_ptx_that_ships_is_current() -> None:
    assert ptx.stale() == [], "run `make ptx`"


@needs_clang
@pytest.mark.parametrize("op", sm20.ops())
def test_the_ptx_that_ships_is_what_its_compiler_makes(op: str) -> None:
    text = (ptx.PREBUILT / f"{op}.ptx").read_text()
    stamp = ptx.STAMP.match(text)
    assert stamp
    if stamp.group(3) != ptx.clang().text:
        pytest.skip(f"the shipped PTX was made by {stamp.group(3)}; here is {ptx.clang().text}")
    compiled = ptx.image_by("clang", op, fermi=False)
    assert text[stamp.end() :] == compiled.data.rstrip(b"\0").decode()


@pytest.mark.soak
@pytest.mark.parametrize("op", sm20.ops())
def test_any_nvcc_accepts_the_sources(op: str, tmp_path: Path) -> None:
    """nvcc.cuh by whatever nvcc is here, for the oldest card that one knows; CUDA 8.0 itself is on the target only."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc here")
    arch = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout.split()[0]
    ptx.compile_to(op, [nvcc, "-ptx", f"-arch={arch}", "-std=c++11", "-Wno-deprecated-gpu-targets"], tmp_path / "out.ptx")
    assert ".entry" in (tmp_path / "out.ptx").read_text()


# planted faults


SHUFFLED = """#include "fermi.cuh"
extern "C" __global__ void shuffled(planted_args a)
{
    float x = a.x[threadIdx.x], y = x;
#ifndef FERMI_EMULATED
    asm volatile("shfl.down.b32 %0, %1, 1, 31;" : "=f"(y) : "f"(x));
#endif
    a.y[threadIdx.x] = y;
}
"""
BROKEN = '#include "fermi.cuh"\nextern "C" __global__ void broken(planted_args a) { oops; }\n'


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    entries = "".join(f"ENTRY({op}, {entry}, planted_args)\n" for op, entry in (
        ("shuffled", "shuffled"), ("broken", "broken"), ("selftest", "lost")))
    return make_tree(tmp_path_factory.mktemp("planted"), entries, shuffled=SHUFFLED, broken=BROKEN)


@needs_clang
def test_planted_kernels_are_found(tree: Path) -> None:
    with sources_from(tree):
        assert check_sm20.violations(check_sm20.compiled("shuffled")) == ["shfl.down.b32: sm_20 has no such instruction"]
        found = check_sm20.violations(check_sm20.compiled("planted"))
        assert sorted(found) == ["planted_big_arguments: 4112 bytes of arguments, sm_20 has 4096",
                                 "planted_too_much: 49156 bytes of static shared memory, sm_20 has 49152"]
        assert check_sm20.undeclared("selftest", check_sm20.compiled("selftest")) == [
            "lost: not both in selftest.cu and in an ENTRY line"]
        with pytest.raises(DeviceError, match=r"op 'broken' does not compile for sm_20 with clang.*broken.cu:2:\d+: error") as e:
            check_sm20.compiled("broken")
        assert "\n" not in str(e.value)


@needs_clang
def test_the_command_reports_findings(tree: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ptx, "PREBUILT", tmp_path)
    with sources_from(tree):
        monkeypatch.setattr(sys, "argv", ["check_sm20.py", "planted", "broken"])
        assert check_sm20.main() == 1
        out = capsys.readouterr().out
        assert "FOUND planted: planted_too_much: 49156 bytes of static shared memory" in out
        assert "FOUND op 'broken' does not compile" in out
        assert "FOUND planted: the PTX that ships is absent, from other sources or of no op; run `make ptx`" in out
        assert "planted_reverse" in out
    monkeypatch.setattr(sys, "argv", ["check_sm20.py", "--write", "selftest"])
    assert check_sm20.main() == 0
    assert (tmp_path / "selftest.ptx").is_file()


# choosing a toolchain


@needs_clang
def test_shipped_ptx_follows_its_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    csrc = make_tree(tmp_path)
    monkeypatch.setattr(ptx, "PREBUILT", tmp_path / "ptx")
    source, header = csrc / "sm20" / "selftest.cu", csrc / "sm20" / "math.cuh"
    with sources_from(csrc):
        assert "selftest" in ptx.stale()
        ptx.write_prebuilt("selftest")
        assert "selftest" not in ptx.stale()
        source.write_text(source.read_text() + "// a comment\n/* another */\n")
        assert "selftest" not in ptx.stale()
        assert ptx.image("selftest", fermi=False).origin.startswith("PTX shipped with the package, made by clang")
        ops = csrc / "sm20" / "ops.h"
        other = "enum { OTHER = 1 };\ntypedef struct { int n; } other_args;\nENTRY(other, other, other_args)\n"
        ops.write_text(ops.read_text().replace("typedef", f"{other}typedef", 1))
        assert "selftest" not in ptx.stale()
        ops.write_text(ops.read_text().replace("float *f;", "double *f;"))
        assert "selftest" in ptx.stale()
        ops.write_text(ops.read_text().replace("double *f;", "float *f;"))
        assert "selftest" not in ptx.stale()
        header.write_text(header.read_text().replace("12582912.0f", "12582913.0f"))
        assert "selftest" in ptx.stale()
        assert ptx.image("selftest", fermi=False).origin.startswith("PTX compiled here by clang")
        (tmp_path / "ptx" / "gone.ptx").write_text("")
        assert "gone" in ptx.stale()


@needs_clang
def test_a_forced_build_is_taken_or_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FERMI_KERNEL_BUILD", "clang")
    image = ptx.image("selftest", fermi=True)
    assert image.origin.startswith("PTX compiled here by clang")
    assert image.data.endswith(b"\0")
    assert b".target sm_20" in image.data
    monkeypatch.setattr(ptx, "PREBUILT", tmp_path)
    monkeypatch.setenv("FERMI_KERNEL_BUILD", "prebuilt")
    with pytest.raises(DeviceError, match="FERMI_KERNEL_BUILD=prebuilt has nothing for op 'selftest': the PTX that ships"):
        ptx.image("selftest", fermi=True)
    monkeypatch.setenv("FERMI_KERNEL_BUILD", "nvrtc")
    with pytest.raises(DeviceError, match="FERMI_KERNEL_BUILD is 'nvrtc'; it takes nvcc, prebuilt, clang"):
        ptx.image("selftest", fermi=True)


def fake_nvcc(path: Path, release: str) -> str:
    """An nvcc that writes its own command line as its output."""
    return executable(path, f'if [ "$1" = --version ]; then echo "release {release}, V{release}.1"; exit; fi\n'
                            'args="$*"; while [ "$1" != -o ]; do shift; done; echo "$args" > "$2"')


def test_nvcc_8_makes_a_cubin_for_the_card_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FERMI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FERMI_NVCC", fake_nvcc(tmp_path / "nvcc", "8.0"))
    monkeypatch.setenv("FERMI_NVCC_FLAGS", "-ccbin gcc-5")
    ptx.nvcc.cache_clear()
    try:
        cubin, text = ptx.image("selftest", fermi=True), ptx.image("selftest", fermi=False)
        assert cubin.origin == "cubin compiled here by nvcc 8.0"
        assert text.origin == "PTX compiled here by nvcc 8.0"
        assert b"-arch=sm_20 -std=c++11 -O3 -cubin -ccbin gcc-5" in cubin.data
        assert b" -ptx " in text.data
        assert text.data.endswith(b"\0")
    finally:
        ptx.nvcc.cache_clear()


def test_a_newer_nvcc_is_no_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FERMI_NVCC", fake_nvcc(tmp_path / "nvcc", "9.0"))
    ptx.nvcc.cache_clear()
    try:
        assert ptx.nvcc() is None
    finally:
        ptx.nvcc.cache_clear()


def test_without_any_way_the_line_names_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ptx, "PREBUILT", tmp_path)
    monkeypatch.setattr(ptx, "clang", lambda: None)
    monkeypatch.setattr(ptx, "nvcc", lambda: None)
    with pytest.raises(DeviceError, match=r"no PTX for op 'selftest': .* neither nvcc <= 8.0 nor clang >= 14 is here"):
        ptx.image("selftest", fermi=False)
    facts = ptx.facts()
    assert facts["sm_20 compilers"].startswith("none")
    assert "selftest" in facts["shipped PTX"]
