"""How one artifact is made: claim, inputs, draft, job, record; the same for all assets of the loop."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg
from coepg_dagster.assets.checks import changed, check_results, evaluate_again, results_of, with_readers
from coepg_dagster.assets.ledger import Loop, assert_unchanged, claim, tag_run
from coepg_dagster.assets.recovery import handed_over, keep_record
from coepg_dagster.assets.shown import shown
from coepg_dagster.resources.store import StoreResource
from coepg_dagster.resources.training import EnginesResource, Processes

from coepg_dagster.benchmark import SOURCE
from coepg_dagster.experiment.models import Member, Models
from coepg_dagster.experiment.schema import Experiment
from coepg_dagster.experiment.strict import ExperimentError, fingerprint
from coepg_dagster.experiment.training import GrounderRl, PolicyTraining, Sft
from coepg_dagster.experiment.versions import code_version
from coepg_dagster.jobs import Job, TrainingJob, seed_of
from coepg_dagster.planning.machine import TrainingSettings, training_refusals, trainings
from coepg_dagster.project import Project
from coepg_dagster.provenance import SHARED, Asset, NotUsable, Record, Ref
from coepg_dagster.refusal import Refusal, machine_trouble
from coepg_dagster.store import CLAIMS, UNPARTITIONED, Store


@dataclass(frozen=True)
class Resources:
    """What Dagster gives a step: the store, how engines run here, and the process that it starts, with its hyper-parameters."""

    store: StoreResource
    engines: EnginesResource
    processes: Mapping[str, Processes] = field(default_factory=dict)  # the step's own, then those of the steps after it

    @property
    def own(self) -> Processes | None:
        """Where the step's own process runs; None: it starts none."""
        return next(iter(self.processes.values()), None)

    def assert_fit(self, experiment: Experiment) -> None:
        """Raises ExperimentError with all settings that this step, or one after it, could not use."""
        models = experiment.models
        configs = {"sft": experiment.sft, "grpo_cdrem": experiment.grpo, "regeneration": experiment.regeneration}
        uses: list[Callable[[], object]] = [self.engines.serving, partial(self.engines.placed, models)]
        for name, resource in self.processes.items():
            uses += [resource.settings, partial(resource.resolve, configs[name])]
            uses.append(partial(chosen, models.verifiers, getattr(resource, "verifiers", None)))
        why: list[str] = []
        for use in uses:
            try:
                use()
            except ExperimentError as error:
                why.append(str(error))
        if why:
            raise ExperimentError("\n".join(dict.fromkeys(why)))


def chosen(members: dict[str, Member], names: list[str] | None) -> dict[str, Member]:
    """The members that the Launchpad names; all if it names none. Raises ExperimentError."""
    unknown = sorted(set(names or ()) - set(members))
    if unknown:
        raise ExperimentError(f"`verifiers` names {', '.join(unknown)}; the experiment has {', '.join(members)}")
    return {name: member for name, member in members.items() if names is None or name in names}


@dataclass
class Outcome:
    """The result of an asset's function, whose files are in the draft."""

    content: list[str]  # files whose hash is the data version
    figures: dict[str, Any]  # kept in the record
    checks: dict[str, str | None] = field(default_factory=dict)  # blocking check → None, or why it failed
    metadata: dict[str, Any] = field(default_factory=dict)  # for the UI only
    config: dict[str, Any] = field(default_factory=dict)  # as resolved
    device: str = "cpu"
    seconds: float | None = None  # of the worker; None: no worker


