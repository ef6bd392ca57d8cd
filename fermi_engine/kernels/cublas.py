"""The vendor's sgemm: cuBLAS from CUDA 8.0 up to the newest, by ctypes. FERMI_CUBLAS names a library; else known names are
tried, newest first, until one works on the card (CUDA 9 and later know no Fermi)."""

from __future__ import annotations

import ctypes
import os

from fermi_engine.errors import DeviceError

VERSIONS = ("13", "12", "11", "10", "9.2", "9.1", "9.0", "8.0")
NAMES = (*(f"libcublas.so.{version}" for version in VERSIONS), "libcublas.so")
NEEDED = ("cublasCreate_v2", "cublasDestroy_v2", "cublasSetStream_v2", "cublasSgemm_v2", "cublasGetVersion_v2")
DEFAULT_MATH = 0  # float32 throughout: TF32 takes another mode
NO_TRANSPOSE, TRANSPOSE = 0, 1
STATUS = {1: "not initialised", 3: "allocation failed", 7: "invalid value", 8: "the card is not supported",
          11: "mapping error", 13: "execution failed", 14: "internal error", 15: "not supported"}


class Cublas:
    """A cuBLAS handle in the current context."""

    def __init__(self) -> None:
        self._handle = ctypes.c_void_p()
        self.library, self.name = _working_library(self._handle)
        version = ctypes.c_int()
        self.library.cublasGetVersion_v2(self._handle, ctypes.byref(version))
        self.version = version.value

    def sgemm(self, m: int, n: int, k: int, areas: list[tuple[int, int]], b_transposed: bool, stream: int) -> None:
        """Row-major c [m, n] = a [m, k] @ b, areas: (address, floats from row to row) of a, b, c; stream: its handle.

        cuBLAS is column-major: it computes the transpose of c from the transposes that row-major storage looks like.
        """
        (a, lda), (b, ldb), (c, ldc) = areas
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        what = f"sgemm {m} x {n} x {k}"
        check(what, self.library.cublasSetStream_v2(self._handle, ctypes.c_void_p(stream)))
        check(what, self.library.cublasSgemm_v2(
            self._handle, TRANSPOSE if b_transposed else NO_TRANSPOSE, NO_TRANSPOSE, n, m, k, ctypes.byref(one),
            ctypes.c_void_p(b), ldb, ctypes.c_void_p(a), lda, ctypes.byref(zero), ctypes.c_void_p(c), ldc))

    def close(self) -> None:
        """Give the handle back."""
        self.library.cublasDestroy_v2(self._handle)


def check(what: str, status: int) -> None:
    """DeviceError for a status other than success."""
    if status:
        raise DeviceError(f"{what} failed: cuBLAS status {status} ({STATUS.get(status, 'unknown')})")


def load(name: str) -> ctypes.CDLL:
    """The library `name`. DeviceError when it cannot be loaded or is no cuBLAS."""
    try:
        library = ctypes.CDLL(name)
    except OSError as err:
        raise DeviceError(f"{name} cannot be loaded ({err})") from None
    missing = [symbol for symbol in NEEDED if not hasattr(library, symbol)]
    if missing:
        raise DeviceError(f"{name} is no cuBLAS: it lacks {missing[0]}")
    return library


def _working_library(handle: ctypes.c_void_p) -> tuple[ctypes.CDLL, str]:
    """The first library that makes a handle on this card."""
    if os.environ.get("NVIDIA_TF32_OVERRIDE") == "1":
        raise DeviceError("NVIDIA_TF32_OVERRIDE=1 makes cuBLAS round to TF32; unset it, or take --gemm own")
    forced = os.environ.get("FERMI_CUBLAS")
    reasons = []
    for name in [forced] if forced else NAMES:
        try:
            library = load(name)
            check(f"{name}: cublasCreate", library.cublasCreate_v2(ctypes.byref(handle)))
            if hasattr(library, "cublasSetMathMode"):  # from CUDA 9 on; before, there is float32 only
                check(f"{name}: cublasSetMathMode", library.cublasSetMathMode(handle, DEFAULT_MATH))
        except DeviceError as err:
            reasons.append(str(err))
            continue
        return library, name
    found = [reason for reason in reasons if "cannot be loaded" not in reason or forced]
    why = "; ".join(found) or f"none of {', '.join(NAMES)} is installed"
    raise DeviceError(f"the vendor's sgemm is not available: {why}; FERMI_CUBLAS names a library, and the engine's own products "
                      "(--gemm own) need none")
