"""Every file, function and test that docs/paper_map.md and docs/reliability.md name exists, and the product uses the code."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

from tests.reachable import Product

REPOSITORY = Path(__file__).parent.parent
MAP, RELIABILITY = ((REPOSITORY / "docs" / f"{page}.md").read_text("utf-8") for page in ("paper_map", "reliability"))
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


@pytest.mark.parametrize(("page", "at_least"), [(MAP, 100), (RELIABILITY, 20)], ids=["paper_map", "reliability"])
def test_every_place_exists(page: str, at_least: int) -> None:
    places = PLACE.findall(page)
    places = [place for place in places if place[0] != "file.py"]  # the example in the first paragraph
    assert len(places) > at_least
    missing = []
    for file, separator, name in places:
        path = REPOSITORY / file
        if not path.is_file() or (name and name not in names_of(path)):
            missing.append(f"{file}{separator}{name}")
        if separator and (separator == "::") != file.startswith("tests/"):
            missing.append(f"{file}{separator}{name}: code is written `file.py:name`, a test `file.py::name`")
    assert not missing


@pytest.fixture(scope="module")
def product() -> Product:
    return Product(REPOSITORY)


def test_the_product_uses_the_code_of_every_row(product: Product) -> None:
    """A row cannot cite what only tests call."""
    code = [(file, name) for file, _, name in PLACE.findall(MAP) if not file.startswith("tests/") and file != "file.py"]
    assert [f"{file}:{name}" for file, name in code if not product.uses(file, name)] == []


def test_the_product_uses_all_of_its_code(product: Product) -> None:
    """What only a test needs stands with the tests."""
    assert product.unused == []


def test_what_only_tests_call_is_not_used(tmp_path: Path) -> None:
    files = {
        "coepg_dagster/__init__.py": "",
        "coepg_dagster/cli/__init__.py": "from coepg_dagster.assets import loop\nfrom coepg_dagster import a as b\n",
        "coepg_dagster/cli/__main__.py": "from coepg_dagster.cli import app\n@app.command()\ndef go(): ...\n",
        "coepg_dagster/a.py": "def used(): return inner()\ndef inner(): ...\ndef unused(): return alone()\ndef alone(): ...",
        "coepg_dagster/apart.py": "used = 1",
        "assets/__init__.py": "",
        "assets/loop.py": "from coepg_dagster import a\nclass Loop:\n    def run(self): ...\n    def never(self): ...\n"
        "def start():\n    a.used()\n    Loop().run()\nstart()\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    product = Product(tmp_path)
    assert product.unused == [f"coepg_dagster.{name}" for name in ("a:alone", "a:unused", "apart:", "apart:used")]
    assert product.uses("assets/loop.py", "Loop.run") and not product.uses("assets/loop.py", "Loop.never")
    assert product.uses("coepg_dagster/a.py") and not product.uses("coepg_dagster/apart.py")


def test_every_file_in_backticks_is_checked() -> None:
    quoted = re.findall(r"`([^`]*\.py[^`]*)`", MAP)
    assert [
        text for text in quoted if not PLACE.fullmatch(f"`{text}`") and text not in ("file.py:name", "file.py::test")
    ] == []


def test_every_equation_has_its_row() -> None:
    rows = re.findall(r"^\| (\d+) \|.*`coepg_dagster/.*`tests/.*\|$", MAP, re.MULTILINE)
    assert [int(number) for number in rows] == list(range(1, 11))
