"""Sensors and schedules of a loop. All are off by default; turn them on in the UI or in a deployment.

`refresh` makes whatever is stale or missing, one run at a time; `evolve` starts iteration k + 1 when D_k has landed; a nightly
schedule evaluates again, a weekly one regenerates the newest D_k; `alert` posts failed runs to a webhook.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import dagster as dg
import httpx
from coepg_dagster.assets.ledger import EXPERIMENT_TAG, ITERATION_TAG, UNFINISHED, Loop

from coepg_dagster.experiment import fingerprint
from coepg_dagster.provenance import SHARED, Asset, NotUsable, Ref, assert_usable
from coepg_dagster.refusal import Refusal

WEBHOOK = "COEPG_ALERT_WEBHOOK"
"""Environment variable with the address that `alert` posts to. The address is a secret: it is never logged or stored."""
WHY_AT_MOST = 2000
"""Characters of a reason in an alert."""
REGENERATION: tuple[Asset, ...] = ("candidate_plans", "verdicts", "dataset", "data_quality")

logging.getLogger("httpx").setLevel(logging.WARNING)  # at INFO it logs the address of every request


@dataclass(frozen=True)
class Todo:
    """What one run has to make: assets of one iteration, or unpartitioned ones (None)."""

    iteration: int | None
    assets: tuple[Asset, ...]
    lost: tuple[str, ...] = ()  # artifacts whose files are gone from the store, and which files


def next_todo(instance: dg.DagsterInstance, loop: Loop, through: int, first: int = 0) -> Todo | None:
    """The next run that is needed to make iterations `first`..`through` current; None: nothing is missing or stale.

    In order: the benchmark and the open models (a change of their source files counts too); the iterations, from the first
    stale one; the report.
    """
    records = loop.records(instance)
    stale = loop.stale(records)

    def todo(iteration: int | None, assets: Sequence[Asset]) -> Todo:
        refs = [Ref(asset, iteration) for asset in assets]
        lost = tuple(f"{ref}: {records.lost[ref]}" for ref in refs if ref in records.lost)
        return Todo(iteration, tuple(assets), lost)

    if shared := loop.shared_to_make(records, stale):
        return todo(None, shared)
    plan = loop.to_make(records, stale, through)
    wanted = [k for k in sorted(plan) if k >= first]
    if wanted:
        return todo(wanted[0], loop.in_one_run(plan[wanted[0]], wanted[0]))
    return None if loop.report_is_current(instance, records) else Todo(None, ("evolution_report",))


def failed_inputs(instance: dg.DagsterInstance, loop: Loop) -> list[str]:
    """Inputs of the next iteration of `coepg evolve` that cannot be used, for example after a failed blocking check."""
    todo, records = next_todo(instance, loop, loop.experiment.iterations), loop.records(instance)
    if todo is None or todo.iteration is None:
        return []
    made = [Ref(asset, todo.iteration) for asset in todo.assets]
    read = dict.fromkeys(ref for one in made for ref in loop.inputs_of(one) if ref in records and ref not in made)
    why = []
    for ref in read:
        try:
            assert_usable(ref, records[ref], None, None, False)
        except NotUsable as error:
            why.append(str(error))
    return why


def running(instance: dg.DagsterInstance, loop: Loop, iteration: int | None = None) -> str | None:
    """Id of a queued or running run that makes artifacts of the loop (of `iteration`, if given); None: there is none."""
    keys = {loop.key(asset) for asset in loop.made}
    for run in instance.get_runs(dg.RunsFilter(statuses=UNFINISHED)):
        partition = run.tags.get("dagster/partition")
        mine = loop.name in run.tags.get(EXPERIMENT_TAG, "").split(",") or bool(keys & (run.asset_selection or set()))
        if mine and (iteration is None or partition == str(iteration)):
            return run.run_id
    return None


def prefix(loop: Loop) -> str:
    """Prefix of the names of a loop's jobs, sensors and schedules."""
    return f"{loop.experiment.name}_s{loop.seed}"


def jobs(loop: Loop) -> dict[str, dg.JobDefinition]:
    """The jobs of one experiment and seed, by what they make: `iteration`, `unpartitioned`, `evaluation`, and `regeneration`
    where it makes data."""

    def job(what: str, assets: tuple[Asset, ...], description: str) -> dg.JobDefinition:
        return dg.define_asset_job(  # type: ignore[return-value]
            f"{prefix(loop)}_{what}",
            selection=dg.AssetSelection.assets(*(loop.key(asset) for asset in assets)),
            tags={EXPERIMENT_TAG: loop.name},
            description=f"{loop.name}: {description}",
        )

    made = {
        "iteration": job("iteration", loop.made, f"one iteration: {', '.join(loop.made)}."),
        "unpartitioned": job(
            "unpartitioned", (*loop.shared, "evolution_report"), "the benchmark, the open models, and the report."
        ),
        "evaluation": job("evaluation", ("evaluation",), "M_k on validation and on the test splits, again."),
    }
    if "dataset" in loop.made:
        made["regeneration"] = job("regeneration", REGENERATION, "D_k again, with the models that are there.")
    return made


