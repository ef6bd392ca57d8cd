"""Limits of the stage table: how many roundings an op makes, and how large what it adds may be, from its inputs.

An error of L units in the last place counts as 2 L roundings. What differs between the families of backends is data of
their `Arithmetic`; so a limit is derived once and holds each family to its own roundings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fermi_engine.compare import All, Arrays, Count, Rule, TwiceReference
from fermi_engine.stages.cpu import cache_formats, fill_pages, given_formats
from fermi_engine.state import KVPages

# Roundings of single elements, sums left out (compare.TwiceReference), where every family makes the same.
NORM = 6  # mean + eps (halved by the root), root, quotient; x * scale, 1 + w, product
MATRIX = 2  # a product and the last addition
BLOCK = NORM + 1  # round a mixer or feed-forward part: the norm before it, the residual after it
LAYER_NORM = NORM + 3  # and the mean, what is left of it, the bias
# Both GELUs are evaluated in double: csrc/scalar/math.h.
GELU_TANH_ULP, GELU_ERF_ULP = 0.505, 0.518
GELU_BIAS = 1.2 + 2 * GELU_ERF_ULP  # the bias, through a slope of at most 1.13, and the function
TAPS = 2 + 1 + 2 + 4  # of the position table: place (2), its fraction, weight (2: 1 - f, product), sum of four


@dataclass(frozen=True)
class Arithmetic:
    """How one family computes. exp_ulp .. cos_ulp: largest errors of its functions in units of the last place, stated where
    they are written. dot: roundings of a float32 product of rows, and by which factor an underflow counts in it. division:
    roundings of the division that ends attention. caches: formats of keys and values by head size."""

    exp_ulp: float
    log1p_ulp: float
    sin_ulp: float
    cos_ulp: float
    dot: tuple[Count, Count]
    division: int
    caches: Callable[[int], tuple[str, ...]]

    @property
    def logistic(self) -> float:
        """1 / (1 + exp(-x)): exp, sum, quotient."""
        return 2 * self.exp_ulp + 2

    @property
    def silu(self) -> float:
        """The logistic times x."""
        return self.logistic + 1

    @property
    def swiglu(self) -> float:
        """silu times up."""
        return 1 + self.silu

    @property
    def gates(self) -> float:
        """exp(A_log) and log1p(exp(x)), then their product."""
        return 4 * self.exp_ulp + 2 * self.log1p_ulp + 1

    def conv_silu(self, a: Arrays) -> float:
        """A product and taps - 1 additions (fused: taps), which silu (slope at most 1.1) passes on, and silu's own."""
        return 1.1 * len(a["w"]) + self.silu

    def chosen_softmax(self, a: Arrays) -> float:
        """Of weight * (1 + |l - l_first|): the difference (in the bound) and exp of the element; the same of the sum,
        whose differences weigh at most e^-d d < 0.4 each; its k - 1 additions; the quotient."""
        return 2 * (1 + 2 * self.exp_ulp) + 1.4 * int(a["k"]) + 1

    def weighted_rows(self, a: Arrays) -> float:
        """A product, k additions (fused: k + 1 steps), and the logistic of the shared expert."""
        return 1 + int(a["k"]) + self.logistic

    def score_softmax(self, a: Arrays) -> float:
        """The scale's product and the difference from the maximum round a score s by u |s| each, which exp makes relative;
        then exp, the product with the value, and the division."""
        largest = 0.0
        for keys in self._cached(a, "k"):
            keys = np.repeat(keys, a["q"].shape[1] // keys.shape[1], axis=1)
            scores = np.einsum("thd,shd->hts", a["q"], keys, dtype=np.float64) * float(a["scale"])
            largest = max(largest, np.abs(scores).max())
        return 2 * largest + 2 * self.exp_ulp + 1 + self.division

    def window_softmax(self, a: Arrays) -> float:
        """The same without a cache, each window by itself."""
        q, k = (a[name].reshape(-1, int(a["window"]), *a[name].shape[1:]).astype(np.float64) for name in ("q", "k"))
        largest = np.abs(np.einsum("gthd,gshd->ghts", q, k)).max() * float(a["scale"])
        return 2 * largest + 2 * self.exp_ulp + 1 + self.division

    def view_softmax(self, a: Arrays) -> float:
        """The same of views of `lengths`."""
        largest, begin = 0.0, 0
        for length in a["lengths"].tolist():
            q, k = (a[name][begin:begin + length].astype(np.float64) for name in "qk")
            largest = max(largest, np.abs(np.einsum("thd,shd->hts", q, k)).max() * float(a["scale"]))
            begin += length
        return 2 * largest + 2 * self.exp_ulp + 1 + self.division

    def cached_size(self, a: Arrays) -> float:
        """Largest value in any format, which may cancel."""
        return max(float(np.abs(values).max()) for values in self._cached(a, "v"))

    def _cached(self, a: Arrays, name: str) -> list[np.ndarray]:
        """Keys or values [S, HKV, D] as each format stands for them that a family has and that is there."""
        head_dim, found = a["q"].shape[2], []
        for format in (one for one in given_formats(a) if one in self.caches(head_dim)):
            rows = a[f"{format}.{name}"]
            cache = KVPages(rows.shape[1], len(rows), head_dim, format)
            cache.reserve(len(rows))
            fill_pages(cache.keys, rows)
            found.append(cache.filled(len(rows))[0])
        return found

    @property
    def delta_step(self) -> float:
        """Of one token: decay, two products and sums, beta."""
        return 3 * 2 + 2 * self.exp_ulp

    @property
    def delta_rule(self) -> Rule:
        """Of the gated delta rule's outputs, token by token or in chunks."""
        return All(o=TwiceReference(self.delta_step, read_size), state=TwiceReference(self.delta_step, value_size))

    @property
    def gated_delta_net(self) -> float:
        """Gates, convolution, l2 norm, one token, gated norm, two matrices."""
        return self.gates + self.silu + NORM + self.delta_step + NORM + self.silu + 2 * MATRIX

    @property
    def _softmax(self) -> float:
        """Scale, difference, exp, product, quotient."""
        return 4 + 2 * self.exp_ulp

    @property
    def delta_token(self) -> float:
        """Gates, convolution, l2 norm, one token, gated norm."""
        return self.gates + self.silu + NORM + self.delta_step + NORM + self.silu

    def token_attention(self, a: Arrays) -> float:
        """The scale's product and the difference from the maximum round a score, at most |q| |k| scale, by u of it each, which
        exp makes relative; two exps, of a split's softmax and of its weight, and their products; division, output gate."""
        scale, dim = float(a["scale"]), a["key"].shape[1]
        query = np.sqrt(dim) * float(np.abs(1 + a["q_norm"]).max())  # a row of length sqrt(dim) times 1 + w, which rope keeps
        key = max(np.sqrt(dim) * float(np.abs(1 + a["k_norm"]).max()), float(np.linalg.norm(a["past_k"], axis=-1).max(initial=0)))
        return 2 * query * key * scale + 4 * self.exp_ulp + 3 + self.division + self.logistic + 1

    def token_swiglu(self, a: Arrays) -> float:
        """Of two products g and u: silu's slope is at most 1.1, and |silu(g)| <= |g|, so that in units of the product of both
        bounds g's roundings count 1.1 times and u's once; one for what is of second order."""
        return 2.1 * token_normed(a) + self.swiglu + 1

    @property
    def gated_attention(self) -> float:
        """Norm of q and k, rope (3), softmax, output gate, two matrices."""
        return NORM + 3 + self._softmax + self.division - 1 + self.logistic + 1 + 2 * MATRIX

    @property
    def dense(self) -> float:
        """swiglu and three matrices."""
        return self.swiglu + 3 * MATRIX

    @property
    def feed_forward(self) -> float:
        """The same, the router, the gate of the shared expert."""
        return self.dense + self._softmax + self.logistic

    @property
    def vision_block(self) -> float:
        """Two layer norms, rope (3), softmax, four matrices with biases, GELU, two residuals."""
        return 2 * LAYER_NORM + 3 + self._softmax + self.division - 1 + 4 * (MATRIX + 1) + 2 * GELU_ERF_ULP + 2

    def vision_tower(self, a: Arrays) -> float:
        """Patches and positions, two additions a layer in the residual stream, then at most one block, or merger."""
        layers = 1 + max(int(part) for name in a for part in name.split(".") if part.isdecimal())
        return MATRIX + 2 + TAPS + 2 * layers + self.vision_block

    def decoder_chain(self, a: Arrays) -> float:
        """Two additions a layer in the residual stream; then at most one mixer, into a state, or norm and head."""
        layers = 1 + max(int(name.split(".")[1]) for name in a if name.startswith("layers."))
        return 2 * layers + self.gated_delta_net


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


def fma_chain(a: Arrays) -> float:
    """One rounding a term."""
    return a["x"].shape[1]


def token_product(a: Arrays) -> float:
    """The longest chain of a product of one row: blocks of a part, the products of a quad or two and the scale, the parts of a
    row and the warps that share it; or, of floats, one of 32 lanes and their sums."""
    k = len(a["x"])
    return max(-(-k // 64) + 8 + 1 + 16 + 8, -(-k // 32) + 32)


def token_terms(a: Arrays) -> float:
    """Each term may underflow, not only those on one chain."""
    return len(a["x"])


def token_normed(a: Arrays) -> float:
    """The same behind a norm and added to what was there. Of the square sum, a chain of k / 256, 8 and 32 more, a division and
    eps, the root leaves half; then the root (1.5 units: csrc/sm20/math.cuh) and three products."""
    return token_product(a) + (-(-len(a["x"]) // 256) + 8 + 32 + 2) / 2 + 2 * 1.5 + 3 + 1


def token_value(a: Arrays) -> float:
    """Largest value that a token attends to, which may cancel."""
    return max(float(np.abs(a[name]).max(initial=0)) for name in ("value", "past_v"))


def up_gain(a: Arrays) -> float:
    """silu underflows, `up` enlarges."""
    return max(1.0, float(np.abs(a["gate_up"]).max(initial=0)))


def x_gain(a: Arrays) -> float:
    """The logistic underflows, `x` enlarges."""
    return max(1.0, float(np.abs(a["x"]).max(initial=0)))


def group_sum(a: Arrays) -> float:
    """Additions after the first element, and the quotient."""
    return int(a["group"])


def position_sum(a: Arrays) -> float:
    """A step a tap, the bias and the last addition."""
    return a["rows"].shape[1] + 2


def position_size(a: Arrays) -> float:
    """Largest sum of magnitudes that may go into an element."""
    return sum(float(np.abs(a[name]).max(initial=0)) for name in ("x", "b")) \
        + float(np.abs(a["table"]).max() * np.abs(a["weights"]).sum(1).max())


def mean_sum(a: Arrays) -> float:
    """Those of the mean, the bias and the last addition."""
    return int(a["group"]) + 2


def mean_size(a: Arrays) -> float:
    """The same."""
    return sum(float(np.abs(a[name]).max(initial=0)) for name in ("x", "y", "b"))


def turned_size(a: Arrays) -> float:
    """Both elements of a pair, each with its bias."""
    return 2 * sum(float(np.abs(a[name]).max(initial=0)) for name in ("x", "b"))


def value_size(a: Arrays) -> float:
    """Largest number that goes into sums of values, which may cancel."""
    return max(float(np.abs(a[name]).max(initial=0)) for name in ("v", "state") if name in a)


def read_size(a: Arrays) -> float:
    """The same, read out of a state through q."""
    return value_size(a) * float(np.sqrt(np.square(a["q"]).sum(-1)).max())


# Accuracies: csrc/scalar/math.h over all inputs; csrc/sm20/math.cuh, which tests/test_emulator.py holds. sm_20 divides by
# multiplying with 1 / l.
CPU = Arithmetic(0.891, 0.501, 0.503, 0.503, (lane_dot, term_count), 1, cache_formats)
SM20 = Arithmetic(0.97, 0.5001, 0.502, 0.502, (fma_chain, 1), 2, lambda head_dim: ("f32",))
