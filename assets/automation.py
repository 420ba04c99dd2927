"""What runs by itself, once the sensor `automation` is switched on: the conditions of the assets, and the alert.

Two sensors are on from the start: they make nothing, and show checks again that an ended run left unevaluated.

An experiment file names what is automated (`automation`): *refresh* makes what is missing or stale, *nightly evaluation* and
*weekly regeneration* make again what is there. All assets of a loop have to decide alike in a tick, or an iteration would fall
apart into several runs. So a tick looks at each loop once (`Seen`), with the staleness that `coepg evolve` uses, and every part
of a condition is a view of that.

Dagster's own operands are not enough (docs/dagster-loops.md): they make nothing that was missing when they were switched on,
start k + 1 while k is still being evaluated, go on to k + 1 with half of a k that failed, and see no lost file, no veto and no
new row of a benchmark.
"""

from __future__ import annotations

import json
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from datetime import datetime
from functools import reduce
from operator import or_
from typing import Final, TypeAlias

import dagster as dg
from coepg_dagster.assets.checks import evaluate_again
from coepg_dagster.assets.ledger import EXPERIMENT_TAG, ITERATION_TAG, UNFINISHED, Loop, Records

from coepg_dagster.experiment.strict import fingerprint
from coepg_dagster.experiment.versions import code_version
from coepg_dagster.provenance import SHARED, Asset, NotUsable, Ref, assert_usable
from coepg_dagster.refusal import Refusal

WEBHOOK = "COEPG_ALERT_WEBHOOK"
"""Environment variable with the address that `alert` posts to. The address is a secret: it is never logged or stored."""
WHY_AT_MOST = 2000
"""Characters of a reason in an alert."""
REGENERATION: Final[tuple[Asset, ...]] = ("candidate_plans", "verdicts", "dataset", "data_quality")
REPORT: Final[Asset] = "evolution_report"
AT_MOST: Final = 500
"""Conditions that Dagster evaluates in one sensor."""

logging.getLogger("httpx").setLevel(logging.WARNING)  # at INFO it logs the address of every request


@dataclass(frozen=True)
class Todo:
    """What one run has to make: assets of one iteration, or unpartitioned ones (None)."""

    iteration: int | None
    assets: tuple[Asset, ...]
    lost: tuple[str, ...] = ()  # artifacts whose files are gone from the store, and which files

    @property
    def refs(self) -> tuple[Ref, ...]:
        return tuple(Ref(asset, self.iteration) for asset in self.assets)


def next_todo(
    instance: dg.DagsterInstance,
    loop: Loop,
    through: int,
    first: int = 0,
    records: Records | None = None,
    *,
    data: bool = True,
) -> Todo | None:
    """The next run that is needed to make iterations `first`..`through` current; None: nothing is missing or stale.

    In order: the benchmark and the open models (a change of their source files counts too); the iterations, from the first
    stale one; the report. `records` are the loop's, if they are known. Without `data` D_`through` is not made.
    """
    records = loop.records(instance) if records is None else records
    stale = loop.stale(records)

    def todo(iteration: int | None, assets: Sequence[Asset]) -> Todo:
        refs = [Ref(asset, iteration) for asset in assets]
        lost = tuple(f"{ref}: {records.lost[ref]}" for ref in refs if ref in records.lost)
        return Todo(iteration, tuple(assets), lost)

    if shared := loop.shared_to_make(records, stale):
        return todo(None, shared)
    plan = loop.to_make(records, stale, through)
    if not data and through in plan:
        plan[through] = [asset for asset in plan[through] if asset not in REGENERATION]
    wanted = [k for k in sorted(plan) if k >= first and plan[k]]
    if wanted:
        return todo(wanted[0], loop.in_one_run(plan[wanted[0]], wanted[0]))
    return None if loop.report_is_current(instance, records) else Todo(None, (REPORT,))


def failed_inputs(instance: dg.DagsterInstance, loop: Loop) -> list[str]:
    """Inputs of the next iteration of `coepg evolve` that cannot be used, for example after a failed blocking check."""
    records = loop.records(instance)
    return _unusable(loop, next_todo(instance, loop, loop.experiment.iterations, records=records), records)


def _unusable(loop: Loop, todo: Todo | None, records: Records) -> list[str]:
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


def running(instance: dg.DagsterInstance, *loops: Loop) -> str | None:
    """What makes artifacts of one of the loops: a run, queued, running or about to be retried, or a backfill."""
    keys = {loop.key(asset) for loop in loops for asset in (*loop.shared, *loop.made, REPORT)}
    names = {loop.name for loop in loops}
    runs = list(instance.get_runs(dg.RunsFilter(statuses=UNFINISHED)))
    lost = instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE], tags={"dagster/will_retry": "true"}))
    runs += [run for run in lost if run.is_complete_and_waiting_to_retry]
    for run in runs:
        if names & set(run.tags.get(EXPERIMENT_TAG, "").split(",")) or keys & (run.asset_selection or set()):
            return f"run {run.run_id[:8]}"
    for backfill in instance.get_backfills(limit=100):  # the newest ones
        if backfill.status.name == "REQUESTED" and keys & set(backfill.asset_selection or ()):
            return f"backfill {backfill.backfill_id}"
    return None


