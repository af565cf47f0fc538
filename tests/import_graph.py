"""The package's modules and who imports whom, read from the sources: nothing is imported for it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parent.parent / "moecache"
_CYTHON_IMPORT = re.compile(r"^(?:from\s+(moecache[\w.]*)\s+c?import\s+(.+)|c?import\s+(moecache[\w.]*))", re.MULTILINE)


class Import(NamedTuple):
    """One module names another."""

    importer: str
    imported: str
    line: int
    where: str  # "module", "function" or "type": at the top, inside a function, for a type checker only


def modules() -> dict[str, Path]:
    """Names as the table in docs/architecture.md has them (``cache``, ``hf/attach``), and their files."""
    found = {}
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix in (".py", ".pyx"):
            found["/".join(path.relative_to(PACKAGE).with_suffix("").parts)] = path
    for path in PACKAGE.rglob("*.pxd"):  # one that stands alone only declares
        found.setdefault("/".join(path.relative_to(PACKAGE).with_suffix("").parts), path)
    return found


def imports() -> list[Import]:
    """All imports between modules of the package."""
    names = modules()
    found = []
    for name, path in names.items():
        sources = (
            [path] if path.suffix == ".py" else [file for file in (path, path.with_suffix(".pxd")) if file.exists()]
        )
        for source in dict.fromkeys(sources):
            lines = _of_python if path.suffix == ".py" else _of_cython
            for target, line, where in lines(name, source.read_text(encoding="utf-8")):
                inside = _module_named(target, names)
                if inside is not None and inside != name:
                    found.append(Import(name, inside, line, where))
    return found


def _module_named(target: str, names: dict[str, Path]) -> str | None:
    # "hf/attach/attach" is a name inside the module hf/attach, "hf" the module hf/__init__.
    while target:
        for name in (target, f"{target}/__init__"):
            if name in names:
                return name
        target = target.rpartition("/")[0]
    return None


def _of_python(name: str, text: str) -> Iterator[tuple[str, int, str]]:
    package = name.split("/")[:-1]

    def walk(node: ast.AST, where: str) -> Iterator[tuple[str, int, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    if alias.name.split(".")[0] == PACKAGE.name:
                        yield "/".join(alias.name.split(".")[1:]), child.lineno, where
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else (child.module or "").split(".")
                if not child.level and base[0] != PACKAGE.name:
                    continue
                base = base + (child.module or "").split(".") if child.level and child.module else base
                base = base if child.level else base[1:]
                for alias in child.names:
                    yield "/".join([*base, alias.name]) or "__init__", child.lineno, where
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from walk(child, "function")
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                for statement in child.body:
                    yield from walk(ast.Module([statement], []), "type")
            else:
                yield from walk(child, where)

    yield from walk(ast.parse(text), "module")


def _of_cython(name: str, text: str) -> Iterator[tuple[str, int, str]]:
    for match in _CYTHON_IMPORT.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        if match[3] is not None:
            yield "/".join(match[3].split(".")[1:]), line, "module"
            continue
        for imported in re.findall(r"\w+", match[2]):
            yield "/".join([*match[1].split(".")[1:], imported]), line, "module"


def cycles(edges: set[tuple[str, str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or by way of others (strongly connected components)."""
    graph: dict[str, list[str]] = {}
    for importer, imported in sorted(edges):
        graph.setdefault(importer, []).append(imported)
        graph.setdefault(imported, [])
    reach = {node: _reachable(graph, node) for node in graph}
    groups = {frozenset({node, *(other for other in reach[node] if node in reach[other])}) for node in graph}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _reachable(graph: dict[str, list[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for other in graph[waiting.pop()]:
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return seen