def automation(loop: Loop, nightly: str, weekly: str, seconds: int) -> dg.Definitions:
    """Jobs, sensors and schedules of one experiment and seed.

    Args:
        nightly, weekly: cron strings.
        seconds: between two ticks of a sensor.
    """
    made = jobs(loop)
    writes_data = "dataset" in loop.made
    return dg.Definitions(
        jobs=list(made.values()),
        sensors=[refresh(loop, made, seconds), *([evolve(loop, made, seconds)] if writes_data else [])],
        schedules=[
            evaluate_nightly(loop, made, nightly),
            *([regenerate_weekly(loop, made, weekly)] if writes_data else []),
        ],
    )


def refresh(loop: Loop, made: dict[str, dg.JobDefinition], seconds: int) -> dg.SensorDefinition:
    """Makes whatever is stale or missing, in order, one run at a time; does not repeat a failed run until something changes."""

    @dg.sensor(
        name=f"{prefix(loop)}_refresh",
        jobs=[made["iteration"], made["unpartitioned"]],
        minimum_interval_seconds=seconds,
        description=f"Makes what is stale or missing in {loop.name}, in order, one run at a time: new benchmark rows lead "
        "to D_0 and everything after it. A run that failed is not tried again until something else changed.",
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        busy = running(context.instance, loop)
        if busy is not None:
            return dg.SkipReason(f"run {busy[:8]} is making something of {loop.name}")
        todo = next_todo(context.instance, loop, loop.experiment.iterations)
        if todo is None:
            return dg.SkipReason("everything is there and current")
        records = loop.records(context.instance)
        awaited = loop.awaited(records, loop.stale(records), todo.iteration)
        if todo.iteration is not None and awaited:
            return dg.SkipReason(f"{loop.name} waits for {awaited[0]} of {loop.experiment.parent}")
        return _request(context.instance, loop, made, todo)

    return sensor


def _request(instance: dg.DagsterInstance, loop: Loop, made: dict[str, dg.JobDefinition], todo: Todo) -> dg.RunRequest:
    """A run whose key covers all current records, code and sources, so that the same attempt is not made twice."""
    records = loop.records(instance)
    current = [[str(ref), record.run_id] for ref, record in records.items()]
    sources = [loop.source(asset) for asset in SHARED]
    return dg.RunRequest(
        run_key=fingerprint([todo.iteration, todo.assets, current, loop.code_versions(), sources]),
        job_name=made["unpartitioned" if todo.iteration is None else "iteration"].name,
        partition_key=None if todo.iteration is None else str(todo.iteration),
        asset_selection=[loop.key(asset) for asset in todo.assets],
        tags=run_tags(loop, todo.iteration),
    )


def run_tags(loop: Loop, iteration: int | None) -> dict[str, str]:
    """The tags of every run of a loop."""
    return {EXPERIMENT_TAG: loop.name} | ({} if iteration is None else {ITERATION_TAG: str(iteration)})


def evolve(loop: Loop, made: dict[str, dg.JobDefinition], seconds: int) -> dg.SensorDefinition:
    """Starts iteration k + 1 when D_k has landed and its blocking checks passed."""

    @dg.asset_sensor(
        asset_key=loop.key("dataset"),
        name=f"{prefix(loop)}_evolve",
        job=made["iteration"],
        minimum_interval_seconds=seconds,
        description=f"Starts iteration k + 1 of {loop.name} when D_k has landed, its blocking checks passed, and it is not "
        "stale; makes what is missing or stale there.",
    )
    def sensor(context: dg.SensorEvaluationContext, event: dg.EventLogEntry) -> dg.RunRequest | dg.SkipReason:
        assert event.dagster_event is not None
        k = int(event.dagster_event.partition or 0)
        if k >= loop.experiment.iterations:
            return dg.SkipReason(f"D_{k} is the last one")
        records = loop.records(context.instance)
        stale = loop.stale(records)
        ref = Ref("dataset", k)
        if records[ref].failed_checks:
            return dg.SkipReason(f"{ref}: blocking check failed: {', '.join(records[ref].failed_checks)}")
        if ref in stale:
            return dg.SkipReason(f"{ref} is stale ({stale[ref]})")
        busy = running(context.instance, loop, k + 1)
        if busy is not None:
            return dg.SkipReason(f"run {busy[:8]} is making iteration {k + 1}")
        assets = loop.in_one_run(loop.to_make(records, stale, k + 1).get(k + 1, []), k + 1)
        if not assets:
            return dg.SkipReason(f"iteration {k + 1} is there and current")
        return dg.RunRequest(
            run_key=f"{k + 1}:{event.run_id}",
            partition_key=str(k + 1),
            asset_selection=[loop.key(asset) for asset in assets],
            tags=run_tags(loop, k + 1),
        )

    return sensor


def evaluate_nightly(loop: Loop, made: dict[str, dg.JobDefinition], cron: str) -> dg.ScheduleDefinition:
    """Evaluates the agent of every iteration that is there, again."""

    @dg.schedule(
        name=f"{prefix(loop)}_evaluate_nightly",
        job=made["evaluation"],
        cron_schedule=cron,
        execution_timezone="UTC",
        description=f"Evaluates every agent M_k of {loop.name} that is there, again.",
    )
    def schedule(context: dg.ScheduleEvaluationContext) -> Iterator[dg.RunRequest | dg.SkipReason]:
        records = loop.records(context.instance)
        there = [
            k
            for k in range(loop.experiment.iterations + 1)
            if all(used in records and used not in records.lost for used in loop.inputs_of(Ref("evaluation", k)))
        ]
        if not there:
            yield dg.SkipReason("there is no agent yet")
        for k in there:
            yield _scheduled(context, loop, k)

    return schedule


def regenerate_weekly(loop: Loop, made: dict[str, dg.JobDefinition], cron: str) -> dg.ScheduleDefinition:
    """Regenerates the newest D_k with the models that are there."""

    @dg.schedule(
        name=f"{prefix(loop)}_regenerate_weekly",
        job=made["regeneration"],
        cron_schedule=cron,
        execution_timezone="UTC",
        description=f"Regenerates the newest D_k of {loop.name}: candidates, verdicts, selection, quality.",
    )
    def schedule(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        records = loop.records(context.instance)
        there = [ref.iteration for ref in records if ref.asset == "dataset" and ref.iteration is not None]
        return _scheduled(context, loop, max(there)) if there else dg.SkipReason("there is no D_k yet")

    return schedule


def _scheduled(context: dg.ScheduleEvaluationContext, loop: Loop, k: int) -> dg.RunRequest:
    return dg.RunRequest(
        run_key=f"{k}:{context.scheduled_execution_time.isoformat()}", partition_key=str(k), tags=run_tags(loop, k)
    )


def alert(seconds: int) -> dg.SensorDefinition:
    """Posts each failed run of the code location to a webhook."""

    @dg.run_failure_sensor(
        name="alert",
        minimum_interval_seconds=seconds,
        description=f"Posts each failed run as JSON to the address in the environment variable {WEBHOOK}.",
    )
    def sensor(context: dg.RunFailureSensorContext) -> None:
        run = context.dagster_run
        failed = [
            {"step": event.step_key, "why": why_failed(event).partition("\n\n")[0][:WHY_AT_MOST]}
            for event in context.get_step_failure_events()
        ]
        name = run.tags.get(EXPERIMENT_TAG, run.job_name)
        iteration = run.tags.get(ITERATION_TAG)
        first = f"{failed[0]['step']}: {failed[0]['why']}" if failed else context.failure_event.message
        text = f"{name}{'' if iteration is None else f', iteration {iteration}'}: run {run.run_id[:8]} failed: {first}"
        post({"text": text, "run_id": run.run_id, "tags": dict(run.tags), "failed": failed})

    return sensor


def why_failed(event: dg.DagsterEvent) -> str:
    """Why a step failed, in the first paragraph; then the end of its log, if it ran in its own process."""
    data = event.step_failure_data
    if data.user_failure_data and data.user_failure_data.description:
        return data.user_failure_data.description.strip()
    error = data.error.cause or data.error if data.error else None
    return error.message.strip() if error else "failed"


class AlertFailed(Refusal, RuntimeError):
    """The webhook did not accept an alert. The message never contains its address."""


def post(message: dict[str, object]) -> None:
    """Posts `message` as JSON to the webhook. Raises AlertFailed."""
    address = os.environ.get(WEBHOOK)
    if not address:
        raise AlertFailed(f"{WEBHOOK} is not set: set it where the daemon and the code server run, or turn `alert` off")
    try:
        status = httpx.post(address, json=message, timeout=10).status_code
    except (httpx.InvalidURL, httpx.UnsupportedProtocol):
        raise AlertFailed(f"{WEBHOOK} is not an http or https address: correct it") from None
    except httpx.HTTPError as error:
        raise AlertFailed(f"the address in {WEBHOOK} cannot be reached: {type(error).__name__}") from None
    if status >= 300:
        raise AlertFailed(f"the address in {WEBHOOK} answered with status {status}")
