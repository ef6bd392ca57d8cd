"""Replays the golden files: every stage on this machine against what the reference gave. NumPy only, no torch.

A golden is a safetensors file with inputs `in.*`, the reference's outputs `out.*` and bounds `bound.*` (compare.py);
tools/make_golden.py makes them. MANIFEST.json holds a hash of each one's tensors, so that a damaged or edited file is
an error and not a verdict.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from difflib import get_close_matches
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fermi_engine import kernels
from fermi_engine.compare import Arrays, Case, verdict
from fermi_engine.errors import DeviceError, VerifyError
from fermi_engine.kernels import dispatch
from fermi_engine.safetensors_header import read_header
from fermi_engine.stages.device_run import DEVICES, Reopened
from fermi_engine.stages.table import STAGES, Stage, find_stage

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
    """Run stages (names; None: all that have a form there) on `backend` (None: FERMI_BACKEND, else each of the CPU's that can
    run here) and judge them. `emulated` and `cuda` run the sm_20 kernels.

    Rows go from kernels up to generation, a stage's backends side by side. on_result(done, total, stage) after each.
    Raises VerifyError for a stage that is unknown or has no form there, and for a golden that is missing, damaged or altered;
    BackendError or DeviceError where the backend cannot run at all. A device that fails in a stage fails the stage.
    """
    directory = directory or golden_directory()
    backends = _backends(backend)
    todo = [(stage, name) for stage in _chosen(stages, backends) for name in backends if stage.form(name)]
    rows: list[Row] = []
    with ExitStack() as stack:
        held = {name: _held(name, stack) for name in backends}
        for stage, name in todo:
            rows.append(_row(stage, name, held[name], load(directory, stage.name).case))
            if on_result is not None:
                on_result(len(rows), len(todo), stage.name)
    return rows


def formless(backend: str | None = None) -> list[str]:
    """Names of the stages that `replay` leaves out there, because they have no form for it."""
    backends = _backends(backend)
    return [stage.name for stage in STAGES if not any(stage.form(name) for name in backends)]


def _backends(backend: str | None) -> list[str]:
    forced = backend or os.environ.get("FERMI_BACKEND")
    return [forced] if forced else dispatch.supported()


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


def _chosen(names: Sequence[str] | None, backends: list[str]) -> list[Stage]:
    known = [stage.name for stage in STAGES]
    unknown = [name for name in names or () if name not in known]
    if unknown:
        near = ", ".join(get_close_matches(unknown[0], known, n=8, cutoff=0))
        raise VerifyError(f"unknown stage {unknown[0]!r}; of {len(known)} stages those most like it are {near}")
    chosen = [stage for stage in STAGES if not names or stage.name in names]
    for stage in chosen if names else ():
        if not any(stage.form(name) for name in backends):
            raise VerifyError(f"stage {stage.name} has no form for {', '.join(backends)}; it runs on "
                              f"{', '.join(stage.backends)}")
    return chosen


def _part(arrays: Arrays, prefix: str) -> Arrays:
    return {name[len(prefix):]: array for name, array in arrays.items() if name.startswith(prefix)}


def _held(backend: str, stack: ExitStack) -> Callable[[], AbstractContextManager[Any]]:
    """Makes what a stage computes with: the same kernels every time, or a run on a device that stays open."""
    if backend not in DEVICES:
        found = kernels.get(backend)
        return lambda: nullcontext(found)
    device = Reopened(backend)
    stack.callback(device.close)
    return device.run


def _row(stage: Stage, backend: str, held: Callable[[], AbstractContextManager[Any]], case: Case) -> Row:
    form = stage.form(backend)
    try:
        with held() as found:
            got = form.compute(found, case.inputs)
        v = form.judge(got, case)
    except DeviceError as err:
        v = verdict("device error", 1, 0, str(err))
    return Row(stage.name, backend, v.metric, v.value, v.limit, v.ratio, "pass" if v.passed else "FAIL", v.detail)
