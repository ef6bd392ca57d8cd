"""Builds the CPU kernels into one cffi module, `fermi_engine.kernels._cpu` (API mode).

The declarations come from csrc/kernels.h; the kernels are whatever csrc/<backend>/<op>.c exist, so a new file is a new
kernel and a partial backend is legal. Everything is compiled for plain x86-64: SIMD functions carry their own target
attribute, so that no instruction the CPU lacks can run before the CPU has been asked.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from setuptools.command.build_ext import build_ext

BACKENDS = ("scalar", "ssse3", "avx2")
# -march=x86-64 holds against a compiler or CFLAGS with a higher default: it comes last.
# -fno-math-errno only lets sqrtf compile to sqrtss; nothing here relaxes IEEE arithmetic.
CFLAGS = [
    "-O3",
    "-std=gnu11",
    "-Wall",
    "-Wextra",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-unsafe-math-optimizations",
    "-fvisibility=hidden",
    "-pthread",
    "-march=x86-64",
    "-mtune=generic",
]
KERNEL_LINE = re.compile(r"^KERNEL\((\w+), (\w+)\)$", re.MULTILINE)


def kernels(csrc: Path) -> list[tuple[str, str, list[str]]]:
    """(op, argument struct, backends that implement it) for each KERNEL line of kernels.h, in its order."""
    header = (csrc / "kernels.h").read_text()
    return [
        (op, args, [b for b in BACKENDS if (csrc / b / f"{op}.c").exists()]) for op, args in KERNEL_LINE.findall(header)
    ]


def declarations(csrc: Path) -> str:
    """kernels.h as cffi reads it: structs and prototypes, preprocessor lines and KERNEL rows replaced by declarations."""
    text = (csrc / "kernels.h").read_text()
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    text = re.sub(r"^[ \t]*#(?:.*\\\n)*.*$", "", text, flags=re.MULTILINE)
    text = KERNEL_LINE.sub("", text)
    lines = [
        f"void {backend}_{op}(const {args} *a, int64_t begin, int64_t end);"
        for op, args, backends in kernels(csrc)
        for backend in backends
    ]
    return text + "\n".join(lines) + "\n"


def sources(csrc: Path) -> list[Path]:
    """Every C file of the module, in a fixed order."""
    files = [csrc / "cpu.c", csrc / "pool.c", csrc / "roofline.c", csrc / "q4_0_mse.c"]
    for op, _, backends in kernels(csrc):
        files += [csrc / backend / f"{op}.c" for backend in backends]
    return files


def ffi_builder(root: Path):
    """The configured cffi.FFI for a source tree at `root` (which may be relative)."""
    from cffi import FFI

    csrc = root / "csrc"
    ffi = FFI()
    ffi.cdef(declarations(csrc))
    ffi.set_source(
        "fermi_engine.kernels._cpu",
        '#include "kernels.h"\n',
        sources=[str(path) for path in sources(csrc)],
        include_dirs=[str(csrc)],
        extra_compile_args=CFLAGS,
        extra_link_args=["-pthread"],
        depends=[str(path) for path in sorted(csrc.rglob("*.h"))],
        libraries=[],
    )
    return ffi


class BuildKernels(build_ext):
    """build_ext that generates the cffi module first; named in pyproject.toml, which has no other hook for cffi."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.extensions = [ffi_builder(Path(".")).distutils_extension(tmpdir=os.path.join("build", "cffi"))]
        for extension in self.extensions:
            extension._needs_stub = False
            extension._full_name = extension.name
            self.ext_map[extension.name] = extension
            self.ext_map[extension.name.rsplit(".", 1)[-1]] = extension
