"""Who may import whom. A fresh interpreter tells what an import really loads; the sources tell what may be imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("gllm", "rserve", "benchmarks")
PURE = sorted(
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    for core in ("gllm/core", "rserve/core")
    for path in (ROOT / core).glob("*.py")
    if path.stem != "__init__"
)

# package -> what of ours it may import (by prefix), besides itself. First match of the importer counts.
ALLOWED = {
    "gllm.core": ("gllm.config",),
    "gllm.layers": ("gllm.errors",),
    "gllm.models": ("gllm.layers", "gllm.errors", "gllm.config", "gllm.core.request"),
    "gllm.worker": (
        "gllm.models", "gllm.layers", "gllm.errors", "gllm.config", "gllm.sampling_params", "gllm.core.batch",
        "gllm.core.request",
    ),
    "gllm.media": ("gllm.config", "gllm.errors"),
    "gllm.engine": (
        "gllm.core", "gllm.worker", "gllm.models", "gllm.media", "gllm.config", "gllm.errors", "gllm.outputs",
        "gllm.sampling_params",
    ),
    "gllm.entrypoints": ("gllm.engine", "gllm.config", "gllm.errors", "gllm.outputs", "gllm.sampling_params"),
    "gllm": ("gllm.sampling_params", "gllm.core.request", "gllm.worker.step"),
    "rserve.core": ("gllm.core", "rserve.config"),
    "rserve.config": (),
    "rserve": ("gllm",),
}  # fmt: skip


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    """Modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if (ROOT / name.replace(".", "/")).with_suffix(".py").exists() else node.module


def loaded_by(module: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after importing `module`."""
    code = f"import sys; before = set(sys.modules); import {module}; print(*(set(sys.modules) - before))"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(out.stdout.split())


@pytest.mark.parametrize("path", list(sources("gllm", "rserve")), ids=module_name)
def test_a_module_imports_only_what_its_package_may(path):
    name = module_name(path)
    package = next(package for package in ALLOWED if name == package or name.startswith(package + "."))
    allowed = (package, *ALLOWED[package])
    for imported in imports(path):
        if imported.split(".")[0] in OURS:
            assert any(imported == ok or imported.startswith(ok + ".") for ok in allowed), f"{name} imports {imported}"


def test_the_cores_load_the_standard_library_only():
    code = "; ".join(f"import {module}" for module in PURE)
    out = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; print(*{{m.split('.')[0] for m in sys.modules}})"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    foreign = set(out.stdout.split()) - sys.stdlib_module_names - {"__main__", "gllm", "rserve", "encodings"}
    # A .pth file of the environment may load something at start, whatever is imported.
    bare = subprocess.run(
        [sys.executable, "-c", "import sys; print(*{m.split('.')[0] for m in sys.modules})"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert not foreign - set(bare.stdout.split())


@pytest.mark.parametrize("module", ["gllm", "rserve", "gllm.config", "gllm.entrypoints.api_server"])
def test_light_imports_stay_light(module):
    assert not loaded_by(module) & {"torch", "transformers"}


def test_gllm_names_rserve_only_to_load_it_lazily():
    named = {module_name(p) for p in sources("gllm") if "rserve." in p.read_text()}
    assert named <= {"gllm.engine.driver_process", "gllm.engine.specs"}


def test_package_files_import_nothing():
    for path in sources("gllm", "rserve"):
        if path.name == "__init__.py":
            assert not [m for m in imports(path) if m not in ("__future__", "typing", "importlib")], path


@pytest.mark.parametrize("path", list(sources("gllm/worker", "gllm/models", "gllm/layers")), ids=module_name)
def test_workers_know_no_scheme(path):
    """The paper's "pipeline workers stay unchanged": they run whatever micro-batch they get."""
    tree = ast.parse(path.read_text())
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None
    }
    strings = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in docs]
    names = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name)] + [
        n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)
    ]
    said = [word for word in [*strings, *names] if isinstance(word, str)]
    assert not [w for w in said if any(scheme in w.lower() for scheme in ("rserve", "epd", "scheme", "intra_request"))]
