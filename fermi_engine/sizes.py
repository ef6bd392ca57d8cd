"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

from fermi_engine.errors import RequestError
from fermi_engine.report import quoted

UNITS = {"": 1, "B": 1, **{f"{prefix}B": 1000**n for n, prefix in enumerate("kMGT", 1)},
         **{f"{prefix}iB": 1024**n for n, prefix in enumerate("KMGT", 1)}}
BYTES = re.compile(rf"(\d{{1,15}}(?:\.\d{{1,9}})?) ?({'|'.join(UNITS)})")


def parse_bytes(option: str, text: str | None) -> int | None:
    """`6GiB`, `500MB` or a whole number of bytes; None without any. RequestError for anything else."""
    if text is None:
        return None
    found = BYTES.fullmatch(text.strip())
    count = int(float(found[1]) * UNITS[found[2]]) if found else 0
    if not count:
        raise RequestError(f"{option} {quoted(text)} is not a size; give for example 6GiB, 500MB or a number of bytes")
    return count


def parse_budget(option: str, text: str | None) -> int | None:
    """The same, and 0 for nothing at all."""
    return 0 if text is not None and text.strip() == "0" else parse_bytes(option, text)
