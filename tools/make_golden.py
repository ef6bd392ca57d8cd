"""Makes the golden files: what the reference gives on fixed inputs, for `fermi-engine verify` to replay without torch.

    python tools/make_golden.py                   every stage
    python tools/make_golden.py --stage rope      some
    python tools/make_golden.py --check           compute again and compare, write nothing

Writing is refused in CI and while the sources of the truth hold uncommitted changes, unless every stage named is new: a
golden that changes is evidence to look into, not a file to refresh.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's sums depend on it

import torch  # noqa: E402

from fermi_engine.compare import Arrays  # noqa: E402
from fermi_engine.errors import FermiError, VerifyError  # noqa: E402
from fermi_engine.stages.table import STAGES, Stage, find_stage  # noqa: E402
from fermi_engine.verify import DTYPES, GOLDEN_FORMAT, MANIFEST, load, tensor_hash  # noqa: E402
from tests.oracle import tensors  # noqa: E402
from tests.stages import ORACLES  # noqa: E402

SEED = 20
MAX_BYTES = 1_000_000
# Where truths and golden inputs come from.
SOURCES = ("reference", "tools", "tests/stages.py", "tests/kernel_references.py", "tests/gpu_stages.py", "tests/token_stages.py",
           "tests/model_stages.py", "tests/vision_stages.py", "tests/vision_inputs.py", "tests/oracle.py",
           "tests/strategies.py", "tests/tiny_models.py")
# Float64 sums in another order: a relative difference far above 2^-53 times their length, far below float32's 2^-24.
DOUBLE = 1e-10


def compute(stage: Stage) -> tuple[Arrays, dict[str, float]]:
    """The tensors of a golden, and per output the reference's own largest error in float32."""
    oracle = ORACLES[stage.name]
    inputs = oracle.inputs(SEED, **oracle.golden)
    if not oracle.usable(tensors(inputs)):
        raise VerifyError(f"{stage.name}: on these inputs noise may change a choice; give another structure in tests/")
    case = oracle.case(inputs)
    errors = oracle.errors(case)
    if oracle.pinned:
        made = stage.candidate(inputs, "scalar", 1)
        case = case._replace(outputs={**case.outputs, **{name: made[name] for name in oracle.pinned}})
    parts = zip(("in", "out", "bound"), case, strict=True)
    return {f"{prefix}.{name}": array for prefix, arrays in parts for name, array in arrays.items()}, errors


def metadata(stage: Stage, errors: dict[str, float]) -> dict[str, str]:
    """What a golden says of itself."""
    versions = {"torch": torch.__version__, "numpy": np.__version__}
    return {"format": GOLDEN_FORMAT, "stage": stage.name, "compare": repr(stage.compare), "seed": str(SEED),
            "structure": json.dumps(ORACLES[stage.name].golden, sort_keys=True),
            "versions": json.dumps(versions, sort_keys=True), "errors": json.dumps(errors, sort_keys=True)}


