"""The commands that make and show artifacts, through the Dagster instance."""

from __future__ import annotations

import gc as garbage
import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Final, Literal
from urllib.parse import SplitResult, urlsplit

import pyarrow as pa
import typer
from rich.console import Console

from coepg_dagster import yaml_files
from coepg_dagster.cli.common import (
    Device,
    Iteration,
    Reference,
    echo,
    err,
    name_left_out,
    open_experiment,
    open_iteration,
    print_table,
    refuse,
    require_device,
    say,
    two_decimals,
)
from coepg_dagster.experiment import Experiment
from coepg_dagster.geometry import Space
from coepg_dagster.jobs import Strategy
from coepg_dagster.planning.estimates import CARDS
from coepg_dagster.planning.machine import MACHINE, Machine, TrainingSettings, machine_named
from coepg_dagster.project import Project, find_project

if TYPE_CHECKING:
    import dagster as dg

    from coepg_dagster.assets.ledger import Loop, Records
    from coepg_dagster.auditing.archive import Archive
    from coepg_dagster.auditing.marks import Mark
    from coepg_dagster.evaluation.result import Comparison, Result
    from coepg_dagster.provenance import Asset, Record, Ref, Stale

On = Annotated[
    str | None, typer.Option("--on", metavar="NAME", help=f"the profile machines/NAME.yaml; else that in {MACHINE}")
]

app = typer.Typer()
rewards = typer.Typer(
    no_args_is_help=True,
    help="Rewards that other variants would have given, and calibration of the grounders' confidence.",
)


def _archive(project: Project) -> Archive:
    """Every version that the project's event log knows of."""
    from coepg_dagster.assets.ledger import archive, open_instance

    return archive(project, open_instance(project))


def _definitions(loop: Loop) -> dg.Definitions:
    """The definitions of one loop, whether the web UI shows it or not."""
    from coepg_dagster.definitions import artifacts

    return artifacts([loop])


@app.command()
def evolve(
    reference: Reference,
    through: Annotated[int, typer.Option(help="the last iteration to make", min=0)],
    first: Annotated[int, typer.Option("--from", help="the first iteration to make", min=0)] = 0,
    device: Annotated[Device | None, typer.Option(help="a GPU if there is one")] = None,
    train_device: Annotated[Device | None, typer.Option(help="the same for training, if it differs")] = None,
    processes: Annotated[
        int | None, typer.Option(help="processes that share inference on a CPU", min=1, max=1024)
    ] = None,
    ray: Annotated[str | None, typer.Option(help="address of a Ray cluster for the heavy steps")] = None,
    on: On = None,
    here: Annotated[
        bool, typer.Option("--here", help="run in this process, with its environment, even if a Dagster daemon runs")
    ] = False,
    data: Annotated[
        bool, typer.Option("--data/--no-data", help="whether D_THROUGH is made, which only the next iteration reads")
    ] = True,
) -> None:
    """Makes iterations FROM..THROUGH in order, through the Dagster instance; skips what is there and current.

    Every iteration is one run: watch it in the web UI too. Where a Dagster daemon runs (`coepg ui`), runs wait in its queue, so
    that its limits hold; else they are made in this process. Call this again to resume a run that was killed.
    """
    project, experiment, seed = open_experiment(reference)
    if through > experiment.iterations:
        refuse(f"{experiment.name} has iterations 0..{experiment.iterations}: lower --through, or raise `iterations`")
    if first > through:
        refuse(f"--from {first} lies behind --through {through}: raise --through, or lower --from")
    if ray is None:
        require_device(device, train_device)
    machine = machine_named(project.root, on)
    from coepg_dagster.assets.ledger import Loop, open_instance

    instance = open_instance(project)
    from coepg_dagster.assets.evolve import Wanted, Where, evolve_through, place_of, placed_machine

    loop = Loop(experiment, seed, project.root)
    place = place_of(device, train_device, processes, ray, machine)
    if through:
        _refuse_training(experiment, placed_machine(place, machine))
    made = evolve_through(_definitions(loop), instance, loop, through, err, Where(place, here), Wanted(first, data))
    err.print(f"{made} runs" if made else "everything is there and current")


def _refuse_training(experiment: Experiment, placed: Machine) -> None:
    """Ends with the reasons why an experiment cannot be trained here, if there are any."""
    # torch takes seconds to import: its GPUs are counted only where that matters
    if placed.spread or placed.refusals(experiment, 0):
        from coepg_dagster.training.launch import visible_gpus

        _refuse_all(experiment, placed.refusals(experiment, visible_gpus()))


def _refuse_all(experiment: Experiment, why: list[str]) -> None:
    """Ends with the reasons, if there are any."""
    if why:
        refuse("\n".join(f"{experiment.name}: {line}" for line in why))


@app.command("import")
def import_steps(reference: Reference) -> None:
    """Imports the labelled steps of an experiment, which `evolve` would do first; says before how much it reads.

    What is there and current is not imported again. A row that cannot be used is left out, with its reason.
    """
    project, experiment, seed = open_experiment(reference)
    benchmark = experiment.benchmark
    from coepg_dagster.assets.ledger import Loop, open_instance
    from coepg_dagster.benchmark import refuse_files, source_size
    from coepg_dagster.provenance import Ref

    loop, ref = Loop(experiment, seed, project.root), Ref("benchmark_steps")
    if ref.asset not in loop.shared:
        refuse(f"{experiment.name} takes its steps from {experiment.parent}: run `coepg import {experiment.parent}`")
    if why := refuse_files(experiment, project.root):
        refuse("\n".join(why))
    instance = open_instance(project)
    files, size = source_size(project.root / benchmark.path)
    free = shutil.disk_usage(project.root).free
    err.print(
        f"reads up to {files:,} files with {size / 1e9:,.3g} GB in {benchmark.path}; its screenshots are kept in the store as "
        f"models see them: {free / 1e9:,.3g} GB are free there",
        highlight=False,
        soft_wrap=True,
    )
    from coepg_dagster.assets.evolve import make_inputs

    made = make_inputs(_definitions(loop), instance, loop, err, [ref.asset])
    record = loop.record(instance, ref)
    assert record is not None
    for split, steps in record.figures["steps"].items():
        echo(f"{steps:,} steps in split {split}")
    kept = sum(record.sizes.values())
    echo(f"{'made' if made else 'is there and current'}: {project.store / record.folder}, {kept / 1e9:,.3g} GB")


