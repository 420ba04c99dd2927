"""Configuration files as YAML 1.2 with its core schema, read strictly.

PyYAML parses the text; what a plain word means is decided here. By itself PyYAML follows YAML 1.1, in which `yes` is true,
`013` is eleven, `1:30` is ninety, `1e-5` is text, and the second of two equal keys wins.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import yaml
from yaml.constructor import ConstructorError

from coepg_dagster.refusal import Refusal

MAX_BYTES: Final = 1 << 18
MAX_VALUES: Final = 10_000
"""Values of a file, those behind an alias counted each time that they stand for."""
MAX_WHOLE: Final = 1 << 63


class BadYaml(Refusal, ValueError):
    """A file that is not read; the message names the file, the place in it, and what is wrong."""


def read(path: Path) -> Any:
    """The content of a YAML file: dictionaries with text as keys, lists, texts, numbers, booleans, None.

    Refused are, besides what is no YAML: a key that stands twice, a key that is no text, a whole number with leading zeros
    (YAML 1.1 and 1.2 differ on it), tags beyond the core schema, control characters in texts, more than MAX_BYTES, and
    aliases that stand for more than MAX_VALUES. Raises BadYaml.
    """
    try:
        if not path.is_file():
            raise BadYaml(f"{path}: {'cannot be read: it is no file' if path.exists() else 'there is no such file'}")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise BadYaml(f"{path}: has more than {MAX_BYTES:,} bytes, which no configuration needs")
        return parse(content.decode("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadYaml(f"{path}: cannot be read: {error}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise BadYaml(f"{path}{where}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise BadYaml(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None


def parse(text: str) -> Any:
    """As `read`, of a text. Raises yaml.YAMLError, and RecursionError where it is nested too deeply."""
    return yaml.load(text, _Loader)  # noqa: S506 - the loader knows the core schema's seven types and nothing else


def dump(value: Any) -> str:
    """A text that `read` reads as `value`, and YAML 1.1 too."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


class _Dumper(yaml.SafeDumper):
    """Puts into quotation marks what would not be text in either version of YAML."""


class _Loader(yaml.BaseLoader):
    """Constructs the types of the core schema, and refuses every other tag."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._sizes: dict[yaml.Node, int] = {}

    def mapping(self, node: yaml.Node) -> dict[str, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise _refused(node, f"{node.tag} is for mappings")
        entries: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise _refused(key_node, "a key must be text: put it into quotation marks")
            if key in entries:
                raise _refused(key_node, f"the key `{key}` stands twice: keep one")
            entries[key] = self.construct_object(value_node, deep=True)
        self._count(node, [value for _, value in node.value])
        return entries

    def sequence(self, node: yaml.Node) -> list[Any]:
        if not isinstance(node, yaml.SequenceNode):
            raise _refused(node, f"{node.tag} is for lists")
        items = [self.construct_object(value, deep=True) for value in node.value]
        self._count(node, node.value)
        return items

    def _count(self, node: yaml.Node, below: list[yaml.Node]) -> None:
        self._sizes[node] = 1 + sum(self._sizes.get(value, 1) for value in below)
        if self._sizes[node] > MAX_VALUES:
            raise _refused(node, f"stands for more than {MAX_VALUES:,} values, which no configuration needs")

    def text(self, node: yaml.Node) -> str:
        value = self._scalar(node)
        if any((c < " " and c not in "\t\n") or "\ud800" <= c <= "\udfff" for c in value):
            raise _refused(node, "a text must not hold control characters or halves of surrogate pairs")
        return value

    def null(self, node: yaml.Node) -> None:
        self._as(node, _NULL, "null")

    def boolean(self, node: yaml.Node) -> bool:
        return self._as(node, _BOOLEAN, "true or false").lower() == "true"

    def whole(self, node: yaml.Node) -> int:
        value = self._scalar(node)
        if _LEADING_ZEROS.fullmatch(value):
            raise _refused(node, f"{value:.40} has leading zeros, which YAML 1.1 reads as octal: write it without them")
        self._as(node, _WHOLE, "a whole number")
        if len(value) > 24 or abs(int(value, 0)) >= MAX_WHOLE:
            raise _refused(node, f"{value:.24} is too large a number")
        return int(value, 0)

    def real(self, node: yaml.Node) -> float:
        value = self._as(node, re.compile(f"{_WHOLE.pattern}|{_REAL.pattern}"), "a number").lower()
        return float(value.replace(".inf", "inf").replace(".nan", "nan"))

    def other(self, node: yaml.Node) -> Any:
        raise _refused(node, f"the tag {node.tag} is none of YAML's core schema: remove it")

    def _as(self, node: yaml.Node, form: re.Pattern[str], what: str) -> str:
        value = self._scalar(node)
        if not form.fullmatch(value):
            raise _refused(node, f"{value[:40]!r} is not {what}")
        return value

    def _scalar(self, node: yaml.Node) -> str:
        return str(self.construct_scalar(node))  # type: ignore[arg-type] # it refuses other nodes


def _refused(node: yaml.Node, why: str) -> ConstructorError:
    return ConstructorError(None, None, why, node.start_mark)


_NULL: Final = re.compile(r"~|null|Null|NULL|")
_BOOLEAN: Final = re.compile(r"true|True|TRUE|false|False|FALSE")
_LEADING_ZEROS: Final = re.compile(r"[-+]?0[0-9]+")
_WHOLE: Final = re.compile(r"[-+]?(?:0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+")
_REAL: Final = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
"""The core schema's forms of plain scalars (YAML 1.2.2, 10.3.2); everything else is text."""

_TAG: Final = "tag:yaml.org,2002:"
for _name, _form, _first in (
    ("null", _NULL, ["~", "n", "N", ""]),
    ("bool", _BOOLEAN, list("tTfF")),
    ("int", re.compile(f"{_WHOLE.pattern}|{_LEADING_ZEROS.pattern}"), list("-+0123456789")),
    ("float", _REAL, list("-+.0123456789")),
):
    for _side in (_Loader, _Dumper):
        _side.add_implicit_resolver(_TAG + _name, re.compile(f"(?:{_form.pattern})$"), _first)
for _name, _make in (
    ("null", _Loader.null),
    ("bool", _Loader.boolean),
    ("int", _Loader.whole),
    ("float", _Loader.real),
    ("str", _Loader.text),
    ("map", _Loader.mapping),
    ("seq", _Loader.sequence),
):
    _Loader.add_constructor(_TAG + _name, _make)
_Loader.add_constructor(None, _Loader.other)
