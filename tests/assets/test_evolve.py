"""`coepg evolve` against the UI's runs: the same results, and never both at once."""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import pytest
from coepg_dagster.assets import evolve as evolve_module
from coepg_dagster.assets.automation import REGENERATION
from coepg_dagster.assets.evolve import Bars, Interrupts, Lines, RunFailed, Wanted, evolve_through, place_of
from coepg_dagster.assets.ledger import EVOLVE_TAG, EXPERIMENT_TAG, IN_PROCESS, ITERATION_TAG
from dagster._core.definitions.repository_definition import SINGLETON_REPOSITORY_NAME
from dagster._core.remote_origin import RemoteRepositoryOrigin
from dagster._core.storage.tags import REPOSITORY_LABEL_TAG
from dagster._core.workspace.load import location_origin_from_module_name, location_origins_from_yaml_paths
from rich.console import Console

from coepg_dagster.progress import local_time
from coepg_dagster.provenance import LOOP, Ref
from tests.assets.conftest import InProcess
from tests.assets.light import light_project, plant
from tests.project import REPOSITORY

QUIET = Console(quiet=True)


@pytest.mark.parametrize("later", [[signal.SIGINT], [signal.SIGTERM, signal.SIGINT]])
@pytest.mark.parametrize("depth", range(4))
def test_only_the_first_signal_raises_whatever_dagster_sets(depth: int, later: list[signal.Signals]) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    undisturbed = 0

    def within(levels: int) -> None:
        """A step of Dagster's in a step of Dagster's, each with its cleanup."""
        nonlocal undisturbed
        with dg.raise_execution_interrupts() if levels else contextlib.nullcontext():
            try:
                if levels:
                    within(levels - 1)
                # all at once, as they come after a long call; sent to the process, another thread could take one earlier
                for number in (signal.SIGTERM, *later):
                    signal.pthread_kill(threading.get_ident(), number)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
                raise AssertionError("no signal came")
            finally:
                for number in later:
                    signal.raise_signal(number)
                undisturbed += 1

    try:
        with Interrupts() as interrupts:
            for _ in range(50):  # as many events as a run has
                with dg.raise_execution_interrupts():
                    pass
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
            with pytest.raises((KeyboardInterrupt, dg.DagsterExecutionInterruptedError)):
                within(depth)
            assert interrupts.first in (signal.SIGINT, signal.SIGTERM)
        assert undisturbed == depth + 1
        for number in later:
            signal.raise_signal(number)
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)


def test_a_swallowed_interrupt_does_not_make_a_run_deaf_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    now = 100.0
    monkeypatch.setattr(evolve_module, "time", SimpleNamespace(monotonic=lambda: now))
    try:
        with Interrupts(), dg.raise_execution_interrupts():
            with pytest.raises(dg.DagsterExecutionInterruptedError):  # and swallowed, as in a destructor
                signal.raise_signal(signal.SIGINT)
            now += evolve_module.ENDS_SECONDS - 1
            signal.raise_signal(signal.SIGINT)
            now += 1
            with pytest.raises(dg.DagsterExecutionInterruptedError):
                signal.raise_signal(signal.SIGINT)
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)


def versions(light: InProcess) -> dict[str, str]:
    return {str(ref): record.data_version for ref, record in light.loop.records(light.instance).items()}


def evolve(light: InProcess, through: int) -> int:
    return evolve_through(light.defs, light.instance, light.loop, through, QUIET)


def test_options_say_where_heavy_steps_run() -> None:
    assert place_of(None) == {"sft": {}, "grpo_cdrem": {}, "regeneration": {}}
    place = place_of("cpu", processes=4)
    assert set(place) == {"sft", "grpo_cdrem", "regeneration"}
    assert all(fields == {"device": "cpu", "processes": 4} for fields in place.values())


