"""Disassembles the built kernels and reports instructions a function must not contain.

    python tools/check_isa.py [MODULE]

MODULE is an object file or shared library; without it the installed `fermi_engine.kernels._cpu` is read,
and each of its kernels must be found. A function named `<backend>_...` may use that backend's instruction
sets, any other function plain x86-64 only; so a static helper that is not inlined needs its backend's
name in front too. rsqrt and rcp instructions, and functions of libm, are banned everywhere: their bits
depend on the vendor or on the library.

Exit status: 0 nothing found, 1 findings, 2 the check could not run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from fermi_engine.errors import FermiError

# Instruction sets beyond plain x86-64 that each backend's functions may use; names from _extension().
ALLOWED = {
    "scalar": frozenset(),
    "ssse3": frozenset({"SSE3", "SSSE3"}),
    "avx2": frozenset({"SSE3", "SSSE3", "SSE4/POPCNT", "AVX2"}),  # not FMA: a contracted sum has other bits
}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SSE3 = _words("""addsubpd addsubps fisttp haddpd haddps hsubpd hsubps lddqu monitor movddup movshdup
    movsldup mwait""")
SSSE3 = _words("""pabsb pabsd pabsw palignr phaddd phaddsw phaddw phsubd phsubsw phsubw pmaddubsw pmulhrsw
    pshufb psignb psignd psignw""")
SSE4 = _words("""blendpd blendps blendvpd blendvps crc32 dppd dpps extractps extrq insertps insertq
    movntdqa movntsd movntss mpsadbw packusdw pblendvb pblendw pcmpeqq pcmpestri pcmpestrm pcmpgtq
    pcmpistri pcmpistrm pextrb pextrd pextrq phminposuw pinsrb pinsrd pinsrq pmaxsb pmaxsd pmaxud pmaxuw
    pminsb pminsd pminud pminuw pmuldq pmulld popcnt ptest roundpd roundps roundsd roundss""")
SSE4_PREFIXES = ("pmovsx", "pmovzx")
# tzcnt is absent on purpose: compilers write it for `bsf`, which is how older processors read the same bytes.
LATER = _words("adcx adox lzcnt movbe pclmulqdq rdrand rdseed")
LATER_PREFIXES = ("aes", "gf2p8", "sha1", "sha256", "tdp", "tile")
V_WITHOUT_VEX = _words("verr verw")
# What VEX may encode in AVX, AVX2 and F16C: SSE instructions with a v in front (the stems here and above), and these.
SSE = _words("""addpd addps addsd addss andnpd andnps andpd andps comisd comiss cvtdq2pd cvtdq2ps
    cvtpd2dq cvtpd2ps cvtps2dq cvtps2pd cvtsd2si cvtsd2ss cvtsi2sd cvtsi2ss cvtss2sd cvtss2si cvttpd2dq
    cvttps2dq cvttsd2si cvttss2si divpd divps divsd divss ldmxcsr maxpd maxps maxsd maxss minpd minps
    minsd minss movapd movaps movd movdqa movdqu movhlps movhpd movhps movlhps movlpd movlps movmskpd
    movmskps movntdq movntpd movntps movq movsd movss movupd movups mulpd mulps mulsd mulss orpd orps
    packssdw packsswb packuswb paddb paddd paddq paddsb paddsw paddusb paddusw paddw pand pandn pavgb
    pavgw pcmpeqb pcmpeqd pcmpeqw pcmpgtb pcmpgtd pcmpgtw pextrw pinsrw pmaddwd pmaxsw pmaxub pminsw
    pminub pmovmskb pmulhuw pmulhw pmullw pmuludq por psadbw pshufd pshufhw pshuflw pslld pslldq psllq
    psllw psrad psraw psrld psrldq psrlq psrlw psubb psubd psubq psubsb psubsw psubusb psubusw psubw
    punpckhbw punpckhdq punpckhqdq punpckhwd punpcklbw punpckldq punpcklqdq punpcklwd pxor shufpd shufps
    sqrtpd sqrtps sqrtsd sqrtss stmxcsr subpd subps subsd subss ucomisd ucomiss unpckhpd unpckhps
    unpcklpd unpcklps xorpd xorps""")
AVX2 = _words("""vbroadcastf128 vbroadcasti128 vbroadcastsd vbroadcastss vcvtph2ps vcvtps2ph
    vextractf128 vextracti128 vgatherdpd vgatherdps vgatherqpd vgatherqps vinsertf128 vinserti128
    vmaskmovpd vmaskmovps vpblendd vpbroadcastb vpbroadcastd vpbroadcastq vpbroadcastw vperm2f128
    vperm2i128 vpermd vpermilpd vpermilps vpermpd vpermps vpermq vpgatherdd vpgatherdq vpgatherqd
    vpgatherqq vpmaskmovd vpmaskmovq vpsllvd vpsllvq vpsravd vpsrlvd vpsrlvq vtestpd vtestps vzeroall
    vzeroupper""")
COMPARISON = re.compile(r"cmp\w*[ps][sd]")
FMA = re.compile(r"vfn?m(add|sub|addsub|subadd)\w*[ps][sd]")
APPROXIMATE = re.compile(r"v?(rsqrt|rcp)(14|28)?[ps][sdh]")

PREFIXES = _words("addr32 bnd cs data16 ds es fs gs lock notrack rep repnz repz ss xacquire xrelease")
FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")
INSTRUCTION = re.compile(r"^\s+[0-9a-f]+:\t((?:[0-9a-f]{2} )+)\s*\t(.+)$")
ENCODINGS = {"62": "EVEX", "c4": "VEX", "c5": "VEX"}  # by the first byte of an instruction of 64-bit code
BEFORE_VEX = _words("26 2e 36 3e 64 65 67")  # bytes that may stand before it: segment and address size

LIBM = frozenset(name + suffix for suffix in ("", "f", "l") for name in _words("""acos acosh asin asinh
    atan atan2 atanh cbrt ceil copysign cos cosh erf erfc exp exp10 exp2 expm1 fabs fdim floor fma fmax
    fmin fmod frexp hypot ilogb ldexp lgamma llrint llround log log10 log1p log2 logb lrint lround modf
    nearbyint nextafter nexttoward pow remainder remquo rint round roundeven scalbln scalbn sin sincos
    sinh sqrt tan tanh tgamma trunc"""))
LIBM_VARIANT = re.compile(r"__(\w+)_finite|_ZGV\w+?_(\w+)")  # entry points for -ffast-math, and libmvec


class Finding(NamedTuple):
    """One thing that must not be there: a function or `undefined symbols`, the instruction, what is wrong."""

    function: str
    instruction: str
    problem: str


class Inspection(NamedTuple):
    """Functions seen, in order, and the findings among them."""

    functions: list[str]
    findings: list[Finding]


def _binutil(tool: str, *arguments: str) -> str:
    path = shutil.which(tool)
    if path is None:
        raise FermiError(f"{tool} not found; the instruction check reads the kernels with it; install "
                         "binutils (Debian: apt install binutils)")
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=False,
                          env={**os.environ, "LC_ALL": "C"})
    if done.returncode:
        reason = (done.stderr.strip() or "no reason given").splitlines()[0]
        raise FermiError(f"{tool} cannot read {arguments[-1]}: {reason}; give a built object file "
                         "or shared library")
    return done.stdout


def _split(text: str) -> tuple[str, str]:
    """(mnemonic, operands) of a line of disassembly in Intel syntax; prefixes and comments dropped."""
    words = re.split(r"[#<]", text, maxsplit=1)[0].split()
    while len(words) > 1 and (words[0] in PREFIXES or words[0].startswith("rex")):
        words.pop(0)
    return (words[0], " ".join(words[1:])) if words else ("", "")


def _encoding(code: str, mnemonic: str) -> str:
    """EVEX, VEX (or a relative of it) or legacy, by an instruction's bytes."""
    first = next((byte for byte in code.split() if byte not in BEFORE_VEX), "")
    relative = mnemonic.startswith("v") and mnemonic not in V_WITHOUT_VEX
    return ENCODINGS.get(first, "VEX" if relative else "legacy")


