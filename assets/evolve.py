"""`coepg evolve`: makes the loop from the command line, one run per iteration, in order, with its progress in the terminal.

The runs go through the queue of the instance where a Dagster daemon serves it, so that its limits hold for them too. Else
they are made in this process.
"""

from __future__ import annotations

import contextlib
import math
import re
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeAlias

import dagster as dg
from coepg_dagster.assets.automation import Todo, next_todo, run_tags, why_failed
from coepg_dagster.assets.checks import evaluate_again
from coepg_dagster.assets.internals import QUEUE_DAEMON, Handler, create_run, execute, submit, wrapped_handlers
from coepg_dagster.assets.ledger import (
    EVOLVE_TAG,
    IN_PROCESS,
    QUEUED,
    UNFINISHED,
    Loop,
    assert_sound,
    end_dead_runs,
    living_run,
)
from coepg_dagster.assets.recovery import RECORDS, assert_not_lost, keep_records_of
from coepg_dagster.resources.training import Processes, default_resources, resource_config
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from coepg_dagster import yaml_files
from coepg_dagster.characters import print_line
from coepg_dagster.experiment.strict import checked
from coepg_dagster.planning.machine import PROCESS_SECTIONS, Machine
from coepg_dagster.processes import GRACE_SECONDS
from coepg_dagster.progress import Pace, local_time, span_text
from coepg_dagster.project import Project
from coepg_dagster.provenance import SHARED
from coepg_dagster.refusal import Refusal

_PROGRESS: Final = re.compile(r"(\d+)/(\d+)(?:, [^;]*)?(?:; (.*))?")
_QUIET: Final = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
ALIVE_SECONDS: Final = 120
"""A daemon whose last heartbeat is older does not run any more; it sends one every 30 seconds, later on a busy machine."""
ENDS_SECONDS: Final = 4 * GRACE_SECONDS
"""How long a cancelled run has to end its processes: they get SIGINT, then SIGTERM, then SIGKILL."""


