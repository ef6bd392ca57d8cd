"""The ops of csrc/sm20: where their sources are, which entry points they have, and the bytes of their arguments.

ops.h declares everything: a struct per op and a line `ENTRY(op, entry, struct)` per entry point.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from struct import error as StructError
from typing import Any

from fermi_engine.errors import DeviceError

ENTRY_LINE = re.compile(r"^ENTRY\((\w+), (\w+), (\w+)\)$", re.MULTILINE)
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)
CODES = {"int64_t": "q", "int32_t": "i", "uint32_t": "I", "float": "f"}  # of struct, for the field types of ops.h
_PACKAGE = Path(__file__).resolve().parent.parent
_CSRC = (_PACKAGE / "csrc", _PACKAGE.parent / "csrc")  # installed from a wheel, in a source tree


@dataclass(frozen=True)
class Entry:
    """An entry point: the op (csrc/sm20/<op>.cu) it belongs to, its name, its argument struct."""

    op: str
    name: str
    struct: str


def csrc() -> Path:
    """The directory that holds sm20/ and emulator/. Raises DeviceError when the kernels' sources are not installed."""
    for path in _CSRC:
        if (path / "sm20" / "ops.h").is_file():
            return path
    raise DeviceError(f"the GPU kernels' ops.h is in neither {_CSRC[0]} nor {_CSRC[1]}; install fermi-engine again")


def source(op: str) -> Path:
    """csrc/sm20/<op>.cu."""
    return csrc() / "sm20" / f"{op}.cu"


def source_files(op: str) -> list[Path]:
    """csrc/sm20/<op>.cu and every file it includes by a quoted name, directly or not; sorted, the .cu first.

    Raises DeviceError when the .cu is not there.
    """
    first = source(op)
    if not first.is_file():
        raise DeviceError(f"op {op!r} has no source {first}")
    found, todo = {first}, [first]
    while todo:
        path = todo.pop()
        for name in INCLUDE.findall(path.read_text()):
            included = (path.parent / name).resolve()
            if included not in found and included.is_file():
                found.add(included)
                todo.append(included)
    return [first, *sorted(found - {first})]


def ops() -> tuple[str, ...]:
    """Every op that has an entry point, in the order of ops.h."""
    return tuple(dict.fromkeys(entry.op for entry in entries().values()))


@functools.cache
def entries() -> Mapping[str, Entry]:
    """Name -> entry point, from the ENTRY lines of ops.h."""
    text = (csrc() / "sm20" / "ops.h").read_text()
    return {name: Entry(op, name, struct) for op, name, struct in ENTRY_LINE.findall(text)}


def entry(name: str) -> Entry:
    """The entry point `name`. Raises ValueError when ops.h has none of that name."""
    found = entries().get(name)
    if found is None:
        raise ValueError(f"no entry point {name!r} in csrc/sm20/ops.h")
    return found


@functools.cache
def _structs() -> Any:
    """cffi.FFI that knows the structs of ops.h."""
    from cffi import FFI

    ffi = FFI()
    ffi.cdef(plain_c((csrc() / "sm20" / "ops.h").read_text()))
    return ffi


def plain_c(header: str) -> str:
    """A header as cffi reads it: no comments, preprocessor lines or ENTRY lines."""
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    text = re.sub(r"^[ \t]*#(?:.*\\\n)*.*$", "", text, flags=re.MULTILINE)
    return ENTRY_LINE.sub("", text)


@functools.cache
def pointer_fields(struct: str) -> tuple[str, ...]:
    """Names of the fields of `struct` that hold device addresses."""
    return tuple(name for name, is_pointer in _layout(struct)[1] if is_pointer)


@functools.cache
def _layout(struct: str) -> tuple[Struct, tuple[tuple[str, bool], ...]]:
    """The bytes of a struct of ops.h as a Struct, and its fields: name, whether it is a pointer. A prefill makes a thousand
    and more of them: assigning to a cffi struct field by field takes eight times as long."""
    kind = _structs().typeof(struct)
    form, end, fields = "<", 0, []
    for name, field in kind.fields:
        is_pointer = field.type.kind == "pointer"
        size = _structs().sizeof(field.type)
        form += f"{field.offset - end}x{'Q' if is_pointer else CODES.get(field.type.cname, f'{size}s')}"
        end = field.offset + size
        fields.append((name, is_pointer))
    return Struct(f"{form}{_structs().sizeof(kind) - end}x"), tuple(fields)


def pack_arguments(struct: str, values: Mapping[str, Any]) -> bytes:
    """`values` as the bytes of `struct`. Pointers are device addresses (int), buffers (their .address) or None, arrays bytes.

    Raises ValueError when a field is missing or unknown, OverflowError when a value does not fit its field.
    """
    form, fields = _layout(struct)
    try:
        row = [address_of(values[name]) if is_pointer else values[name] for name, is_pointer in fields]
        if len(values) == len(fields):
            return form.pack(*row)
    except KeyError:
        pass
    except StructError as err:
        raise OverflowError(f"{struct}: {err}; its fields are {', '.join(name for name, _ in fields)}") from None
    odd = sorted({name for name, _ in fields} ^ values.keys())
    raise ValueError(f"{struct}: {', '.join(odd)} missing or unknown; its fields are {', '.join(name for name, _ in fields)}")


def struct_bytes(struct: str) -> int:
    """Size of `struct`."""
    return _layout(struct)[0].size


def address_of(pointer: Any) -> int:
    """The device address that a pointer argument stands for, 0 for None."""
    return 0 if pointer is None else int(getattr(pointer, "address", pointer))


def unpack_pointers(struct: str, packed: bytes) -> tuple[int, ...]:
    """The device addresses in the bytes of `struct`, 0 for NULL."""
    form, fields = _layout(struct)
    return tuple(value for value, (_, is_pointer) in zip(form.unpack(packed), fields, strict=True) if is_pointer)


def digest(paths: Iterable[Path], *more: str) -> str:
    """Hex hash of the contents of files, and of texts such as compiler flags; 32 digits."""
    state = hashlib.blake2b(digest_size=16)
    for part in [*(path.read_bytes() for path in paths), *(text.encode() for text in more)]:
        state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()


def cache_directory() -> Path:
    """Where builds are kept: FERMI_CACHE, else fermi-engine under XDG_CACHE_HOME or ~/.cache. Created when absent.

    Raises DeviceError when it cannot be made.
    """
    named = os.environ.get("FERMI_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = Path(named) if named else Path(base) / "fermi-engine"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise DeviceError(f"no cache directory at {path} ({err.strerror}); set FERMI_CACHE to one that can be made") from None
    return path
