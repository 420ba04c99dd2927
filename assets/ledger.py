"""The records of a loop's artifacts in the Dagster instance, and which run may write an iteration.

Only the event log decides which version of an artifact is current; the record is in the metadata of the materialization.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Final

import dagster as dg
from coepg_dagster.assets.internals import claim_slots_in_one_statement, json_metadata
from coepg_dagster.assets.run_launcher import BACKFILL_TAG, HOST_TAG, is_gone
from filelock import FileLock, Timeout
from pydantic import ValidationError
from yaml import YAMLError

from coepg_dagster import jsonlines
from coepg_dagster.artifacts import BOARDS, whole
from coepg_dagster.auditing.archive import BASE, Archive
from coepg_dagster.auditing.marks import MARKS, NotMarked, read_marks, vetoes, vetoes_changed
from coepg_dagster.experiment.schema import Experiment
from coepg_dagster.experiment.strict import ExperimentError
from coepg_dagster.experiment.versions import code_version
from coepg_dagster.project import Project
from coepg_dagster.provenance import (
    SHARED,
    Asset,
    NotUsable,
    Record,
    Ref,
    Stale,
    assert_usable,
    in_one_run,
    inputs_of,
    staleness,
    to_make,
)
from coepg_dagster.refusal import Refusal, machine_trouble
from coepg_dagster.store import CLAIMS, Store, changes

EXPERIMENT_TAG, ITERATION_TAG = "coepg/experiment", "coepg/iteration"
"""Tags of every run."""
EVOLVE_TAG = "coepg/evolve"
"""Tag of the runs of `coepg evolve`: IN_PROCESS or QUEUED."""
IN_PROCESS, QUEUED = "yes", "queued"
"""Whether a run lives in the process of `coepg evolve`, or in one that the daemon started."""
RECORD = "record"
"""Metadata key of the record."""
REPORTED: Final[tuple[Asset, ...]] = ("evaluation", "data_quality")
"""Assets that the report reads, of every iteration."""
UNFINISHED: Final = [
    status
    for status in dg.DagsterRunStatus
    if status not in (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)
]
"""Statuses of runs that are queued or go on."""


def _cannot_open(*also: type[Exception]) -> tuple[type[Exception], ...]:
    """Errors that Dagster raises for an instance that it cannot open, and others."""
    from sqlalchemy.exc import SQLAlchemyError  # here: definitions alone do without SQLAlchemy

    return dg.DagsterError, SQLAlchemyError, YAMLError, *also


def open_instance(project: Project) -> dg.DagsterInstance:
    """The Dagster instance of the project: DAGSTER_HOME, or `.dagster` under the root. Raises NotUsable."""
    home = Path(os.environ.get("DAGSTER_HOME") or project.dagster_home)
    if home == project.dagster_home:
        project.prepare_dagster_home()
    if not home.is_absolute():
        raise NotUsable(f"DAGSTER_HOME={home}: Dagster wants an absolute path: set it to {home.absolute()}")
    if not home.is_dir():
        raise NotUsable(f"DAGSTER_HOME={home}: there is no such folder: make it, or unset DAGSTER_HOME")
    os.environ["DAGSTER_HOME"] = str(home)
    os.environ.setdefault("COEPG_ROOT", str(project.root))
    try:
        with FileLock(home / ".opening.lock"):  # two processes would race to create the databases of a fresh instance
            instance = dg.DagsterInstance.get()
            make_databases(instance)
        claim_slots_in_one_statement()
    except _cannot_open(OSError) as error:
        why = " ".join(str(error).split())
        if trouble := machine_trouble(error):
            raise NotUsable(f"{home}: the Dagster instance there cannot be opened: {trouble}") from None
        raise NotUsable(
            f"{home}: the Dagster instance there cannot be opened: repair it (it must be writable), or set DAGSTER_HOME to "
            f"another folder ({why:.400})"
        ) from None
    return instance


def make_databases(instance: dg.DagsterInstance) -> None:
    """Creates the databases of a fresh instance: daemon and web server, started together, would race to create them."""
    instance.get_runs_count()
    instance.all_asset_keys()
    instance.all_instigator_state()


def assert_sound(instance: dg.DagsterInstance) -> None:
    """Raises NotUsable where a SQLite database of the instance is damaged: rows that are not found would be made again."""
    home = Path(instance.root_directory)
    for file in (home / "history" / "runs.db", home / "history" / "runs" / "index.db"):
        if file.exists():
            try:
                with contextlib.closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as database:
                    found = database.execute("PRAGMA integrity_check(1)").fetchone()[0]
                if found != "ok":
                    raise sqlite3.DatabaseError(f"database disk image is malformed ({found})")
            except sqlite3.DatabaseError as error:
                raise NotUsable(f"{file}: {machine_trouble(error) or error}") from None


@contextmanager
def alone(lock: Path, otherwise: Refusal) -> Iterator[None]:
    """Holds a lock file while open; raises `otherwise` if another process holds it."""
    try:
        held = FileLock(lock).acquire(timeout=0)
    except Timeout:
        raise otherwise from None
    with held:
        yield


def one_daemon(instance: dg.DagsterInstance) -> AbstractContextManager[None]:
    """Held by `coepg ui`, whose daemon works as long. Raises NotUsable while another holds it: two daemons start runs twice."""
    said = "another `coepg ui` runs on this Dagster instance: open its address, or end it first"
    folder = Path(instance.root_directory)
    return alone(folder / ".ui.lock", NotUsable(f"{folder}: {said}"))


@dataclass(frozen=True)
class Loop:
    """One experiment with one seed: its asset keys and its records."""

    experiment: Experiment
    seed: int
    root: Path  # of the project; the experiment's relative paths start here

    @property
    def name(self) -> str:
        """EXPERIMENT/sSEED, as in commands and messages."""
        return f"{self.experiment.name}/s{self.seed}"

    @property
    def made(self) -> tuple[Asset, ...]:
        """The partitioned assets that this loop makes itself, in the order in which one iteration is made."""
        return self.experiment.made

    @property
    def shared(self) -> tuple[Asset, ...]:
        """The unpartitioned inputs that this experiment makes itself."""
        return tuple(asset for asset in SHARED if asset not in self.experiment.taken)

    @cached_property
    def parent(self) -> Loop | None:
        """The loop with the same seed from which artifacts are taken; None where none are."""
        if not self.experiment.take:
            return None
        project, name = Project(self.root), str(self.experiment.parent)
        try:
            return Loop(project.experiment(name), self.seed, self.root)
        except ExperimentError:  # its file cannot be used now, see `last_used`
            if (last := project.last_used(name)) is None:
                raise
            return Loop(last, self.seed, self.root)

    def owner(self, asset: Asset) -> str:
        """Name of the experiment that makes `asset`: this one, or the parent from which it is taken."""
        return str(self.experiment.parent) if asset in self.experiment.taken else self.experiment.name

    def key(self, asset: Asset) -> dg.AssetKey:
        """The asset key; the seeds of an experiment share that of benchmarks and open models."""
        if asset in SHARED:
            return dg.AssetKey([self.owner(asset), asset])
        return dg.AssetKey([self.owner(asset), f"s{self.seed}", asset])

    def twin(self, asset: Asset) -> dg.AssetKey:
        """The key under which iteration k reads `asset` of iteration k - 1."""
        return dg.AssetKey([self.owner(asset), f"s{self.seed}", "previous", asset])

    def inputs_of(self, ref: Ref) -> list[Ref]:
        """The artifacts that are read to make `ref`."""
        return inputs_of(ref, self.experiment.agent, self.experiment.init, self.experiment.phi)

    def partition(self, ref: Ref) -> str | None:
        """The Dagster partition of an artifact."""
        return None if ref.iteration is None else str(ref.iteration)

    def record(self, instance: dg.DagsterInstance, ref: Ref) -> Record | None:
        """The record of the current version of `ref`; None where it was never materialized."""
        partition = self.partition(ref)
        events = instance.fetch_materializations(
            dg.AssetRecordsFilter(self.key(ref.asset), asset_partitions=[partition] if partition else None), limit=1
        ).records
        return _record_of(ref, events[0]) if events else None

    def records(self, instance: dg.DagsterInstance, store: Path | None = None) -> Records:
        """The current records of all artifacts but the report; those of taken assets are the parent's.

        `store` is the folder of all artifacts; None: the project's.
        """
        records = Records()
        if self.parent is not None:
            parent_records = self.parent.records(instance, store)
            records.stale_where_taken = {
                ref: Stale(ref, ref, f"in {self.parent.name}: {why}", why.spreads)
                for ref, why in self.parent.stale(parent_records).items()
            }
            records |= {
                ref: record
                for ref, record in parent_records.items()
                if ref.asset in self.experiment.taken and (ref.iteration or 0) <= self.experiment.iterations
            }
        for shared in self.shared:
            if (record := self.record(instance, Ref(shared))) is not None:
                records[Ref(shared)] = record
        for asset in self.made:
            latest = instance.event_log_storage.get_latest_storage_id_by_partition(
                self.key(asset), dg.DagsterEventType.ASSET_MATERIALIZATION
            )
            wanted = [number for k, number in latest.items() if k is not None and int(k) <= self.experiment.iterations]
            for partition, value in json_metadata(instance, wanted, RECORD):
                ref = Ref(asset, int(str(partition)))
                records[ref] = _checked(ref, value)
        records.note_lost(Store(store or Project(self.root).store))
        if "dataset" in self.made:
            records.note_vetoes(self.marks(store))
        records.note_boards(self.board_source)
        return records

    def report(self, instance: dg.DagsterInstance) -> Record | None:
        """The record of the report."""
        return self.record(instance, Ref("evolution_report"))

    def report_is_current(self, instance: dg.DagsterInstance, records: Mapping[Ref, Record]) -> bool:
        """Whether the report exists and was made from exactly the current records."""
        report = self.report(instance)
        if report is None or report.code_version != code_version(self.experiment, "evolution_report"):
            return False
        if self.lost(report):
            return False
        shown = {used.ref: used.data_version for used in report.inputs}
        return shown == {ref: record.data_version for ref, record in records.items() if ref.asset in REPORTED}

    def lost(self, record: Record) -> str | None:
        """Message about the files of an artifact that are gone from the store; None: all are there."""
        return _lost(Store(Project(self.root).store), record)

    def marks(self, store: Path | None = None) -> Path:
        """The file of what auditors marked in this loop's D_k: the parent's where they are taken from it."""
        return (store or Project(self.root).store) / self.owner("dataset") / f"s{self.seed}" / MARKS

    def code_versions(self) -> dict[Asset, str]:
        """The current version of each asset's code and configuration."""
        return {asset: code_version(self.experiment, asset) for asset in (*SHARED, *self.made)}

    @property
    def imports(self) -> Path:
        """Where imported benchmarks are kept."""
        return Project(self.root).store / ".imports"

    def source(self, asset: Asset) -> str:
        """Fingerprint of the files that an unpartitioned asset is made from; those of hub models do not count."""
        from coepg_dagster import benchmark  # its readers take a tenth of a second, and most commands need none

        experiment = self.experiment
        if asset == "benchmark_steps":
            return benchmark.benchmark_version(experiment.benchmark, self.root, self.imports, experiment.models.prompts)
        return benchmark.files_version(self.root, [Path(name) for name in experiment.models.checkpoints()])

    def board_source(self, name: str) -> str | None:
        """Version of the present files of a grounding board; None where the experiment names it no longer."""
        from coepg_dagster import benchmark

        config = self.experiment.evaluation.boards.get(name)
        return None if config is None else benchmark.board_version(config, self.root, self.imports)

    def source_changed(self, record: Record) -> bool:
        """Whether the files that an unpartitioned asset was made from have changed since."""
        from coepg_dagster.benchmark import SOURCE

        return bool(record.figures.get(SOURCE) != self.source(record.asset))

    def stale(self, records: Records) -> dict[Ref, Stale]:
        """The stale ones among `records`."""
        taken = self.experiment.taken
        return staleness(records, self.code_versions(), taken, records.stale_where_taken, records.lost, records.changed)

    def to_make(self, records: Records, stale: Mapping[Ref, Stale], through: int) -> dict[int, list[Asset]]:
        """Iteration → the assets to make there: missing, stale, or downstream of one of these, for iterations 0..`through`."""
        return to_make(
            records, stale, through, self.made, self.experiment.agent, self.experiment.init, self.experiment.phi
        )

    def shared_to_make(self, records: Records, stale: Mapping[Ref, Stale]) -> tuple[Asset, ...]:
        """The unpartitioned inputs to make: missing, stale, or their source files have changed."""
        return tuple(
            asset
            for asset in self.shared
            if (record := records.get(Ref(asset))) is None or record.ref in stale or self.source_changed(record)
        )

    def in_one_run(self, assets: Sequence[Asset], iteration: int) -> list[Asset]:
        """The first of `assets` of an iteration: as many as one run can make."""
        return in_one_run(
            assets, iteration, self.made, self.experiment.agent, self.experiment.init, self.experiment.phi
        )

    def awaited(self, records: Records, stale: Mapping[Ref, Stale], iteration: int | None) -> list[Ref]:
        """Parent artifacts that this iteration needs and that are missing or stale."""
        read = [used for asset in self.made for used in self.inputs_of(Ref(asset, iteration or 0))]
        taken = [used for used in read if used.asset in self.experiment.taken]
        return [used for used in dict.fromkeys(taken) if used not in records or used in stale]

    def require(
        self, context: dg.AssetExecutionContext, refs: list[Ref], iteration: int, accept_stale_input: bool, store: Path
    ) -> dict[Ref, Record]:
        """The records of `refs`, the inputs of iteration `iteration`. Raises NotUsable, whose message ends with the remedy."""
        records = self.records(context.instance, store)
        stale = self.stale(records)
        usable = {}
        for ref in refs:
            record = records.get(ref)
            crosses = ref.iteration is not None and ref.iteration < iteration
            not_made = self._failed_in_backfill(context, ref, record) if crosses else None
            try:
                lost = records.lost.get(ref)
                usable[ref] = assert_usable(ref, record, stale.get(ref), not_made, accept_stale_input, lost)
                for read in filter(None, (usable[ref], records.stood_for(usable[ref]))):
                    assert_unchanged(Store(store), read)
            except NotUsable as why:
                more = self.where_taken(ref.asset, iteration)
                if record is None:
                    more += self._about_the_instance(context.instance, ref)
                raise NotUsable(with_hints(str(why), more)) from None
        return usable

    def where_taken(self, asset: Asset, iteration: int) -> list[str]:
        """The command that makes an asset anew where it is taken from the parent; empty: it is this loop's."""
        if self.parent is None or asset not in self.experiment.taken:
            return []
        return [f"it is taken from {self.parent.name}: run `coepg evolve {self.parent.name} --through {iteration}`"]

    def _about_the_instance(self, instance: dg.DagsterInstance, ref: Ref) -> list[str]:
        """Hints about a missing artifact if `instance` is not that of the project."""
        home = Project(self.root).dagster_home
        if Path(instance.root_directory).resolve() == home.resolve():
            return []
        hints = [f"this is the Dagster instance in {instance.root_directory}"]
        if not home.is_dir():
            return hints
        try:
            with dg.DagsterInstance.from_config(str(home)) as of_project:
                if self.record(of_project, ref) is not None:
                    hints.append(f"the project's own, {home}, has it: set DAGSTER_HOME={home}")
        except _cannot_open(NotUsable):
            hints.append(f"the project's own, {home}, cannot be opened")
        return hints

    def _failed_in_backfill(self, context: dg.AssetExecutionContext, ref: Ref, record: Record | None) -> str | None:
        """Message if the running backfill contains `ref` but `record` comes from another run; else None."""
        backfill = context.run.tags.get(BACKFILL_TAG)
        if backfill is None or record is None:
            return None
        made_by = context.instance.get_run_by_id(record.run_id)
        if made_by is not None and made_by.tags.get(BACKFILL_TAG) == backfill:
            return None
        if self.partition(ref) not in _targets(context.instance, backfill, self.key(ref.asset)):
            return None
        return f"was not made by backfill {backfill}, which contains it: it failed or was skipped there"


