"""exp, log1p, sin, cos and both GELUs of the kernels: accuracy over every exponent and sign, exact limits, equal bits.

ULP limits: the largest errors of the sweep that csrc/scalar/math.h describes, rounded up. One ulp is the spacing
of float32 at the exact value, never below 2^-149. The judge is NumPy in float64, whose own error is below 1e-8 of
that.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from fermi_engine import kernels
from fermi_engine.kernels import dispatch

BACKENDS = [backend.name for backend in dispatch.BACKENDS]


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """x/2 (1 + tanh(u)) without cancellation."""
    return x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_erf(x: np.ndarray) -> np.ndarray:
    """x/2 (1 + erf(x / sqrt 2)) without cancellation."""
    return x / 2 * np.vectorize(math.erfc)(-x / math.sqrt(2))


EXACT = {"exp_f32": np.exp, "log1p_f32": np.log1p, "sin_f32": np.sin, "cos_f32": np.cos, "gelu_tanh": gelu_tanh,
         "gelu_erf": gelu_erf}
ULP = {"exp_f32": 0.891, "log1p_f32": 0.501, "sin_f32": 0.503, "cos_f32": 0.503, "gelu_tanh": 0.505, "gelu_erf": 0.518}
# The same where the result is subnormal: exp rounds twice there, log1p and sin return x.
SUBNORMAL_ULP = {"exp_f32": 0.751, "log1p_f32": 0.5, "sin_f32": 0.5, "cos_f32": 0.5, "gelu_tanh": 0.502, "gelu_erf": 0.504}
INF, NAN, TINY = np.inf, np.nan, 2.0**-149
BELOW_MINUS_ONE = -1.0 - 2.0**-23

# Where a branch, a clamp or a seam of an argument reduction lies.
CORNERS = (
    88.72284, -87.33655, -103.97208, 89.0, -104.0, 0.34657359, 1.03972077,  # exp: its ends, clamps, n + 1/2
    -1.0, -0.29289322, 0.41421356, 2.0**-29,  # log1p: start, both ends of k = 0, where 1 + x starts to round
    0.78539816, 1.57079633, 3.14159265, 355.0, 103993.0,  # sin, cos: quadrants, multiples of pi nearly met
    2.0**24, 2.0**25, 3.0e38,  # sin, cos: the two reductions
    10.1, 10.6, 13.1, 14.4, 15.0, 17.0,  # GELUs: where results become subnormal and vanish, the end of the polynomial
)
LIMITS = {
    "exp_f32": [(INF, INF), (-INF, 0.0), (0.0, 1.0), (-0.0, 1.0), (TINY, 1.0), (88.73, INF), (3.4e38, INF),
                (-3.4e38, 0.0), (-103.9, TINY), (-104.0, 0.0)],
    "log1p_f32": [(INF, INF), (-1.0, -INF), (0.0, 0.0), (-0.0, -0.0), (TINY, TINY), (-TINY, -TINY),
                  (BELOW_MINUS_ONE, NAN), (-1.5, NAN), (-INF, NAN)],
    "sin_f32": [(0.0, 0.0), (-0.0, -0.0), (TINY, TINY), (-TINY, -TINY), (INF, NAN), (-INF, NAN)],
    "cos_f32": [(0.0, 1.0), (-0.0, 1.0), (TINY, 1.0), (INF, NAN), (-INF, NAN)],
    "gelu_tanh": [(0.0, 0.0), (-0.0, -0.0), (INF, INF), (-INF, NAN), (20.0, 20.0), (-20.0, -0.0), (3.4e38, 3.4e38),
                  (-3.4e38, -0.0)],
    "gelu_erf": [(0.0, 0.0), (-0.0, -0.0), (INF, INF), (-INF, NAN), (20.0, 20.0), (-20.0, -0.0), (3.4e38, 3.4e38),
                 (-3.4e38, -0.0)],
}


def kernels_of(backend: str) -> kernels.CpuKernels:
    if backend not in dispatch.supported():
        pytest.skip(f"this CPU cannot run {backend}")
    return kernels.get(backend=backend, threads=1)


def sweep() -> np.ndarray:
    """Float32 of every exponent and sign (subnormals, infinities, NaN too), and those near each corner."""
    edges = [1, 2, (1 << 22) - 1, 1 << 22, (1 << 23) - 2, (1 << 23) - 1]
    mantissas = np.concatenate([np.arange(0, 1 << 23, 8209), edges]).astype(np.uint32)
    patterns = (np.arange(512, dtype=np.uint32) << 23)[:, None] | mantissas
    near = np.float32(CORNERS).view(np.int32)[:, None] + np.arange(-500, 501, dtype=np.int32)
    near = near.view(np.float32).ravel()
    return np.concatenate([patterns.view(np.float32).ravel(), near, -near])


def ulp(exact: np.ndarray) -> np.ndarray:
    """Spacing of float32 in the binade of each exact value."""
    _, exponent = np.frexp(exact)
    return np.ldexp(1.0, np.clip(exponent - 24, -149, 104))


def bits(x: np.ndarray) -> np.ndarray:
    """Bit patterns, with one pattern for all NaN."""
    return np.where(np.isnan(x), np.float32(np.nan), x).view(np.uint32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", EXACT)
def test_error_is_within_the_stated_ulp_over_all_exponents(op: str, backend: str) -> None:
    x = sweep()
    got = getattr(kernels_of(backend), op)(x)
    with np.errstate(all="ignore"):
        exact = EXACT[op](x.astype(np.float64))
        rounded = exact.astype(np.float32)
    special = ~np.isfinite(rounded)
    np.testing.assert_array_equal(bits(got[special]), bits(rounded[special]))
    x, got, exact = x[~special], got[~special], exact[~special]
    error = np.abs(got - exact) / ulp(exact)
    limit = np.where(np.abs(exact) < 2.0**-126, SUBNORMAL_ULP[op], ULP[op])
    i = int(np.argmax(np.where(np.isnan(error), INF, error / limit)))
    assert error[i] <= limit[i], f"{op}({x[i]!r}) = {got[i]!r}, exact {exact[i]!r}: {error[i]:.3f} ulp"
    np.testing.assert_array_equal(np.signbit(got), np.signbit(exact))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", LIMITS)
def test_limits_are_exact(op: str, backend: str) -> None:
    x, expected = np.float32(LIMITS[op]).T.copy()
    np.testing.assert_array_equal(bits(getattr(kernels_of(backend), op)(x)), bits(expected))


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "scalar"])
@pytest.mark.parametrize("op", EXACT)
def test_every_backend_gives_the_bits_of_scalar(op: str, backend: str) -> None:
    x = sweep()
    expected = bits(getattr(kernels_of("scalar"), op)(x))
    f = getattr(kernels_of(backend), op)
    np.testing.assert_array_equal(bits(f(x)), expected)
    for length in range(1, 40):  # every way a row can end
        part = slice(1000 * length, 1001 * length)
        np.testing.assert_array_equal(bits(f(x[part])), expected[part])
