"""Every file, function and test that docs/paper_map.md names exists."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
MAP = (REPOSITORY / "docs" / "paper_map.md").read_text("utf-8")
PLACE = re.compile(r"`([\w/]+\.py)(?:(::?)([\w.]+))?`")


@lru_cache
def names_of(path: Path) -> set[str]:
    """Functions, classes, their methods, and constants at the top of a module."""
    names: set[str] = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        match node:
            case ast.FunctionDef(name=name):
                names.add(name)
            case ast.ClassDef(name=name, body=body):
                names |= {name, *(f"{name}.{inner.name}" for inner in body if isinstance(inner, ast.FunctionDef))}
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return names


def test_every_place_exists() -> None:
    places = PLACE.findall(MAP)
    places = [place for place in places if place[0] != "file.py"]  # the example in the first paragraph
    assert len(places) > 100
    missing = []
    for file, separator, name in places:
        path = REPOSITORY / file
        if not path.is_file() or (name and name not in names_of(path)):
            missing.append(f"{file}{separator}{name}")
        if (separator == "::") != file.startswith("tests/"):
            missing.append(f"{file}{separator}{name}: code is written `file.py:name`, a test `file.py::name`")
    assert not missing


def test_nothing_in_backticks_looks_like_a_place_and_is_not_checked() -> None:
    quoted = re.findall(r"`([^`]*\.py[^`]*)`", MAP)
    assert [
        text for text in quoted if not PLACE.fullmatch(f"`{text}`") and text not in ("file.py:name", "file.py::test")
    ] == []


def test_every_equation_has_its_row() -> None:
    rows = re.findall(r"^\| (\d+) \|.*`coepg_dagster/.*`tests/.*\|$", MAP, re.MULTILINE)
    assert [int(number) for number in rows] == list(range(1, 11))