def to_bytes(arrays: Arrays, about: dict[str, str]) -> bytes:
    """A safetensors file: wide types first, then by name, so that equal contents give equal bytes."""
    codes = {np.dtype(code): name for name, code in DTYPES.items()}
    header: dict[str, object] = {"__metadata__": about}
    body = bytearray()
    for name in sorted(arrays, key=lambda name: (-arrays[name].itemsize, name)):
        begin = len(body)
        body += np.ascontiguousarray(arrays[name]).tobytes()
        header[name] = {"dtype": codes[arrays[name].dtype], "shape": list(arrays[name].shape),
                        "data_offsets": [begin, len(body)]}
    text = json.dumps(header, sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


def write(directory: Path, stages: list[Stage]) -> None:
    """Make the goldens of `stages` and list them in the manifest. Raises VerifyError where that is refused."""
    refuse(directory, stages)
    directory.mkdir(exist_ok=True)
    path = directory / MANIFEST
    manifest = json.loads(path.read_text()) if path.is_file() else {}
    for stage in stages:
        arrays, errors = compute(stage)
        content = to_bytes(arrays, metadata(stage, errors))
        if len(content) > MAX_BYTES:
            raise VerifyError(f"{stage.name}: {len(content)} bytes, a golden may have {MAX_BYTES}; shrink its inputs")
        _replace(directory / f"{stage.name}.safetensors", content)
        manifest[stage.name] = tensor_hash(arrays)
        ordered = {s.name: manifest[s.name] for s in STAGES if s.name in manifest}
        _replace(path, (json.dumps(ordered, indent=1) + "\n").encode())
        case, backend = load(directory, stage.name).case, "scalar" if stage.cpu else "emulated"
        verdict = stage.form(backend).judge(stage.candidate(case.inputs, backend, 1), case)
        print(f"{stage.name:16s} {len(content):7d} bytes; {backend} kernels: {verdict}")


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    os.replace(part, path)


def refuse(directory: Path, stages: list[Stage]) -> None:
    """Raises VerifyError in CI, and for uncommitted changes in SOURCES unless none of the stages has a golden yet."""
    if os.environ.get("CI"):
        raise VerifyError("goldens are not made in CI: run tools/make_golden.py where you can look at what changes")
    old = [stage.name for stage in stages if (directory / f"{stage.name}.safetensors").exists()]
    changed = uncommitted()
    if old and changed:
        raise VerifyError(f"{old[0]} has a golden and {changed[0]} has uncommitted changes: commit them first, "
                          "or name new stages only")


def uncommitted() -> list[str]:
    """Changed or untracked files in SOURCES; none outside a repository or before its first commit."""
    if _git("rev-parse", "--verify", "--quiet", "HEAD") is None:
        return []
    lines = _git("status", "--porcelain", "--untracked-files=all", "--", *SOURCES) or ""
    return [line[3:] for line in lines.splitlines()]


def _git(*args: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout


def check(directory: Path, stages: list[Stage]) -> list[tuple[str, str, str]]:
    """(stage, tensor, what differs) between the files and what the reference gives now."""
    return [(stage.name, name, problem) for stage in stages for name, problem in _differences(directory, stage)]


def _differences(directory: Path, stage: Stage) -> Iterator[tuple[str, str]]:
    golden = load(directory, stage.name)
    now, _ = compute(stage)
    stored = {f"{prefix}.{name}": array for prefix, arrays in zip(("in", "out", "bound"), golden.case, strict=True)
              for name, array in arrays.items()}
    if golden.metadata["compare"] != repr(stage.compare):
        yield "metadata", f"made for {golden.metadata['compare']}, the stage compares by {stage.compare!r}"
    for name in sorted(stored.keys() ^ now.keys()):
        yield name, "only in the file" if name in stored else "not in the file"
    errors = json.loads(golden.metadata["errors"])
    for name in sorted(stored.keys() & now.keys()):
        problem = _difference(name, stored[name], now[name], errors)
        if problem:
            yield name, problem


def _difference(name: str, stored: np.ndarray, now: np.ndarray, errors: dict[str, float]) -> str | None:
    """Inputs and exact outputs are equal to the byte. A float64 output moves by at most the reference's float32 error,
    a measured bound (a single number, or that of integers) by itself: torch's bits change with CPU and version."""
    if (stored.dtype, stored.shape) != (now.dtype, now.shape):
        return f"{stored.dtype} {stored.shape} in the file, now {now.dtype} {now.shape}"
    kind, _, output = name.partition(".")
    if stored.tobytes() == now.tobytes():
        return None
    if kind == "in" or now.dtype != np.float64:
        return f"{int((stored != now).sum())} of {now.size} differ"
    if kind == "out":
        allowed = errors[output]
    else:
        allowed = np.abs(stored) * (DOUBLE if output in errors and stored.ndim else 1)
    excess = np.abs(now - stored) - allowed
    return f"differs by {np.abs(now - stored).max():.3g}, allowed {np.max(allowed):.3g}" if (excess > 0).any() else None


def main(argv: list[str] | None = None) -> int:
    """Command line: 1 where a check found differences, 2 for a refusal, told in one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", action="append", choices=[stage.name for stage in STAGES], help="default: all")
    parser.add_argument("--check", action="store_true", help="compare with the files, write nothing")
    parser.add_argument("--directory", type=Path, default=ROOT / "golden", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    stages = [find_stage(name) for name in args.stage] if args.stage else list(STAGES)
    try:
        if not args.check:
            write(args.directory, stages)
            return 0
        problems = check(args.directory, stages)
    except FermiError as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    for row in problems:
        print("{:16s} {:24s} {}".format(*row))
    print(f"{len(stages)} goldens checked, {len(problems)} differences")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
