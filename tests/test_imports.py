"""Programs outside of the package import only names that it has, since mypy does not read them."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@cache
def names_of(module: str) -> frozenset[str] | None:
    """Return the names that a module of the package defines; None if there is no such module."""
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return None
    found = {one.stem for one in path.glob("*")} if path.is_dir() else set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Import() | ast.ImportFrom():
                found |= {one.asname or one.name for one in node.names}
            case ast.Name(ctx=ast.Store()):
                found.add(node.id)
            case ast.Constant(value=str()):  # names that outpace/__init__.py imports when used
                found |= {node.value} if path.is_dir() else set()
    return frozenset(found)


def missing_names(text: str) -> list[str]:
    """Return what a program imports from the package, although the package does not have it."""
    asked = [(node.module, one.name) for node in ast.walk(ast.parse(text))
             if isinstance(node, ast.ImportFrom) and node.module and node.level == 0
             and node.module.split(".")[0] == "outpace" for one in node.names]  # fmt: skip
    known = {module: names_of(module) for module, _ in asked}
    return [f"{module}.{name}" for module, name in asked
            if known[module] is None or name not in known[module]]  # fmt: skip


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "scripts", "tests"])
def test_a_program_imports_what_there_is(folder):
    programs = sorted((ROOT / folder).rglob("*.py"))
    missing = {str(file.relative_to(ROOT)): names for file in programs
               if (names := missing_names(file.read_text(encoding="utf-8")))}  # fmt: skip
    assert missing == {}


def test_a_name_that_was_moved_is_found():
    text = "from outpace.planner.plan import plans, moved\nfrom outpace.gone import plans\n"
    assert missing_names(text) == ["outpace.planner.plan.moved", "outpace.gone.plans"]
    assert missing_names("from outpace import train\nfrom outpace.nn import lora\n") == []
