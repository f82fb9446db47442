"""The rooms of the code: who may import whom.  Imports for types count like the others."""

from __future__ import annotations

import ast
import os
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import kvcanary_fx

PACKAGE = Path(kvcanary_fx.__file__).parent

#: From the ground up: a room imports from itself and from those before it.
ROOMS = ["errors", "kernels", "config", "passes", "reports", "runtime", "compile", "engine", "proof", "install",
         "adapters", "cli"]  # fmt: skip

MOST = 15


def modules() -> dict[str, Path]:
    """Every module of the package, and its file."""
    found = {}
    for folder, _, files in os.walk(PACKAGE, followlinks=True):
        for file in files:
            path = Path(folder, file)
            if path.suffix == ".py":
                parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports() -> dict[str, set[str]]:
    """The modules of ours that each module imports."""
    known = modules()
    return {name: _imported(name, path, known) - {name} for name, path in known.items()}


def _imported(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {inner if (inner := f"{base}.{alias.name}") in known else base for alias in node.names}
    return found & known.keys()


def test_no_module_imports_itself_by_way_of_others():
    try:
        TopologicalSorter(imports()).prepare()
    except CycleError as e:
        pytest.fail("a circle: " + " imports ".join(reversed(e.args[1])))


def test_rooms_import_from_those_below():
    wrong = []
    for name, imported in imports().items():
        for other in imported:
            here, there = (module.split(".")[1:2] for module in (name, other))
            if here and there and here != ["__main__"] and ROOMS.index(there[0]) > ROOMS.index(here[0]):
                wrong.append(f"{name} imports {other}")
    assert wrong == []


def test_no_module_needs_half_of_the_others():
    counts = {name: len(imported) for name, imported in imports().items() if name != "kvcanary_fx"}
    assert {name: n for name, n in counts.items() if n > MOST} == {}


def test_the_root_has_fifteen_names_at_most():
    names = {p.name for p in PACKAGE.iterdir() if not p.name.startswith(("__pycache__", "."))}
    assert len(names) <= 15, sorted(names)


def test_an_engine_answers_a_sessions_questions_and_overrides_no_step_of_its_work():
    base, engine = vars(kvcanary_fx.CanarySession), vars(kvcanary_fx.EngineSession)
    both = {name for name in base.keys() & engine.keys() if not name.startswith("__")}
    assert both == {"stats", "summary"}  # the base's, with more in them
