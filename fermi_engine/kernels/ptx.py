"""From csrc/sm20/<op>.cu to what a card loads: PTX for sm_20, or a cubin where CUDA 8.0's own compiler is at hand.

Three ways, in this order: `nvcc` up to 8.0 (the only toolkit that knows these cards), the PTX that ships with the package
if it was made from these very sources, `clang` >= 14, which needs no CUDA toolkit. FERMI_KERNEL_BUILD forces one of them; a
forced one works or raises. What is compiled stays in the cache directory under a hash of sources, flags and compiler. A
newer card takes the same PTX: its driver compiles it.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fermi_engine.errors import DeviceError
from fermi_engine.kernels import sm20

PREBUILT = Path(__file__).resolve().parent / "ptx"
# No toolkit is looked for: with one, newer clangs write PTX too new for the last driver of these cards.
CLANG_FLAGS = ("-x", "cuda", "--cuda-path=/nonexistent", "--cuda-gpu-arch=sm_20", "--cuda-device-only", "-nocudainc",
               "-nocudalib", "-std=c++11", "-O3", "-ffp-contract=fast", "-fno-strict-aliasing", "-Wall", "-Wextra",
               "-Wno-unused-function", "-Wno-unknown-cuda-version", "-S")
NVCC_FLAGS = ("-arch=sm_20", "-std=c++11", "-O3")
WAYS = ("nvcc", "prebuilt", "clang")
CLANG_FLOOR = 14
NVCC_CEILING = (8, 0)
FIRST_LINE = "// fermi-engine sm_20 op {op}, sources {sources}, {compiler}"
TYPE = re.compile(r"typedef\b[^;{]*\{[^}]*\}\s*(\w+)\s*;")
CONSTANTS = re.compile(r"enum\s*\{([^}]*)\}\s*;")
ENTRY = re.compile(r"ENTRY\((\w+), \w+, \w+\)")
STAMP = re.compile(r"\A// fermi-engine sm_20 op (\w+), sources ([0-9a-f]{32}), (.+)\n")


@dataclass(frozen=True)
class Compiler:
    """A program and what it calls itself."""

    path: str
    version: tuple[int, ...]

    @property
    def text(self) -> str:
        return f"{Path(self.path).name.split('-')[0]} {'.'.join(map(str, self.version))}"


@dataclass(frozen=True)
class Image:
    """What cuModuleLoadData takes, and where it came from."""

    data: bytes
    origin: str


def source_hash(op: str) -> str:
    """Hash of what the PTX of `op` depends on: its file and what that includes from csrc/sm20, without comments, and of
    ops.h only what concerns it, so that a new op leaves the PTX of the others current."""
    directory = (sm20.csrc() / "sm20").resolve()
    files = [path for path in sm20.source_files(op) if path.resolve().parent == directory]
    texts = {path.name: _without_comments(path.read_text()) for path in files}
    if "ops.h" in texts:
        own = " ".join(text for name, text in texts.items() if name != "ops.h")
        texts["ops.h"] = _concerning(op, texts["ops.h"], own)
    return sm20.digest([], *texts.values())


def _concerning(op: str, header: str, text: str) -> str:
    """ops.h without the ENTRY lines of other ops and without the types and constants that `text`, the op's code, and the rest
    never name."""
    header = ENTRY.sub(lambda found: found.group(0) if found.group(1) == op else " ", header)
    types = {found.group(1): found.group(0) for found in TYPE.finditer(header)}
    for found in CONSTANTS.finditer(header):
        types |= dict.fromkeys(re.findall(r"(\w+) =", found.group(1)), found.group(0))
    rest = CONSTANTS.sub(" ", TYPE.sub(" ", header))
    kept: dict[str, str] = {}
    words = set(re.findall(r"\w+", text + rest))
    while new := [name for name in types if name in words and name not in kept]:
        kept.update((name, types[name]) for name in new)
        words.update(re.findall(r"\w+", " ".join(types[name] for name in new)))
    return " ".join([*(kept[name] for name in types if name in kept), *rest.split()])


def _without_comments(text: str) -> str:
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)
    return " ".join(text.split())


@functools.cache
def clang() -> Compiler | None:
    """clang >= 14: FERMI_CLANG, else the oldest found (older ones write the older PTX)."""
    named = os.environ.get("FERMI_CLANG")
    names = [named] if named else [*(f"clang-{n}" for n in range(CLANG_FLOOR, 31)), "clang"]
    found = _first(names, r"clang version (\d+)\.(\d+)\.(\d+)")
    return found if found and found.version[0] >= CLANG_FLOOR else None


@functools.cache
def nvcc() -> Compiler | None:
    """nvcc <= 8.0: FERMI_NVCC, else on the PATH or under /usr/local."""
    named = os.environ.get("FERMI_NVCC")
    names = [named] if named else ["nvcc", "/usr/local/cuda-8.0/bin/nvcc", "/usr/local/cuda/bin/nvcc"]
    for name in names:
        found = _first([name], r"release (\d+)\.(\d+)")
        if found and found.version <= NVCC_CEILING:
            return found
    return None


def _first(names: Iterable[str], version: str) -> Compiler | None:
    for name in names:
        path = shutil.which(name)
        if path:
            text = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
            found = re.search(version, text)
            if found:
                return Compiler(path, tuple(map(int, found.groups())))
    return None


def image(op: str, fermi: bool) -> Image:
    """What to load for `op`; `fermi`: the card is one (compute capability 2.x) and takes a cubin.

    Raises DeviceError, naming the op and the remedy, when no way is open.
    """
    forced = os.environ.get("FERMI_KERNEL_BUILD")
    for way in [forced] if forced else WAYS:
        found = image_by(way, op, fermi)
        if found:
            return found
    if forced:
        raise DeviceError(f"FERMI_KERNEL_BUILD={forced} has nothing for op {op!r}: {_MISSING[forced]}")
    raise DeviceError(f"no PTX for op {op!r}: {_MISSING['prebuilt']}, and neither nvcc <= 8.0 nor clang >= 14 is here; "
                      "install clang or the package again")


def image_by(way: str, op: str, fermi: bool) -> Image | None:
    """The same one way: nvcc, prebuilt or clang; None where that way is not open. Raises DeviceError for any other."""
    if way == "nvcc":
        return _with_nvcc(op, fermi)
    if way == "prebuilt":
        return _prebuilt(op)
    if way == "clang":
        return _with_clang(op)
    raise DeviceError(f"FERMI_KERNEL_BUILD is {way!r}; it takes {', '.join(WAYS)}")


_MISSING = {
    "nvcc": "no nvcc <= 8.0 was found (FERMI_NVCC names one)",
    "prebuilt": "the PTX that ships with the package is absent or was made from other sources",
    "clang": "no clang >= 14 was found (FERMI_CLANG names one)",
}


def _prebuilt(op: str) -> Image | None:
    path = PREBUILT / f"{op}.ptx"
    if not path.is_file():
        return None
    text = path.read_text()
    stamp = STAMP.match(text)
    if not stamp or stamp.group(2) != source_hash(op):
        return None
    return Image(text.encode() + b"\0", f"PTX shipped with the package, made by {stamp.group(3)}")


def _with_clang(op: str) -> Image | None:
    compiler = clang()
    if compiler is None:
        return None
    data = cached(op, "ptx", [compiler.path, *CLANG_FLAGS], compiler.text)
    return Image(data + b"\0", f"PTX compiled here by {compiler.text}")


def _with_nvcc(op: str, fermi: bool) -> Image | None:
    compiler = nvcc()
    if compiler is None:
        return None
    kind = "cubin" if fermi else "ptx"
    more = shlex.split(os.environ.get("FERMI_NVCC_FLAGS", ""))
    data = cached(op, kind, [compiler.path, *NVCC_FLAGS, f"-{kind}", *more], compiler.text)
    return Image(data + (b"" if fermi else b"\0"), f"{kind if fermi else 'PTX'} compiled here by {compiler.text}")


def cached(op: str, suffix: str, command: list[str], compiler: str) -> bytes:
    """The output of `command` for `op`, from the cache if it has it. Raises DeviceError when it does not compile."""
    directory = sm20.cache_directory() / "sm_20"
    directory.mkdir(exist_ok=True)
    target = directory / f"{op}-{sm20.digest([], source_hash(op), compiler, *command)}.{suffix}"
    if not target.is_file():
        with tempfile.TemporaryDirectory(dir=directory) as work:
            made = Path(work) / target.name
            compile_to(op, command, made)
            os.replace(made, target)
    return target.read_bytes()


def compile_to(op: str, command: list[str], target: Path) -> None:
    """Run `command` on the source of `op`. Raises DeviceError with the first error line."""
    done = subprocess.run([*command, str(sm20.source_files(op)[0]), "-o", str(target)], capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.splitlines() or ["no message"]
        error = next((line for line in lines if "error" in line), lines[0])
        raise DeviceError(f"op {op!r} does not compile for sm_20 with {Path(command[0]).name}: {error}")


def write_prebuilt(op: str) -> Path:
    """Compile `op` by clang into the file that ships with the package, stamped with the hash of its sources."""
    found = _with_clang(op)
    compiler = clang()
    if found is None or compiler is None:
        raise DeviceError(f"PTX of op {op!r} not written: {_MISSING['clang']}")
    PREBUILT.mkdir(exist_ok=True)
    target = PREBUILT / f"{op}.ptx"
    stamp = FIRST_LINE.format(op=op, sources=source_hash(op), compiler=compiler.text)
    target.write_text(f"{stamp}\n{found.data.rstrip(bytes(1)).decode()}")
    return target


def stale() -> list[str]:
    """Ops whose shipped PTX is absent or was made from other sources, and PTX files that belong to no op."""
    ops = sm20.ops()
    odd = [path.stem for path in sorted(PREBUILT.glob("*.ptx")) if path.stem not in ops]
    return [op for op in ops if _prebuilt(op) is None] + odd


def facts() -> dict[str, str]:
    """Which toolchain would build the kernels here: label -> text."""
    compilers = [found.text for found in (nvcc(), clang()) if found]
    old = stale()
    shipped = "matches the sources" if not old else f"absent or from other sources for {', '.join(old)}"
    return {"sm_20 compilers": ", ".join(compilers) or "none (nvcc <= 8.0 or clang >= 14)", "shipped PTX": shipped,
            "FERMI_KERNEL_BUILD": os.environ.get("FERMI_KERNEL_BUILD") or "not set: nvcc, shipped PTX, clang"}