def run_tags(loop: Loop, iteration: int | None) -> dict[str, str]:
    """The tags of every run of a loop."""
    return {EXPERIMENT_TAG: loop.name} | ({} if iteration is None else {ITERATION_TAG: str(iteration)})


@dataclass(frozen=True)
class Seen:
    """A loop at one tick."""

    todo: Todo | None  # the next run
    needed: frozenset[Ref]  # missing or stale, or made from what is
    making: str | None  # what makes something of the loop now
    waits: str | None  # why the inputs of the next run cannot be used yet
    before: str  # fingerprint of code, sources, and all that comes before the next run
    within: str  # fingerprint of what is there of the iteration that the next run makes
    agents: frozenset[int]  # iterations whose agent is there
    newest: frozenset[int]  # the last iteration whose D_k is there


def unseen(why: str) -> Seen:
    """A loop that cannot be looked at: nothing of it is made."""
    return Seen(None, frozenset(), why, why, before="", within="", agents=frozenset(), newest=frozenset())


def look(instance: dg.DagsterInstance, loop: Loop, seeds: Sequence[Loop]) -> Seen:
    """`loop` as it is now; `seeds` are all loops of its experiment, which share the benchmark and the open models."""
    records, last = loop.records(instance), loop.experiment.iterations
    stale = loop.stale(records)
    todo = next_todo(instance, loop, last, records=records)
    plan = loop.to_make(records, stale, last)
    awaited = loop.awaited(records, stale, todo.iteration) if todo is not None and todo.iteration is not None else []
    waits = [f"for {ref} of {loop.experiment.parent}" for ref in awaited] + _unusable(loop, todo, records)
    there = records.keys() - records.lost.keys()
    data = [k for k in range(last + 1) if Ref("dataset", k) in there]

    def state(place: Collection[int]) -> list[list[str | None]]:
        return [
            [str(ref), record.data_version, record.code_version, records.lost.get(ref), records.changed.get(ref)]
            for ref, record in sorted(records.items(), key=lambda item: str(item[0]))
            if (-1 if ref.iteration is None else ref.iteration) in place
        ]

    # shared inputs come before all iterations, the report after them
    place = last + 1 if todo is None or todo.assets == (REPORT,) else -1 if todo.iteration is None else todo.iteration
    code = [loop.code_versions(), code_version(loop.experiment, REPORT), [loop.source(asset) for asset in loop.shared]]
    return Seen(
        todo=todo,
        needed=frozenset((*(Ref(asset, k) for k in plan for asset in plan[k]), *(todo.refs if todo else ()))),
        making=running(instance, *(seeds if todo is not None and todo.assets[0] in SHARED else [loop])),
        waits=waits[0] if waits else None,
        before=fingerprint([code, state(range(-1, place))]),
        within=fingerprint(state([place])),
        agents=frozenset(k for k in range(last + 1) if there.issuperset(loop.inputs_of(Ref("evaluation", k)))),
        newest=frozenset(data[-1:]),
    )


@dataclass(frozen=True)
class Tried:
    """The last run that refresh asked for, and the state in which it did; kept in the cursor of a condition."""

    made: tuple[str, ...]
    before: str
    within: str | None  # as the run left it; None: it has not ended

    @classmethod
    def read(cls, cursor: str | None) -> Tried | None:
        if cursor is None:
            return None
        made, before, within = json.loads(cursor)
        return cls(tuple(made), before, within)

    def text(self) -> str:
        return json.dumps(astuple(self))


def decide(tried: Tried | None, seen: Seen) -> tuple[Tried | None, bool]:
    """Whether the next run starts now, and what to keep in mind.

    A run that did not make what it was asked for (it failed or was cancelled) is not asked for again until something else
    than that run has changed its inputs, its code, or what is there of its iteration.
    """
    if seen.making is not None:
        return tried, False
    if seen.todo is None:
        return None, False
    made = tuple(map(str, seen.todo.refs))
    again = tried is not None and tried.before == seen.before and not set(tried.made).isdisjoint(made)
    if tried is not None and again and tried.within in (None, seen.within):
        return replace(tried, within=seen.within), False
    return (tried, False) if seen.waits is not None else (Tried(made, seen.before, None), True)