def test_data_that_only_the_next_iteration_reads_may_be_left_out_and_come_later(light: InProcess) -> None:
    def made() -> dict[Ref, str]:
        records = light.loop.records(light.instance)
        return {ref: record.data_version for ref, record in records.items() if ref.iteration is not None}

    assert evolve_through(light.defs, light.instance, light.loop, 1, QUIET, wanted=Wanted(data=False)) == 4
    before = made()
    assert {ref.asset for ref in before if ref.iteration == 0} == set(LOOP), "iteration 1 learns from D_0"
    assert {ref.asset for ref in before if ref.iteration == 1} == set(LOOP) - set(REGENERATION)
    assert evolve_through(light.defs, light.instance, light.loop, 1, QUIET, wanted=Wanted(data=False)) == 0
    assert evolve(light, 1) == 2  # D_1, and the report
    after = made()
    assert {ref: after[ref] for ref in before} == before
    assert {ref.asset for ref in after.keys() - before.keys()} == set(REGENERATION)


def test_the_command_line_makes_what_the_ui_makes(light: InProcess, tmp_path: Path) -> None:
    assert evolve(light, 1) == 4  # inputs, two iterations, report
    assert evolve(light, 1) == 0
    with dg.DagsterInstance.ephemeral() as instance:
        other = InProcess(light_project(tmp_path / "other"), instance)
        assert other.run(None, "open_models").success and other.run(None, "benchmark_steps").success
        assert other.run(0).success
        for asset in LOOP:  # one asset of one iteration after the other
            assert other.run(1, asset).success
        assert versions(light) == versions(other)
        assert evolve(other, 1) == 1  # the report


def runs_of(instance: dg.DagsterInstance, location: str, loop: str) -> list[dg.DagsterRun]:
    """The runs of a loop that the UI's overview of a code location shows: those with the label of its repository."""
    if location == "reproductions":  # as workspace.yaml names it, once its lines are uncommented
        origin = location_origin_from_module_name(f"coepg_dagster.{location}", None, ".", location)
    else:
        [origin] = location_origins_from_yaml_paths([str(REPOSITORY / "workspace.yaml")])
        assert origin.location_name == location
    label = RemoteRepositoryOrigin(origin, SINGLETON_REPOSITORY_NAME).get_label()
    return list(instance.get_runs(dg.RunsFilter(tags={REPOSITORY_LABEL_TAG: label, EXPERIMENT_TAG: loop})))


def test_the_ui_counts_the_runs_of_the_command_line(light: InProcess) -> None:
    assert evolve(light, 1) == 4
    runs = runs_of(light.instance, "coepg", "light/s1")
    assert [run.tags.get(ITERATION_TAG) for run in runs] == [None, "1", "0", None]
    assert all(run.is_success and run.tags[EVOLVE_TAG] == IN_PROCESS for run in runs)


def test_evolve_goes_on_after_a_failure(light: InProcess) -> None:
    planted = plant(light.project, "fail", "light/s1", Ref("verdicts", 0))
    with pytest.raises(RunFailed, match=r"verdicts, iteration 0: .*planted failure"):
        evolve(light, 0)
    kept = light.loop.record(light.instance, Ref("candidate_plans", 0))
    planted.unlink()
    assert evolve(light, 0) == 2
    assert light.loop.record(light.instance, Ref("candidate_plans", 0)) == kept


def test_evolve_says_why_a_check_blocks(light: InProcess) -> None:
    plant(light.project, "check", "light/s1", Ref("dataset", 0))
    with pytest.raises(RunFailed, match=r"light__s1__dataset, iteration 0: (?s:.*)\nhas_rows: planted"):
        evolve(light, 0)


def test_evolve_refuses_an_iteration_that_another_run_writes(light: InProcess) -> None:
    light.run(None)
    job = light.defs.resolve_implicit_global_asset_job_def()
    other = light.instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED)
    claims = light.project.store / ".claims" / "light" / "s1"
    claims.mkdir(parents=True)
    (claims / "0.json").write_text(json.dumps({"run_id": other.run_id}))
    with pytest.raises(RunFailed, match=f"iteration 0 is being written by run {other.run_id[:8]}"):
        evolve(light, 0)
    light.instance.report_run_canceled(other)
    assert evolve(light, 0) == 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(light: InProcess, file: io.StringIO) -> str:
    """What `coepg evolve` prints of iteration 0, whose candidates report their progress to the end and then fail."""
    plant(light.project, "progress", "light/s1", Ref("candidate_plans", 0))
    plant(light.project, "fail", "light/s1", Ref("candidate_plans", 0))
    with pytest.raises(RunFailed, match="planted failure"):
        console = Console(file=file, force_terminal=file.isatty(), width=80)
        evolve_through(light.defs, light.instance, light.loop, 0, console)
    return file.getvalue()


