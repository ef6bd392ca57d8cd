"""What a GPU prefill did: its plan, what it copied, and from a timeline how long copies and kernels took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fermi_engine.kernels.gpu import Span
from fermi_engine.placement import Plan
from fermi_engine.report import size


@dataclass(frozen=True)
class Report:
    """What the last prefill did: its plan, bytes of weights copied, whose dense products (`own`, or the vendor's library by name
    and version), and with `timing` every operation on the device's clock."""

    plan: Plan
    copied_bytes: int
    peak_bytes: int
    gemm: str
    spans: tuple[Span, ...] = ()

    def line(self) -> str:
        """Tokens, memory, bytes copied, and where a timeline was kept how long copies and kernels took, and both at once."""
        blocks, tokens = self.plan.blocks, self.plan.blocks[-1][1] - self.plan.blocks[0][0]
        text = (f"GPU prefill of {tokens} tokens in {len(blocks)} block{'s' if len(blocks) > 1 else ''}, {self.plan.resident} "
                f"layers resident, {size(self.copied_bytes)} of weights copied, peak {size(self.peak_bytes)} of "
                f"{size(self.plan.limit)}" + ("" if self.gemm == "own" else f", products by {self.gemm}"))
        if not self.spans:
            return text
        copies, kernels = (busy(self.spans, engine) for engine in ("h2d", "compute"))
        both = _length(copies) + _length(kernels) - _length(_union([*copies, *kernels]))
        return (f"{text} | copies {_length(copies):.3f} s, kernels {_length(kernels):.3f} s, {both:.3f} s of it at once, "
                f"in all {max(span.end_s for span in self.spans):.3f} s")


def busy(spans: Sequence[Span], engine: str) -> list[tuple[float, float]]:
    """Times (begin, end) in seconds, apart and in order, in which an engine (h2d, d2h, compute) was busy."""
    return _union([(span.begin_s, span.end_s) for span in spans if span.engine == engine])


def _union(times: list[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(times):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def _length(times: list[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in times)
