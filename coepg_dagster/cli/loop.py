"""The commands that make artifacts, through the Dagster instance."""

from __future__ import annotations

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
from typing import TYPE_CHECKING, Annotated
from urllib.parse import SplitResult, urlsplit

import typer

from coepg_dagster import yaml_files
from coepg_dagster.cli.common import (
    Device,
    On,
    Reference,
    echo,
    err,
    name_left_out,
    open_experiment,
    refuse,
    require_device,
    say,
)
from coepg_dagster.experiment.schema import Experiment
from coepg_dagster.jobs import Strategy
from coepg_dagster.planning.estimates import CARDS
from coepg_dagster.planning.machine import MACHINE, Machine, TrainingSettings, machine_named
from coepg_dagster.project import Project, find_project

if TYPE_CHECKING:
    import dagster as dg

    from coepg_dagster.assets.ledger import Loop, Records
    from coepg_dagster.provenance import Record, Ref, Stale

app = typer.Typer()


def _definitions(loop: Loop) -> dg.Definitions:
    """The definitions of one loop, whether the web UI shows it or not."""
    from coepg_dagster.definitions import artifacts

    return artifacts([loop])


@app.command()
def evolve(
    reference: Reference,
    through: Annotated[int, typer.Option(help="the last iteration to make", min=0)],
    first: Annotated[int, typer.Option("--from", help="the first iteration to make", min=0)] = 0,
    device: Annotated[Device | None, typer.Option(help="default: cuda if there is a GPU")] = None,
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
    """Makes iterations FROM..THROUGH in order, through the Dagster instance; skips what is up to date.

    Every iteration is one run: watch it in the web UI too. Where a Dagster daemon runs (`coepg ui`), runs wait in its queue, so
    that its limits hold; else they are made in this process. Call this again to resume a run that was killed.
    """
    project, experiment, seed = open_experiment(reference)
    if through > experiment.iterations:
        refuse(f"{experiment.name} has iterations 0..{experiment.iterations}: lower --through, or raise `iterations`")
    if first > through:
        refuse(f"--from {first} is after --through {through}: raise --through, or lower --from")
    if ray is None:
        require_device(device)
    machine = machine_named(project.root, on)
    from coepg_dagster.assets.ledger import Loop, open_instance

    instance = open_instance(project)
    from coepg_dagster.assets.evolve import Wanted, Where, evolve_through, place_of, placed_machine

    loop = Loop(experiment, seed, project.root)
    place = place_of(device, processes, ray, machine)
    if through:
        _refuse_training(experiment, placed_machine(place, machine))
    made = evolve_through(_definitions(loop), instance, loop, through, err, Where(place, here), Wanted(first, data))
    say(f"{made} runs" if made else "everything is up to date")


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
    say(
        f"reads up to {files:,} files with {size / 1e9:,.3g} GB in {benchmark.path}; its screenshots are kept in the store as "
        f"models see them: {free / 1e9:,.3g} GB are free there"
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
    machine, there = _planned_machine(project, experiment, on, gpu, gpus, strategy)
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
    why += [*machine.refusals(experiment, there), *dryrun.broken(experiment.models, project.root)]
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
    report = dryrun.report(dry, hardware, rates_of(hardware.card, project.root / "benchmarks" / "baselines"))
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
) -> tuple[Machine, int | None]:
    """The machine to plan for: a profile, a card without one, or what `coepg evolve` would use here.

    With it the GPUs that there are, where it cannot say: their card is not known.
    """
    from coepg_dagster.planning.dryrun import find_gpus

    if gpu is None and gpus is not None:
        refuse("--gpus counts cards of a kind: add --gpu, e.g. --gpu H100-80GB, or name a profile with --on")
    if gpu is not None:
        if on is not None:
            refuse(f"--on {on} has its cards in its profile: leave out --gpu")
        if gpu not in CARDS:
            refuse(f"--gpu {gpu} is not known; known: {', '.join(CARDS)}")
        spread = TrainingSettings(training_processes=gpus or 1, strategy=strategy if (gpus or 1) > 1 else "ddp")
        return Machine(name="this_machine", card=gpu, gpus=gpus or 1, sft=spread, grpo_cdrem=spread), None
    if (machine := machine_named(project.root, on)) is not None:
        return machine, None
    here = find_gpus()
    if here is None and experiment.pool != "cpu":
        say("no GPU was found here: --on NAME plans for another machine, see machines/", "yellow")
    if here is None:
        return Machine(name="this_machine"), None
    if here.card is None:
        say(
            f"{here.name} with {here.memory / 2**30:.0f} GiB is not known here, so this is the plan for CPUs: name the nearest "
            f"card with --gpu ({', '.join(CARDS)})",
            "yellow",
        )
        return Machine(name="this_machine"), here.number
    if here.number > 1:
        say(
            f"training takes one of {here.number} GPUs: a profile with --on NAME spreads it over several, see machines/",
            "yellow",
        )
    return Machine(name="this_machine", card=here.card.name, gpus=here.number), None


def _would_run(loop: Loop, records: Records, stale: Mapping[Ref, Stale], reported: bool) -> list[str]:
    """What `coepg evolve` would make, the unpartitioned steps too."""
    shared = loop.shared_to_make(records, stale)
    todo = loop.to_make(records, stale, loop.experiment.iterations)
    lines = [f"would run first: {', '.join(shared)}"] if shared else []
    lines += [f"would run iteration {k}: {', '.join(assets)}" for k, assets in todo.items()]
    if lines or not reported:
        lines.append("would run last: evolution_report")
    return lines or ["would run: nothing, everything is up to date"]


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
    from coepg_dagster.assets.ledger import assert_sound, end_dead_runs, one_daemon, open_instance

    instance = open_instance(project)
    assert_sound(instance)
    from coepg_dagster.assets.pages import ui_server
    from coepg_dagster.assets.recovery import RECORDS, assert_not_lost
    from coepg_dagster.assets.run_launcher import what_it_lacks
    from coepg_dagster.processes import GRACE_SECONDS, end_group, ended, group_ended, started_here

    assert_not_lost(instance, project.store / RECORDS, instance.all_asset_keys())
    with one_daemon(instance):
        end_dead_runs(instance, project.store)
        if lacks := what_it_lacks(instance):
            say(lacks, "yellow")
        try:
            listening = socket.create_server((host, port))
        except OSError as error:
            refuse(f"port {port} of {host} cannot be used ({error.strerror}): choose another --port or --host")
        os.chdir(project.root)
        say("loading the code locations …")
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
                say(f"Dagster and the pages are at {public_url or f'http://{host}:{port}'}; Ctrl-C ends both")
                server.run(sockets=[listening])
        finally:
            try:
                with suppress(ProcessLookupError):
                    os.killpg(daemon.pid, signal.SIGINT)
                if not group_ended(daemon.pid, 3):
                    say("ending the runs that go on; Ctrl-C kills them")
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
        refuse(f"--host {host}: is not an IPv4 address or a name of this machine: correct it")
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
    processes: Annotated[
        int | None,
        typer.Option(help="processes that share the inference of one iteration on a CPU; default: 1", min=1, max=1024),
    ] = None,
    on: On = None,
    only_collect: Annotated[bool, typer.Option("--collect", help="make nothing; write what is there so far")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="folder of results.md, results.json and figures; default: store/pages/EXPERIMENT/results"),
    ] = None,
) -> None:
    """Runs every loop of a study, the experiment and its ablations with all seeds; writes tables, figures and findings.

    Each iteration is a `coepg evolve` of its own. What is up to date is not made again, so this resumes
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
        require_device(device)
        if machine is not None and machine.spread and jobs > 1:
            refuse(
                f"machine {machine.name} trains on several GPUs at once: add --jobs 1, or name one with a GPU for each"
            )
    from coepg_dagster.assets.ledger import end_dead_runs, open_instance

    instance = open_instance(project)
    from coepg_dagster.assets.evolve import place_of, placed_machine
    from coepg_dagster.assets.reproduce import Reproduction, find_study, is_begun, one_at_a_time, results_folder
    from coepg_dagster.assets.reproduce import collect as collect_study

    study = find_study(project, name, chosen)
    placed = placed_machine(place_of(device, processes, None, machine), machine)
    if not only_collect:
        for experiment in {loop.experiment.name: loop.experiment for loop in study.loops}.values():
            _refuse_training(experiment, placed)
    if only_collect and not is_begun(find_study(project, name), instance):
        refuse(f"{name}: no iteration of this study is made: run `coepg evolve {name} --through 0`, then collect it")
    out = out or results_folder(project, name)
    out.mkdir(parents=True, exist_ok=True)  # fails now rather than after hours of work
    failed = []
    if not only_collect:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the child processes, as Ctrl-C does
        with one_at_a_time(project):
            end_dead_runs(instance, project.store)
            places = {"--device": device, "--processes": processes, "--on": on}
            chosen_place = [
                word for option, value in places.items() if value is not None for word in (option, str(value))
            ]
            reproduction = Reproduction(project, instance, err, jobs, chosen_place, placed)
            failed = reproduction.run(study, _definitions)
    page = collect_study(project, instance, find_study(project, name), out)
    echo(str(page))
    raise typer.Exit(1 if failed else 0)
