"""Plug-ins: ideas of other systems that an experiment file switches on by name, beside the paper's own way.

A plug-in is a function with the decorator `plugin`, in the file of its kind. Its keyword-only parameters are its settings, with
their defaults and types. Plug-ins of a user's own package are found by entry points of the group ENTRY_POINTS, each of which
names a module with decorated functions: installing such a package means that its code runs here.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Final, Literal, TypeVar, get_args

from coepg_dagster.refusal import Refusal

F = TypeVar("F", bound=Callable[..., Any])
Kind = Literal["reward", "combiner", "advantage", "policy_loss", "data", "inference", "check"]

ENTRY_POINTS: Final = "coepg_dagster.plugins"


class NoPlugin(Refusal, ValueError):
    """A plug-in that does not exist, or that two functions want to be; the message names those that exist."""


@dataclass(frozen=True)
class Plugin:
    """What one name of a kind stands for."""

    kind: Kind
    name: str
    source: str  # the paper or the code that it comes from
    function: Callable[..., Any]

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of its positional parameters; what a kind offers is found by them."""
        return tuple(
            name
            for name, parameter in inspect.signature(self.function).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        )

    @property
    def settings(self) -> Mapping[str, tuple[Any, Any]]:
        """Setting → (type, default); a setting without a default has `inspect.Parameter.empty` there."""
        types = typing.get_type_hints(self.function, include_extras=True)  # Annotated holds the limits of a setting
        return {
            name: (types.get(name, Any), parameter.default)
            for name, parameter in inspect.signature(self.function).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY
        }


_known: dict[tuple[Kind, str], Plugin] = {}


def plugin(kind: Kind, source: str, name: str | None = None) -> Callable[[F], F]:
    """Decorator of a function: its `kind`, where the idea comes from, and its name, if not the function's.

    Raises:
        NoPlugin: another function has the name.
    """

    def known(function: F) -> F:
        made = Plugin(kind, name or function.__name__, source, function)
        before = _known.setdefault((kind, made.name), made)
        if (before.function.__module__, before.function.__qualname__) != (function.__module__, function.__qualname__):
            raise NoPlugin(
                f"two plug-ins are the {kind} {made.name!r}: {before.function.__module__} and {function.__module__}"
            )
        return function

    return known


@cache
def load_entry_points() -> None:
    """Imports the modules of ENTRY_POINTS; what they define is then known."""
    for entry in entry_points(group=ENTRY_POINTS):
        import_module(entry.module)


def find(kind: Kind, name: str) -> Plugin:
    """The plug-in of a kind with a name; the module that defines it has been imported. Raises NoPlugin."""
    load_entry_points()
    if (kind, name) not in _known:
        there = ", ".join(sorted(known for of, known in _known if of == kind)) or "none"
        raise NoPlugin(f"there is no {kind} {name!r:.80}; known: {there}")
    return _known[kind, name]


def plugins() -> list[Plugin]:
    """All that are known, by kind and name."""
    load_entry_points()
    return sorted(_known.values(), key=lambda one: (get_args(Kind).index(one.kind), one.name))
