"""Experiment files: YAML in, with parents and overlays; names of experiments, seeds and iterations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from coepg_dagster import yaml_files
from coepg_dagster.experiment.schema import Experiment
from coepg_dagster.experiment.strict import ExperimentError, Name, checked
from coepg_dagster.experiment.versions import code_version


def load_experiment(path: Path) -> Experiment:
    """The experiment in the YAML file `path`, named as the file. Raises ExperimentError.

    A file with a `parent` holds only what differs: mappings are merged key by key; other values, and pools, replace those of
    the parent. `description`, `take`, `overlays`, `variant`, `agent`, `shown` and `automation` are not inherited. With
    `overlays` it holds what these files hold too, wherever their own parents are; two that differ in a key which this file
    does not give are an error.
    """
    return _load(path, ())


_NOT_INHERITED: Final = ("description", "parent", "take", "overlays", "variant", "agent", "shown", "automation")
"""Keys that an overlay does not inherit."""
_WHOLE: Final = ("planners", "verifiers", "point_score", "combiner", "policy_loss")
"""Mappings that are not merged: a pool in an overlay has exactly the members given there, a plug-in its own settings."""


def _load(path: Path, children: tuple[Path, ...]) -> Experiment:
    raw, parent = _read(path), None
    if "name" in raw:
        raise ExperimentError(f"{path}: key `name`: an experiment is named by its file; remove the key")
    if raw.get("parent") is not None:
        parent_file = _parent_file(path, raw["parent"])
        if parent_file in (path, *children):
            raise ExperimentError(f"{path}: key `parent`: {raw['parent']} has this file as its parent, or is it")
        try:
            parent = _load(parent_file, (path, *children))
        except ExperimentError as error:
            raise ExperimentError(f"{path}: key `parent`: {raw['parent']} cannot be used: {error}") from None
        inherited = parent.model_dump(mode="json", exclude={"name", *_NOT_INHERITED}, exclude_unset=True)
        raw = _merged(inherited, _with_overlays(path, raw, (path, *children)))
    experiment = checked(Experiment, raw | {"name": path.stem}, path)
    if parent is not None:
        _check_overlay(path, experiment, parent)
    return experiment


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = yaml_files.read(path)
    except yaml_files.BadYaml as error:
        raise ExperimentError(str(error)) from None
    if not isinstance(raw, dict):
        raise ExperimentError(f"{path}: the file must hold a mapping of keys, see experiments/sandbox.yaml")
    return raw


ABLATIONS: Final = "ablations"
"""Folder below `experiments/` whose variants form a separate code location."""
PLUGINS: Final = "plugins"
"""The same for an overlay of each plug-in, which the web UI does not load by itself."""


def _parent_file(path: Path, name: Any) -> Path:
    """The parent's file: beside the overlay, or for one in a folder of overlays one folder above."""
    folders = (path.parent, path.parent.parent) if path.parent.name in (ABLATIONS, PLUGINS) else (path.parent,)
    return _file_named(path, "parent", name, folders)


def _file_named(path: Path, key: str, name: Any, folders: Sequence[Path]) -> Path:
    """The first file of that name in `folders`. Raises ExperimentError, which names the `key` of `path`."""
    try:
        TypeAdapter(Name).validate_python(name, strict=True)
    except ValidationError:
        raise ExperimentError(f"{path}: key `{key}`: {name!r:.80} is no name of an experiment; correct it") from None
    files = [folder / f"{name}.yaml" for folder in folders if (folder / f"{name}.yaml").is_file()]
    if not files:
        raise ExperimentError(
            f"{path}: key `{key}`: there is no {name}.yaml in {' or '.join(map(str, folders))}; correct the name"
        )
    return files[0]


def _with_overlays(path: Path, raw: dict[str, Any], children: tuple[Path, ...]) -> dict[str, Any]:
    """`raw`, the content of `path`, laid over that of its `overlays`. Raises ExperimentError if two of these conflict."""
    names = raw.get("overlays")
    if not isinstance(names, list):
        return raw  # none, or refused when the whole file is checked
    root = path.parent.parent if path.parent.name in (ABLATIONS, PLUGINS) else path.parent
    own, below, owner = _leaves(raw), dict[str, Any](), dict[tuple[str, ...], tuple[Path, Any]]()
    for name in names:
        file = _file_named(path, "overlays", name, (path.parent, root, root / PLUGINS, root / ABLATIONS))
        if file in children:
            raise ExperimentError(f"{path}: key `overlays`: {name} has this file among its overlays, or is it")
        held = _read(file)
        if held.get("parent") is None:
            raise ExperimentError(
                f"{path}: key `overlays`: {file} is no overlay, since it has no `parent`; name another"
            )
        held = {k: v for k, v in _with_overlays(file, held, (file, *children)).items() if k not in _NOT_INHERITED}
        for key, value in _leaves(held).items():
            other, before = owner.setdefault(key, (file, value))
            if before != value and not any(key[: len(given)] == given for given in own):
                raise ExperimentError(
                    f"{path}: key `overlays`: {other} and {file} differ in `{'.'.join(key)}` ({before!r:.80} and "
                    f"{value!r:.80}): give it in this file, or leave one out"
                )
        below = _merged(below, held)
    return _merged(below, raw)