def test_a_log_file_has_a_line_where_a_step_starts_and_where_it_ends(light: InProcess) -> None:
    first, *lines = shown(light, io.StringIO()).splitlines()
    assert first == "runs are made in this process: the Dagster instance has no queue"
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert all(
        re.fullmatch(rf"{time} light/s1 k=[–0] \w+: (started|(done in|failed after) [\d.]+ s)", x) for x in lines
    )
    steps = [line.split()[4:6] for line in lines]
    assert ["benchmark_steps:", "done"] in steps and ["candidate_plans:", "failed"] in steps
    assert not any("1/1" in line or "3/3" in line for line in lines)


def test_a_step_that_waits_for_a_slot_says_so_and_which_run_holds_it(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "home")) as instance:
        light, events = InProcess(light_project(tmp_path / "project"), instance), instance.event_log_storage
        assert light.run(None).success
        other = instance.create_run_for_job(light.defs.resolve_implicit_global_asset_job_def())
        events.set_concurrency_slots("gpu", 1)
        assert events.claim_concurrency_slot("gpu", other.run_id, "step").is_claimed

        class FreedOnceSaid(io.StringIO):
            def write(self, text: str) -> int:
                if "waits" in text:
                    events.free_concurrency_slots_for_run(other.run_id)
                return super().write(text)

        file = FreedOnceSaid()
        assert evolve_through(light.defs, instance, light.loop, 0, Console(file=file, width=80)) == 2
    said = [line for line in file.getvalue().splitlines() if "waits" in line]
    # π_0 and ϕ_0 may both wait for it; that later steps of the run wait for each other is not said
    assert said and {line.split()[4] for line in said} <= {"planner_sft:", "grounder:"}
    assert all(f"waits for a slot of pool gpu, which run {other.run_id[:8]} holds" in line for line in said)
    assert said[0].endswith("`dagster instance concurrency set gpu 2`")


def test_a_failed_step_has_no_count_in_a_terminal(light: InProcess) -> None:
    last = [line for line in shown(light, Terminal()).splitlines() if "candidate_plans" in line][-1]
    assert "failed" in last and "1/1" not in last and "3/3" not in last


@pytest.mark.parametrize(
    ("ends", "says"), [(False, "40/40 0:00:00 being saved and checked"), (True, "40/40 0:00:00 reward=0.7")]
)
def test_a_bar_says_what_goes_on_after_its_count(ends: bool, says: str) -> None:
    file = Terminal()
    bars = Bars("light/s1 k=1", Console(file=file, force_terminal=True, no_color=True, width=160))
    bars.open()
    bars.started("planner", 0.0)
    bars.advanced("planner", 40, 40, "reward=0.7", 1.0)
    if ends:
        bars.ended("planner", 2.0, failed=False)
    bars.close()
    last = [line for line in file.getvalue().splitlines() if "planner" in line][-1]
    assert says in " ".join(last.split())


def test_long_steps_say_every_half_minute_how_far_they_are() -> None:
    file = io.StringIO()
    lines = Lines("light/s1 k=1", Console(file=file, width=40))
    lines.started("planner", 0.0)
    lines.tick(20.0)
    lines.tick(31.0)
    lines.advanced("planner", 10, 40, "reward=0.5", 60.0)  # an earlier attempt had made ten
    lines.tick(61.5)
    lines.advanced("planner", 20, 40, "reward=0.6", 180.0)
    lines.tick(180.5)
    lines.tick(190.0)
    lines.advanced("planner", 40, 40, "reward=0.7", 430.0)
    lines.tick(480.0)
    lines.ended("planner", 1000.0, failed=False)
    start = local_time(0.0)[:11]
    assert [line.removeprefix(start) for line in file.getvalue().splitlines()] == [
        f"{local_time(at)[11:]} light/s1 k=1 planner: {text}"
        for at, text in (
            (0.0, "started"),
            (31.0, "at work for 31 s"),
            (61.5, "10/40, reward=0.5"),
            (180.5, f"20/40, 5/min, ends about {local_time(420.0)[:-3]}, reward=0.6"),
            (480.0, "40/40, 4.86/min, being saved and checked"),
            (1000.0, "done in 16 min 40 s"),
        )
    ]
