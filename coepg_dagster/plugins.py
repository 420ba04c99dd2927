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

from pydantic import ConfigDict, TypeAdapter, ValidationError

from coepg_dagster.refusal import Refusal

F = TypeVar("F", bound=Callable[..., Any])
Chosen = dict[str, Any]
"""A plug-in as an experiment has it: {"name": …} and all its settings."""
Named = dict[str, dict[str, Any]]
"""Name of a plug-in → all its settings, in the order in which they are applied."""
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
    lowest: float = 0.0  # of a reward: the lowest score that it gives

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

    def completed(self, given: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """All settings: those that are `given`, and the defaults of the others.

        Args:
            more: setting → (type, default) that is not the function's.
        Raises:
            ValueError: a setting that it lacks, does not have, or that is wrong.
        """
        settings = {**self.settings, **more}
        unknown = sorted(set(given) - set(settings), key=str)
        if unknown:
            raise ValueError(f"{self.name} has no setting {unknown[0]!r:.80}; it has {', '.join(settings) or 'none'}")
        complete = {}
        for name, (type_of_value, default) in settings.items():
            if name not in given and default is inspect.Parameter.empty:
                raise ValueError(f"{self.name} needs the setting `{name}`")
            adapter = TypeAdapter[Any](type_of_value, config=ConfigDict(strict=True, allow_inf_nan=False))
            try:
                complete[name] = adapter.validate_python(given.get(name, default))
            except ValidationError as error:
                raise ValueError(f"setting `{name}` of {self.name}: {error.errors()[0]['msg']}") from None
        return complete

    def takes(self, kind: type) -> bool:
        """Whether its first parameter may be of this type."""
        hint = typing.get_type_hints(self.function).get(self.inputs[0]) if self.inputs else None
        return hint is kind or kind in get_args(hint)


_known: dict[tuple[Kind, str], Plugin] = {}


def plugin(kind: Kind, source: str, name: str | None = None, *, lowest: float = 0.0) -> Callable[[F], F]:
    """Decorator of a function: its `kind`, where the idea comes from, and its name, if not the function's.

    Args:
        lowest: of a reward: the lowest score that it gives, 0 or less. An answer that it cannot score has this one.
    Raises:
        NoPlugin: another function has the name.
    """

    def known(function: F) -> F:
        made = Plugin(kind, name or function.__name__, source, function, lowest)
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


def chosen(kind: Kind, value: Any, **more: Any) -> Chosen:
    """The plug-in that an experiment file names, as a name or as a mapping with `name`, with all its settings.

    Args:
        more: setting → (type, default) that is not the function's.
    Raises:
        ValueError: there is no such plug-in, or a setting is wrong; the message says which there are.
    """
    given = {"name": value} if isinstance(value, str) else value
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise ValueError(f"name a {kind}, as `NAME` or as `{{name: NAME, SETTING: …}}`, not {value!r:.80}")
    found = find(kind, given["name"])
    return {"name": found.name} | found.completed(settings_of(given), **more)


def settings_of(choice: Mapping[str, Any], *without: str) -> dict[str, Any]:
    """The settings of a plug-in {"name": …, settings…}, but those in `without`."""
    return {name: value for name, value in choice.items() if name not in ("name", *without)}


def chosen_for(takes: type, kind: Kind, named: Mapping[str, Mapping[str, Any]]) -> Named:
    """The plug-ins that an experiment file names, with all their settings.

    Args:
        takes: each must be a function of this type, as the annotation of its first parameter says.
    Raises:
        ValueError: there is no such plug-in, it is one of another type, or a setting is wrong.
    """
    for name in named:
        if not find(kind, name).takes(takes):
            choice = ", ".join(one.name for one in plugins() if one.kind == kind and one.takes(takes))
            raise ValueError(f"{name} is not for {takes.__name__.lower()}; those that are: {choice}")
    return {name: find(kind, name).completed(given) for name, given in named.items()}
