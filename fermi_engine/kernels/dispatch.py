"""Which backend runs each op. Backends are listed best first; the scalar one has every op, the others override it.

A backend that was named (argument or FERMI_BACKEND) runs every op or raises: nothing falls back in silence.
Imports no NumPy, so that the CPU can be checked before anything heavy loads.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from fermi_engine.errors import BackendError

FEATURES = ("ssse3", "sse4.1", "sse4.2", "popcnt", "avx", "avx2", "fma", "f16c", "avx512f", "avx512vnni")
FLOOR = ("ssse3", "sse4.1", "sse4.2", "popcnt")  # x86-64-v2: what NumPy's wheels need


@dataclass(frozen=True)
class Backend:
    """A folder of csrc/ and the CPU features its kernels use."""

    name: str
    needs: tuple[str, ...]


BACKENDS = (Backend("avx2", ("avx2", "f16c")), Backend("ssse3", ("ssse3",)), Backend("scalar", ()))  # best first


@dataclass(frozen=True)
class Kernel:
    """One C function: the op, the backend it belongs to, and its address."""

    op: str
    backend: str
    pointer: Any


def library() -> Any:
    """The compiled module `_cpu` (`.ffi`, `.lib`). Raises BackendError when it has not been built."""
    try:
        from fermi_engine.kernels import _cpu
    except ImportError as err:
        raise BackendError(
            f"the CPU kernels are not built ({err}); run `pip install -e .` in the source tree, which "
            "needs a C compiler (Debian: gcc, python3-dev)"
        ) from None
    return _cpu


def cpu_features() -> frozenset[str]:
    """Names from FEATURES that this CPU supports, by CPUID."""
    bits = library().lib.fermi_cpu_features()
    return frozenset(name for i, name in enumerate(FEATURES) if bits >> i & 1)


def check_cpu() -> None:
    """Raises BackendError on a CPU below x86-64-v2, in place of an illegal instruction later."""
    missing = [name for name in FLOOR if name not in cpu_features()]
    if missing:
        raise BackendError(f"this CPU lacks {', '.join(missing)}: x86-64-v2 (Westmere, 2010, or newer) is the floor")


def ops() -> tuple[str, ...]:
    """Every op, by the scalar kernels that the module holds."""
    return tuple(name.removeprefix("scalar_") for name in dir(library().lib) if name.startswith("scalar_"))


def supported() -> list[str]:
    """Backends this CPU can run, best first."""
    features = cpu_features()
    return [b.name for b in BACKENDS if features.issuperset(b.needs)]


def table(backend: str | None = None) -> dict[str, Kernel]:
    """Op -> kernel for `backend`; None takes FERMI_BACKEND, and if that is unset the best kernel of each op."""
    forced = backend or os.environ.get("FERMI_BACKEND") or None
    order = supported() if forced is None else [_checked(forced)]
    return {op: _find(op, order) for op in ops()}


def _checked(name: str) -> str:
    known = {b.name: b for b in BACKENDS}
    if name not in known:
        raise BackendError(f"unknown backend {name!r}; this build has {', '.join(known)}")
    if name not in supported():
        raise BackendError(
            f"backend {name!r} needs {', '.join(known[name].needs)}, which this CPU lacks; "
            f"it can run {', '.join(supported())}"
        )
    return name


def _find(op: str, order: list[str]) -> Kernel:
    module = library()
    for backend in order:
        symbol = f"{backend}_{op}"
        if hasattr(module.lib, symbol):
            return Kernel(op, backend, module.ffi.cast("kernel_fn", module.ffi.addressof(module.lib, symbol)))
    raise BackendError(f"backend {order[0]!r} has no kernel for {op}; leave FERMI_BACKEND unset to mix backends")