@app.command()
def results(
    reference: Reference,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Prints Step SR, data quality and time of every iteration; stale artifacts are named with their root cause."""
    garbage.disable()  # what imports make stays: looking for garbage in it takes a sixth of this command
    project, experiment, seed = open_experiment(reference)
    from coepg_dagster.assets.ledger import Loop, open_instance

    instance = open_instance(project)
    from coepg_dagster.results import board_tables, learned_text, overview, pairs_text, probe_lines, short_splits
    from coepg_dagster.results import results as table_of

    loop = Loop(experiment, seed, project.root)
    records = loop.records(instance)
    stale = loop.stale(records)
    table = table_of(experiment, seed, records, stale)
    inputs = {str(ref): str(why) for ref, why in stale.items() if ref.iteration is None}
    if as_json:
        echo(json.dumps(table | {"stale": inputs}))
        return
    numbers, left_out = overview(experiment, seed, records)
    print_table(numbers.title, numbers.header, numbers.rows, numbers.protocols)
    for alone in board_tables(experiment, seed, records):
        print_table(alone.title, alone.header, alone.rows, alone.protocols)
    console = Console()
    for asset, why in inputs.items():
        console.print(f"stale: {asset}: {why}", style="yellow", highlight=False, soft_wrap=True)
    for iteration in table["iterations"]:
        for line in pairs_text(iteration) + learned_text(iteration):
            console.print(line, highlight=False, soft_wrap=True)
    for line in probe_lines(records):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    for line in (*short_splits(table["iterations"]), *left_out):
        console.print(line, style="yellow", highlight=False, soft_wrap=True)
    for iteration in table["iterations"]:
        for asset, why in iteration["stale"].items():
            console.print(
                f"stale: {asset}[{iteration['iteration']}]: {why}", style="yellow", highlight=False, soft_wrap=True
            )
    report = loop.report(instance)
    if report is not None:
        console.print(f"page: {project.store / report.folder / 'report.html'}", highlight=False, soft_wrap=True)


@app.command()
def plan(
    reference: Reference,
    on: On = None,
    gpu: Annotated[str | None, typer.Option(help="a card without a profile, e.g. H100-80GB")] = None,
    gpus: Annotated[int | None, typer.Option(help="with --gpu: cards on one machine", min=1, max=1024)] = None,
    strategy: Annotated[Strategy, typer.Option(help="with --gpus: how they share the training")] = "zero3",
    probe: Annotated[bool, typer.Option("--probe", help="ask every endpoint for its model")] = False,
    resolved: Annotated[bool, typer.Option("--resolved", help="print the resolved file and nothing else")] = False,
) -> None:
    """Says whether an experiment can run and fits, what `evolve` would run, how long that takes, and what is missing.

    Touches no model: memory per GPU, main memory, disk, steps, tokens and GPU-hours of each stage are computed from sizes
    and from measured rates. Ends with code 1 where a later step would fail on the data, on a failed check or on this machine;
    with code 3 where a stage cannot fit, and names three settings that would help.
    """
    project, experiment, seed = open_experiment(reference)
    if resolved:
        echo(yaml_files.dump(experiment.model_dump(mode="json")))
        return
    machine = _planned_machine(project, experiment, on, gpu, gpus, strategy)
    from coepg_dagster.assets.automation import failed_inputs
    from coepg_dagster.assets.ledger import Loop, open_instance
    from coepg_dagster.benchmark import is_to_be_fetched
    from coepg_dagster.planning import dryrun
    from coepg_dagster.planning.estimates import rates_of
    from coepg_dagster.provenance import Ref

    instance = open_instance(project)
    loop = Loop(experiment, seed, project.root)
    records = loop.records(instance)
    stale = loop.stale(records)
    why = [*_bad_steps(loop, records, stale), *failed_inputs(instance, loop)]
    why += [*machine.refusals(experiment), *dryrun.broken(experiment.models, project.root)]
    if probe and not why:
        why += _silent_endpoints(experiment, machine)
    would_run = _would_run(loop, records, stale, loop.report_is_current(instance, records))
    hardware = dryrun.Hardware.of(machine)
    on_machine = f"{loop.name} on {machine.name} ({hardware.text()})"
    if why:
        echo("\n".join([f"{on_machine}: cannot run", *would_run]))
        _refuse_all(experiment, why)
    imported = records.get(Ref("benchmark_steps"))
    dry = dryrun.DryRun(experiment, project.root, imported.figures["steps"] if imported else None)
    report = dryrun.report(
        dry, hardware, rates_of(hardware.card or dryrun.CPU, project.root / "benchmarks" / "baselines")
    )
    fits = "does not fit" if report.refused else "can run and fits" if hardware.card else "can run"
    echo("\n".join([f"{on_machine}: {fits}", *would_run]))
    echo(f"takes: {report.summary}")
    missing = []
    if is_to_be_fetched(experiment.benchmark, project.root) and imported is None:
        missing.append(f"{experiment.benchmark.path}: fetch the data before `coepg evolve`")
    if not probe and any(member.engine == "openai" for member in experiment.models.named().values()):
        missing.append("answers of the endpoints: --probe asks them")
    echo(f"missing: {'; '.join(missing) or 'nothing'}")
    for ref, cause in stale.items():
        echo(f"stale: {ref}: {cause}")
    echo("")
    for line in report.lines:
        echo(line)
    for line in report.refused:
        say(line, "red")
    if report.refused:
        raise typer.Exit(3)


def _planned_machine(
    project: Project, experiment: Experiment, on: str | None, gpu: str | None, gpus: int | None, strategy: Strategy
) -> Machine:
    """The machine to plan for: a profile, a card without one, or what `coepg evolve` would use here."""
    from coepg_dagster.planning.dryrun import detect_card

    if gpu is None and gpus is not None:
        refuse("--gpus counts cards of a kind: add --gpu, e.g. --gpu H100-80GB, or name a profile with --on")
    if gpu is not None:
        if on is not None:
            refuse(f"--on {on} has its cards in its profile: leave out --gpu")
        if gpu not in CARDS:
            refuse(f"--gpu {gpu} is not known; known: {', '.join(CARDS)}")
        spread = TrainingSettings(training_processes=gpus or 1, strategy=strategy if (gpus or 1) > 1 else "ddp")
        return Machine(name="this_machine", card=gpu, gpus=gpus or 1, sft=spread, grpo_cdrem=spread)
    if (machine := machine_named(project.root, on)) is not None:
        return machine
    here = detect_card()
    if here is None and experiment.pool != "cpu":
        say("no GPU is known here: --on NAME plans another machine, see machines/", "yellow")
    if here is None:
        return Machine(name="this_machine")
    if here[1] > 1:
        say(f"training takes one of {here[1]} GPUs: --on NAME spreads it, see machines/", "yellow")
    return Machine(name="this_machine", card=here[0].name, gpus=here[1])


def _would_run(loop: Loop, records: Records, stale: Mapping[Ref, Stale], reported: bool) -> list[str]:
    """What `coepg evolve` would make, the unpartitioned steps too."""
    shared = loop.shared_to_make(records, stale)
    todo = loop.to_make(records, stale, loop.experiment.iterations)
    lines = [f"would run first: {', '.join(shared)}"] if shared else []
    lines += [f"would run iteration {k}: {', '.join(assets)}" for k, assets in todo.items()]
    if lines or not reported:
        lines.append("would run last: evolution_report")
    return lines or ["would run: nothing, everything is there and current"]


def _silent_endpoints(experiment: Experiment, machine: Machine) -> list[str]:
    """Why the endpoints of an experiment would refuse its requests, a line for each."""
    from coepg_dagster.inference.endpoint import endpoint_of, served_model
    from coepg_dagster.inference.engine import EngineRefused
    from coepg_dagster.planning.machine import place_models

    why = []
    for name, member in place_models(experiment.models, machine.endpoints).named().items():
        if member.engine == "openai":
            try:
                served_model(endpoint_of(member))
            except EngineRefused as error:
                why.append(f"models: {name}: {error}")
    return why


def _bad_steps(loop: Loop, records: Mapping[Ref, Record], stale: Mapping[Ref, Stale]) -> list[str]:
    """Why a stage of the loop would fail on the labelled steps, as imported or else as in their files, or on the boards."""
    from coepg_dagster.artifacts import STEPS, all_steps
    from coepg_dagster.benchmark import is_to_be_fetched, refuse_boards, refuse_files, refuse_steps
    from coepg_dagster.provenance import Ref

    ref, experiment = Ref("benchmark_steps"), loop.experiment
    record = records.get(ref)
    file = Project(loop.root).store / record.folder / STEPS if record else None
    moved = record is not None and ref.asset in loop.shared and loop.source_changed(record)
    if file is not None and file.is_file() and ref not in stale and not moved:
        trained_on = {k: Ref("dataset", k) for k in range(experiment.iterations)}
        covered = {
            k: records[data].figures["covered_steps"]
            for k, data in trained_on.items()
            if data in records and data not in stale
        }
        why = refuse_steps(experiment, all_steps(file), covered)
    elif is_to_be_fetched(experiment.benchmark, loop.root):
        why = []  # what a run takes can be estimated all the same
    else:
        why = refuse_files(experiment, loop.root)
    return [*why, *refuse_boards(experiment, loop.root)]


@app.command()
def lineage(reference: Reference) -> None:
    """Writes the lineage map D_0 → π_1, ϕ_1 → π'_1 → D_1 → … as one HTML file and prints its path.

    Every artifact with its data version, run, time and key number; stale ones are marked with their root cause. `coepg ui`
    serves the same map, drawn anew each time it is opened.
    """
    project, experiment, seed = open_experiment(reference)
    from coepg_dagster.assets.ledger import Loop, open_instance

    instance = open_instance(project)
    from coepg_dagster.assets.pages import write_lineage

    try:
        page = write_lineage(project, Loop(experiment, seed, project.root), instance)
    except OSError as error:
        refuse(f"{error.filename}: {error.strerror}: `coepg report {reference} --out DIR` writes the map elsewhere")
    echo(page)


@app.command()
def trace(
    row: Annotated[
        str,
        typer.Argument(
            metavar="ROW",
            help="a row id, or EXPERIMENT@k#N (row N of D_k, counted from 0), or EXPERIMENT@k#CANDIDATE_ID, dropped or not",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Shows where a row of D_k came from: step, planner, verdicts, rule, what was dropped, and what was trained on it.

    Goes back to D_0 and the open models, and compares every file on the way with the hash recorded when it was made. Names
    what was tampered with; the exit code is then 1.
    """
    from coepg_dagster.auditing.trace import find_row, parse_place, trace_row
    from coepg_dagster.auditing.trace import trace as trace_place

    place = parse_place(row)
    if place.reference is None:
        project = find_project()
        name_left_out(project.all_experiments())
        archive = _archive(project)
        row_trace = trace_row(archive, *find_row(archive, place.what))
    else:
        project, experiment, seed, k = open_iteration(place.reference)
        from coepg_dagster.assets.ledger import Loop

        owner = Loop(experiment, seed, project.root).owner("dataset")  # of an overlay that takes it: the parent
        row_trace = trace_place(_archive(project), f"{owner}/s{seed}", k, place.what)
    if as_json:
        echo(json.dumps(row_trace))
    else:
        from coepg_dagster.auditing.text import trace_text

        echo(trace_text(row_trace))
    if row_trace["row"]["tampered"]:
        for line in row_trace["row"]["tampered"]:
            say(f"tampered: {line}", "red")
        raise typer.Exit(1)


@app.command()
def mark(
    row: Annotated[str, typer.Argument(metavar="ROW", help="as for `coepg trace`")],
    what: Annotated[
        Literal["veto", "flag", "withdraw"],
        typer.Argument(metavar="veto|flag|withdraw", help="leave it out, only mark it, or take either back"),
    ],
    reason: Annotated[str, typer.Option(help="why: one line")],
    whole_step: Annotated[bool, typer.Option("--whole-step", help="every plan of the row's step")] = False,
    by: Annotated[str | None, typer.Option(help="who says so; default: the name of the user")] = None,
) -> None:
    """Vetoes or flags the plan of a row, or its whole step; the next D_k leaves out what is vetoed.

    A mark of EXPERIMENT@k counts for D_k and those after it, one of a row id from the iteration that made the row. A D_k that
    holds what is vetoed now is stale, and so is what was made from it: `coepg evolve` makes them again. A flag changes no data.
    """
    from coepg_dagster.auditing.archive import loop_of
    from coepg_dagster.auditing.marks import MARKS, add_mark, marking
    from coepg_dagster.auditing.text import marked
    from coepg_dagster.auditing.trace import find_row, parse_place, what_to_mark

    try:
        who = getpass.getuser() if by is None else by
    except (KeyError, OSError):  # as in a container without a list of users
        refuse("the user of this process has no name: say with --by who marks")
    said = marking({"mark": what, "reason": reason, "whole_step": whole_step, "by": who})
    place = parse_place(row)
    if place.reference is None:
        project = find_project()
        archive = _archive(project)
        record, found = find_row(archive, place.what)
        owner, k, named = loop_of(record), found["made_in"], (found["step_id"], found["plan"], place.what)
    else:
        project, experiment, seed, k = open_iteration(place.reference)
        from coepg_dagster.assets.ledger import Loop

        owner = f"{Loop(experiment, seed, project.root).owner('dataset')}/s{seed}"
        named = what_to_mark(_archive(project), owner, k, place.what)
    file = project.store / owner / MARKS
    added = add_mark(file, said, k, *named)
    echo(f"{file}: {added.mark}: {marked(added.model_dump(mode='json') | {'applied': True, 'counts': True})}")


@app.command()
def marks(
    reference: Reference,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Lists what is vetoed or flagged in the D_k of a loop, with who, when and why; withdrawn marks are left out."""
    from coepg_dagster.auditing.marks import MARKS, last_marks, read_marks

    project, experiment, seed = open_experiment(reference)
    from coepg_dagster.assets.ledger import Loop

    owner = Loop(experiment, seed, project.root).owner("dataset")  # of an overlay that takes it: the parent
    found = last_marks(read_marks(project.store / owner / f"s{seed}" / MARKS))
    if as_json:
        echo(json.dumps({"marks": [mark.model_dump(mode="json") for mark in found]}))
        return
    title, head = f"{owner}/s{seed}: marks that count", ("mark", "from", "step", "plan", "reason", "by", "on")
    print_table(title, head, [_mark_row(mark) for mark in found])


def _mark_row(mark: Mark) -> list[str]:
    plan = "the whole step" if mark.plan is None else json.dumps(mark.plan, ensure_ascii=False)[1:-1]  # on one line
    return [mark.mark, f"D_{mark.iteration}", mark.step_id, plan, mark.reason, mark.by, f"{mark.at:%Y-%m-%d}"]


@app.command()
def audit(
    reference: Reference,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Compares every artifact of a loop, and all its inputs, with the hashes that were recorded when they were made.

    Also compares every row of every D_k with its screenshot, its candidate and its verdicts. Names what was tampered with;
    the exit code is then 1.
    """
    project, experiment, seed = open_experiment(reference)
    from coepg_dagster.auditing.check import check

    checked = check(_archive(project), f"{experiment.name}/s{seed}")
    if as_json:
        echo(json.dumps(checked))
    else:
        for line in checked["tampered"]:
            echo(f"tampered: {line}")
        counts = ", ".join(f"{checked[what]} {what}" for what in ("artifacts", "files", "rows"))
        echo(f"checked {counts}: {len(checked['tampered']) or 'none'} tampered with")
    if checked["tampered"]:
        raise typer.Exit(1)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="EXPERIMENT@k", help="from this one")],
    b: Annotated[str, typer.Argument(metavar="EXPERIMENT@k", help="to this one")],
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Shows how two iterations differ, of one experiment or two: rows of D_k and why, models, results."""
    from coepg_dagster.auditing.differences import Side, differences

    sides = []
    for name in (a, b):
        project, experiment, seed, k = open_iteration(name)
        from coepg_dagster.assets.ledger import Loop

        loop = Loop(experiment, seed, project.root)
        sides.append(Side(f"{loop.name}@{k}", k, loop.owner, seed))
    changes = differences(_archive(project), *sides)
    if as_json:
        echo(json.dumps(changes))
    else:
        from coepg_dagster.auditing.text import diff_text

        echo(diff_text(changes))


@app.command()
def gc(
    keep: Annotated[int, typer.Option(help="number of newest versions of each artifact to keep", min=1)] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only print what would be removed")] = False,
) -> None:
    """Removes what nothing needs any more: older versions, leftovers of finished jobs, old outputs of `coepg play`.

    What a current artifact was made from stays, however old. Refuses while anything is running.
    """
    project = find_project()
    name_left_out(project.all_experiments())
    from coepg_dagster.assets.ledger import end_dead_runs, finished_jobs, open_instance, unfinished_runs
    from coepg_dagster.auditing.cleaning import leftovers

    instance = open_instance(project)
    end_dead_runs(instance, project.store)
    busy = unfinished_runs(instance)
    if busy:
        refuse(f"run {busy[0][:8]} is not finished: wait for it, or cancel it, then run this again")
    removable = leftovers(_archive(project), finished_jobs(project, instance), keep)
    for leftover in removable:
        if not dry_run:
            leftover.remove()
        name = leftover.folder.relative_to(project.store)
        echo(f"{leftover.kind:8} {leftover.size:>14,} bytes  {name}")
    total = sum(leftover.size for leftover in removable)
    echo(f"{'would remove' if dry_run else 'removed'} {len(removable)} folders, {total:,} bytes")


@app.command()
def recover() -> None:
    """Makes a damaged or lost event log again, from the records that the store keeps.

    Stop `coepg ui` and move the folder `.dagster` away first. Then every artifact is current as before. What the event log
    knows stays as it is; runs and their logs are not restored.
    """
    project = find_project()
    name_left_out(project.all_experiments())
    from coepg_dagster.assets.ledger import assert_sound, open_instance

    instance = open_instance(project)
    assert_sound(instance)
    from coepg_dagster.assets.recovery import recover as recover_records

    artifacts, unreadable = recover_records(project, instance)
    for line in unreadable:
        say(line, "yellow")
    echo(f"{artifacts:,} artifacts are in the event log again" if artifacts else "the event log lacks nothing")


@app.command()
def report(
    reference: Reference,
    out: Annotated[Path, typer.Option(help="folder of the pages")],
) -> None:
    """Writes the pages of an experiment as HTML files and prints the path of their index.

    The lineage map, the evolution report, an audit page for each D_k and a page for each model. They need no server and no
    network. What is there and current is not written again. `coepg ui` serves the same pages, and the trace of each row.
    """
    project, experiment, seed = open_experiment(reference)
    from coepg_dagster.assets.ledger import Loop, open_instance

    instance = open_instance(project)
    from coepg_dagster.assets.pages import write_pages

    echo(str(write_pages(project, Loop(experiment, seed, project.root), instance, out)[0]))


@app.command()
def ui(
    port: Annotated[int, typer.Option(help="of the web UI and the pages", min=1, max=65535)] = 3000,
    host: Annotated[
        str, typer.Option(help="address to listen on; others than loopback need --without-login")
    ] = "127.0.0.1",
    public_url: Annotated[
        str | None, typer.Option(help="where people open it, e.g. https://agents.example.org behind a reverse proxy")
    ] = None,
    without_login: Annotated[
        bool, typer.Option("--without-login", help="let whoever reaches the address start runs and read all data")
    ] = False,
    on: On = None,
) -> None:
    """Starts Dagster's web server and daemon for this project, with its pages, until Ctrl-C.

    Neither has a login; docs/using-the-ui.md says how to share them.
    """
    project = find_project()
    name_left_out(project.all_experiments())
    machine = machine_named(project.root, on)  # for the Launchpad and for automation
    hosts = _hosts(host, port, public_url, without_login)
    # a code location takes its time to load while training keeps every core busy; read when Dagster is imported
    os.environ.setdefault("DAGSTER_GRPC_TIMEOUT_SECONDS", "300")
    if machine:
        os.environ[MACHINE] = machine.name
    from coepg_dagster.assets.ledger import assert_sound, end_dead_runs, open_instance

    instance = open_instance(project)
    assert_sound(instance)
    from coepg_dagster.assets.pages import ui_server
    from coepg_dagster.assets.run_launcher import what_it_lacks
    from coepg_dagster.processes import GRACE_SECONDS, end_group, ended, group_ended, started_here

    end_dead_runs(instance, project.store)
    if lacks := what_it_lacks(instance):
        say(lacks, "yellow")
    try:
        listening = socket.create_server((host, port))
    except OSError as error:
        refuse(f"port {port} of {host} cannot be used ({error.strerror}): choose another --port or --host")
    os.chdir(project.root)
    err.print("loading the code locations …")
    # in a group of its own with the runs that it starts: whatever ends this process ends them all
    daemon = subprocess.Popen(
        [
            *(sys.executable, "-m", "coepg_dagster.processes"),
            *(str(Path(sys.executable).parent / "dagster-daemon"), "run", "-w", "workspace.yaml"),
        ],
        env=os.environ | started_here(),
        start_new_session=True,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a service manager's way to say Ctrl-C
    try:
        with ui_server(project, instance, hosts, public_url) as server:

            def end_with_daemon() -> None:
                code = daemon.wait()
                if not server.should_exit:
                    say(f"Dagster's daemon {ended(code)}: run `coepg ui` again", "red")
                server.should_exit = True

            Thread(target=end_with_daemon, daemon=True).start()
            err.print(f"Dagster and the pages are at {public_url or f'http://{host}:{port}'}; Ctrl-C ends both")
            server.run(sockets=[listening])
    finally:
        try:
            with suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGINT)
            if not group_ended(daemon.pid, 3):
                err.print("ending the runs that go on; Ctrl-C kills them")
                group_ended(daemon.pid, 3 * GRACE_SECONDS)
        finally:
            end_group(daemon, 0)
            instance.wipe_daemon_heartbeats()  # `coepg evolve` need not wait to see that it is gone


def _hosts(host: str, port: int, public_url: str | None, without_login: bool) -> list[str]:
    """The host names by which browsers may ask for the UI; exits with a message where an option does not fit."""
    try:
        address = None if public_url is None else urlsplit(public_url)
    except ValueError:
        address = SplitResult("", "", "", "", "")
    if address is not None and (
        address.scheme not in ("http", "https")
        or not address.hostname
        or "@" in address.netloc
        or any((address.path.strip("/"), address.query, address.fragment))
    ):
        refuse(
            f"--public-url {public_url}: give https://NAME or http://NAME:PORT, without a path: links start at its root"
        )
    try:
        listens_on = ip_address(socket.gethostbyname(host))  # IPv4
    except (OSError, ValueError, TypeError):
        refuse(f"--host {host}: is no IPv4 address of this machine, nor a name of one: correct it")
    if not listens_on.is_loopback and not without_login:
        refuse(
            f"--host {host}: the web UI has no login: whoever reaches this address can start and delete runs and read all data. "
            "Leave it on 127.0.0.1 and share it by SSH or behind a reverse proxy with a login (docs/using-the-ui.md), or "
            "add --without-login if everyone who reaches it may do that"
        )
    if listens_on.is_unspecified and address is None:
        refuse(f"--host {host}: name the address that people open, too: --public-url http://NAME:{port}")
    return ["127.0.0.1", "localhost", host, *([address.hostname] if address and address.hostname else [])]


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(metavar="EXPERIMENT", help="with its overlays in experiments/ablations/")],
    jobs: Annotated[
        int, typer.Option(help="iterations made at the same time, each in its own process", min=1, max=1024)
    ] = 2,
    seeds: Annotated[
        str | None, typer.Option(help="only these, e.g. 13,42; all of the experiment's if left out")
    ] = None,
    device: Annotated[
        Device | None, typer.Option(help="for inference and training; default: cpu, or as --on says")
    ] = None,
    train_device: Annotated[
        Device | None, typer.Option(help="the same for training, if it differs; several GPUs take turns")
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(help="processes that share the inference of one iteration on a CPU; default: 1", min=1, max=1024),
    ] = None,
    on: On = None,
    only_collect: Annotated[bool, typer.Option("--collect", help="make nothing; write what is there so far")] = False,
    out: Annotated[Path, typer.Option(help="folder of results.md, results.json and figures")] = Path("docs"),
) -> None:
    """Runs every loop of a study, the experiment and its ablations with all seeds; writes tables, figures and findings.

    Each iteration is a `coepg evolve` of its own. What is there and current is not made again, so this resumes
    after any interruption. Ends with code 1 where something could not be made; the page names it.
    """
    chosen = None
    if seeds is not None:
        if not all(seed.isascii() and seed.isdecimal() and len(seed) <= 10 for seed in seeds.split(",")):
            refuse(f"--seeds {seeds}: give whole numbers with commas between them, e.g. 13,42")
        chosen = [int(seed) for seed in seeds.split(",")]
    if "/" in name:
        refuse(f"{name}: name the experiment alone; --seeds chooses among its seeds")
    project, _, _ = open_experiment(name)
    machine = machine_named(project.root, on)
    if machine is None:
        device, processes = device or "cpu", processes or 1
    if not only_collect:
        require_device(device, train_device)
        if machine is not None and machine.spread and jobs > 1:
            refuse(
                f"machine {machine.name} trains on several GPUs at once: add --jobs 1, or name one with a GPU for each"
            )
    from coepg_dagster.assets.ledger import end_dead_runs, open_instance

    instance = open_instance(project)
    from coepg_dagster.assets.evolve import place_of, placed_machine
    from coepg_dagster.assets.reproduce import Reproduction, find_study, one_at_a_time
    from coepg_dagster.assets.reproduce import collect as collect_study

    study = find_study(project, name, chosen)
    placed = placed_machine(place_of(device, train_device, processes, None, machine), machine)
    if not only_collect:
        for experiment in {loop.experiment.name: loop.experiment for loop in study.loops}.values():
            _refuse_training(experiment, placed)
    out.mkdir(parents=True, exist_ok=True)  # fails now rather than after hours of work
    failed = []
    if not only_collect:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the child processes, as Ctrl-C does
        with one_at_a_time(project):
            end_dead_runs(instance, project.store)
            places = {"--device": device, "--train-device": train_device, "--processes": processes, "--on": on}
            chosen_place = [
                word for option, value in places.items() if value is not None for word in (option, str(value))
            ]
            reproduction = Reproduction(project, instance, err, jobs, chosen_place, placed)
            failed = reproduction.run(study, _definitions)
    page = collect_study(project, instance, find_study(project, name), out)
    echo(str(page))
    raise typer.Exit(1 if failed else 0)


@app.command()
def compare(
    a: Annotated[str, typer.Argument(help="a file of predictions, or EXPERIMENT@k")],
    b: Annotated[str, typer.Argument(help="another one, of the same steps")],
    protocol: Annotated[str, typer.Option(help="for files; experiments have their own")] = "miniwob/point",
    format: Annotated[
        str, typer.Option(help="of the files: coepg (our own), gui_r1, mai_ui, ui_genie or uground")
    ] = "coepg",
    labels: Annotated[Path | None, typer.Option(help="of the files, as for `score`")] = None,
    space: Annotated[Space | None, typer.Option(help="of the files, as for `score`")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Says whether two results differ: paired by step, with a 95 % interval clustered by task.

    Iterations are compared on each test split alone. A file names no splits: its steps are compared as one.
    """
    from coepg_dagster.evaluation.score import PredictionFile, score_predictions
    from coepg_dagster.evaluation.score import compare as compare_results

    apart = all(_is_iteration(name) for name in (a, b))
    if apart and (labels, space) != (None, None):
        raise typer.BadParameter("--labels and --space are for files; an experiment has its own")

    def results_of(name: str) -> dict[str, Result]:
        if _is_iteration(name):
            return _results_of(name, apart)
        return {ALL_STEPS: score_predictions(PredictionFile(Path(name), format, labels, space=space), protocol)}

    first, second = map(results_of, (a, b))
    if first.keys() != second.keys():
        refuse(
            f"{a} has the test splits {', '.join(first)}, {b} has {', '.join(second)}: compare results of the same splits"
        )
    compared = {split: compare_results(first[split], second[split]) for split in first}
    if as_json:
        echo(json.dumps({"splits": {split: one.as_dict() for split, one in compared.items()}}, indent=2))
        return
    for split, one in compared.items():
        title = f"{one.protocol}, {split}: {one.steps} steps; per cent"
        head = ("metric", "A", "B", "B - A", "differs", "over steps: B - A", "smallest that shows")
        print_table(title, head, [_difference_row(name, one) for name in one.differences])
        if any(one.left_out):
            echo(
                f"rows that cannot be read, left out: {one.left_out[0]} of A, {one.left_out[1]} of B (see `coepg score`)"
            )
    echo(
        f"A: {a}, B: {b}. Averages are macro but for those over steps (micro); differences in points, with 95 % intervals. "
        "Of the smallest true difference that shows, 4 of 5 such comparisons find one."
    )