def _leaves(raw: dict[str, Any], *above: str) -> dict[tuple[str, ...], Any]:
    """Key path → value, of everything that `_merged` does not merge deeper."""
    leaves: dict[tuple[str, ...], Any] = {}
    for key, value in raw.items():
        deeper = isinstance(value, dict) and value and key not in _WHOLE
        leaves |= _leaves(value, *above, str(key)) if deeper else {(*above, str(key)): value}
    return leaves


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` laid over `below`, mapping by mapping."""
    result = dict(below)
    for key, value in above.items():
        deeper = isinstance(value, dict) and isinstance(below.get(key), dict) and key not in _WHOLE
        result[key] = _merged(below[key], value) if deeper else value
    return result


def _check_overlay(path: Path, experiment: Experiment, parent: Experiment) -> None:
    """Raises ExperimentError if the parent does not make what is taken, or made it with other settings than the overlay's."""
    if experiment.take and parent.take:
        raise ExperimentError(
            f"{path}: key `take`: {parent.name} takes artifacts itself; name the experiment that makes them as `parent`"
        )
    if experiment.take and not set(experiment.seeds) <= set(parent.seeds):
        raise ExperimentError(
            f"{path}: key `seeds`: {parent.name} has {parent.seeds} only; take from these, or add there"
        )
    if experiment.take and experiment.iterations > parent.iterations:
        raise ExperimentError(f"{path}: key `iterations`: {parent.name} has {parent.iterations} only; raise it there")
    for asset in sorted(experiment.taken):
        if code_version(experiment, asset) != code_version(parent, asset):
            raise ExperimentError(
                f"{path}: key `take`: {asset} is {parent.name}'s, but this file changes settings that decide it; "
                "remove them, or take less"
            )


class Experiments(dict[str, Experiment]):
    """Experiments by name, in alphabetical order; `left_out` has the files that cannot be used, with the reason."""

    left_out: dict[str, str]

    def __init__(self, experiments: Mapping[str, Experiment], left_out: Mapping[str, str]) -> None:
        super().__init__(experiments)
        self.left_out = dict(left_out)

    def named(self, name: str) -> Experiment:
        """The experiment `name`. Raises ExperimentError if there is none, or with what is wrong with its file."""
        if name in self:
            return self[name]
        if name in self.left_out:
            raise ExperimentError(self.left_out[name])
        near = get_close_matches(name, self)
        meant = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ExperimentError(f"there is no experiment {name!r:.80}{meant}; known: {', '.join(self) or 'none'}")


def find_experiments(folder: Path) -> Experiments:
    """The experiments in `folder`. A file that cannot be used is left out with the reason; hidden files are ignored."""
    experiments, left_out = {}, {}
    for path in experiment_files(folder):
        try:
            experiments[path.stem] = load_experiment(path)
        except ExperimentError as error:
            left_out[_printable(path.stem)] = _printable(str(error))
    return Experiments(experiments, left_out)


def experiment_files(folder: Path) -> list[Path]:
    """The files of the experiments in `folder`, in alphabetical order."""
    return sorted(path for path in folder.glob("*.yaml") if not path.name.startswith("."))


def _printable(text: str) -> str:
    """`text` without the halves of surrogate pairs that stand for bytes of a file name that is no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def split_reference(reference: str, named: Callable[[str], Experiment]) -> tuple[Experiment, int]:
    """(experiment, seed) of `NAME` (its first seed) or `NAME/sSEED`; `named` finds NAME. Raises ExperimentError."""
    name, stroke, seed_part = reference.partition("/")
    experiment = named(name)
    if not stroke:
        return experiment, experiment.seeds[0]
    seeds = {f"s{seed}": seed for seed in experiment.seeds}
    if seed_part not in seeds:
        choice = ", ".join(f"{name}/{seed}" for seed in seeds)
        raise ExperimentError(f"{reference}: {name} has no such seed; use {name} or one of {choice}")
    return experiment, seeds[seed_part]


def split_iteration(reference: str, named: Callable[[str], Experiment]) -> tuple[Experiment, int, int]:
    """(experiment, seed, k) of `NAME@k` or `NAME/sSEED@k`; `named` finds NAME. Raises ExperimentError."""
    name, _, k = reference.rpartition("@")
    if not (name and k.isascii() and k.isdecimal()):
        raise ExperimentError(f"{reference!r:.80} names no iteration: write EXPERIMENT@k, e.g. sandbox@1")
    experiment, seed = split_reference(name, named)
    if k.lstrip("0")[4:] or int(k) > experiment.iterations:
        raise ExperimentError(f"{reference:.80}: {experiment.name} has the iterations 0..{experiment.iterations}")
    return experiment, seed, int(k)
