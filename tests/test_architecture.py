"""The import order of the folders, what may be imported where, and what importing the package costs."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("passes", "lowering", "models")
LEVELS = {
    "dsa_compile": 0,
    "dsa_compile.errors": 0,
    "dsa_compile.dims": 0,
    "dsa_compile.config": 0,
    "dsa_compile.plan": 0,
    "dsa_compile.record": 0,
    "dsa_compile.folders": 0,
    "dsa_compile.report": 0,
    "dsa_compile.cost": 1,
    "dsa_compile.compat": 1,
    "dsa_compile.programs": 1,
    "dsa_compile.sampling": 1,
    "dsa_compile.lowering.ops": 1,
    "dsa_compile.lowering.fp8_keys": 1,
    "dsa_compile.lowering.fp8_rows": 1,
    "dsa_compile.lowering.pages": 1,
    "dsa_compile.lowering.mtp_verify.limits": 1,
    "dsa_compile.lowering.prefill_mla.limits": 1,
    "dsa_compile.lowering.route.limits": 1,
    "dsa_compile.lowering.row_products.limits": 1,
    "dsa_compile.lowering.select.limits": 1,
    "dsa_compile.lowering.sparse_mla.limits": 1,
    "dsa_compile.cache": 2,
    "dsa_compile.lowering": 2,
    "dsa_compile.passes": 3,
    "dsa_compile.models": 4,
}
"""A module not named here has the level of its folder; of the modules in dsa_compile itself those are the top, 5."""

MATHS = {
    "dsa_compile.lowering.cache_write.compact",
    "dsa_compile.lowering.keep_selection.previous",
    "dsa_compile.lowering.mtp_verify.greedy",
    "dsa_compile.lowering.route.limits",
    "dsa_compile.lowering.row_products.limits",
    "dsa_compile.lowering.select.projections",
}
"""Plain torch functions and numbers of `lowering` for passes and models; of all else they know the op's name."""


def sources() -> dict[str, Path]:
    """Every module of the package by the name that it is imported as."""
    files = [p for folder in ("", "bench", "cli", "cost") for p in (ROOT / "dsa_compile" / folder).glob("*.py")]
    files += [p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")]
    return {module_name(p): p for p in files}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "dsa_compile" else ("dsa_compile", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = sources()
PYTHON = [p for p in ROOT.rglob("*.py") if not any(part.startswith(".") for part in p.relative_to(ROOT).parts)]


def imported(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Full names of what import statements name; ``from a import b`` is ``a.b`` where that is a module of ours."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else str(node.module)


def imports_of(path: Path) -> set[str]:
    """Imports anywhere in a file, except those for type checkers alone."""
    tree = ast.parse(path.read_text())
    typing = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    hidden = {id(n) for block in typing for statement in block.body for n in ast.walk(statement)}
    return set(imported(n for n in ast.walk(tree) if id(n) not in hidden))


def module_scope(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from module_scope(child)


def level_of(name: str) -> int:
    while name not in LEVELS and name.count(".") > 1:
        name = name.rpartition(".")[0]
    return LEVELS.get(name, 5)


def folder_of(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FOLDERS else "dsa_compile"


def test_the_walk_sees_the_package():
    assert {"dsa_compile", "dsa_compile.api", "dsa_compile.passes.pipeline", "dsa_compile.lowering.mla.reference"} <= {
        *MODULES
    }
    assert "dsa_compile.compat" in imports_of(MODULES["dsa_compile.passes.base"])
    assert [level_of(f"dsa_compile.{m}") for m in ("dims", "lowering.ops", "lowering.mla", "passes.x", "new")] == [
        0,
        1,
        2,
        3,
        5,
    ]


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_go_down(name):
    ours = {target for target in imports_of(MODULES[name]) if target.split(".")[0] == "dsa_compile"}
    for target in ours:
        own, other = level_of(name), level_of(target)
        among_themselves = own == other and folder_of(name) == folder_of(target)
        assert other < own or among_themselves, f"{name} (level {own}) imports {target} (level {other})"


@pytest.mark.parametrize("name", sorted(n for n in MODULES if folder_of(n) in ("passes", "models")))
def test_passes_and_models_know_ops_by_name(name):
    from_lowering = {t for t in imports_of(MODULES[name]) if t.startswith("dsa_compile.lowering")}
    assert from_lowering <= MATHS


@pytest.mark.parametrize("name", sorted(MODULES))
def test_transformers_is_imported_where_models_are_handled(name):
    allowed = name == "dsa_compile.cache" or folder_of(name) == "models" or level_of(name) == 5
    assert allowed or "transformers" not in {target.split(".")[0] for target in imports_of(MODULES[name])}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_triton_is_imported_by_kernels_and_kernels_inside_functions(name):
    """A module named ...kernel needs triton at its top; nothing but another imports it before a call does."""
    tree = ast.parse(MODULES[name].read_text())
    anywhere, at_import = (set(imported(nodes)) for nodes in (ast.walk(tree), module_scope(tree)))
    kernel = folder_of(name) == "lowering" and name.endswith("kernel")
    assert kernel or "triton" not in {target.split(".")[0] for target in anywhere}
    assert kernel or not any(target.endswith("kernel") for target in at_import)


def test_nobody_imports_the_folders_bare():
    assert len(PYTHON) > len(MODULES)
    for path in PYTHON:
        bare = {target.split(".")[0] for target in imported(ast.walk(ast.parse(path.read_text())))} & set(FOLDERS)
        assert not bare, f"{path.relative_to(ROOT)} imports {bare} without dsa_compile"


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_folders_are_linked_into_the_package(folder):
    link = ROOT / "dsa_compile" / folder
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{folder}"


def test_importing_the_package_is_cheap():
    program = """
import sys, time
import torch
before, start = set(sys.modules), time.perf_counter()
import dsa_compile
seconds, new = time.perf_counter() - start, set(sys.modules) - before
heavy = [m for m in ("transformers", "triton", "torch._dynamo.backends") if m in new]
assert not heavy, heavy
assert seconds < 0.5, seconds
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
