"""Who imports whom, what lies where, and that a forced backend runs or raises."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from fermi_engine import kernels
from fermi_engine.errors import BackendError
from fermi_engine.kernels import dispatch
from fermi_engine.kernels._build import BACKENDS
from fermi_engine.kernels._build import kernels as declared_kernels

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
STDLIB = set(sys.stdlib_module_names)
# A module imports from the rows above its own only (annotations under TYPE_CHECKING aside).
TIERS = (
    ("errors", "compare", "report", "kept_memory", "background", "snapshots.directory"),
    ("sizes", "quality.resume", "quality.measures", "compression.saliency"),
    ("config_fields",),
    ("config", "formats", "safetensors_header", "tokenizer"),
    ("vision.images", "vision.plans"),
    ("vision.patches", "vision.config"),
    ("vision.prompt",),
    ("snapshots.boundaries", "snapshots.prefix", "shapes", "pack_layout", "tokenizer_ahead", "stages.array_weights", "chat",
     "kernels", "compression.rules", "state", "pages"),
    ("quality.documents", "compression.scales", "compression.sensitivity"),
    ("model", "checkpoint", "pack", "numa", "sampling", "snapshots.prefix_tree", "snapshots.budget", "placement"),
    ("vision.encoder",),
    ("memory", "pack_writer", "generate", "snapshots.cache", "timeline", "roofline", "gpu.stream", "gpu.state", "gpu.report",
     "gpu.boundaries"),
    ("compression.moments", "compression.prune_pack"),
    ("compression.prune_checkpoint",),
    ("convert", "snapshots.taking", "gpu.prefill", "gpu.resident", "gpu.vision", "snapshots.sealed_file"),
    ("session", "gpu.cost", "snapshots.files"),
    ("gpu.choice", "snapshots.disk"),
    ("engine", "stages.runs", "stages.device_run", "stages.vision_runs", "snapshots.named_session"),
    ("quality.evaluate", "compression.calibration"),
    ("stages.cpu", "stages.gpu_runs", "stages.gpu_vision_runs"),
    ("stages.limits", "stages.gpu"),
    ("stages.products", "stages.token", "stages.vision"),
    ("doctor", "info", "stages.table", "against", "conversation"),
    ("verify", "cli.files", "cli.generate"),
    ("cli.evaluate", "compression.calibrate", "compression.reap"),
    ("cli.reap",),
    ("cli.verify", "bench"),
    ("cli.bench",),
    ("cli.options",),
    ("cli.measure",),
    ("cli.app",),
)
# What the parts at the bottom may import at most.
MAY_IMPORT = {
    "fermi_engine/kernels": {"kernels", "errors", "formats", "config"},
    "fermi_engine/model": {"model", "kernels", "config", "formats", "state", "vision"},
    "fermi_engine/formats.py": {"errors"},
    "fermi_engine/config.py": {"errors", "config_fields"},
    "fermi_engine/state.py": {"config", "formats", "kept_memory"},
    "fermi_engine/placement.py": {"errors", "kernels"},
    "fermi_engine/compare.py": set(),
    "fermi_engine/sampling.py": {"errors", "tokenizer", "kernels"},
}
PUBLIC_FUNCTION = re.compile(r"^(?!static|typedef|enum|struct|union|INLINE)\w[\w \*]*?(\w+)\([^;]*?\)\s*\{", re.M)
FILE_MODULES = {"pathlib", "mmap", "io", "os", "shutil", "tempfile", "fermi_engine.safetensors_header"}
FILE_CALLS = {"open", "fromfile", "load", "memmap", "loadtxt", "read_text", "read_bytes", "write_text", "write_bytes",
              "tofile", "save"}


def sources(where: str) -> list[Path]:
    path = ROOT / where
    found = [path] if path.is_file() else sorted(path.rglob("*.py"))
    assert found, f"nothing at {where}"
    return found


def imports(path: Path, annotations: bool = True) -> set[str]:
    """Full names of all modules a file imports, wherever it does; of `from a import b` both a and a.b.

    annotations: those under TYPE_CHECKING too.
    """
    names: set[str] = set()
    tree = ast.parse(path.read_text())
    if not annotations:
        tree.body = [n for n in tree.body if not (isinstance(n, ast.If) and getattr(n.test, "id", "") == "TYPE_CHECKING")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def tops(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


def test_the_walk_sees_imports_inside_functions(tmp_path):
    file = tmp_path / "x.py"
    file.write_text("def f():\n    from torch.nn import functional\n    import reference.quant\n")
    assert tops(file) == {"torch", "reference"}


@pytest.mark.parametrize("path", sources("fermi_engine"), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_engine_knows_no_oracle(path):
    assert not tops(path) & {"torch", "transformers", "safetensors", "gguf", "reference", "tests", "tools", "pytest"}
    if path.name != "cuda.py":
        assert "pycuda" not in tops(path)


@pytest.mark.parametrize("path", sources("reference"), ids=lambda p: p.name)
def test_the_oracle_knows_torch_only(path):
    assert tops(path) <= STDLIB | {"torch", "reference"}


@pytest.mark.parametrize("where", MAY_IMPORT)
def test_imports_run_one_way(where):
    for path in sources(where):
        inner = {name.split(".")[1] for name in imports(path) if name.startswith("fermi_engine.")}
        assert inner <= MAY_IMPORT[where], path


@pytest.mark.parametrize("path", sources("fermi_engine"), ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_import_from_the_tiers_above(path):
    rank = {name: i for i, row in enumerate(TIERS) for name in row}
    own = ".".join(path.relative_to(ROOT / "fermi_engine").with_suffix("").parts).removesuffix(".__init__")
    if own == "__init__":
        return
    if path.name == "__init__.py" and own not in rank:
        assert not imports(path), f"{path} is a folder's line of text"
        return
    own = placed(own, rank)
    assert own is not None, f"{path} has no place in TIERS"
    inner = {name.removeprefix("fermi_engine.") for name in imports(path, annotations=False) if name.startswith("fermi_engine.")}
    late = {name for name in inner if (at := placed(name, rank)) is not None and at != own and rank[at] >= rank[own]}
    assert not late, f"{own} imports {sorted(late)}, which do not stand above it"


def placed(name: str, rank: dict[str, int]) -> str | None:
    """The row's name for a module or something in it: kernels for kernels.cpu, gpu.state for gpu.state.Fetch."""
    parts = name.split(".")
    return next((known for n in range(len(parts), 0, -1) if (known := ".".join(parts[:n])) in rank), None)


