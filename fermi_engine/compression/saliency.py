"""Which experts matter: REAP saliency (Lasby et al., arXiv 2510.13999), added up while the engine reads a text.

score of expert j = mean, over the tokens routed to j, of gate * ||output of j||_2: the gate as the model uses it (softmax
over all experts, renormalised over the chosen), the output before the gate. Nothing is computed that the model would not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fermi_engine.errors import RequestError

KIND, VERSION = "fermi-engine-reap", 1


class Saliency:
    """Sums over routed tokens: gate_norm float64, routed int64 and broken int64, [layers, experts] each.

    broken counts outputs that are NaN or infinite where the layer's input is finite: the expert's own fault. Tokens whose
    input is not finite any more are left out everywhere.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self.gate_norm = np.zeros((layers, experts))
        self.routed, self.broken = (np.zeros((layers, experts), np.int64) for _ in range(2))
        self._seen: dict[str, np.ndarray] = {}

    def trace(self, name: str, array: np.ndarray) -> None:
        """What layers report; the work is done when an expert layer's outputs come."""
        kind = name.rsplit(".", 1)[-1]
        if kind in ("ffn_norm", "router_ids", "router_weights", "expert_rows"):
            self._seen[kind] = array
        elif kind == "expert_out":
            self._add(int(name.split(".")[1]), array, **self._seen)

    def _add(self, layer: int, expert_out: np.ndarray, ffn_norm: np.ndarray, router_ids: np.ndarray,
             router_weights: np.ndarray, expert_rows: np.ndarray) -> None:
        """expert_out [T * k, H], ffn_norm [T, H]; ids, gates and rows [T, k]."""
        with np.errstate(over="ignore", invalid="ignore"):
            norms = np.sqrt(np.square(expert_out, dtype=np.float64).sum(axis=1))[expert_rows]
        counted = np.isfinite(ffn_norm).all(axis=1)[:, None] & np.isfinite(router_weights)
        good = counted & np.isfinite(norms)
        np.add.at(self.gate_norm[layer], router_ids[good], (router_weights * norms)[good])
        np.add.at(self.routed[layer], router_ids[good], 1)
        np.add.at(self.broken[layer], router_ids[counted & ~good], 1)

    def scores(self) -> np.ndarray:
        """float64 [layers, experts]; 0 for an expert never routed to, NaN for one that gave no numbers."""
        scores = np.divide(self.gate_norm, self.routed, out=np.zeros_like(self.gate_norm), where=self.routed > 0)
        scores[self.broken > 0] = np.nan
        return scores

    def arrays(self) -> dict[str, np.ndarray]:
        """The sums."""
        return {"gate_norm": self.gate_norm, "routed": self.routed, "broken": self.broken}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Go on from earlier sums."""
        self.gate_norm, self.routed, self.broken = (arrays[name].copy() for name in ("gate_norm", "routed", "broken"))


def keep_best(scores: np.ndarray, keep: int) -> np.ndarray:
    """int64 [layers, keep], rising: the experts of highest score of each layer; of equal scores the lower id stays.

    scores [layers, experts]. A NaN score is worse than any. RequestError where one would have to stay.
    """
    ranked = np.where(np.isnan(scores), -np.inf, scores)
    kept = np.sort(np.argsort(-ranked, axis=1, kind="stable")[:, :keep], axis=1)
    for layer, ids in enumerate(kept):
        bad = ids[np.isnan(scores[layer, ids])]
        if bad.size:
            raise RequestError(f"layer {layer} would keep expert {bad[0]}, whose output is no number; keep fewer than {keep}, "
                               "or check the model: fermi-engine info --check")
    return kept


@dataclass
class Scores:
    """Saliency of a model as a file holds it: scores and routed [layers, experts]; `about` says what it was measured on."""

    scores: np.ndarray
    routed: np.ndarray
    top_k: int
    about: dict[str, Any] = field(default_factory=dict)

    def to_json(self, kept: np.ndarray) -> dict[str, Any]:
        """The file's document, with the experts that stay [layers, keep]; a NaN score is null."""
        layers = [{"layer": i, "kept": ids.tolist(), "scores": [None if math.isnan(s) else s for s in self.scores[i].tolist()],
                   "routed": self.routed[i].tolist()} for i, ids in enumerate(kept)]
        return {"kind": KIND, "version": VERSION, **self.about, "experts": self.scores.shape[1], "top_k": self.top_k,
                "keep": kept.shape[1], "layers": layers}

    @classmethod
    def read(cls, path: Path) -> Scores:
        """Read such a file. RequestError naming it where it is none, damaged, or its layers have different numbers of
        experts."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except OSError as err:
            raise RequestError(f"cannot read {path}: {err.strerror}; give the scores of a fermi-engine reap") from None
        except (ValueError, RecursionError):
            raise RequestError(f"{path} is no JSON; give the scores of a fermi-engine reap") from None
        if not isinstance(fields, dict) or fields.get("kind") != KIND or fields.get("version") != VERSION:
            raise RequestError(f"{path} holds no scores of version {VERSION}; give those of a fermi-engine reap")
        try:
            rows = [row["scores"] for row in fields["layers"]]
            counts = {len(row) for row in rows}
            if len(counts) != 1:
                raise RequestError(f"{path} has layers of {', '.join(map(str, sorted(counts)))} experts; a model has as many "
                                   "in every layer: measure it again")
            scores = np.array([[math.nan if s is None else s for s in row] for row in rows], np.float64)
            routed = np.array([row["routed"] for row in fields["layers"]], np.int64)
            if scores.shape != routed.shape:
                raise ValueError
            about = {name: fields[name] for name in fields if name not in ("kind", "version", "experts", "top_k", "keep",
                                                                           "layers")}
            return cls(scores, routed, int(fields["top_k"]), about)
        except (KeyError, TypeError, ValueError):
            raise RequestError(f"{path} is damaged; measure the model again") from None
