"""Rules that keep the most sensitive tensors of a q4_0 pack at q8_0, within a number of bytes: `--rules sensitive=5%`.

How much a tensor loses was measured by quantising it alone (fermi-engine eval --by kind, or --by tensor): mean KL divergence
from the f32 model, in nats. What one more byte buys is then known, and bytes go where they buy most.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from fermi_engine.compression.rules import Rule, assign, parse_rules
from fermi_engine.errors import ConfigError, RequestError
from fermi_engine.formats import FORMATS
from fermi_engine.sizes import parse_bytes

PRESET = "sensitive"
LOW, HIGH = "q4_0", "q8_0"
BUDGET = re.compile(r"(\d{1,3}(?:\.\d{1,3})?)%")
LAYER = re.compile(r"^layers\.\d+\.")
# Nats per weight, of golden/tiny in q4_0: tools/tiny_quality.py measures them, golden/tiny/README.md has the table.
MEASURED = {
    "lm_head.weight": 7.8e-9,
    "layers.*.self_attn.v_proj.weight": 2.0e-9,
    "layers.*.mlp.experts.down_proj": 1.5e-9,
    "layers.*.self_attn.k_proj.weight": 7.7e-10,
    "layers.*.mlp.shared_expert.down_proj.weight": 4.1e-10,
    "layers.*.linear_attn.out_proj.weight": 4.0e-10,
    "layers.*.self_attn.o_proj.weight": 3.9e-10,
    "embed_tokens.weight": 3.7e-10,
    "layers.*.linear_attn.in_proj_z.weight": 2.0e-10,
    "layers.*.self_attn.q_proj.weight": 1.6e-10,
    "layers.*.linear_attn.in_proj_qkv.weight": 1.2e-10,
    "layers.*.mlp.shared_expert.gate_proj.weight": 1.1e-10,
    "layers.*.mlp.shared_expert.up_proj.weight": 8.4e-11,
    "layers.*.mlp.experts.gate_up_proj": 4.5e-11,
}

Shapes = Mapping[str, Sequence[int]]


class Costed(NamedTuple):
    """One tensor that could be q8_0: nats it loses in q4_0, and the bytes it would grow by."""

    name: str
    nats: float
    more_bytes: int


def resolve(text: str | None, shapes: Shapes, default: str) -> tuple[Rule, ...]:
    """Rules of a --rules text: `pattern=format` as in parse_rules, and `sensitive=BUDGET` or `sensitive=BUDGET@FILE`.

    BUDGET: `5%` of the pack's bytes without it, or a size as `500MB`. FILE: what `fermi-engine eval --by kind --json` (or
    tensor) wrote about this model; without it the figures of MEASURED count. Rules given as such win over the preset.
    ConfigError or RequestError for anything else.
    """
    parts = [part.strip() for part in (text or "").split(",")]
    presets = [part for part in parts if part.partition("=")[0].strip() == PRESET]
    given = parse_rules(",".join(part for part in parts if part not in presets))
    if not presets:
        return given
    if len(presets) > 1:
        raise ConfigError(f"{PRESET} is given twice; give one budget")
    budget, _, file = presets[0].partition("=")[2].strip().partition("@")
    if default != LOW:
        raise ConfigError(f"{PRESET} keeps tensors of a {LOW} pack at {HIGH}; the default format is {default}")
    measured = read_measured(Path(file)) if file else MEASURED
    return (*given, *sensitive(shapes, given, _bytes(budget, shapes, given), measured))


def _bytes(text: str, shapes: Shapes, given: Sequence[Rule]) -> int:
    share = BUDGET.fullmatch(text.strip())
    if share is None:
        return parse_bytes(f"{PRESET}=", text) or 0
    assignments = assign(shapes, LOW, given)
    return int(sum(_stored(shape, assignments[name].format) for name, shape in shapes.items()) * float(share[1]) / 100)


def _stored(shape: Sequence[int], format: str) -> int:
    """Bytes of a tensor: of a stack of matrices all of them, of a vector or a convolution float32."""
    if len(shape) < 2 or format == "f32":
        return 4 * math.prod(shape)
    return math.prod(shape[:-2]) * math.prod(FORMATS[format].stored_shape(*shape[-2:]))


def sensitive(shapes: Shapes, given: Sequence[Rule], budget: int, measured: Mapping[str, float]) -> tuple[Rule, ...]:
    """q8_0 for what buys most nats a byte, as long as it fits into `budget` bytes; one that does not fit is passed over.

    measured: nats per weight by canonical name, or by that of its kind (`layers.*.`). Tensors that `given` names or that are
    not q4_0 are left alone. A kind that is taken in all layers becomes one rule.
    """
    assignments = assign(shapes, LOW, given)
    free = [name for name, row in assignments.items() if row.format == LOW and row.reason == "default"]
    costed = [_costed(name, shapes[name], measured) for name in free]
    chosen, left = set(), budget
    for row in sorted(costed, key=lambda row: -row.nats / row.more_bytes):  # stable: equals in the model's order
        if row.nats > 0 and row.more_bytes <= left:
            chosen.add(row.name)
            left -= row.more_bytes
    return tuple(Rule(pattern, HIGH) for pattern in _patterns(chosen, shapes))


def _costed(name: str, shape: Sequence[int], measured: Mapping[str, float]) -> Costed:
    nats = measured.get(name, measured.get(LAYER.sub("layers.*.", name), 0.0))
    return Costed(name, nats * math.prod(shape), _stored(shape, HIGH) - _stored(shape, LOW))


def _patterns(chosen: set[str], shapes: Shapes) -> list[str]:
    """Names, or their kind's where every tensor of the kind is chosen, in the model's order."""
    patterns = []
    for name in (name for name in shapes if name in chosen):
        kind = LAYER.sub("layers.*.", name)
        whole = all(other in chosen for other in shapes if fnmatchcase(other, kind))
        patterns.append(kind if whole else name)
    return list(dict.fromkeys(patterns))


def read_measured(path: Path) -> dict[str, float]:
    """Nats per weight by tensor from the document that `eval --by kind|tensor --json` prints. RequestError for any other."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        rows = document["parts"] if document["by"] in ("kind", "tensor") else None
        return {name: float(row["kl"]["mean"]) / row["weights"] for row in rows for name in row["tensors"]}
    except OSError as err:
        raise RequestError(f"cannot read {path}: {err.strerror}; write it with fermi-engine eval --by kind --json") from None
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
        raise RequestError(f"{path} holds no losses by tensor; write it with fermi-engine eval --by kind --json") from None
