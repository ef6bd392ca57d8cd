"""Dense products by the vendor's sgemm in place of the own kernels."""

from __future__ import annotations

import numpy as np

from fermi_engine.kernels.device_arrays import DeviceArray, DeviceMatrix
from fermi_engine.kernels.gpu import Device, Stream
from fermi_engine.kernels.gpu_kernels import GpuKernels, product_fits


class VendorKernels(GpuKernels):
    """GpuKernels but for `gemm`, whose bits may now differ between cards, libraries and numbers of rows.

    A quantised matrix is expanded to float32 in `scratch`, once a product. Grouped products stay with the own kernel: a call
    for each of 128 experts with 59 rows took 3.2 and 4.2 times as long on an H200 (tools/lab/vendor_gemm.py).
    """

    def __init__(self, device: Device, stream: Stream, scratch: DeviceArray | None) -> None:
        """scratch: flat float32, at least the elements of the largest quantised matrix; None where there is none."""
        super().__init__(device, stream)
        self._scratch = scratch

    def gemm(self, x: DeviceArray, w: DeviceMatrix, out: DeviceArray, column: int = 0,
             source: DeviceArray | None = None) -> None:
        """As GpuKernels.gemm; gathered rows stay with the own kernel."""
        m, stride = product_fits(x, w, out, column, source)
        if source is not None:
            super().gemm(x, w, out, column, source)
        elif m:
            self.device.sgemm(m, w.rows, w.cols, x.address, self._expanded(w), out.address + 4 * column, self.stream,
                              lda=w.cols, ldb=w.cols, ldc=stride)

    def _expanded(self, w: DeviceMatrix) -> int:
        """Address of the matrix as float32 [rows, cols]."""
        if w.format == "f32":
            return w.address
        if self._scratch is None or self._scratch.size < w.rows * w.cols:
            raise ValueError(f"gemm: the scratch is too small for a {w.format} matrix [{w.rows}, {w.cols}]")
        floats = DeviceArray.within(self._scratch.buffer, (w.rows, w.cols), np.float32, self._scratch.offset)
        self.rows(w, floats)
        return floats.address