class Turns:
    """Which loop asks for runs at a tick: one only, since Dagster makes one run of all that is asked for of a partition."""

    def __init__(self) -> None:
        self._taken: dict[datetime, str] = {}

    def take(self, tick: datetime, who: str) -> bool:
        """Whether this tick is `who`'s: the first one that asks gets it."""
        mine = self._taken.setdefault(tick, who) == who
        for old in sorted(self._taken)[:-9]:
            self._taken.pop(old, None)
        return mine


class Watched:
    """A loop, looked at once in each tick.

    Args:
        seeds: all loops of its experiment, which share the benchmark and the open models.
        turns: those of all loops of the code location.
    """

    def __init__(self, loop: Loop, seeds: Sequence[Loop], turns: Turns) -> None:
        self.loop, self.seeds, self._turns = loop, seeds, turns
        self._last: tuple[datetime, Seen] | None = None

    def takes_turn(self, context: dg.AutomationContext[dg.AssetKey]) -> bool:
        """Whether the loop may ask for runs at this tick. For what seeds share, they ask together."""
        todo = self.seen(context).todo
        together = todo is not None and todo.assets[0] in SHARED
        return self._turns.take(context.evaluation_time, self.loop.experiment.name if together else self.loop.name)

    def seen(self, context: dg.AutomationContext[dg.AssetKey]) -> Seen:
        """The loop as it is at this tick."""
        last = self._last
        if last is None or last[0] != context.evaluation_time:
            try:
                seen = look(context.asset_graph_view.instance, self.loop, self.seeds)
            except (Refusal, OSError) as error:  # costs this loop its turn, not the others
                seen = unseen(str(error))
            self._last = last = context.evaluation_time, seen
            if seen.waits is not None:
                context.log.warning(f"{self.loop.name} waits: {seen.waits}")
        return last[1]


class Part(dg.AutomationCondition[dg.AssetKey]):
    """A part of a condition, under its label: true for the iterations that `holds` names, or for all or none of them."""

    def __init__(self, label: str, watched: Watched, holds: Callable[[Seen], Collection[int | None] | bool]) -> None:
        self._label, self._watched, self._holds = label, watched, holds

    def get_label(self) -> str:
        return self._label

    def evaluate(self, context: dg.AutomationContext[dg.AssetKey]) -> dg.AutomationResult[dg.AssetKey]:
        holds = self._holds(self._watched.seen(context))
        if not isinstance(holds, bool) and context.partitions_def is not None:
            keys = {str(iteration) for iteration in holds}
            return dg.AutomationResult(context, context.candidate_subset.compute_intersection_with_partition_keys(keys))
        return dg.AutomationResult(context, context.candidate_subset if holds else context.get_empty_subset())


class Starts(dg.AutomationCondition[dg.AssetKey]):
    """Whether refresh asks for the next run of the loop at this tick; the answer is the same for all assets of the loop."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched

    def get_label(self) -> str:
        return "it did not fail before with the same inputs and code, and no other loop starts at this tick"

    def evaluate(self, context: dg.AutomationContext[dg.AssetKey]) -> dg.AutomationResult[dg.AssetKey]:
        before = Tried.read(context.cursor)
        tried, starts = decide(before, self._watched.seen(context))
        if starts and not self._watched.takes_turn(context):
            tried, starts = before, False
        true = context.candidate_subset if starts else context.get_empty_subset()
        return dg.AutomationResult(context, true, cursor=None if tried is None else tried.text())


class TakesTurn(dg.AutomationCondition[dg.AssetKey]):
    """Whether no other loop asks for runs at this tick. The last part of a condition: if all else holds, it takes the turn."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched

    def get_label(self) -> str:
        return "no other loop starts at this tick"

    def evaluate(self, context: dg.AutomationContext[dg.AssetKey]) -> dg.AutomationResult[dg.AssetKey]:
        mine = not context.candidate_subset.is_empty and self._watched.takes_turn(context)
        return dg.AutomationResult(context, context.candidate_subset if mine else context.get_empty_subset())


Condition: TypeAlias = dg.AutomationCondition[dg.AssetKey]


def automated(defs: dg.Definitions, loops: Sequence[Loop], nightly: str, weekly: str, seconds: int) -> dg.Definitions:
    """`defs` with the conditions of the assets of `loops`, and the sensors that are their switch.

    Args:
        nightly, weekly: when agents are evaluated again, and D_k is regenerated (cron, UTC).
        seconds: between two ticks.
    """
    seeds = defaultdict[str, list[Loop]](list)
    for loop in loops:
        seeds[loop.experiment.name].append(loop)
    turns = Turns()
    decided = [conditions(Watched(loop, seeds[loop.experiment.name], turns), nightly, weekly) for loop in loops]
    when = {key: condition for mapping in decided for key, condition in mapping.items()}
    with_conditions = defs.map_asset_specs(
        func=lambda spec: spec.replace_attributes(automation_condition=when[spec.key]) if spec.key in when else spec
    )
    return dg.Definitions.merge(with_conditions, dg.Definitions(sensors=switches(decided, seconds)))


