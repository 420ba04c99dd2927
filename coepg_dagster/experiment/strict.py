"""The base of all configuration: unknown keys, other types and impossible values are errors that name file and key."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from coepg_dagster.refusal import Refusal

Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$", max_length=60)]
"""Names become parts of asset keys and of paths."""
Pool = Annotated[str, StringConstraints(pattern=r"^\S+$", max_length=60)]
"""As Dagster wants the names of its pools."""
Owner = Annotated[
    str, StringConstraints(pattern=r"^(team:\S+|\w[\w.%+-]*@[A-Za-z0-9.-]+\.[A-Za-z]{2,7})$", max_length=100)
]
"""As Dagster wants the owners of assets."""


class ExperimentError(Refusal, ValueError):
    """An experiment file that cannot be used; the message names file and key, and says what to do."""


class Strict(BaseModel):
    """Base of all configuration: unknown keys and other types are refused, values cannot be changed afterwards.

    No type stands for another, but that a whole number may stand for a real one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

    def fingerprint(self) -> str:
        """Twelve hex digits that change with any value."""
        return fingerprint(self.model_dump(mode="json"))


def fingerprint(value: Any) -> str:
    """Twelve hex digits of the SHA-256 of `value` as canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:12]


Config = TypeVar("Config", bound=Strict)


def checked(kind: type[Config], values: Any, source: Path | str) -> Config:
    """`values` as configuration. Raises ExperimentError with a line for each wrong key, which begins with `source`."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ExperimentError("\n".join(_explain(source, kind, problem) for problem in error.errors())) from None


OF_TRL: Final[Mapping[str, str]] = {
    "attn_implementation": "attention",
    "beta": "kl_beta",
    "epsilon": "clip_epsilon",
    "gradient_checkpointing": "recompute",
    "max_completion_length": "max_plan_tokens",
    "max_length": "max_tokens",
    "num_generations": "group_size",
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "micro_batch_size",
    "torch_compile": "compile",
}
"""Names of TRL and transformers for settings that have another name here."""


def _keys(kind: type[Strict], place: Sequence[int | str]) -> list[str]:
    """The keys of the section at `place` in a configuration; empty if it has none."""
    section: type[Strict] | None = kind
    for part in place:
        if section is not None and part in section.model_fields:
            section = _section(section.model_fields[str(part)].annotation)
        # else it is a name in a mapping of sections
    return [] if section is None else list(section.model_fields)


def _section(annotation: Any) -> type[Strict] | None:
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        return annotation
    return next((found for part in get_args(annotation) if (found := _section(part)) is not None), None)


def _unknown(key: str, known: Sequence[str]) -> str:
    meant = [OF_TRL[key]] if OF_TRL.get(key) in known else get_close_matches(key, known, n=2)
    spelt = " or ".join(f"`{name}`" for name in meant)
    return f"there is no such key; {f'did you mean {spelt}?' if meant else 'remove it or correct its spelling'}"


_REMEDIES = {
    "missing": "the key is missing; add it",
    "bool_type": "a boolean is written as true or false",
}


def _explain(source: Path | str, kind: type[Strict], problem: Any) -> str:
    *place, last = problem["loc"] or ("(whole file)",)
    key = ".".join(str(part) for part in (*place, last))
    remedy = _REMEDIES.get(problem["type"], problem["msg"].removeprefix("Value error, "))
    if problem["type"] in ("string_pattern_mismatch", "string_unicode") and key != "pool":
        remedy = "use lower-case letters, digits and _, starting with a letter"
    if problem["type"] == "extra_forbidden":
        remedy = _unknown(str(last), _keys(kind, place))
    # what stands where it should not may be a key
    plain = problem["type"] not in ("missing", "value_error", "extra_forbidden") and not isinstance(
        problem["input"], dict | list
    )
    got = f" (got {problem['input']!r:.200})" if plain else ""
    return f"{source}: {f'key `{key}`' if key != 'name' else 'the name of the file'}: {remedy}{got}"