@dataclass
class StageContext:
    """What the function of an asset needs to make `ref`: its inputs, and an empty draft for its content."""

    context: dg.AssetExecutionContext
    resources: Resources
    loop: Loop
    ref: Ref
    inputs: dict[Ref, Record]
    store: Store
    draft: Path

    @property
    def k(self) -> int:
        assert self.ref.iteration is not None
        return self.ref.iteration

    @property
    def models(self) -> Models:
        """The models of the experiment, asked at the endpoints of this machine."""
        return self.resources.engines.placed(self.loop.experiment.models)

    @property
    def process(self) -> Processes:
        """Where the process of this step runs, and the hyper-parameters that the Launchpad replaces."""
        assert self.resources.own is not None
        return self.resources.own

    def record(self, asset: Asset) -> Record:
        """The record of the input `asset` of this iteration."""
        return self.inputs[Ref(asset, self.ref.iteration)] if Ref(asset) not in self.inputs else self.inputs[Ref(asset)]

    def folder(self, asset: Asset) -> Path:
        """The folder of the input `asset` of this iteration."""
        return self.store.root / self.record(asset).folder

    def previous_folder(self, asset: Asset) -> Path | None:
        """The folder of the input `asset` of iteration k - 1; None if it is not an input."""
        record = self.inputs.get(Ref(asset, self.k - 1))
        return self.store.root / record.folder if record else None

    def read_by(self, reader: Asset, asset: Asset) -> Path:
        """The folder of the version of `asset` that the input `reader` was made from. Raises NotUsable if it is gone."""
        used = self.record(reader).input(asset)
        now = self.loop.record(self.context.instance, used.ref)
        files, sizes = (now.files, now.sizes) if now and now.folder == used.folder else ({}, {})
        if gone := self.store.lost(used.folder, files, sizes):
            raise NotUsable(
                f"{used.ref}, which {reader} was made from, is gone from the store: {gone}; materialize {used.ref} again"
            )
        if files and now:
            assert_unchanged(self.store, now)
        return self.store.root / used.folder

    def run_job(self, kind: type[Job], **settings: Any) -> dict[str, Any]:
        """Runs a job that fills the draft; returns {"figures", "device", "seconds"}.

        A re-run with the same inputs and settings uses the same scratch folder, which is deleted when the job is done.
        """
        experiment, resource = self.loop.experiment, self.process
        if issubclass(kind, TrainingJob):
            self._refuse_training()
        common: dict[str, Any] = {
            "models": self.models.model_dump(mode="json"),
            "device": resource.device,
            "batch_size": experiment.batch_size,
            "seed": seed_of(self.loop.seed, str(self.ref)),
        }
        # the address of an endpoint changes no result: a job continues after its server has moved
        decides = common | {"models": self.models.without_places().model_dump(mode="json")}
        named = kind.__name__.replace("Job", "Work")  # part of the name of scratch folders
        versions = {str(used): record.data_version for used, record in self.inputs.items()}
        made_by = [versions, code_version(experiment, self.ref.asset)]  # as a staleness of the artifact would
        key = fingerprint([named, decides, {name: _plain(value) for name, value in settings.items()}, made_by])
        scratch = self.store.scratch(f"{self.loop.experiment.name}-s{self.loop.seed}-{self.ref.asset}-{self.k}-{key}")
        settings |= resource.placement(kind)  # not in the key: the number of processes changes no result
        serving = self.resources.engines.serving()
        tracked = self.store.tracked(self.loop.experiment.name, self.loop.seed, str(self.ref.asset), self.k)
        places: dict[str, Any] = {
            "visual": self.store.visual,
            "tracked": tracked,
            "out": self.draft,
            "scratch": scratch,
        }
        job = kind(**common, **settings, serving=serving, **places)
        result = resource.launch(self.context, job, self.loop.root)
        shutil.rmtree(scratch)
        return result

    def _refuse_training(self) -> None:
        """Raises ExperimentError if this training, or GRPO after it, cannot run where the resources say."""
        why: list[str] = []
        for config, name in trainings(self.loop.experiment):
            if (resource := self.resources.processes.get(name)) is not None:
                settings = resource.settings()
                assert isinstance(settings, TrainingSettings)
                why += training_refusals(_used(resource, config), settings, name)
        if why:
            raise ExperimentError("\n".join(why))


StageFunction = Callable[[StageContext], Outcome]
"""The function of an asset: fills the draft of a StageContext."""


def _used(resource: Processes, config: Sft | PolicyTraining) -> Sft | PolicyTraining:
    """The settings of a training with what the Launchpad replaces; a resource has no settings of the grounder's GRPO."""
    return config if isinstance(config, GrounderRl) else resource.resolve(config)


def _plain(value: Any) -> Any:
    def plain(part: Any) -> Any:
        part = part.without_place() if isinstance(part, Member) else part
        return part.model_dump(mode="json") if hasattr(part, "model_dump") else str(part)

    return json.loads(json.dumps(value, default=plain))


@contextmanager
def failing_plainly() -> Iterator[None]:
    """Fails the step with a message for users, and no traceback, where a request or a disk is the reason."""
    try:
        yield
    except dg.Failure:
        raise
    except Exception as error:
        why = str(error) if isinstance(error, Refusal) else machine_trouble(error)
        if why is None:
            raise
        raise dg.Failure(why, allow_retries=False) from None


@contextmanager
def stage_context(
    context: dg.AssetExecutionContext, resources: Resources, loop: Loop, asset: Asset
) -> Iterator[StageContext]:
    """Claims the iteration, checks that the inputs may be used, and opens a draft."""
    # a run of an iteration may make unpartitioned assets too
    ref = Ref(asset, None if asset in SHARED else int(context.partition_key))
    store = resources.store.store(loop.root)
    tag_run(context)
    _refuse_invalid_file(context, loop)
    if resources.processes:
        resources.assert_fit(loop.experiment)
    if ref.iteration is not None:
        claim(context, store.root / CLAIMS / loop.experiment.name / f"s{loop.seed}", ref.iteration)
    k = ref.iteration or 0
    inputs = loop.require(context, loop.inputs_of(ref), k, resources.store.accept_stale_input, store.root)
    with store.draft(loop.experiment.name, f"s{loop.seed}", asset, str(ref.iteration)) as draft:
        yield StageContext(context, resources, loop, ref, inputs, store, draft)