def test_every_folder_is_installed():
    """A wheel holds the packages that pyproject.toml names; the checkout, on the path, hides one that is missing."""
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "fermi_engine").rglob("__init__.py")}
    assert len(folders) > 5
    assert [str(folder) for folder in folders if f'"{".".join(folder.parts)}"' not in declared] == []


def test_nothing_but_tools_and_tests_imports_tools():
    for path in ROOT.glob("*/**/*.py"):
        part = path.relative_to(ROOT).parts[0]
        if part not in ("tools", "tests") and not part.startswith((".", "build")):
            assert not tops(path) & {"tools", "tests"}, path


@pytest.mark.parametrize("path", sources("fermi_engine/model"), ids=lambda p: p.name)
def test_the_model_opens_no_files(path):
    assert not imports(path) & FILE_MODULES
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    names = {call.id if isinstance(call, ast.Name) else getattr(call, "attr", None) for call in calls}
    assert not names & FILE_CALLS


def test_every_op_has_a_scalar_twin():
    rows = declared_kernels(CSRC)
    assert len(rows) > 20
    assert [op for op, _, backends in rows if "scalar" not in backends] == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_folder_is_the_backend_and_the_file_is_the_op(backend):
    """A file defines the function of its own name, and everything else in it stays private."""
    ops = {op for op, _, _ in declared_kernels(CSRC)}
    for path in sorted((CSRC / backend).glob("*.c")):
        assert path.stem in ops, f"{path.name} is no op of kernels.h"
        public = PUBLIC_FUNCTION.findall(path.read_text())
        assert public == [f"{backend}_{path.stem}"], path


def test_the_library_holds_what_the_folders_hold():
    """A stale build would test other kernels than those in csrc/."""
    held = set(dir(dispatch.library().lib))
    for op, _, backends in declared_kernels(CSRC):
        assert [b for b in BACKENDS if f"{b}_{op}" in held] == backends, f"{op}: build the kernels again"


@pytest.mark.parametrize("backend", dispatch.supported())
def test_a_forced_backend_runs(backend, monkeypatch):
    x = np.ones((2, 64), np.float32)
    monkeypatch.setenv("FERMI_BACKEND", "no such")
    k = kernels.get(backend, 1)
    k.quantize_q8_0(k.add(x, x))
    assert k.ran == {"add": backend, "quantize_q8_0": backend}
    assert set(k.backends.values()) == {backend}
    assert set(k.backends) == set(dispatch.ops())
    monkeypatch.setenv("FERMI_BACKEND", backend)
    assert set(kernels.get(None, 1).backends.values()) == {backend}


def test_an_unknown_backend_raises(monkeypatch):
    with pytest.raises(BackendError, match=r"unknown backend 'avx9'.*ssse3, scalar"):
        kernels.get("avx9")
    monkeypatch.setenv("FERMI_BACKEND", "avx9")
    with pytest.raises(BackendError, match="unknown backend 'avx9'"):
        kernels.get()


def test_a_backend_the_cpu_lacks_raises(monkeypatch):
    monkeypatch.setattr(dispatch, "cpu_features", lambda: frozenset({"sse4.1"}))
    with pytest.raises(BackendError, match="'ssse3' needs ssse3, which this CPU lacks"):
        dispatch.table("ssse3")
    assert {kernel.backend for kernel in dispatch.table().values()} == {"scalar"}


def test_a_backend_without_an_op_raises(monkeypatch):
    monkeypatch.setattr(dispatch, "ops", lambda: ("add", "no_such_op"))
    with pytest.raises(BackendError, match="no kernel for no_such_op"):
        dispatch.table("ssse3" if "ssse3" in dispatch.supported() else "scalar")
