"""Kernels: every op of the forward pass, per backend. `get()` hands out a set bound to a backend and a thread count.

Knows arrays and ops, no layers. dispatch.py picks, cpu.py calls the C kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fermi_engine.kernels.cpu import CpuKernels

__all__ = ["get"]


def get(backend: str | None = None, threads: int | None = None) -> CpuKernels:
    """Kernels of `backend` (None: FERMI_BACKEND, else the best this CPU runs) on `threads` threads (None: physical cores).

    Raises BackendError when the backend is unknown, cannot run here, or lacks an op. Imports NumPy only after the CPU
    has been checked, because NumPy's own wheels assume x86-64-v2.
    """
    from fermi_engine.kernels import dispatch

    dispatch.check_cpu()
    from fermi_engine.kernels.cpu import CpuKernels

    return CpuKernels(dispatch.table(backend), threads)