class Records(dict[Ref, Record]):
    """The current records of a loop, by artifact; `lost`: files gone; `stale_where_taken`: stale in the parent.

    `changed`: the vetoes of a D_k are other ones now, or cannot be read; the files of a grounding board have changed.
    """

    stale_where_taken: dict[Ref, Stale]
    lost: dict[Ref, str]
    changed: dict[Ref, str]

    def __init__(self) -> None:
        super().__init__()
        self.stale_where_taken, self.lost, self.changed = {}, {}, {}

    def replaced(self, record: Record) -> Records:
        """These records, but for one artifact that was made just now."""
        records = Records()
        records.update(self | {record.ref: record})
        records.stale_where_taken = self.stale_where_taken
        records.lost = {ref: gone for ref, gone in self.lost.items() if ref != record.ref}
        return records

    def note_lost(self, store: Store) -> None:
        """Fills `lost`: the artifacts whose files are missing in the store."""
        for ref, record in self.items():
            gone = _lost(store, record)
            if gone is None and (model := self.stood_for(record)) is not None:
                gone = _lost(store, model)
            if gone is not None:
                self.lost[ref] = gone

    def stood_for(self, record: Record) -> Record | None:
        """The record of the model of planner_sft that a planner without GRPO refers to; else None."""
        if record.asset != "planner" or record.iteration == 0 or BASE not in record.files:
            return None
        model = self.get(Ref("planner_sft", record.iteration))
        return model if model is not None and model.folder == record.input("planner_sft").folder else None

    def note_vetoes(self, marks: Path) -> None:
        """Fills `changed` from the file of marks."""
        try:
            marked, unreadable = read_marks(marks), None
        except NotMarked as error:
            marked, unreadable = [], str(error)  # what needs no D_k goes on
        for ref, record in self.items():
            if ref.asset == "dataset" and ref.iteration is not None:
                why = unreadable or vetoes_changed(record, vetoes(marked, ref.iteration))
                if why is not None:
                    self.changed[ref] = why

    def note_boards(self, source: Callable[[str], str | None]) -> None:
        """Fills `changed` where the files of a board have changed; `source`: the version of a board's present files."""
        now = cache(source)
        for ref, record in self.items():
            for name, score in record.figures.get(BOARDS, {}).items() if ref.asset == "evaluation" else ():
                if now(name) not in (None, score["source"]):
                    self.changed[ref] = f"the files of the grounding board {name} have changed"