Place: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Where the heavy steps run: resource → fields of `resources.training.Processes`."""


@dataclass(frozen=True)
class Where:
    """Where runs are made: the settings of the resources, and whether in this process even if a daemon runs."""

    place: Place = field(default_factory=dict)
    here: bool = False


@dataclass(frozen=True)
class Wanted:
    """What is made of the iterations up to the last one."""

    first: int = 0  # iterations before it are left as they are: inputs from them must exist and be current
    data: bool = True  # false: not D_k of the last one, which only the next iteration reads


class RunFailed(Refusal, RuntimeError):
    """A run of the loop failed; the message says which step, why, and where to look."""


def evolve_through(
    defs: dg.Definitions,
    instance: dg.DagsterInstance,
    loop: Loop,
    through: int,
    console: Console,
    where: Where = Where(),
    wanted: Wanted = Wanted(),
) -> int:
    """Makes what is missing or stale in the iterations up to `through`, and the report; returns the number of runs."""
    assert_sound(instance)
    store = Project(loop.root).store
    for run_id in end_dead_runs(instance, store):
        print_line(console, f"run {run_id[:8]} was killed; what it had finished is used")
    records = loop.records(instance)
    assert_not_lost(instance, store / RECORDS / loop.name, records)
    evaluate_again(instance, loop, records, loop.stale(records))
    keep_records_of(store, loop, records.values())
    runs, last = 0, None
    while (todo := next_todo(instance, loop, through, wanted.first, data=wanted.data)) is not None:
        if todo == last:
            raise RunFailed(
                f"{', '.join(todo.assets)} of iteration {todo.iteration} were made and are still not current: "
                f"look at `coepg results {loop.name}`"
            )
        for lost in todo.lost:
            print_line(console, f"{lost}; it is made again")
        if runs == 0 and not where.here and (why := no_queue(instance, loop)) is not None:
            print_line(console, f"runs are made in this process: {why}")
        _run(defs, instance, loop, todo, console, where)
        runs, last = runs + 1, todo
    return runs


def make_inputs(
    defs: dg.Definitions,
    instance: dg.DagsterInstance,
    loop: Loop,
    console: Console,
    only: Sequence[str] = SHARED,
    where: Where = Where(),
) -> bool:
    """Makes the unpartitioned inputs of an experiment, which its seeds share, if they are missing or stale.

    Returns whether something was made. `only` names the inputs that are wanted.
    """
    todo = next_todo(instance, loop, -1)
    shared = tuple(asset for asset in todo.assets if asset in loop.shared and asset in only) if todo else ()
    if shared:
        _run(defs, instance, loop, Todo(None, shared), console, where)
    return bool(shared)


def _run(
    defs: dg.Definitions,
    instance: dg.DagsterInstance,
    loop: Loop,
    todo: Todo,
    console: Console,
    where: Where,
) -> None:
    """Makes `todo` in one run: through the daemon's queue, or in this process if that is asked for or no daemon runs."""
    project, iteration = Project(loop.root), todo.iteration
    project.use(loop.experiment, loop.seed)  # the code location shows it, and the daemon's runs find it there
    title = f"{loop.name} k={'–' if iteration is None else iteration}"
    job = defs.resolve_implicit_global_asset_job_def()
    assets = frozenset(loop.key(asset) for asset in todo.assets)
    config: dict[str, Any] = {"resources": {key: {"config": dict(fields)} for key, fields in where.place.items()}}
    tags = run_tags(loop, iteration) | ({} if iteration is None else {"dagster/partition": str(iteration)})
    queued = not where.here and no_queue(instance, loop) is None
    tags[EVOLVE_TAG] = QUEUED if queued else IN_PROCESS
    if not queued:
        tags["dagster/max_retries"] = "0"  # of a lost run the daemon repeats nothing: `coepg evolve` goes on there
    going_on = _going_on(instance, tags, assets) if queued else None
    run_id = going_on.run_id if going_on is not None else str(uuid.uuid4())
    with Interrupts() as interrupts:
        try:
            alive = contextlib.nullcontext() if queued else living_run(project.store, run_id)
            with alive, Watch(instance, run_id, title, console):
                if going_on is None:
                    settings = config if queued else _QUIET | config
                    run = create_run(instance, job, assets, location_of(loop), run_id, settings, tags)
                    if not queued:
                        execute(instance, job, run)
                    else:
                        submit(instance, run)
                elif going_on.status is dg.DagsterRunStatus.NOT_STARTED:
                    submit(instance, going_on)  # its command was killed before it did
                if queued:
                    said = "goes on" if going_on else "waits"
                    print_line(console, f"{title}: run {run_id[:8]} {said} in the queue of the Dagster daemon")
                    queued = _await(instance, run_id)
        except KeyboardInterrupt:
            if interrupts.first is None:
                raise
        if interrupts.first is not None:
            if going_on is None:
                end_cancelled_run(instance, run_id)
                ended = f"ended by {interrupts.first.name}; what was finished is kept, a re-run goes on there"
            else:
                ended = f"run {run_id[:8]}, which another `coepg evolve` started, goes on: cancel it in the web UI"
            print_line(console, f"{title}: {ended}")
            raise SystemExit(128 + interrupts.first)
    made = instance.get_run_by_id(run_id)
    if made is not None and made.tags.get(EVOLVE_TAG) == QUEUED and not queued:
        print_line(console, f"{title}: the Dagster daemon is gone; the run is made in this process")
        _run(defs, instance, loop, todo, console, replace(where, here=True))
    elif made is None or not made.is_success:
        raise RunFailed(_why(instance, run_id, iteration))


def location_of(loop: Loop) -> tuple[str, str, Path]:
    """Name, module and working directory of the code location of workspace.yaml that holds a loop."""
    return *Project(loop.root).location_of(loop.experiment.name), loop.root


def no_queue(instance: dg.DagsterInstance, loop: Loop) -> str | None:
    """Why no daemon would start a queued run of a loop; None: one would."""
    if not isinstance(instance.run_coordinator, dg.QueuedRunCoordinator):
        return "the Dagster instance has no queue"
    if not isinstance(instance.run_launcher, dg.DefaultRunLauncher):
        return f"runs of the Dagster instance are started by {type(instance.run_launcher).__name__}"
    if not _daemon_lives(instance):
        return "no Dagster daemon runs (`coepg ui` starts one)"
    location, workspace = location_of(loop)[0], loop.root / "workspace.yaml"
    try:
        places = [place for entry in yaml_files.read(workspace)["load_from"] for place in entry.values()]
        if any(place["location_name"] == location for place in places):
            return None
    except yaml_files.BadYaml as error:
        return str(error)
    except (LookupError, TypeError, AttributeError):
        return f"{workspace} does not list code locations under `load_from`, each with a `location_name`"
    return f"{workspace} has no code location `{location}`"


