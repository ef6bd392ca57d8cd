"""Which tensor gets which format: a visible table, first match wins, and the user's rules checked before it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from fermi_engine.errors import ConfigError
from fermi_engine.formats import FORMATS, find_format
from fermi_engine.vision.config import is_vision

# Small, and read in full for every token: four bits would save nothing and cost accuracy where it hurts most.
F32_RULES = (
    ("*norm.weight", "norm"),
    ("*.conv1d.weight", "causal convolution"),
    ("*.A_log", "decay of the delta rule"),
    ("*.dt_bias", "decay of the delta rule"),
    ("*.in_proj_a.weight", "decay of the delta rule"),
    ("*.in_proj_b.weight", "write strength of the delta rule"),
    ("*.mlp.gate.weight", "router: a rounding error picks another expert"),
    ("*.mlp.shared_expert_gate.weight", "gate of the shared expert"),
    ("visual.patch_embed.*", "pixels"),
    ("vision_tower.embeddings.patch_embedding.*", "pixels"),
    ("visual.pos_embed.weight", "position table"),
    ("vision_tower.embeddings.position_embedding.weight", "position table"),
)
VISION_FORMAT = {"q4_0": "q8_0"}  # of a tower's matrices, by default format


class Rule(NamedTuple):
    """A user's wish: tensors whose canonical name matches `pattern` (fnmatch) are stored as `format`."""

    pattern: str
    format: str


class Assignment(NamedTuple):
    """The format of one tensor and why it has it."""

    format: str
    reason: str


def parse_rules(text: str | None) -> tuple[Rule, ...]:
    """`"pattern=format,pattern=format"` -> rules; ConfigError for another shape or an unknown format."""
    rules = []
    for part in filter(None, (part.strip() for part in (text or "").split(","))):
        pattern, equals, name = (piece.strip() for piece in part.rpartition("="))
        if not (equals and pattern and name):
            raise ConfigError(f"rule {part!r} is not of the form pattern=format, for example *.experts.*=q8_0")
        if name not in FORMATS:
            raise ConfigError(f"rule {part!r}: unknown weight format {name!r}; choose one of {', '.join(FORMATS)}")
        rules.append(Rule(pattern, name))
    return tuple(rules)


def assign(shapes: Mapping[str, Sequence[int]], default: str, rules: Sequence[Rule] = ()) -> dict[str, Assignment]:
    """Format and reason of every tensor of `shapes` (canonical name -> shape, in its order).

    ConfigError for an unknown default, a rule that matches nothing, or one that would move a tensor of F32_RULES
    out of f32.
    """
    find_format(default)
    for rule in rules:
        _check_rule(rule, shapes)
    return {name: _assign(name, tuple(shape), default, rules) for name, shape in shapes.items()}


def _check_rule(rule: Rule, shapes: Mapping[str, Sequence[int]]) -> None:
    matches = [name for name in shapes if fnmatchcase(name, rule.pattern)]
    if not matches:
        example = next((name for name in shapes if _f32_reason(name) is None), "none")
        raise ConfigError(f"rule '{rule.pattern}={rule.format}' matches no tensor; names look like {example}")
    fixed = next((name for name in matches if _f32_reason(name)), None)
    if fixed and rule.format != "f32":
        raise ConfigError(f"rule '{rule.pattern}={rule.format}' matches {fixed} ({_f32_reason(fixed)}), which stays "
                          "f32; narrow the pattern, or set the default format instead")


def _f32_reason(name: str) -> str | None:
    return next((reason for pattern, reason in F32_RULES if fnmatchcase(name, pattern)), None)


def _assign(name: str, shape: tuple[int, ...], default: str, rules: Sequence[Rule]) -> Assignment:
    rule = next((rule for rule in rules if fnmatchcase(name, rule.pattern)), None)
    fixed = _f32_reason(name)
    if fixed or len(shape) < 2:
        return Assignment("f32", fixed or "vector")
    wanted = rule.format if rule else VISION_FORMAT.get(default, default) if is_vision(name) else default
    block = FORMATS[wanted].block
    if shape[-1] % block:
        return Assignment("f32", f"row length {shape[-1]} is not a multiple of {block}, so not {wanted}")
    plain = "default" if wanted == default else "vision: four bits would save little"
    return Assignment(wanted, f"rule {rule.pattern}={rule.format}" if rule else plain)


class RuleRow(NamedTuple):
    """One printable line: tensors of one kind (layer numbers shown as *) that share format and reason."""

    tensors: str
    count: int
    format: str
    reason: str


def rule_rows(assignments: Mapping[str, Assignment]) -> list[RuleRow]:
    """The assignment as a table, one row a kind of tensor, in order of first appearance."""
    counts: dict[tuple[str, Assignment], int] = {}
    for name, assignment in assignments.items():
        key = re.sub(r"(^|\.)(layers|blocks)\.\d+\.", r"\1\2.*.", name), assignment
        counts[key] = counts.get(key, 0) + 1
    return [RuleRow(kind, count, *assignment) for (kind, assignment), count in counts.items()]