def _lost(store: Store, record: Record) -> str | None:
    gone = store.lost(record.folder, record.files, record.sizes)
    return f"its files are gone from the store: {gone}" if gone else None


def with_hints(why: str, hints: Sequence[str]) -> str:
    """A message, with hints in brackets if there are any."""
    return f"{why} ({'; '.join(hints)})" if hints else why


def assert_unchanged(store: Store, record: Record) -> None:
    """Raises NotUsable if files of an artifact have other content than was recorded: what is made from it would be wrong.

    The artifact is set aside, so that it counts as lost and the next `coepg evolve` makes it again.
    """
    wrong = changes(record.files, store.root / record.folder, added=False)
    if wrong:
        aside = store.set_aside(record.folder)
        raise NotUsable(
            f"{record.ref} {record.data_version} is damaged: {'; '.join(wrong)}; "
            f"{f'it was moved to {aside}' if aside else f'delete {store.root / record.folder}'}: "
            f"materialize {record.ref} again, or run `coepg evolve`"
        )


def archive(project: Project, instance: dg.DagsterInstance) -> Archive:
    """Every version in the event log, of all experiments."""
    records: list[tuple[int, Record]] = []
    for key in instance.all_asset_keys():
        cursor, more = None, True
        while more:
            page = instance.fetch_materializations(key, limit=1000, cursor=cursor)
            for event in page.records:
                value = event.asset_materialization and event.asset_materialization.metadata.get(RECORD)
                if isinstance(value, dg.JsonMetadataValue):
                    records.append((event.storage_id, _parsed(key.to_user_string(), value.value)))
            cursor, more = page.cursor, page.has_more
    return Archive((record for _, record in sorted(records, key=lambda one: one[0])), project.store, project.root)


