"""Which functions, classes and constants of the product are used by the product itself, found in its source."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

ENTRIES = (
    "coepg_dagster.assets.run_launcher",
    "coepg_dagster.cli.__main__",
    "coepg_dagster.definitions",
    "coepg_dagster.plugged",
    "coepg_dagster.reproductions",
    "coepg_dagster.sandbox.miniwob.environment",
    "coepg_dagster.training.launch",
)
"""Modules that something else starts: the shell, Dagster, accelerate, a pool of environments."""
ENTRY_NAMES = ("defs", "app", "RunLauncher", "RunCoordinator")
"""Names that Dagster, its dagster.yaml or the console script takes from a module."""
Definition = tuple[str, str]
"""(module, name at its top); the name is empty for what runs when the module is imported."""


def _names(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.FunctionDef(name=name, decorator_list=[]) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


class Product:
    """The source below `root`: coepg_dagster/, assets/ and resources/."""

    def __init__(self, root: Path) -> None:
        self.root = root
        files = [file for folder in ("coepg_dagster", "assets", "resources") for file in (root / folder).rglob("*.py")]
        self.sources = {self.module_of(file): ast.parse(file.read_text("utf-8")) for file in files}

    def module_of(self, file: Path) -> str:
        """The name by which a source file is imported."""
        parts = file.relative_to(self.root).with_suffix("").parts
        parts = parts if parts[0] == "coepg_dagster" else ("coepg_dagster", *parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def definitions(self) -> dict[Definition, list[ast.stmt]]:
        """A decorated function runs with its module: the decorator may have kept it."""
        definitions: dict[Definition, list[ast.stmt]] = {}
        for module, tree in self.sources.items():
            definitions[module, ""] = []
            for statement in tree.body:
                for name in _names(statement) or [""]:
                    definitions.setdefault((module, name), []).append(statement)
                if isinstance(statement, ast.FunctionDef) and statement.decorator_list:
                    definitions[module, statement.name] = [statement]
        return definitions

    @cached_property
    def _imported(self) -> dict[str, dict[str, set[Definition]]]:
        """Module → local name → what it may stand for: every import of the product, inside functions too."""
        imported: dict[str, dict[str, set[Definition]]] = {}
        for module, tree in self.sources.items():
            names: dict[str, set[Definition]] = defaultdict(set)
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.module in self.sources:
                    for alias in node.names:
                        whole = f"{node.module}.{alias.name}"
                        target = (whole, "") if whole in self.sources else (node.module, alias.name)
                        names[alias.asname or alias.name].add(target)
            imported[module] = dict(names)
        return imported

    def _used(self, module: str, statement: ast.stmt) -> Iterator[Definition]:
        local = self._imported[module]
        for node in ast.walk(statement):
            match node:
                case ast.FunctionDef(name=name, decorator_list=[_, *_]):
                    yield module, name
                case ast.Name(id=name):
                    yield from local.get(name, {(module, name)})
                case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                    yield from ((target, attribute) for target, inside in local.get(name, ()) if not inside)
                case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                    for alias in aliases:
                        yield from ((target, "") for target, _ in local.get(alias.asname or alias.name, ()))

    @cached_property
    def reachable(self) -> frozenset[Definition]:
        """Every definition that is used, over any number of others, by what runs when one of ENTRIES starts."""
        reached: set[Definition] = set()
        todo: list[Definition] = [(module, "") for module in ENTRIES]
        while todo:
            one = todo.pop()
            if one in reached or one not in self.definitions:
                continue
            reached.add(one)
            module, _ = one
            packages = [module.rsplit(".", n)[0] for n in range(1, module.count(".") + 1)]
            todo += [(name, "") for name in (module, *packages)]
            todo += [(module, name) for name in ENTRY_NAMES]
            for statement in self.definitions[one]:
                todo += self._used(module, statement)
        return frozenset(reached)

    @cached_property
    def _attributes(self) -> frozenset[str]:
        """Every `.name` that occurs in a reachable definition."""
        nodes = (node for one in self.reachable for statement in self.definitions[one] for node in ast.walk(statement))
        return frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute))

    def uses(self, file: str, name: str = "") -> bool:
        """Whether the product uses a function, class, constant or `Class.method` of a file."""
        owner, _, method = name.partition(".")
        known = (self.module_of(self.root / file), owner) in self.reachable
        return known and (not method or method in self._attributes or method.startswith("__"))

    @property
    def unused(self) -> list[str]:
        """`module:name` of every definition that the product does not use."""
        return [f"{module}:{name}" for module, name in sorted(self.definitions.keys() - self.reachable)]
