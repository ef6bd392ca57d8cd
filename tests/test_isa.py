"""No instruction outside its backend in the built kernels, and a checker that notices planted ones."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from fermi_engine.errors import FermiError
from fermi_engine.kernels._build import BACKENDS
from tools import check_isa

CC = (sysconfig.get_config_var("CC") or "cc").split()


def compiled(tmp_path: Path, source: str, *flags: str) -> Path:
    """`source` as an object file, or a shared library where -shared is among the flags."""
    (tmp_path / "planted.c").write_text(source)
    target = tmp_path / ("planted.so" if "-shared" in flags else "planted.o")
    mode = [] if "-shared" in flags else ["-c"]
    command = [*CC, "-O2", "-fPIC", *mode, *flags, "planted.c", "-o", target.name]
    subprocess.run(command, cwd=tmp_path, check=True)
    return target


def with_instruction(function: str, instruction: str) -> str:
    """A C file whose `function` holds one line of assembly, beside an innocent one of the scalar backend."""
    asm = f'__asm__ volatile(".intel_syntax noprefix\\n{instruction}\\n.att_syntax");'
    return f"void {function}(void) {{ {asm} }}\nfloat scalar_add(float a, float b) {{ return a + b; }}\n"


@pytest.fixture(scope="module")
def built() -> tuple[Path, set[str], check_isa.Inspection]:
    path, kernels = check_isa.built_module()
    return path, kernels, check_isa.inspect(path)


def test_every_kernel_was_looked_at(built):
    _, kernels, inspection = built
    assert {name.split("_")[0] for name in kernels} == set(BACKENDS) == set(check_isa.ALLOWED)
    assert kernels <= set(inspection.functions)
    assert "fermi_run" in inspection.functions


def test_built_kernels_keep_to_their_backends(built):
    assert built[2].findings == []


def test_built_kernels_call_no_libm(built):
    assert check_isa.libm_findings(built[0]) == []


@pytest.mark.parametrize(("function", "instruction", "problem"), [
    ("scalar_norm", "rsqrtps xmm0, xmm1", "approximate"),
    ("ssse3_norm", "rsqrtss xmm0, xmm1", "approximate"),
    ("ssse3_norm", "rcpps xmm0, xmm1", "approximate"),
    ("fermi_run", "rcpss xmm0, xmm1", "approximate"),
    ("scalar_norm", "vrsqrt14ps zmm0, zmm1", "approximate"),
    ("avx2_norm", "vrcpps ymm0, ymm1", "approximate"),
    ("scalar_add4", "vaddps ymm0, ymm1, ymm2", "AVX2 in a function of backend scalar"),
    ("ssse3_add4", "vaddps xmm0, xmm1, xmm2", "AVX2 in a function of backend ssse3"),
    ("fermi_run", "vzeroupper", "AVX2 in a function without a backend's name"),
    ("ssse3_bits", "pext rax, rcx, rdx", "after AVX2"),
    ("ssse3_mask", "kmovw eax, k1", "after AVX2"),
    ("avx2_dot", "vfmadd231ps ymm0, ymm1, ymm2", "FMA in a function of backend avx2"),
    ("avx2_dot", "vfnmsub132sd xmm0, xmm1, [rsp-16]", "FMA"),
    ("avx2_dot", "vaddps zmm0, zmm1, zmm2", "EVEX in a function of backend avx2"),
    ("avx2_dot", "vaddps xmm17, xmm1, xmm2", "EVEX"),
    ("avx2_dot", "{evex} vaddps xmm0, xmm1, xmm2", "EVEX"),
    ("avx2_dot", "vpdpbusd ymm0, ymm1, fs:[rsp-64]", "EVEX"),
    ("avx2_dot", "{vex} vpdpbusd ymm0, ymm1, ymm2", "an extension after AVX2"),
    ("avx2_bits", "andn eax, ecx, edx", "an extension after AVX2"),
    ("avx2_bits", "lzcnt eax, ecx", "after SSE4"),
    ("ssse3_dot", "pmulld xmm0, xmm1", "SSE4"),
    ("ssse3_dot", "pmovsxbw xmm0, xmm1", "SSE4"),
    ("ssse3_dot", "pextrw [rsp-16], xmm0, 1", "SSE4"),
    ("ssse3_count", "popcnt eax, ecx", "POPCNT"),
    ("ssse3_count", "lzcnt eax, ecx", "after SSE4"),
    ("scalar_dot", "pmaddubsw xmm0, xmm1", "SSSE3 in a function of backend scalar"),
    ("scalar_sum", "haddps xmm0, xmm1", "SSE3 in a function of backend scalar"),
    ("helper", "pshufb xmm0, xmm1", "SSSE3 in a function without a backend's name"),
])
def test_planted_instruction_is_found(tmp_path, function, instruction, problem):
    inspection = check_isa.inspect(compiled(tmp_path, with_instruction(function, instruction)))
    assert {function, "scalar_add"} <= set(inspection.functions)
    (finding,) = inspection.findings
    assert finding.function == function
    assert finding.instruction.split()[0] == instruction.split()[0]
    assert problem in finding.problem


@pytest.mark.parametrize(("function", "instruction"), [
    ("ssse3_dot", "pmaddubsw xmm0, xmm1"),
    ("ssse3_sum", "haddps xmm0, xmm1"),
    ("scalar_root", "sqrtps xmm0, xmm1"),
    ("scalar_word", "pextrw eax, xmm0, 1"),
    ("avx2_dot", "vpmaddubsw ymm0, ymm1, [rsp-32]"),
    ("avx2_dot", "vpmovsxbd ymm0, fs:[rsp-16]"),
    ("avx2_max", "vcmpunordps ymm0, ymm1, ymm2"),
    ("avx2_half", "vcvtph2ps ymm0, xmm1"),
    ("avx2_end", "vzeroupper"),
    ("avx2_count", "popcnt eax, ecx"),
    ("fermi_run", "lock xadd [rsp-16], rax"),
    ("scalar_fill", "rep stosb"),
])
def test_allowed_instruction_is_not_reported(tmp_path, function, instruction):
    assert check_isa.inspect(compiled(tmp_path, with_instruction(function, instruction))).findings == []


@pytest.mark.parametrize("part", ["cold", "part.0", "constprop.0.cold"])
def test_split_off_part_counts_with_its_function(tmp_path, part):
    source = with_instruction("planted", "pshufb xmm0, xmm1\\nvzeroall")
    renamed = f'void planted(void) __asm__("ssse3_sum.{part}");\n' + source
    (finding,) = check_isa.inspect(compiled(tmp_path, renamed)).findings
    assert finding == (f"ssse3_sum.{part}", "vzeroall", "AVX2 in a function of backend ssse3")


@pytest.mark.parametrize("flags", [(), ("-shared",)], ids=["object", "library"])
def test_libm_call_is_found(tmp_path, flags):
    source = "float expf(float);\nvoid *memset(void *, int, unsigned long);\n" \
             "float scalar_exp(float x) { memset(&x, 0, 4); return expf(x); }\n"
    (finding,) = check_isa.libm_findings(compiled(tmp_path, source, "-fno-builtin", *flags))
    assert finding.instruction.split("@")[0] == "expf"


def test_report_names_the_function(tmp_path, capsys):
    planted = compiled(tmp_path, with_instruction("scalar_norm", "rsqrtps xmm0, xmm1"))
    assert check_isa.main([str(planted)]) == 1
    assert "scalar_norm: rsqrtps" in capsys.readouterr().out


def test_stripped_module_is_refused(tmp_path, built, capsys, monkeypatch):
    path, kernels, _ = built
    stripped = tmp_path / "stripped.so"
    subprocess.run(["strip", "-s", "-o", stripped, path], check=True)
    monkeypatch.setattr(check_isa, "built_module", lambda: (stripped, kernels))
    assert check_isa.main([]) == 2
    assert "stripped" in capsys.readouterr().err


def test_missing_objdump_is_one_clear_line(monkeypatch, built, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert check_isa.main([]) == 2
    assert capsys.readouterr().err == (
        "check_isa: objdump not found; the instruction check reads the kernels with it; "
        "install binutils (Debian: apt install binutils)\n")


def test_file_that_is_no_module_is_an_error(tmp_path):
    (tmp_path / "text.so").write_text("no object file")
    with pytest.raises(FermiError, match=r"objdump cannot read .*text\.so: .*not recognized"):
        check_isa.inspect(tmp_path / "text.so")