def unfinished_runs(instance: dg.DagsterInstance) -> list[str]:
    """The ids of all queued or running runs."""
    return [run.run_id for run in instance.get_runs(dg.RunsFilter(statuses=UNFINISHED))]


def finished_jobs(project: Project, instance: dg.DagsterInstance) -> set[str]:
    """EXPERIMENT-sSEED-ASSET-K of every current artifact of which there is a scratch folder: how its name begins."""
    scratch = project.store / ".scratch"
    there = [folder.name for folder in scratch.iterdir()] if scratch.is_dir() else []
    names = set()
    for experiment in project.all_experiments().values():
        for seed in experiment.seeds:
            if not any(name.startswith(f"{experiment.name}-s{seed}-") for name in there):
                continue  # records of sixty loops take seconds
            loop = Loop(experiment, seed, project.root)
            records = loop.records(instance)
            current = records.keys() - loop.stale(records).keys()
            names |= {f"{experiment.name}-s{seed}-{r.asset}-{r.iteration}" for r in current if r.asset in loop.made}
    return names


def _record_of(ref: Ref, event: dg.EventLogRecord) -> Record:
    materialization = event.asset_materialization
    value = materialization.metadata.get(RECORD) if materialization else None
    return _checked(ref, value.value if isinstance(value, dg.JsonMetadataValue) else None)


