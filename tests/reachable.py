"""Which functions, classes and constants of the product are used by the product itself, found in its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent

ENTRIES = ("coepg_dagster.cli.__main__", "coepg_dagster.reproductions", "coepg_dagster.training.launch")
"""Modules that something else starts: the shell, Dagster (`reproductions` imports `definitions`), accelerate."""
Definition = tuple[str, str]
"""(module, name at its top); the name is empty for what runs when the module is imported."""


def module_of(file: Path) -> str:
    """The name by which a source file is imported."""
    parts = file.relative_to(REPOSITORY).with_suffix("").parts
    parts = parts if parts[0] == "coepg_dagster" else ("coepg_dagster", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def sources() -> dict[str, ast.Module]:
    """Module → its syntax tree, of everything that a wheel holds."""
    files = [
        file for folder in ("coepg_dagster", "assets", "resources") for file in (REPOSITORY / folder).rglob("*.py")
    ]
    return {module_of(file): ast.parse(file.read_text("utf-8")) for file in files}


def _names(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.FunctionDef(name=name, decorator_list=[]) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


@cache
def _definitions() -> dict[Definition, list[ast.stmt]]:
    """A decorated function is also what runs when the module is imported: a decorator may keep it."""
    found: dict[Definition, list[ast.stmt]] = {}
    for module, tree in sources().items():
        found[module, ""] = []
        for statement in tree.body:
            for name in _names(statement) or [""]:
                found.setdefault((module, name), []).append(statement)
            if isinstance(statement, ast.FunctionDef) and statement.decorator_list:
                found[module, statement.name] = [statement]
    return found


@cache
def _imported(module: str) -> dict[str, Definition]:
    """Local name → what it stands for, of every import of the product in a module, inside functions too."""
    found = {}
    for node in ast.walk(sources()[module]):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                target = (whole, "") if whole in sources() else (node.module, alias.name)
                found[alias.asname or alias.name] = target
        elif isinstance(node, ast.Import):
            found |= {alias.asname or alias.name: (alias.name, "") for alias in node.names}
    return {name: target for name, target in found.items() if target[0] in sources()}


def _used(module: str, statement: ast.stmt) -> Iterator[Definition]:
    local = _imported(module)
    for node in ast.walk(statement):
        match node:
            case ast.Name(id=name):
                yield local.get(name, (module, name))
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if local.get(name, ("", "-"))[1] == "":
                yield local[name][0], attribute
            case ast.Import() | ast.ImportFrom():
                for alias in node.names:
                    if target := local.get(alias.asname or alias.name):
                        yield target[0], ""


@cache
def reachable() -> frozenset[Definition]:
    """Every definition that is used, over any number of others, by what runs when one of ENTRIES starts."""
    found: set[Definition] = set()
    todo: list[Definition] = [(module, "") for module in ENTRIES]
    while todo:
        one = todo.pop()
        if one in found or one not in _definitions():
            continue
        found.add(one)
        parents = [one[0].rsplit(".", n)[0] for n in range(1, one[0].count(".") + 1)]
        todo += [(module, "") for module in (one[0], *parents)]
        for statement in _definitions()[one]:
            todo += _used(one[0], statement)
    return frozenset(found)


@cache
def attributes() -> frozenset[str]:
    """Every `.name` that occurs in a reachable definition."""
    nodes = (node for one in reachable() for statement in _definitions()[one] for node in ast.walk(statement))
    return frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute))