def _difference_row(name: str, compared: Comparison) -> list[str]:
    of = compared.differences[name]
    differs = {None: "–", True: "yes", False: "no"}[of.differs]
    return [
        name,
        two_decimals(of.macro_a),
        two_decimals(of.macro_b),
        _with_interval(of.macro, of.ci95),
        differs,
        _with_interval(of.micro, of.ci95_micro),
        two_decimals(of.detectable_micro),
    ]


def _with_interval(difference: float | None, ends: tuple[float, float] | None) -> str:
    text = "–" if difference is None else f"{difference:+.2f}"
    return text if ends is None else f"{text} [{ends[0]:+.2f}, {ends[1]:+.2f}]"


@rewards.command("recompute")
def rewards_recompute(
    reference: Iteration,
    variant: Annotated[str, typer.Option(help="no_cdrem, uniform, prior, literal, probability or temperature")],
    temperature: Annotated[float | None, typer.Option(help="τ of the variant `temperature`; default 0.25")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
    out: Annotated[Path | None, typer.Option(help="Parquet file for the rewards of every rollout")] = None,
) -> None:
    """Rewards and advantages that another variant of C-DREM would have given the rollouts of π'_k. Runs no model."""
    import pyarrow.parquet as pq

    from coepg_dagster.artifacts import ROLLOUTS, write_table
    from coepg_dagster.rewards.variants import recompute, summary, variant_named

    record, folder = _record_of(reference, "planner")
    if not (folder / ROLLOUTS).exists():
        refuse(f"{reference} has no {ROLLOUTS}: this planner was not made by GRPO, so nothing was rewarded")
    made = recompute(pq.read_table(folder / ROLLOUTS), variant_named(variant), temperature)
    logged = record.config["confidence"]
    facts = {"of": reference, "variant": variant, "temperature": temperature, "logged_confidence": logged} | summary(
        made
    )
    if out is not None:
        write_table(made, out)
    if as_json:
        echo(json.dumps(facts))
        return
    rows = [
        [label, f"{facts[name]:.4g}", f"{facts[f'{name}_logged']:.4g}"]
        for label, name in (("mean reward", "mean_reward"), ("share of groups without spread", "frac_reward_zero_std"))
    ]
    print_table(f"{reference}: {facts['rollouts']} rollouts", ("", variant, f"as trained ({logged})"), rows)
    for name in ("same_reward", "same_advantage", "same_sign"):
        echo(f"{name.replace('_', ' ')}: {facts[name]:.1f} % of the rollouts")
    echo(f"largest difference of a reward: {facts['largest_difference']:.4g}")


@rewards.command("calibration")
def rewards_calibration(
    reference: Iteration,
    out: Annotated[Path | None, typer.Option(help="folder for calibration.json and the figures")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """How well each grounder's confidence predicts hits: ECE, Brier score, AUROC and reliability curve.

    From the verdicts of iteration k, and from the rollouts of π'_k where it was trained with GRPO.
    """
    import pyarrow.parquet as pq

    from coepg_dagster.artifacts import ROLLOUTS, VERDICTS
    from coepg_dagster.reports.calibration import reliability_figure
    from coepg_dagster.reports.figures import save
    from coepg_dagster.rewards.calibration import as_json as plain
    from coepg_dagster.rewards.calibration import of_rollouts, of_verdicts

    by_source = {"verdicts": of_verdicts(pq.read_table(_record_of(reference, "verdicts")[1] / VERDICTS))}
    rollouts = _record_of(reference, "planner")[1] / ROLLOUTS
    if rollouts.exists():
        by_source["rollouts"] = of_rollouts(pq.read_table(rollouts))
    facts = {source: plain(calibrations) for source, calibrations in by_source.items()}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "calibration.json").write_text(json.dumps(facts, indent=1))
        for source, calibrations in by_source.items():
            save(reliability_figure(calibrations), out / f"reliability-{source}.png")
    if as_json:
        echo(json.dumps(facts))
        return
    heads = ("grounder", "answers", "hit rate, %", "confidence, %", "ECE, %", "Brier", "AUROC")
    for source, calibrations in by_source.items():
        rows = []
        for name, one in calibrations.items():
            rates = (f"{100 * rate:.1f}" for rate in (one.hit_rate, one.confidence, one.ece))
            rows.append([name, str(one.n), *rates, f"{one.brier:.3f}", two_decimals(one.auroc)])
        print_table(f"{reference}: confidence against hits, {source}", heads, rows)


@rewards.command("agreement")
def rewards_agreement(
    reference: Iteration,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """How often C-DREM and the live pages that rewarded π'_k say the same of an answer."""
    import pyarrow.parquet as pq

    from coepg_dagster.artifacts import ROLLOUTS
    from coepg_dagster.training.page_reward import agreement

    rollouts = _record_of(reference, "planner")[1] / ROLLOUTS
    facts = agreement(pq.read_table(rollouts, columns=["parts", "graders"]).to_pylist() if rollouts.exists() else [])
    if not facts["rollouts"]:
        refuse(
            f"{reference} was not rewarded by live pages at recorded steps: set `grpo.environment`, as "
            "experiments/plugins/live_pages.yaml does"
        )
    if as_json:
        echo(json.dumps(facts))
        return
    rows = [
        ("answers", str(facts["rollouts"])),
        ("both say the same, %", two_decimals(facts["agree"])),
        ("Cohen's kappa", two_decimals(facts["kappa"])),
        ("of what C-DREM accepts the page rewards, %", two_decimals(facts["cdrem_is_right"])),
        ("of what the page rewards C-DREM accepts, %", two_decimals(facts["page_is_found"])),
        ("the hit of ϕ_k and the page say the same, %", two_decimals(facts["own_hit_agrees"])),
    ]
    print_table(f"{reference}: C-DREM and the page", ("", ""), rows)


def _record_of(reference: str, asset: Asset) -> tuple[Record, Path]:
    """The current version of an asset of `EXPERIMENT@k` and its folder; exits with a message where there is none."""
    project, experiment, seed, k = open_iteration(reference)
    from coepg_dagster.assets.ledger import Loop, open_instance
    from coepg_dagster.provenance import Ref

    loop = Loop(experiment, seed, project.root)
    record = loop.record(open_instance(project), Ref(asset, k))
    if record is None:
        refuse(f"{reference} has no {asset}: run `coepg evolve {experiment.name}/s{seed} --through {k}` first")
    _whole(loop, record)
    return record, project.store / record.folder


def _whole(loop: Loop, *records: Record) -> None:
    """Exits with a message where files of an artifact are gone."""
    for record in records:
        if gone := loop.lost(record):
            refuse(f"{record.ref}: {gone}: run `coepg evolve {loop.name} --through {record.iteration or 0}` first")


def _is_iteration(name: str) -> bool:
    """Whether a result is that of `EXPERIMENT@k`, and not a file."""
    return "@" in name and not Path(name).exists()


def _results_of(name: str, apart: bool) -> dict[str, Result]:
    """The results of `EXPERIMENT@k` by test split, or as one if they are not wanted `apart`."""
    from coepg_dagster.evaluation.score import score_steps

    project, experiment, seed, k = open_iteration(name)
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    from coepg_dagster.artifacts import PREDICTIONS, STEPS, all_steps
    from coepg_dagster.assets.ledger import Loop, open_instance
    from coepg_dagster.provenance import Ref

    loop, instance = Loop(experiment, seed, project.root), open_instance(project)
    record = loop.record(instance, Ref("evaluation", k))
    if record is None:
        refuse(f"{name} has no evaluation: run `coepg evolve {experiment.name}/s{seed} --through {k}` first")
    steps_made = loop.record(instance, Ref("benchmark_steps"))
    _whole(loop, *[record, steps_made] if steps_made else [record])
    predictions = pq.read_table(project.store / record.folder / PREDICTIONS)
    steps = all_steps(project.store / record.input("benchmark_steps").folder / STEPS)
    steps = steps.filter(pc.is_in(steps["step_id"], predictions["step_id"].combine_chunks()))
    tests = experiment.benchmark.test
    parts = {split: [split] for split in tests} if apart else {ALL_STEPS: tests}
    results = {}
    for part, splits in parts.items():
        of_part = steps.filter(pc.is_in(steps["split"], pa.array(splits, pa.string())))
        answers = predictions.filter(pc.is_in(predictions["step_id"], of_part["step_id"].combine_chunks()))
        results[part] = score_steps(experiment.benchmark.protocol, of_part, answers)
    return results


ALL_STEPS: Final = "all steps"
"""What `coepg compare` calls the steps of a file, which names no splits."""