def _daemon_lives(instance: dg.DagsterInstance) -> bool:
    heartbeat = instance.get_daemon_heartbeats().get(QUEUE_DAEMON)
    return heartbeat is not None and time.time() - heartbeat.timestamp < ALIVE_SECONDS


def _going_on(
    instance: dg.DagsterInstance, tags: Mapping[str, str], assets: frozenset[dg.AssetKey]
) -> dg.DagsterRun | None:
    """The queued run of the same assets that another `coepg evolve` left behind, if it has not ended."""
    runs = instance.get_runs(dg.RunsFilter(tags=dict(tags), statuses=UNFINISHED))
    return next((run for run in runs if run.asset_selection == assets), None)


def _await(instance: dg.DagsterInstance, run_id: str) -> bool:
    """Waits until a queued run is finished. False: it was taken from the queue, since its daemon is gone."""
    while True:
        run = instance.get_run_by_id(run_id)
        if run is None or run.is_finished:
            return True
        if run.status is dg.DagsterRunStatus.QUEUED and not _daemon_lives(instance):
            instance.run_coordinator.cancel_run(run_id)
            return False
        time.sleep(0.5)


class Interrupts:
    """Handles Ctrl-C and SIGTERM while open: the first one raises; while the cleanup after it may last, others are ignored.

    The handlers that Dagster sets during a run raise at every signal and do not report which one came. So each of them is
    wrapped, and the numbers are read from the wakeup file descriptor.
    """

    def __init__(self) -> None:
        self._numbers = b""
        self._main = threading.current_thread() is threading.main_thread()
        self._deaf_until = -math.inf  # by time.monotonic()

    @property
    def first(self) -> signal.Signals | None:
        """The first signal that came, if any."""
        self._read()
        return signal.Signals(self._numbers[0]) if self._numbers else None

    def __enter__(self) -> Interrupts:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        self._wrapped = contextlib.ExitStack()
        if self._main:
            self._handlers = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
            self._fd = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
            self._wrapped.enter_context(wrapped_handlers(self._once))
            for number, _ in self._handlers:
                signal.signal(number, self._once(_interrupt))
        return self

    def __exit__(self, *_: object) -> None:
        self._wrapped.close()
        if self._main:
            for number, handler in self._handlers:  # after a signal the process ends; later ones must not disturb that
                signal.signal(number, handler if self.first is None else signal.SIG_IGN)
            signal.set_wakeup_fd(self._fd)
        self._receiver.close()
        self._sender.close()

    def _once(self, handler: Handler) -> Handler:
        """`handler`, wrapped; what is no function, or is wrapped already, stays as it is."""
        return handler if not callable(handler) or isinstance(handler, _Once) else _Once(handler, self)

    def call(self, handler: Callable[[int, FrameType | None], object], number: int, frame: FrameType | None) -> None:
        """Calls a handler, unless one raised in the last `ENDS_SECONDS`: what it raised may have been swallowed."""
        if time.monotonic() >= self._deaf_until:
            try:
                handler(number, frame)
            except BaseException:
                self._deaf_until = time.monotonic() + ENDS_SECONDS
                raise

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            received = self._receiver.recv(1 << 10)
            self._numbers += bytes(number for number in received if number in (signal.SIGINT, signal.SIGTERM))


@dataclass(frozen=True)
class _Once:
    handler: Callable[[int, FrameType | None], object]
    interrupts: Interrupts

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.interrupts.call(self.handler, number, frame)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def end_cancelled_run(instance: dg.DagsterInstance, run_id: str) -> None:
    """Ends an interrupted run wherever it is, marks it as cancelled, and frees its pool slots."""
    run = instance.get_run_by_id(run_id)
    if run is not None and run.tags.get(EVOLVE_TAG) == QUEUED and run.status is not dg.DagsterRunStatus.NOT_STARTED:
        instance.run_coordinator.cancel_run(run_id)
        end = time.monotonic() + ENDS_SECONDS
        while run is not None and not run.is_finished and time.monotonic() < end:
            time.sleep(0.5)
            run = instance.get_run_by_id(run_id)
    if run is not None and not run.is_finished:
        instance.report_run_canceled(run)
    instance.event_log_storage.free_concurrency_slots_for_run(run_id)


