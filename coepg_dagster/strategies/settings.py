"""The settings that an experiment file gives to plug-ins, checked against their parameters when the file is read."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

from pydantic import ConfigDict, ValidationError, create_model

from coepg_dagster.plugins import Kind, Plugin, find, plugins

Named = dict[str, dict[str, Any]]
"""Name of a plug-in → its settings, in the order in which they are applied."""


def checked_settings(kind: Kind, named: Mapping[str, Mapping[str, Any]], takes: type) -> Named:
    """`named`, with the defaults of all settings filled in.

    Args:
        takes: the plug-ins must be functions of this type, as the annotation of their first parameter says.
    Raises:
        ValueError: a name that is not known, a plug-in of another type, a setting that it lacks or that is wrong.
    """
    return {name: _checked(find(kind, name), given, takes) for name, given in named.items()}


def _checked(of: Plugin, given: Mapping[str, Any], takes: type) -> dict[str, Any]:
    if not _takes(of, takes):
        choice = ", ".join(one.name for one in plugins() if one.kind == of.kind and _takes(one, takes))
        raise ValueError(f"{of.name} is not for {takes.__name__.lower()}; those that are: {choice}")
    fields: dict[str, Any] = {
        name: (kind, ... if default is inspect.Parameter.empty else default)
        for name, (kind, default) in of.settings.items()
    }
    model = create_model(of.name, __config__=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False), **fields)
    try:
        settings: dict[str, Any] = model.model_validate(given).model_dump()
    except ValidationError as error:
        known = ", ".join(fields) or "none"
        wrong = "; ".join(
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg'].removeprefix('Value error, ')}"
            for problem in error.errors()
        )
        raise ValueError(f"{of.name}: {wrong} (settings: {known})") from None
    return settings


def _takes(of: Plugin, kind: type) -> bool:
    first = next(iter(inspect.signature(of.function).parameters))
    hint = get_type_hints(of.function).get(first)
    return hint is kind or kind in get_args(hint)
