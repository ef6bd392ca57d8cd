"""Limits of the stage table: how many roundings an op makes, and how large what it adds may be, from its inputs."""

from __future__ import annotations

import numpy as np

from fermi_engine.compare import Arrays
from fermi_engine.stage_cpu import cache_formats, fill_pages
from fermi_engine.state import KVPages

# Roundings, as functions of the inputs. An error of L units in the last place counts as 2 L roundings.

EXP_ULP, LOG1P_ULP, SIN_ULP, COS_ULP = 0.891, 0.501, 0.503, 0.503  # stated in csrc/scalar/math.h over all inputs
LOGISTIC = 2 * EXP_ULP + 2  # 1 / (1 + exp(-x)): exp, sum, quotient
SILU = LOGISTIC + 1  # times x
GATES = 4 * EXP_ULP + 2 * LOG1P_ULP + 1  # exp(A_log) and log1p(exp(x)), then their product


def block_sum(a: Arrays) -> float:
    """Scale times scale, times the integer (exact below 2^24), then blocks - 1 additions."""
    return a["d"].shape[1] + 1


def block_gain(a: Arrays) -> float:
    """A scale product that underflows meets an integer of at most 32 * 128 * 127, in each block."""
    return 32 * 128 * 127 * a["d"].shape[1]


def lane_dot(a: Arrays) -> float:
    """The product, ceil(n / 16) - 1 additions in a lane (the first one is to 0), four in the tree."""
    return 1 + (-(-a["x"].shape[1] // 16) - 1) + 4


def term_count(a: Arrays) -> float:
    """Each of the n products may underflow, not only those on one chain."""
    return a["x"].shape[1]


def conv_silu(a: Arrays) -> float:
    """A product and taps - 1 additions, which silu (slope at most 1.1) passes on, and silu's own."""
    return 1.1 * len(a["w"]) + SILU


def chosen_softmax(a: Arrays) -> float:
    """Of weight * (1 + |l - l_first|): the difference (in the bound) and exp of the element; the same of the sum,
    whose differences weigh at most e^-d d < 0.4 each; its k - 1 additions; the quotient."""
    return 2 * (1 + 2 * EXP_ULP) + 1.4 * int(a["k"]) + 1


def weighted_rows(a: Arrays) -> float:
    """A product, k additions, and the logistic of the shared expert."""
    return 1 + int(a["k"]) + LOGISTIC


def up_gain(a: Arrays) -> float:
    """silu underflows, `up` enlarges."""
    return max(1.0, float(np.abs(a["gate_up"]).max(initial=0)))


def x_gain(a: Arrays) -> float:
    """The logistic underflows, `x` enlarges."""
    return max(1.0, float(np.abs(a["x"]).max(initial=0)))


# Roundings of single elements, sums left out (compare.TwiceReference). A matrix: a product and the last addition.
NORM = 6  # mean + eps (halved by the root), root, quotient; x * scale, 1 + w, product
DELTA_STEP = 3 * 2 + 2 * EXP_ULP  # of one token: decay, two products and sums, beta
SOFTMAX = 4 + 2 * EXP_ULP  # scale, difference, product, quotient
SWIGLU = 1 + SILU
MATRIX = 2
GATED_DELTA_NET = GATES + SILU + NORM + DELTA_STEP + NORM + SILU + 2 * MATRIX  # convolution, l2 norm, gated norm
GATED_ATTENTION = NORM + 3 + SOFTMAX + LOGISTIC + 1 + 2 * MATRIX  # norm of q and k, rope (3), output gate
DENSE = SWIGLU + 3 * MATRIX
FEED_FORWARD = DENSE + SOFTMAX + LOGISTIC  # router, gate of the shared expert


def decoder_chain(a: Arrays) -> float:
    """Two additions a layer in the residual stream; then at most one mixer, into a state, or norm and head."""
    layers = 1 + max(int(name.split(".")[1]) for name in a if name.startswith("layers."))
    return 2 * layers + GATED_DELTA_NET


def score_softmax(a: Arrays) -> float:
    """The scale's product and the difference from the maximum round a score s by u |s| each, which exp makes relative;
    then exp, the product with the value, and the quotient."""
    largest = 0.0
    for keys in _cached(a, "k"):
        keys = np.repeat(keys, a["q"].shape[1] // keys.shape[1], axis=1)
        scores = np.einsum("thd,shd->hts", a["q"], keys, dtype=np.float64) * float(a["scale"])
        largest = max(largest, np.abs(scores).max())
    return 2 * largest + 2 * EXP_ULP + 2


def _cached(a: Arrays, name: str) -> list[np.ndarray]:
    """Keys or values [S, HKV, D] as each format stands for them."""
    head_dim, found = a["q"].shape[2], []
    for format in cache_formats(head_dim):
        rows = a[f"{format}.{name}"]
        cache = KVPages(rows.shape[1], len(rows), head_dim, format)
        cache.reserve(len(rows))
        fill_pages(cache.keys, rows)
        found.append(cache.filled(len(rows))[0])
    return found


def cached_size(a: Arrays) -> float:
    """Largest value in any format, which may cancel."""
    return max(float(np.abs(values).max()) for values in _cached(a, "v"))


def value_size(a: Arrays) -> float:
    """Largest number that goes into sums of values, which may cancel."""
    return max(float(np.abs(a[name]).max(initial=0)) for name in ("v", "state") if name in a)


def read_size(a: Arrays) -> float:
    """The same, read out of a state through q."""
    return value_size(a) * float(np.sqrt(np.square(a["q"]).sum(-1)).max())