def place_of(
    device: str | None,
    processes: int | None = None,
    ray: str | None = None,
    machine: Machine | None = None,
) -> Place:
    """Where the heavy steps run, by resource; None: as `machine` says, and without one the default of the resource.

    Args:
        device: `cpu` or `cuda`.
        processes: number that share inference.
        ray: address of a Ray cluster.
    """
    place: dict[str, dict[str, Any]] = resource_config(machine) if machine else {}
    for key, resource in default_resources().items():
        if isinstance(resource, Processes):
            fields = {"device": device, "processes": processes, "launcher": "ray" if ray else None, "ray_address": ray}
            place[key] = place.get(key, {}) | {name: value for name, value in fields.items() if value is not None}
    return place


def placed_machine(place: Place, machine: Machine | None = None) -> Machine:
    """`machine` with the fields of `place`; None: a machine without a profile. Raises ExperimentError."""
    known = machine or Machine(name="this_machine")
    sections = {
        key: getattr(known, key).model_dump() | dict(fields) for key, fields in place.items() if key in PROCESS_SECTIONS
    }
    return checked(Machine, known.model_dump() | sections, f"machine {known.name}")


def _why(instance: dg.DagsterInstance, run_id: str, iteration: int | None) -> str:
    """The first failed step of a run and its message, with what blocked; without one, why the run itself ended."""
    why = "failed before any step: see the run in `make ui`"
    blocked: dict[str | None, str] = {}
    for entry in instance.all_logs(run_id):
        event = entry.dagster_event
        if event is None:
            continue
        if event.event_type == dg.DagsterEventType.ASSET_CHECK_EVALUATION:
            check = event.asset_check_evaluation_data
            if check.blocking and not check.passed:
                blocked[event.step_key] = blocked.get(event.step_key, "") + f"\n{check.check_name}: {check.description}"
        elif event.is_step_failure:
            reasons = blocked.get(event.step_key, "")
            return f"run {run_id[:8]}, {event.step_key}, iteration {iteration}: {why_failed(event)}{reasons}"
        elif event.event_type in _ENDS:
            why = f"{_ENDS[event.event_type]}: {event.message}"
    return f"run {run_id[:8]} of iteration {iteration} {why}"


_ENDS: Final = {dg.DagsterEventType.RUN_FAILURE: "failed", dg.DagsterEventType.RUN_CANCELED: "was cancelled"}


COUNTED: Final = "being saved and checked"
"""What a step whose work is all counted does until it ends; for a large model that takes minutes."""


class Bars:
    """The steps of a run as bars in a terminal."""

    def __init__(self, title: str, console: Console) -> None:
        self._title, self._tasks = title, dict[str, TaskID]()
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            console=console,
        )
        self.open, self.close = self._progress.start, self._progress.stop

    def waits(self, step: str, now: float, why: str) -> None:
        print_line(self._progress.console, f"{self._title} {step}: {why}")

    def started(self, step: str, now: float) -> None:
        self._tasks[step] = self._progress.add_task(f"{self._title} {step}", total=1, count="", figures="", last="")

    def advanced(self, step: str, done: int, of: int, figures: str, now: float) -> None:
        shown = COUNTED if done == of else figures
        task, count = self._tasks[step], f"{done}/{of}"
        self._progress.update(task, completed=done, total=of, count=count, figures=shown, last=figures)

    def ended(self, step: str, now: float, failed: bool) -> None:
        """The count of a step that failed is not shown: it may be complete, for a result that is not there."""
        task = self._tasks[step]
        if failed:
            self._progress.update(task, completed=0, count="failed")
            self._progress.stop_task(task)
        else:
            shown = self._progress.tasks[task]
            count, last = shown.fields["count"] or "done", shown.fields["last"]
            self._progress.update(task, completed=shown.total, count=count, figures=last)

    def tick(self, now: float) -> None:
        """Bars are drawn anew by their own thread."""


