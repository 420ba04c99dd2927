"""The records of every version: what each was made from, what was made from it, and whether its files are unchanged.

This module looks versions up and compares their files with the recorded hashes; it does not interpret tables. Folders of
versions are named by their content, so older versions are read like current ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from pydantic import ValidationError

from coepg_dagster.experiment.schema import Regeneration
from coepg_dagster.provenance import ORDER, Asset, Input, Record, Ref
from coepg_dagster.refusal import Refusal
from coepg_dagster.store import changes

MODELS = "models.json"
"""The list of open models in an `open_models` artifact: name → {"checkpoint", "version", "files"}."""

BASE = "base.json"
"""Stands in a model artifact in place of weights, where the model is an untrained base checkpoint: {"checkpoint", "version"}."""


class NotFound(Refusal, LookupError):
    """A row, version or file that was named, or that a lineage needs, does not exist; the message says what to do."""


class Archive:
    """The records of all versions, oldest first, and the folders in which artifacts and checkpoints lie.

    Args:
        records: one per materialization, of all experiments, oldest first.
        store: the folder of all artifacts.
        root: the project, where relative paths of checkpoints start.
    """

    def __init__(self, records: Iterable[Record], store: Path, root: Path) -> None:
        self.records: Sequence[Record] = tuple(records)
        self.store, self.root = store, root
        self._by_run = {(record.folder, record.run_id): record for record in self.records}
        self._newest = {record.folder: record for record in self.records}
        self._damage: dict[str, list[str]] = {}

    @cached_property
    def current(self) -> dict[str, Record]:
        """Place (EXPERIMENT/sSEED/ASSET/PARTITION) → the record of its newest version."""
        return {place_of(record): record for record in self.records}

    def is_current(self, record: Record) -> bool:
        """Whether this is the newest version in its place. Versions with the same content are the same version."""
        return self.current[place_of(record)].data_version == record.data_version

    def newest(self, loop: str, asset: Asset, iteration: int | None) -> Record:
        """The current version of an artifact of `loop` (EXPERIMENT/sSEED). Raises NotFound."""
        place = f"{loop}/{asset}/{iteration}"
        if place not in self.current:
            raise NotFound(
                f"{loop} has no {Ref(asset, iteration)}: run `coepg evolve {loop} --through {iteration or 0}` first"
            )
        return self.current[place]

    def versions(self, loop: str, asset: Asset) -> list[Record]:
        """Every version of a partitioned asset of `loop`, newest first, each once."""
        by_folder = {r.folder: r for r in self.records if r.asset == asset and r.folder.startswith(f"{loop}/{asset}/")}
        return sorted(by_folder.values(), key=self.records.index, reverse=True)

    def made_by(self, used: Input) -> Record:
        """The record of the version that was read as `used`. Raises NotFound where the event log has lost it.

        Of an artifact that all seeds share, the record of the same content by another run is as good: seeds of several machines,
        brought together, have one of them.
        """
        record = self._by_run.get((used.folder, used.run_id))
        if record is None and used.iteration is None:
            record = self._newest.get(used.folder)
        if record is None:
            raise NotFound(
                f"the record of {used.ref} {used.data_version} (run {used.run_id[:8]}) is not in the event log: "
                f"it was wiped there; materialize {used.ref} again, and everything made from it"
            )
        return record

    def folder(self, record: Record) -> Path:
        """The folder of a version. Raises NotFound where it was pruned."""
        folder = self.store / record.folder
        if not folder.is_dir():
            raise NotFound(
                f"{record.ref} {record.data_version} is not in the store any more: `coepg gc` or somebody removed it"
            )
        return folder

    def lineage(self, record: Record) -> list[Record]:
        """`record` and everything that it was made from: nearest first, each once, the open models last."""
        return sorted(self.reached([record]), key=_distance)

    def reached(self, records: Iterable[Record]) -> list[Record]:
        """`records` and everything that they were made from, each once. Raises NotFound."""
        reached = {(record.folder, record.run_id): record for record in records}
        todo = list(reached.values())
        while todo:
            for used in todo.pop().inputs:
                above = self.made_by(used)
                if (above.folder, above.run_id) not in reached:
                    reached[above.folder, above.run_id] = above
                    todo.append(above)
        return list(reached.values())

    def readers(self, record: Record) -> list[Record]:
        """Every version that was made directly from this one, oldest first."""
        return [
            reader
            for reader in self.records
            if any(used.folder == record.folder and used.run_id == record.run_id for used in reader.inputs)
        ]

    def damage(self, record: Record) -> list[str]:
        """How a version, and the checkpoints that it lists, differ from what was recorded: one line for each changed file.

        A file has other content, is gone, or was added. Empty: all files are the same, byte for byte. Results are cached.
        """
        if record.folder not in self._damage:
            newest = self._newest.get(record.folder, record)  # lost files may have been made again, logs and all
            self._damage[record.folder] = [f"{record.ref} {record.data_version}: {what}" for what in self._look(newest)]
        return self._damage[record.folder]

    def _look(self, record: Record) -> list[str]:
        folder = self.store / record.folder
        if not folder.is_dir():
            return ["its folder is gone"]
        if not record.files:
            return ["its record has no hashes of files (an older coepg made it): materialize it again"]
        differences = changes(record.files, folder)
        if record.asset == "open_models" and not differences:
            for name, model in json.loads((folder / MODELS).read_text()).items():
                checkpoint = model["checkpoint"]
                if model.get("files"):  # a hub model has its revision instead
                    differences += [
                        f"{name}: {what}" for what in changes(model["files"], self.root / checkpoint, checkpoint)
                    ]
        return differences


def place_of(record: Record) -> str:
    """EXPERIMENT/sSEED/ASSET/PARTITION: the folder that holds all versions of an artifact."""
    return record.folder.rpartition("/")[0]


def loop_of(record: Record) -> str:
    """EXPERIMENT/sSEED of a partitioned artifact, EXPERIMENT of a shared one."""
    return record.folder.rsplit("/", 3)[0]


def selected_by(dataset: Record) -> Regeneration:
    """The settings by which a version of D_k was selected.

    Raises NotFound where another version of this project wrote them: numbers by half of them would be others.
    """
    try:
        return Regeneration.model_validate(dataset.config)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)[0]
        raise NotFound(
            f"the settings of {dataset.ref} {dataset.data_version} cannot be read ({'.'.join(map(str, wrong['loc']))}: "
            f"{wrong['msg']}): another version of coepg-dagster made it: use that one, or materialize {dataset.ref} again"
        ) from None


def _distance(record: Record) -> tuple[int, int, str]:
    """Sort key: newest iteration first, within it the asset made last; then shared artifacts, the open models at the end."""
    if record.iteration is None:
        return 1, int(record.asset == "open_models"), record.folder
    return -record.iteration, -ORDER.index(record.asset), record.folder
