"""The package is what docs/architecture.md says: modules without cycles, in the order of its table, small, importable without a warning."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import import_graph
import pytest

PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
MOST_LINES, MOST_FUNCTION_LINES = 500, 60
NAMES = import_graph.modules()


def table(title: str, column: int) -> list[str]:
    """The modules in a column of the first table under a heading."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\|.*\|$(?:\n\|.*\|$)*", section, re.MULTILINE)[0].splitlines()[2:]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[column])]


ORDER = table("Modules", 1)


def row_of(module: str) -> str | None:
    """A module's entry in the table: its own, or that of a folder (``_decide/``)."""
    return next((row for row in ORDER if row == module or (row.endswith("/") and module.startswith(row))), None)


def test_every_module_has_one_row_and_every_row_a_module() -> None:
    assert len(ORDER) == len(set(ORDER))
    assert [name for name in NAMES if row_of(name) is None] == []
    assert [row for row in ORDER if not any(row_of(name) == row for name in NAMES)] == []


@pytest.mark.parametrize("where", [("module", "function"), ("module", "function", "type")])
def test_no_modules_import_each_other(where: tuple[str, ...]) -> None:
    edges = {(found.importer, found.imported) for found in import_graph.imports() if found.where in where}
    assert len(edges) > 100
    assert import_graph.cycles(edges) == []


def test_imports_point_down_the_table() -> None:
    at = {row: n for n, row in enumerate(ORDER)}
    upward = [
        f"{found.importer}, line {found.line}: imports {found.imported}, which stands above it"
        for found in import_graph.imports()
        if at[row_of(found.imported) or ""] < at[row_of(found.importer) or ""]
    ]
    assert upward == []


def test_the_runtime_imports_neither_the_lab_nor_transformers() -> None:
    runtime = ORDER[ORDER.index("metrics") :]
    found = {(f.importer, f.imported) for f in import_graph.imports() if row_of(f.importer) in runtime}
    assert found
    assert [edge for edge in found if edge[1].startswith(("hf/", "lab/"))] == []


def test_cycles_are_found_whatever_way_they_go() -> None:
    assert import_graph.cycles({("a", "b"), ("b", "c")}) == []
    assert import_graph.cycles({("a", "b"), ("b", "c"), ("c", "a"), ("d", "a")}) == [["a", "b", "c"]]


def test_changes_lead_to_modules_that_say_so_in_their_first_line() -> None:
    section = PAGE.read_text(encoding="utf-8").split("\n## Where a change goes\n")[1]
    rows = [row.split("|")[1:-1] for row in section.splitlines() if row.startswith("| ")][1:]
    assert len(rows) >= 10
    for change, module, said in rows:
        (name,) = re.findall(r"`([^`]+)`", module)
        docstring = ast.get_docstring(ast.parse(NAMES[name].read_text(encoding="utf-8"))) or ""
        assert docstring.splitlines()[0] == said.strip(), change


def python_files() -> list[Path]:
    return [path for path in NAMES.values() if path.suffix == ".py"]


def test_no_file_is_long() -> None:
    files = [
        path for path in import_graph.PACKAGE.rglob("*") if path.suffix in {".py", ".pyi", ".pyx", ".pxd", ".pxi", ".h"}
    ]
    lines = {str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert len(lines) > 100
    assert {path: n for path, n in lines.items() if n > MOST_LINES} == {}


def test_every_field_of_a_compiled_class_says_what_it_is() -> None:
    fields, silent = 0, []
    for path in import_graph.PACKAGE.rglob("*.p[xy][dx]"):
        block = False
        for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if re.match(r"(cdef|cpdef|ctypedef) .*(class|struct|union)\b.*:", line):
                block = True
            elif line and not line[0].isspace():
                block = False
            # A field: no parenthesis of a method, nothing below the level of the class.
            elif (
                block
                and re.match(r"    (cdef |[\w_]+\*? \*?[\w_, *]+(\[\w+\])?$)", line)
                and "(" not in line.split("#")[0]
            ):
                fields += 1
                if "#" not in line and "#" not in path.read_text(encoding="utf-8").splitlines()[n - 2]:
                    silent.append(f"{path.name}, line {n}: {line.strip()}")
    assert fields > 300
    assert silent == []


def test_no_function_is_long() -> None:
    """Lines of code; a docstring may need as many as it needs."""
    long = {}
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = node.body[0]
                documented = ast.get_docstring(node, clean=False) is not None
                docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
                lines = (node.end_lineno or 0) - node.lineno + 1 - docstring
                if lines > MOST_FUNCTION_LINES:
                    long[f"{path}: {node.name}"] = lines
    assert long == {}


@pytest.mark.failure("G24")
def test_every_module_imports_where_every_warning_is_an_error() -> None:
    importable = [name for name, path in NAMES.items() if path.suffix != ".pxd"]
    wanted = [
        "/".join(("moecache", *name.split("/"))).replace("/", ".").removesuffix(".__init__") for name in importable
    ]
    found = subprocess.run(
        [sys.executable, "-bb", "-X", "dev", "-W", "error", "-c", _IMPORT_ALL, *wanted],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(import_graph.PACKAGE.parent)},
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert set(found.stdout.split()) == set(wanted)


# What others warn of as their own modules are read is not ours: they are imported before, with the warnings let through.
_IMPORT_ALL = """
import importlib, importlib.util, sys, warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for name in ("numpy", "torch", "safetensors.numpy", "numba", "transformers", "typer", "rich", "matplotlib.figure", "tqdm"):
        if importlib.util.find_spec(name.split(".")[0]):
            importlib.import_module(name)
for name in sys.argv[1:]:
    importlib.import_module(name)
    print(name)
"""