@dataclass
class _Line:
    """What is known of a step that goes on."""

    started: float
    printed: float
    pace: Pace = field(default_factory=Pace)
    text: str = ""


class Lines:
    """The steps of a run as lines of a log file: where each starts and ends, and every half minute how far it is."""

    EVERY_SECONDS: Final = 30.0

    def __init__(self, title: str, console: Console) -> None:
        self._title, self._console = title, console
        self._steps: dict[str, _Line] = {}

    def open(self) -> None:
        """A line needs no preparation."""

    def close(self) -> None:
        """Nothing is left open."""

    def waits(self, step: str, now: float, why: str) -> None:
        self._print(step, now, why)

    def started(self, step: str, now: float) -> None:
        self._steps[step] = _Line(now, now)
        self._print(step, now, "started")

    def advanced(self, step: str, done: int, of: int, figures: str, now: float) -> None:
        line = self._steps[step]
        figures = COUNTED if done == of else figures
        line.text = line.pace.text(done, of, now) + (f", {figures}" if figures else "")

    def ended(self, step: str, now: float, failed: bool) -> None:
        line = self._steps.pop(step)
        self._print(step, now, f"{'failed after' if failed else 'done in'} {span_text(now - line.started)}")

    def tick(self, now: float) -> None:
        """Prints how far the steps are of which nothing was printed for a while."""
        for step, line in self._steps.items():
            if now - line.printed >= self.EVERY_SECONDS:
                line.printed = now
                self._print(step, now, line.text or f"at work for {span_text(now - line.started)}")

    def _print(self, step: str, now: float, text: str) -> None:
        print_line(self._console, f"{local_time(now)} {self._title} {step}: {text}")


class Watch:
    """Shows the steps of a run while it goes on, from the instance's event log: bars in a terminal, else lines."""

    def __init__(self, instance: dg.DagsterInstance, run_id: str, title: str, console: Console) -> None:
        self._instance, self._run_id = instance, run_id
        live = console.is_interactive and console.file.isatty()
        self._view = Bars(title, console) if live else Lines(title, console)
        self._names: dict[str, str] = {}  # key → name of the steps that go on
        self._waiting = set[str]()  # keys of the steps that have waited for a slot of a pool
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._cursor: str | None = None

    def __enter__(self) -> Watch:
        self._view.open()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._read()
        self._view.close()

    def _follow(self) -> None:
        while not self._stop.wait(1.0):
            self._read()
            self._view.tick(time.time())

    def _read(self) -> None:
        if self._cursor is None and not self._instance.has_run(self._run_id):
            return
        news = self._instance.get_records_for_run(self._run_id, self._cursor)
        self._cursor = news.cursor
        for entry in (record.event_log_entry for record in news.records):
            step, event, now = entry.step_key, entry.dagster_event, entry.timestamp
            if step is None:
                continue
            if event is None:
                match = _PROGRESS.fullmatch(entry.user_message)
                if match and step in self._names:
                    self._view.advanced(self._names[step], int(match[1]), int(match[2]), match[3] or "", now)
            elif event.is_step_start:
                self._names[step] = step.rpartition("__")[2]
                self._view.started(self._names[step], now)
            elif event.event_type == dg.DagsterEventType.ENGINE_EVENT and step not in self._waiting:
                pool = event.engine_event_data.metadata.get("pool")
                if pool is not None and (why := self._held(str(pool.value))):
                    self._waiting.add(step)
                    self._view.waits(step.rpartition("__")[2], now, why)
            elif (event.is_step_success or event.is_step_failure) and step in self._names:
                self._view.ended(self._names.pop(step), now, event.is_step_failure)

    def _held(self, pool: str) -> str | None:
        """What a step waits for while other runs hold the slots of its pool; None: steps of its own run do."""
        slots = self._instance.event_log_storage.get_concurrency_info(pool)
        others = sorted(run_id[:8] for run_id in slots.active_run_ids - {self._run_id})
        if not others:
            return None
        more = f"`dagster instance concurrency set {pool} {slots.slot_count + 1}`"
        return f"waits for a slot of pool {pool}, which run {', '.join(others)} holds; for one more at a time: {more}"