def _refuse_invalid_file(context: dg.AssetExecutionContext, loop: Loop) -> None:
    """Raises ExperimentError if the experiment's file cannot be used, and could not when this run was launched.

    A run that goes on while its file is edited is made to its end by the settings that it began with.
    """
    project, record = Project(loop.root), context.instance.get_run_record_by_id(context.run.run_id)
    assert record is not None
    try:
        project.experiment(loop.experiment.name)
    except ExperimentError:
        if not project.changed_since(record.create_timestamp.timestamp()):
            raise
    for used in (loop, loop.parent):
        if used is not None:
            project.use_last(used.experiment)


def materialize(
    context: dg.AssetExecutionContext, resources: Resources, loop: Loop, asset: Asset, make: StageFunction
) -> dg.MaterializeResult[None]:
    """Makes the artifact, commits it, hands it over to the next iteration, and reports it with its record and checks.

    What the checks of other artifacts say changes with it, and those that a failed step leaves unevaluated say it again.
    """
    try:
        with failing_plainly():
            return _materialize(context, resources, loop, asset, make)
    except BaseException as error:
        if asset not in SHARED:
            from sqlalchemy.exc import SQLAlchemyError  # here: definitions alone do without SQLAlchemy

            store = resources.store.store(loop.root).root
            # an interrupt ends the run: it makes nothing any more
            not_made = with_readers(loop, asset) if isinstance(error, Exception) else loop.made
            unevaluated = (context.run.run_id, not_made)
            with suppress(SQLAlchemyError):  # the event log itself may be what fails; the next run evaluates them
                records = loop.records(context.instance, store)
                evaluate_again(context.instance, loop, records, loop.stale(records), unevaluated=unevaluated)
        raise


def _materialize(
    context: dg.AssetExecutionContext, resources: Resources, loop: Loop, asset: Asset, make: StageFunction
) -> dg.MaterializeResult[None]:
    started = time.monotonic()
    # computed first: a change during the read makes the artifact stale
    source = {SOURCE: loop.source(asset)} if asset in SHARED else {}
    with stage_context(context, resources, loop, asset) as work:
        outcome = make(work)
        seed_part = () if loop.key(asset).path[1] == asset else (f"s{loop.seed}",)
        place = (loop.experiment.name, *seed_part, asset, loop.partition(work.ref) or UNPARTITIONED)
        before = loop.record(context.instance, work.ref)
        damaged = before is not None and work.store.lost(before.folder, before.files, before.sizes) is not None
        artifact = work.store.commit(work.draft, place, outcome.content, replace=damaged)
    seconds = time.monotonic() - started
    record = Record(
        asset=asset,
        iteration=work.ref.iteration,
        data_version=artifact.version,
        run_id=context.run.run_id,
        folder=str(artifact.folder.relative_to(work.store.root)),
        inputs=[used.as_input(taken_from(loop, used.asset)) for used in work.inputs.values()],
        code_version=code_version(loop.experiment, asset),
        config=outcome.config,
        seed=loop.seed,
        seconds=round(seconds, 3),
        device=outcome.device,
        figures=source | outcome.figures,  # an import's fingerprint of its source takes precedence
        files=dict(artifact.files),
        sizes=artifact.sizes,
        failed_checks=sorted(name for name, why in outcome.checks.items() if why is not None),
        accepted_stale_input=resources.store.accept_stale_input,
        place=_place(resources) if outcome.seconds is not None else {},
    )
    keep_record(work.store.root, loop.key(asset), record)
    if (observed := handed_over(loop, record)) is not None:  # after the last iteration too: K may be raised later
        context.log_event(observed)  # before k materializes; a sensor would be too late
    known = loop.records(context.instance, work.store.root)
    records = known.replaced(record)
    stale = loop.stale(records)
    skipped = with_readers(loop, asset) - {asset} if record.failed_checks else set()
    affected = (changed(loop, known, records, stale) | {ref for ref in known if ref.asset in skipped}) - {work.ref}
    evaluate_again(context.instance, loop, records, stale, affected, (context.run.run_id, skipped))
    checks = {} if asset in SHARED else results_of(loop, work.ref, records, stale) | outcome.checks
    return dg.MaterializeResult(
        data_version=dg.DataVersion(artifact.version),
        metadata=shown(loop, work.store.root, record, outcome.metadata, outcome.seconds, _overrides(resources, asset)),
        check_results=check_results(asset, checks),
    )


def taken_from(loop: Loop, asset: Asset) -> str | None:
    """The name of the parent loop if `asset` is taken from it."""
    return loop.parent.name if loop.parent is not None and asset in loop.experiment.taken else None


def _overrides(resources: Resources, asset: Asset) -> dict[str, Any]:
    """The settings of the experiment file that the Launchpad replaced in this run."""
    # where the grounder learns by GRPO its settings are its own: those of the resource are the planner's
    return resources.own.overrides() if resources.own is not None and asset != "grounder_rl" else {}


def _place(resources: Resources) -> dict[str, Any]:
    """Where a worker of this run was: the machine's profile, and every setting as it was used."""
    engines, own = resources.engines, resources.own
    assert own is not None
    return {
        "machine": engines.machine,
        **own.settings().model_dump(mode="json"),
        "vllm": engines.serving().model_dump(mode="json"),
        "endpoints": engines.endpoints,
    }