def _checked(ref: Ref, value: object) -> Record:
    if value is None:
        raise NotUsable(f"{ref} was not made by this project (its metadata has no `{RECORD}`): materialize {ref} again")
    return _parsed(str(ref), value)


def _parsed(what: str, value: object) -> Record:
    """A record, also of an older version of this project. Raises NotUsable where it is of a newer one."""
    try:
        return Record.model_validate(value)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)[0]
        raise NotUsable(
            f"the record of {what} cannot be read ({'.'.join(map(str, wrong['loc']))}: {wrong['msg']}): another version of "
            "coepg-dagster made it: use that one, or wipe its materializations in the web UI and make it again"
        ) from None


def _targets(instance: dg.DagsterInstance, backfill_id: str, key: dg.AssetKey) -> set[str]:
    """The partitions of `key` that a backfill is to make."""
    backfill = instance.get_backfill(backfill_id)
    if backfill is None:
        return set()
    if backfill.asset_backfill_data is None:
        return set(backfill.partition_names or [])
    subset = backfill.asset_backfill_data.target_subset.partitions_subsets_by_asset_key.get(key)
    return set(subset.get_partition_keys()) if subset else set()


def claim(context: dg.AssetExecutionContext, folder: Path, iteration: int) -> None:
    """Gives this run the exclusive right to write `iteration` of a loop, whose locks are in `folder`.

    A claim ends with its run, however that ends. Raises NotUsable while another unfinished run holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    holder_file = folder / f"{iteration}.json"
    with FileLock(folder / f"{iteration}.lock", timeout=30):
        if holder_file.exists():
            try:
                holder = str(jsonlines.parse(holder_file.read_bytes())["run_id"])
            except (jsonlines.NotJson, KeyError, TypeError):
                raise NotUsable(
                    f"{holder_file} is damaged: delete it once no run of iteration {iteration} goes on, then run this again"
                ) from None
            run = context.instance.get_run_by_id(holder) if holder != context.run.run_id else None
            if run is not None and not run.is_finished:
                raise NotUsable(
                    f"iteration {iteration} is being written by run {holder[:8]} ({run.status.value}): "
                    "wait for it, or cancel it, then run this again"
                )
        with whole(holder_file) as draft:
            draft.write_text(json.dumps({"run_id": context.run.run_id}))


def tag_run(context: dg.AssetExecutionContext) -> None:
    """Tags this run with its machine, and with what it makes: runs of a backfill or of the UI's buttons do not say that.

    A run that makes several seeds of one iteration names them all.
    """
    tags = {HOST_TAG: socket.gethostname()}
    if EXPERIMENT_TAG not in context.run.tags:
        keys = [key.path for key in context.job_def.asset_layer.executable_asset_keys]
        loops = {"/".join(path[:2]) for path in keys if len(path) > 2}
        names = loops or {path[0] for path in keys}  # shared assets alone belong to no seed
        tags[EXPERIMENT_TAG] = ",".join(sorted(names))
        if context.has_partition_key:
            tags[ITERATION_TAG] = context.partition_key
    if not tags.items() <= context.run.tags.items():
        context.instance.add_run_tags(context.run.run_id, tags)


@contextmanager
def living_run(store: Path, run_id: str) -> Iterator[None]:
    """Holds a lock while the process of the run is alive, for `end_dead_runs`; a lock ends with its process."""
    folder = store / _EVOLVING
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / run_id):
        try:
            yield
        finally:
            (folder / run_id).unlink()


_EVOLVING: Final = f"{CLAIMS}/evolve"


def end_dead_runs(instance: dg.DagsterInstance, store: Path) -> list[str]:
    """Marks the runs whose process is gone as failed, so that their claims and slots are free again. Returns their ids.

    A daemon does this for the runs that it started, as long as it is there. A run of `coepg evolve` holds a lock; of the
    others, those of this machine are looked at.
    """
    ended = []
    unfinished = instance.get_runs(dg.RunsFilter(statuses=UNFINISHED))
    for run in unfinished:
        evolving = run.tags.get(EVOLVE_TAG) == IN_PROCESS
        if _let_go(store / _EVOLVING / run.run_id) if evolving else is_gone(instance, run):
            instance.report_run_failed(run, "its process is gone: it was killed, or the machine was")
            ended.append(run.run_id)
    _free_slots(instance)
    if (store / _LIMITS).exists():
        with contextlib.suppress(Timeout), FileLock(store / REPRODUCING, timeout=0):  # else it needs them still
            restore_limits(instance, store)
    locks = {path.name for path in (store / _EVOLVING).glob("*")}
    for run_id in locks - {run.run_id for run in unfinished}:  # killed before its run began, or after it had ended
        _let_go(store / _EVOLVING / run_id)
    return ended


def _free_slots(instance: dg.DagsterInstance) -> None:
    """Frees the pool slots of runs that are over: who wrote that a run is over can be killed before it frees them."""
    events = instance.event_log_storage
    for pool in events.get_concurrency_keys():
        slots = events.get_concurrency_info(pool)
        for run_id in slots.active_run_ids | slots.assigned_run_ids | slots.pending_run_ids:
            run = instance.get_run_by_id(run_id)
            if run is None or run.is_finished:
                events.free_concurrency_slots_for_run(run_id)


REPRODUCING: Final = f"{CLAIMS}/reproduce.lock"
"""File in the store that `coepg reproduce` locks."""
_LIMITS: Final = f"{CLAIMS}/limits.json"


def keep_limits(store: Path, limits: Mapping[str, int | None]) -> None:
    """Keeps the limits of pools, None for the default one, before `coepg reproduce` raises them."""
    with whole(store / _LIMITS) as draft:
        draft.write_text(json.dumps(limits))


def restore_limits(instance: dg.DagsterInstance, store: Path) -> None:
    """Gives pools the limits again that were kept, if any were."""
    if not (store / _LIMITS).exists():
        return
    for pool, limit in json.loads((store / _LIMITS).read_bytes()).items():
        if limit is None:
            instance.event_log_storage.delete_concurrency_limit(pool)
        else:
            instance.event_log_storage.set_concurrency_slots(pool, limit)
    (store / _LIMITS).unlink()


def _let_go(file: Path) -> bool:
    """Removes the lock of a process that is gone; False: its process is alive and holds it."""
    try:
        with FileLock(file, timeout=0):
            file.unlink(missing_ok=True)
    except Timeout:
        return False
    return True