def _vex_extension(mnemonic: str) -> str:
    stem = mnemonic.removeprefix("v")
    if FMA.fullmatch(mnemonic):
        return "FMA"
    ours = stem != mnemonic and (stem in SSE | SSE3 | SSSE3 | SSE4 or stem.startswith(SSE4_PREFIXES)
                                 or COMPARISON.fullmatch(stem) is not None)
    return "AVX2" if ours or mnemonic in AVX2 else "an extension after AVX2"


def _extension(mnemonic: str, operands: str, encoding: str) -> str | None:
    """The instruction set beyond plain x86-64 that an instruction belongs to, or None. AVX2 stands for AVX and F16C, too."""
    if encoding != "legacy":
        return "EVEX" if encoding == "EVEX" else _vex_extension(mnemonic)
    if mnemonic in SSE4 or mnemonic.startswith(SSE4_PREFIXES) or (mnemonic == "pextrw" and "[" in operands):
        return "SSE4/POPCNT"
    if mnemonic in LATER or mnemonic.startswith(LATER_PREFIXES):
        return "an extension after SSE4"
    return "SSSE3" if mnemonic in SSSE3 else "SSE3" if mnemonic in SSE3 else None


def _problem(function: str, code: str, text: str) -> str | None:
    mnemonic, operands = _split(text)
    if APPROXIMATE.fullmatch(mnemonic):
        return "approximate: its bits differ between vendors; use sqrt and div"
    backend = function.split("_")[0]
    extension = _extension(mnemonic, operands, _encoding(code, mnemonic))
    if extension is None or extension in ALLOWED.get(backend, ()):
        return None
    owner = f"of backend {backend}" if backend in ALLOWED else "without a backend's name"
    return f"{extension} in a function {owner}"


