"""The folders of a project: `experiments/`, its store and its Dagster home."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coepg_dagster.artifacts import whole
from coepg_dagster.experiment.files import (
    ABLATIONS,
    PLUGINS,
    Experiments,
    experiment_files,
    find_experiments,
    load_experiment,
)
from coepg_dagster.experiment.schema import Experiment
from coepg_dagster.experiment.strict import ExperimentError
from coepg_dagster.provenance import SHARED

LOCATIONS: Final = {
    "": ("coepg", "coepg_dagster.definitions"),
    ABLATIONS: ("reproductions", "coepg_dagster.reproductions"),
    PLUGINS: ("plugins", "coepg_dagster.plugged"),
}
"""Folder below `experiments/` → (name, module) of the Dagster code location that holds its experiments."""


@dataclass(frozen=True)
class Project:
    """A checkout, or any folder that holds `experiments/`. Relative paths in experiment files start here."""

    root: Path

    @property
    def store(self) -> Path:
        """The folder of all artifacts."""
        return self.root / "store"

    @property
    def dagster_home(self) -> Path:
        """The folder of the Dagster instance: runs, event log, schedules."""
        return self.root / ".dagster"

    def experiments(self, folder: str = "") -> Experiments:
        """The experiments in `experiments/` (in `experiments/FOLDER`)."""
        place = self.root / "experiments"
        experiments = find_experiments(place / folder)
        for name in [name for name in experiments if folder and (place / f"{name}.yaml").is_file()]:
            del experiments[name]
            experiments.left_out[name] = (
                f"{place / folder / name}.yaml: {place / name}.yaml has the same name: rename one"
            )
        return experiments

    def all_experiments(self) -> Experiments:
        """The experiments of all folders; where two have one name, that of the first folder."""
        found: dict[str, Experiment] = {}
        left_out: dict[str, str] = {}
        for folder in LOCATIONS:
            of_folder = self.experiments(folder)
            found, left_out = {**of_folder, **found}, {**of_folder.left_out, **left_out}
        return Experiments(found, left_out)

    def experiment(self, name: str) -> Experiment:
        """The experiment `name`, as `all_experiments` has it; other files than it needs are not read. Raises ExperimentError."""
        folders = [self.root / "experiments" / folder for folder in LOCATIONS]
        files = [path for folder in folders for path in experiment_files(folder) if path.stem == name]
        if files:
            with suppress(ExperimentError):
                return load_experiment(files[0])
        return self.all_experiments().named(name)  # raises, with what is wrong or what there is

    def last_used(self, name: str) -> Experiment | None:
        """The experiment `name` as it was when something of it was last made; None if nothing was.

        Definitions are made of it while its file cannot be used: else runs of it would lose their assets, and backfills end.
        """
        try:
            return Experiment.model_validate_json(self._last_used(name).read_bytes())
        except (OSError, ValueError):  # none; or of another version of the code
            return None

    def use_last(self, experiment: Experiment) -> None:
        """Keeps an experiment for `last_used`."""
        file, content = self._last_used(experiment.name), experiment.model_dump_json().encode()
        if not file.is_file() or file.read_bytes() != content:
            file.parent.mkdir(parents=True, exist_ok=True)
            with whole(file) as draft:
                draft.write_bytes(content)

    def _last_used(self, name: str) -> Path:
        return self.store / ".experiments" / f"{name}.json"

    def changed_since(self, time: float) -> bool:
        """Whether a file of an experiment was changed after `time`, in seconds since 1970."""
        return any(path.stat().st_mtime > time for path in (self.root / "experiments").rglob("*.yaml"))

    def location_of(self, name: str) -> tuple[str, str]:
        """(name, module) of the code location that holds an experiment (LOCATIONS)."""
        folders = [folder for folder in LOCATIONS if (self.root / "experiments" / folder / f"{name}.yaml").is_file()]
        return LOCATIONS[folders[0] if folders else ""]

    def seeds_in_use(self, experiment: Experiment) -> list[int]:
        """The seeds of an experiment that are to be shown: those under `shown` in its file, and those with artifacts.

        Where only the inputs that its seeds share were made, the first one.
        """
        made = self.store / experiment.name
        seeds = [seed for seed in experiment.seeds if seed in experiment.shown or self.is_in_use(experiment, seed)]
        return seeds or ([experiment.seeds[0]] if any((made / asset).is_dir() for asset in SHARED) else [])

    def is_in_use(self, experiment: Experiment, seed: int) -> bool:
        """Whether anything was made of a seed of an experiment, or is about to be."""
        return (self.store / experiment.name / f"s{seed}").is_dir()

    def use(self, experiment: Experiment, seed: int) -> None:
        """Marks a seed of an experiment as in use before its first artifact is made."""
        (self.store / experiment.name / f"s{seed}").mkdir(parents=True, exist_ok=True)

    def prepare_dagster_home(self) -> Path:
        """Creates the Dagster home, with a link to the project's dagster.yaml, unless it exists."""
        self.dagster_home.mkdir(exist_ok=True)
        settings = self.dagster_home / "dagster.yaml"
        if not settings.exists() and (self.root / "dagster.yaml").exists():
            settings.symlink_to(Path("..") / "dagster.yaml")
        return self.dagster_home


def find_project() -> Project:
    """The project in COEPG_ROOT, else in the working folder or the nearest one above it. Raises ExperimentError."""
    named = os.environ.get("COEPG_ROOT")
    start = Path(named).resolve() if named else Path.cwd()
    for folder in (start,) if named else (start, *start.parents):
        if (folder / "experiments").is_dir():
            return Project(folder)
    raise ExperimentError(f"{start}: there is no folder `experiments` here or above: run this from the project's root")