def conditions(watched: Watched, nightly: str, weekly: str) -> dict[dg.AssetKey, Condition]:
    """When the assets of a loop are made by themselves: any of what the experiment's file names under `automation`.

    The assets that the seeds of the experiment share have their conditions from the first of these.
    """
    loop, chosen = watched.loop, watched.loop.experiment.automation
    idle = Part("nothing of the loop is being made", watched, lambda seen: seen.making is None)
    rested = (idle & ~Starts(watched) if "refresh" in chosen else idle) & TakesTurn(watched)
    found = defaultdict[Asset, list[Condition]](list)
    if "refresh" in chosen:
        shared = loop.shared if loop is watched.seeds[0] else ()  # the other seeds would say the same
        for asset in (*shared, *loop.made, REPORT):
            found[asset].append(_refresh(asset, watched, idle))
    if "evaluate_nightly" in chosen:
        due: Condition = dg.AutomationCondition.cron_tick_passed(nightly).since_last_handled()  # type: ignore[assignment, misc]
        there = Part("the agent is there", watched, lambda seen: seen.agents)
        found["evaluation"].append((due & there & rested).with_label("nightly evaluation"))
    if "regenerate_weekly" in chosen:
        # all four are handled when the first of them is
        handled = dg.AutomationCondition.newly_requested() | dg.AutomationCondition.newly_updated()
        first = dg.AutomationCondition.asset_matches(loop.key(REGENERATION[0]), handled).with_label("handled")
        due = dg.AutomationCondition.cron_tick_passed(weekly).since(first)
        newest = Part("it is of the newest D_k", watched, lambda seen: seen.newest)
        for asset in REGENERATION:
            found[asset].append((due & newest & rested).with_label("weekly regeneration"))
    return {loop.key(asset): reduce(or_, any_of) for asset, any_of in found.items()}


def _refresh(asset: Asset, watched: Watched, idle: Part) -> Condition:
    def iterations(refs: Iterable[Ref]) -> set[int | None]:
        return {ref.iteration for ref in refs if ref.asset == asset}

    return (
        Part("it is missing or stale, or made from what is", watched, lambda seen: iterations(seen.needed))
        & Part("everything before it is current", watched, lambda seen: iterations(seen.todo.refs if seen.todo else ()))
        & idle
        & Part("what it reads passed its blocking checks", watched, lambda seen: seen.waits is None)
        & Starts(watched)
    ).with_label("refresh")


def switches(decided: Iterable[Collection[dg.AssetKey]], seconds: int) -> list[dg.AutomationConditionSensorDefinition]:
    """The switch of all conditions of a code location; another one if there are more than Dagster evaluates in a sensor.

    Args:
        decided: the assets of each loop that have conditions; they stay together.
        seconds: between two ticks.
    """
    targets: list[list[dg.AssetKey]] = []
    for keys in filter(None, decided):
        if not targets or len(targets[-1]) + len(keys) > AT_MOST:
            targets.append([])
        targets[-1] += keys
    return [
        dg.AutomationConditionSensorDefinition(
            "automation" if i == 0 else f"automation_{i + 1}",
            target=dg.AssetSelection.assets(*target),
            minimum_interval_seconds=seconds,
            emit_backfills=False,
            use_user_code_server=True,  # as conditions of our own need
            description="Makes what is due of the experiments whose files say so under `automation`. Each asset's page shows "
            "under Automation why it was made or not.",
        )
        for i, target in enumerate(targets)
    ]


def checks_of_ended_runs(loops: Sequence[Loop], seconds: int) -> list[dg.SensorDefinition]:
    """Evaluate again what a run planned to check and never did: one that reached no step cannot do so itself."""

    def evaluate(context: dg.RunStatusSensorContext) -> None:
        run = context.dagster_run
        for loop in loops:
            if {loop.key(asset) for asset in loop.made} & (run.asset_selection or set()):
                records = loop.records(context.instance)
                evaluate_again(context.instance, loop, records, loop.stale(records))

    return [
        dg.run_status_sensor(
            status,
            name=name,
            minimum_interval_seconds=2 * seconds,  # each look is four lines in the daemon's log
            default_status=dg.DefaultSensorStatus.RUNNING,
            description="Shows the results of checks again that a run which ended early was to evaluate.",
        )(evaluate)
        for name, status in (
            ("checks_after_cancel", dg.DagsterRunStatus.CANCELED),
            ("checks_after_failure", dg.DagsterRunStatus.FAILURE),
        )
    ]


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
        if run.tags.get("dagster/will_retry") == "true":
            text += "; its process or machine is gone, so Dagster goes on with it by itself"
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
    import httpx  # here, since it takes a tenth of a second and few projects alert

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