def inspect(path: Path | str) -> Inspection:
    """Every function of an object file or shared library, and what is wrong in it.

    Raises FermiError when objdump is missing or cannot read the file.
    """
    functions: list[str] = []
    findings: list[Finding] = []
    for line in _binutil("objdump", "-d", "--insn-width=15", "-M", "intel", str(path)).splitlines():
        if start := FUNCTION.match(line):
            functions.append(start[1])
        elif functions and (instruction := INSTRUCTION.match(line)):
            problem = _problem(functions[-1], instruction[1], instruction[2])
            if problem:
                findings.append(Finding(functions[-1], " ".join(instruction[2].split()), problem))
    return Inspection(functions, findings)


def libm_findings(path: Path | str) -> list[Finding]:
    """Undefined symbols that libm or libmvec would fill in. FermiError as `inspect`."""
    found = []
    tables = [_binutil("nm", *which, "--undefined-only", str(path)) for which in ((), ("-D",))]
    for symbol in sorted({line.split()[-1] for table in tables for line in table.splitlines()}):
        name = symbol.split("@")[0]
        variant = LIBM_VARIANT.fullmatch(name)
        if name in LIBM or (variant and (variant[1] or variant[2]) in LIBM):
            found.append(Finding("undefined symbols", symbol, "libm: its bits change with library and CPU"))
    return found


def built_module() -> tuple[Path, set[str]]:
    """(path, kernel names) of the installed module. FermiError (BackendError) when it is not built."""
    from fermi_engine.kernels.dispatch import library

    module = library()
    return Path(module.__file__), {name for name in dir(module.lib) if name.split("_")[0] in ALLOWED}


def _check(path: Path | None) -> int:
    expected: set[str] = set()
    if path is None:
        path, expected = built_module()
    functions, findings = inspect(path)
    missing = sorted(expected - set(functions))
    if missing or not functions:
        raise FermiError(f"{path} shows no code for {', '.join(missing) or 'any function'}; it may be "
                         "stripped: build it without -s")
    findings += libm_findings(path)
    for finding in findings:
        print(f"{finding.function}: {finding.instruction}: {finding.problem}")
    print(f"{path.name}: {len(functions)} functions, {len(findings)} findings")
    return 1 if findings else 0


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("module", nargs="?", type=Path,
                        help="object file or shared library (default: the built kernels)")
    try:
        return _check(parser.parse_args(argv).module)
    except FermiError as err:
        print(f"check_isa: {err}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
