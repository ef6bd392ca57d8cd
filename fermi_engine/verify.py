"""Replays the golden files: every stage on this machine against what the reference gave. NumPy only, no torch.

A golden is a safetensors file with inputs `in.*`, the reference's outputs `out.*` and bounds `bound.*` (compare.py);
tools/make_golden.py makes them. MANIFEST.json holds a hash of each one's tensors, so that a damaged or edited file is
an error and not a verdict.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fermi_engine.compare import Arrays, Case
from fermi_engine.errors import VerifyError
from fermi_engine.kernels import dispatch
from fermi_engine.safetensors_header import read_header
from fermi_engine.stages import STAGES, Stage, find_stage

MANIFEST = "MANIFEST.json"
GOLDEN_FORMAT = "fermi-engine-golden"
DTYPES = {"F64": "<f8", "F32": "<f4", "I64": "<i8", "I32": "<i4", "I8": "i1", "U8": "u1"}
FORWARD_STAGE = "decoder_q4_0"
_REMEDY = "install the package again, or `git checkout golden` in a source tree"


class Row(NamedTuple):
    """One stage on one backend: `value` of `metric` against `limit`, their ratio, and the verdict, 'pass' or 'FAIL'."""

    stage: str
    backend: str
    metric: str
    value: float
    limit: float
    ratio: float
    verdict: str
    detail: str

    @property
    def passed(self) -> bool:
        """True for 'pass'."""
        return self.verdict == "pass"


class Golden(NamedTuple):
    """A golden file's content."""

    case: Case
    metadata: Mapping[str, str]


def replay(backend: str | None = None, stages: Sequence[str] | None = None,
           on_result: Callable[[int, int, str], None] | None = None, directory: Path | None = None) -> list[Row]:
    """Run stages (names; None: all) on `backend` (None: FERMI_BACKEND, else each that this CPU runs) and judge them.

    Rows go from kernels up to generation, a stage's backends side by side. on_result(done, total, stage) after each.
    Raises VerifyError for an unknown stage and for a golden that is missing, damaged or altered; BackendError.
    """
    directory = directory or golden_directory()
    forced = backend or os.environ.get("FERMI_BACKEND")
    backends = [forced] if forced else dispatch.supported()
    chosen, rows = _chosen(stages), []
    for stage in chosen:
        case = load(directory, stage.name).case
        for name in backends:
            rows.append(_row(stage, name, case))
            if on_result is not None:
                on_result(len(rows), len(chosen) * len(backends), stage.name)
    return rows


def first_divergence(rows: Sequence[Row]) -> Row | None:
    """The first row that failed: what the rows after it build on."""
    return next((row for row in rows if not row.passed), None)


def forward_hash(backend: str | None = None, directory: Path | None = None) -> str:
    """Hex blake2b over logits and state of the quantised model's golden run: one value for every backend and CPU.

    The golden holds the value expected (`replay` compares it). Raises as `replay`.
    """
    case = load(directory or golden_directory(), FORWARD_STAGE).case
    return find_stage(FORWARD_STAGE).candidate(case.inputs, backend)["digest"].tobytes().hex()


def golden_directory() -> Path:
    """Where the golden files lie: in the installed package, else in the source tree. Raises VerifyError."""
    try:
        from fermi_engine import golden
        places = [Path(place) for place in golden.__path__]
    except ImportError:
        places = []
    places.append(Path(__file__).resolve().parent.parent / "golden")
    found = next((place for place in places if (place / MANIFEST).is_file()), None)
    if found is None:
        raise VerifyError(f"no golden files: {places[-1] / MANIFEST} is missing; {_REMEDY}")
    return found


def load(directory: Path, stage: str) -> Golden:
    """The golden of `stage`, its hash checked against the manifest. Raises VerifyError naming the file."""
    expected = _manifest(directory / MANIFEST).get(stage)
    path = directory / f"{stage}.safetensors"
    if expected is None:
        raise VerifyError(f"{directory / MANIFEST} does not list {stage}; run `make golden STAGE={stage}`")
    if not path.is_file():
        raise VerifyError(f"{path} is missing; {_REMEDY}")
    arrays, metadata = read(path)
    if tensor_hash(arrays) != expected:
        raise VerifyError(f"{path} is not the file that {MANIFEST} describes: its tensors were altered; {_REMEDY}")
    if metadata.get("format") != GOLDEN_FORMAT or metadata.get("stage") != stage:
        raise VerifyError(f"{path} calls itself {metadata.get('stage')!r}, expected a golden of {stage!r}; {_REMEDY}")
    parts = [_part(arrays, prefix) for prefix in ("in.", "out.", "bound.")]
    return Golden(Case(*parts), metadata)


def read(path: Path) -> tuple[Arrays, dict[str, str]]:
    """Every tensor of a safetensors file, and its metadata. Raises VerifyError."""
    header = read_header(path, VerifyError)
    data = np.fromfile(path, np.uint8, offset=header.data_start)
    arrays = {}
    for name, entry in header.tensors.items():
        if entry.dtype not in DTYPES:
            raise VerifyError(f"{path}: tensor {name} has type {entry.dtype}, which no golden uses; {_REMEDY}")
        arrays[name] = data[entry.begin:entry.end].copy().view(DTYPES[entry.dtype]).reshape(entry.shape)
    return arrays, header.metadata


def tensor_hash(arrays: Arrays) -> str:
    """Hex blake2b over names, types, shapes and bytes, by name: how a file is laid out does not matter."""
    hash = blake2b(digest_size=32)
    for name in sorted(arrays):
        array = arrays[name]
        hash.update(f"{name} {array.dtype.str} {array.shape}\n".encode() + np.ascontiguousarray(array).tobytes())
    return hash.hexdigest()


def _manifest(path: Path) -> dict[str, str]:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise VerifyError(f"cannot read {path}: {err}; {_REMEDY}") from None
    if not isinstance(manifest, dict):
        raise VerifyError(f"{path} is not a table of stages; {_REMEDY}")
    return manifest


def _chosen(names: Sequence[str] | None) -> list[Stage]:
    known = [stage.name for stage in STAGES]
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise VerifyError(f"unknown stage {unknown[0]!r}; stages are {', '.join(known)}")
    return [stage for stage in STAGES if not names or stage.name in names]


def _part(arrays: Arrays, prefix: str) -> Arrays:
    return {name[len(prefix):]: array for name, array in arrays.items() if name.startswith(prefix)}


def _row(stage: Stage, backend: str, case: Case) -> Row:
    v = stage.compare.judge(stage.candidate(case.inputs, backend), case)
    return Row(stage.name, backend, v.metric, v.value, v.limit, v.ratio, "pass" if v.passed else "FAIL", v.detail)
