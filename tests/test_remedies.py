"""What messages, pages and docs tell people to type is what the command line takes."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from coepg_dagster.cli import app
from tests.project import REPOSITORY

SOURCES = [file for place in ("coepg_dagster", "assets", "resources") for file in (REPOSITORY / place).rglob("*.py")]
DOCS = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "docs").glob("*.md")]
OTHERS = [
    *(REPOSITORY / "experiments").rglob("*.yaml"),
    *(REPOSITORY / "models").glob("*.yaml"),
    REPOSITORY / "Makefile",
]
SAMPLES = {
    r"k|i|iteration|through|max\(.*\)|.*iteration or 0|most|needed\[.*\]|iterations": "1",
    r".*\bname|loop|reference|study\.root|self\._name": "sandbox/s13",
    r"split": "test_seed",
    r"since": " --from 1",
}
"""What stands in a message for an expression, by its source."""


def sample(expression: ast.expr) -> str:
    source = ast.unparse(expression)
    return next((value for pattern, value in SAMPLES.items() if re.fullmatch(pattern, source)), f"<{source}>")


def texts(file: Path) -> Iterator[str]:
    """Every text of a source file that is no docstring, with samples in place of expressions."""
    tree = ast.parse(file.read_text())
    parts = {id(value) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for value in node.values}
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                sample(part.value) if isinstance(part, ast.FormattedValue) else str(part.value)  # type: ignore[attr-defined]
                for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts | docs:
            yield node.value


def commands(text: str) -> list[str]:
    """The commands in a text: in back-ticks, or all of it."""
    quoted = re.findall(r"`(?:\.venv/bin/)?(coepg [a-z][^`]*)`", text)
    return [*quoted, text] if re.match(r"coepg [a-z]+( |$)", text) else quoted


def refused(command: str, **settings: Any) -> str | None:
    """What the command line says against a command; a command without arguments may only be its name."""
    words = shlex.split(command)[1:]
    group: Any = get_command(app)
    context = group.make_context("coepg", [*words])
    try:
        while hasattr(group, "commands") and words:
            name, group, words = group.resolve_command(context, words)
            if not words:
                return None
            if not hasattr(group, "commands"):
                group.make_context(name, [*words], parent=context)
    except Exception as error:  # noqa: BLE001 - typer brings a Click of its own, whose errors have no public name
        return f"{type(error).__name__}: {error}"
    return None


def test_every_command_in_a_message_is_one_that_its_parser_takes() -> None:
    found = {(file.name, command) for file in SOURCES for text in texts(file) for command in commands(text)}
    assert len(found) > 15
    assert {place: why for place in sorted(found) if (why := refused(place[1])) is not None} == {}


def test_what_the_parser_refuses_is_seen() -> None:
    assert "MissingParameter" in str(refused("coepg evolve sandbox"))
    assert "NoSuchOption" in str(refused("coepg results sandbox --jsno"))
    assert "UsageError" in str(refused("coepg evlove sandbox"))
    assert "BadParameter" in str(refused("coepg evolve sandbox --through None"))
    assert refused("coepg rewards calibration sandbox@1") is None and refused("coepg gc") is None
    assert "UsageError" in str(refused("coepg rewards calibrate sandbox@1"))


def of_page(file: Path) -> Iterator[str]:
    """The commands in a page or a file with comments: in back-ticks, and lines of shell blocks."""
    text = file.read_text()
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.S)) if file.suffix == ".md" else text
    lines = re.findall(r"^[#\s]*(?:[\w./$()]*bin/)?(coepg [a-z].*)$", blocks.replace("\\\n", " "), re.M)
    for command in (*commands(text), *lines):
        if "…" not in command:
            command = re.sub(r"\s#.*", "", command).partition(" | ")[0].partition(" > ")[0].partition(" && ")[0]
            yield re.sub(r"\[--json\]|\[|\]", "", command).strip()


@pytest.mark.parametrize("file", [*DOCS, *OTHERS], ids=lambda file: file.name)
def test_every_command_in_the_docs_is_one_that_its_parser_takes(file: Path) -> None:
    found = {
        re.sub(r"\b[KkN]\b", "1", command).replace("FOLDER", "docs").replace("data-of-mine", "docs")
        for command in of_page(file)
    }
    assert {command: why for command in sorted(found) if (why := refused(command)) is not None} == {}
