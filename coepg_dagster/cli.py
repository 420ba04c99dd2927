"""The `coepg` command."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import pyarrow as pa
import typer
from rich.console import Console
from rich.table import Table

from coepg_dagster import yaml_files
from coepg_dagster.estimates import CARDS, Strategy
from coepg_dagster.experiment import ABLATIONS, Experiment, Experiments, split_iteration, split_reference
from coepg_dagster.processes import leave_words
from coepg_dagster.project import Project, find_project
from coepg_dagster.refusal import Refusal

if TYPE_CHECKING:
    from coepg_dagster.assets.ledger import Loop
    from coepg_dagster.auditing.archive import Archive
    from coepg_dagster.evaluation.result import Result
    from coepg_dagster.provenance import Asset, Record, Ref, Stale

err = Console(stderr=True)


class _Commands(typer.core.TyperGroup):
    """Whatever a person asked for and cannot have ends with one message, and code 2."""

    def invoke(self, ctx: Any) -> Any:
        _told.clear()
        try:
            return super().invoke(ctx)
        except Refusal as error:
            _refuse(str(error), error.code)
        except OSError as error:
            if error.errno == errno.EPIPE:  # nobody reads on, as in `coepg results … | head`
                raise
            what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            _refuse(f"{what}: name another place, or mend this one")
        except pa.ArrowException as error:
            _refuse(f"a stored table cannot be read: {error}: `coepg audit EXPERIMENT` names what is damaged")
        except ModuleNotFoundError as error:
            if error.name not in _EXTRAS:
                raise
            extra = _EXTRAS[error.name]
            _refuse(f"the package {error.name} is not installed: pip install 'coepg-dagster[{extra}]'")


_told: set[str] = set()
"""The files that this command has said to be left out."""
_EXTRAS = {"miniwob": "miniwob", "selenium": "miniwob", "websocket": "miniwob", "ray": "ray", "vllm": "vllm"}
"""Optional packages, and the extras that bring them."""


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="""Co-evolution of a planner and a grounder for GUI agents (Co-EPG, arXiv 2511.10705).

Start with `coepg plan sandbox`, then `coepg evolve sandbox --through 2`, then `coepg results sandbox`. `make ui` opens
the same runs in Dagster's web UI. EXPERIMENT is NAME (a file under experiments/, its first seed) or NAME/sSEED.""",
)
rewards = typer.Typer(no_args_is_help=True, help="What rewarded the planner's rollouts, and what else would have.")
app.add_typer(rewards, name="rewards")
Reference = Annotated[str, typer.Argument(metavar="EXPERIMENT", help="NAME or NAME/sSEED")]
Iteration = Annotated[str, typer.Argument(metavar="EXPERIMENT@k", help="iteration k of NAME or NAME/sSEED")]
Device = Literal["cpu", "cuda"]


def _open(reference: str) -> tuple[Project, Experiment, int]:
    """The project, experiment and seed that the user named; says which other files cannot be used. Raises ExperimentError."""
    project = find_project()
    known = project.all_experiments()
    opened = split_reference(reference, known)
    _name_left_out(known)
    return project, *opened


def _open_iteration(reference: str) -> tuple[Project, Experiment, int, int]:
    """The project, experiment, seed and k of `EXPERIMENT@k`. Raises ExperimentError."""
    project = find_project()
    known = project.all_experiments()
    opened = split_iteration(reference, known)
    _name_left_out(known)
    return project, *opened


def _name_left_out(known: Experiments) -> None:
    for name in sorted(known.left_out.keys() - _told):
        first, *more = known.left_out[name].splitlines()
        _print(f"left out: {first}{f' (and {len(more)} more)' if more else ''}", "yellow")
        _told.add(name)


def _require(*devices: Device | None) -> None:
    """Ends with a message where a GPU is asked for that is not there."""
    if "cuda" in devices:
        import torch

        if not torch.cuda.is_available():
            _refuse("cuda: torch sees no GPU here: use `cpu`, or look at the driver and at CUDA_VISIBLE_DEVICES")


def _print(text: str, style: str) -> None:
    err.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _archive(project: Project) -> Archive:
    """Every version that the project's event log knows of."""
    from coepg_dagster.assets.ledger import archive, open_instance

    return archive(project, open_instance(project))


@app.command()
def evolve(
    reference: Reference,
    through: Annotated[int, typer.Option(help="the last iteration to make", min=0)],
    first: Annotated[int, typer.Option("--from", help="the first iteration to make", min=0)] = 0,
    device: Annotated[Device | None, typer.Option(help="a GPU if there is one")] = None,
    train_device: Annotated[Device | None, typer.Option(help="the same for training, if it differs")] = None,
    processes: Annotated[int | None, typer.Option(help="that share inference on a CPU", min=1, max=1024)] = None,
    ray: Annotated[str | None, typer.Option(help="address of a Ray cluster for the heavy steps")] = None,
) -> None:
    """Makes iterations FROM..THROUGH in order, through the Dagster instance; skips what is there and current.

    Every iteration is one run: watch it in the web UI too. A run that was killed goes on where it was when you call this
    again.
    """
    project, experiment, seed = _open(reference)
    if through > experiment.iterations:
        _refuse(f"{experiment.name} has iterations 0..{experiment.iterations}: lower --through, or raise `iterations`")
    if first > through:
        _refuse(f"--from {first} lies behind --through {through}: raise --through, or lower --from")
    if ray is None:
        _require(device, train_device)
    from coepg_dagster.assets.ledger import Loop, open_instance

    instance = open_instance(project)
    from coepg_dagster.assets.evolve import evolve_through, place_of

    if experiment.name in project.experiments(ABLATIONS):
        from coepg_dagster.reproductions import defs
    else:
        from coepg_dagster.definitions import defs

    loop = Loop(experiment, seed, project.root)
    place = place_of(device, train_device, processes, ray)
    made = evolve_through(defs, instance, loop, through, err, place, first)
    err.print(f"{made} runs" if made else "everything is there and current")


@app.command()
def results(
    reference: Reference,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Prints Step SR, data quality and time of every iteration; stale artifacts are named with their root cause."""
    project, experiment, seed = _open(reference)
    from coepg_dagster.assets.ledger import Loop, open_instance

    instance = open_instance(project)
    from coepg_dagster.results import learned_text, short_splits
    from coepg_dagster.results import results as table_of

    loop = Loop(experiment, seed, project.root)
    records = loop.records(instance)
    stale = loop.stale(records)
    table = table_of(experiment, seed, records, stale)
    inputs = {str(ref): str(why) for ref, why in stale.items() if ref.iteration is None}
    if as_json:
        typer.echo(json.dumps(table | {"stale": inputs}))
        return
    from coepg_dagster.reports.evolution import rows_of

    heads, rows = rows_of(table["iterations"])
    view = Table(*heads, title=f"{experiment.name}/s{seed} (per cent, macro over tasks, 95 % interval)")
    for row in rows:
        view.add_row(*row)
    console = Console()
    console.print(view)
    for asset, why in inputs.items():
        console.print(f"stale: {asset}: {why}", style="yellow", highlight=False, soft_wrap=True)
    for iteration in table["iterations"]:
        for line in learned_text(iteration):
            console.print(line, highlight=False, soft_wrap=True)
    for line in short_splits(table["iterations"]):
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
    gpu: Annotated[
        str | None, typer.Option(help="card, e.g. H100-80GB; default: this machine's, A100-80GB if none")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="cards on one machine; default: this machine's", min=1)] = None,
    strategy: Annotated[Strategy, typer.Option(help="of training on several")] = "zero3",
) -> None:
    """Validates an experiment, prints its resolved configuration, what `evolve` would run and what that would take.

    Touches no model: memory per GPU, main memory, disk, steps, tokens and GPU-hours of each stage are computed from sizes
    and from measured rates. Ends with code 2 where a later step would fail on the data or on a failed check; with code 3
    where a stage cannot fit, and names three settings that would help.
    """
    project, experiment, seed = _open(reference)
    if gpu is not None and gpu not in CARDS:
        _refuse(f"--gpu {gpu} is not known; known: {', '.join(CARDS)}")
    from coepg_dagster.assets.automation import failed_inputs
    from coepg_dagster.assets.ledger import Loop, open_instance

    instance = open_instance(project)
    loop = Loop(experiment, seed, project.root)
    typer.echo(yaml_files.dump(experiment.model_dump(mode="json")))
    records = loop.records(instance)
    stale = loop.stale(records)
    why = [*_bad_steps(loop, records, stale), *failed_inputs(instance, loop)]
    if why:
        _refuse("\n".join(f"{experiment.name}: {line}" for line in why))
    for ref, cause in stale.items():
        typer.echo(f"# stale: {ref}: {cause}")
    shared = loop.shared_to_make(records, stale)
    if shared:
        typer.echo(f"# would make {', '.join(shared)}")
    todo = loop.to_make(records, stale, experiment.iterations)
    for k, assets in todo.items():
        typer.echo(f"# would run iteration {k}: {', '.join(assets)}")
    if not todo and not shared:
        typer.echo("# everything is there and current")
    _dry_run(project, experiment, records, gpu, gpus, strategy)


def _bad_steps(loop: Loop, records: Mapping[Ref, Record], stale: Mapping[Ref, Stale]) -> list[str]:
    """Why a step of the loop would fail on the labelled steps, as they were imported or as their files say."""
    from coepg_dagster.artifacts import STEPS, all_steps
    from coepg_dagster.benchmark import is_to_be_fetched, refuse_files, refuse_steps
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
        return refuse_steps(experiment, all_steps(file), covered)
    if is_to_be_fetched(experiment.benchmark, loop.root):
        _print(f"{experiment.benchmark.path} is not there yet: fetch the data before `coepg evolve`", "yellow")
        return []
    return refuse_files(experiment, loop.root)


def _dry_run(
    project: Project,
    experiment: Experiment,
    records: Mapping[Ref, Record],
    gpu: str | None,
    gpus: int | None,
    strategy: Strategy,
) -> None:
    """The part of `plan` that says what a run would take."""
    from coepg_dagster import dryrun
    from coepg_dagster.estimates import rates_of
    from coepg_dagster.provenance import Ref

    here = dryrun.found_card() if gpu is None else (CARDS[gpu], gpus or 1)
    if here is None and experiment.pool != "cpu":
        here = CARDS["A100-80GB"], gpus or 8  # the paper's machine
    card, count = here or (None, 1)
    hardware = dryrun.Hardware(card, gpus or count, strategy)
    benchmark = records.get(Ref("benchmark_steps"))
    if wrong := dryrun.broken(experiment.models, project.root):
        _refuse("\n".join(wrong))
    dry = dryrun.DryRun(experiment, project.root, benchmark.figures["steps"] if benchmark else None)
    rates = rates_of(card or dryrun.CPU, project.root / "benchmarks" / "baselines")
    report = dryrun.report(dry, hardware, rates)
    for line in report.lines:
        typer.echo(f"# {line}")
    for line in report.refused:
        _print(line, "red")
    if report.refused:
        raise typer.Exit(3)


@app.command()
def lineage(reference: Reference) -> None:
    """Writes the lineage map D_0 → π_1, ϕ_1 → π'_1 → D_1 → … as one HTML file and prints its path.

    Every artifact with its data version, run, time and key number; stale ones are marked with their root cause. `coepg ui`
    serves the same map, drawn anew each time it is opened.
    """
    project, experiment, seed = _open(reference)
    from coepg_dagster.assets.ledger import Loop, open_instance

    instance = open_instance(project)
    from coepg_dagster.assets.pages import write_lineage

    try:
        page = write_lineage(project, Loop(experiment, seed, project.root), instance)
    except OSError as error:
        _refuse(f"{error.filename}: {error.strerror}: `coepg report {reference} --out DIR` writes the map elsewhere")
    typer.echo(page)


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
    """Says where a row of D_k came from: step, planner, verdicts, rule, what was dropped, and what was trained on it.

    Goes up to D_0 and the open models, and compares every file on the way with the hash that was recorded when it was made:
    what was tampered with is named, and the exit code is 1.
    """
    from coepg_dagster.auditing.trace import find_row, parse_place, trace_row
    from coepg_dagster.auditing.trace import trace as trace_place

    place = parse_place(row)
    if place.reference is None:
        archive = _archive(find_project())
        found = trace_row(archive, *find_row(archive, place.what))
    else:
        project, experiment, seed, k = _open_iteration(place.reference)
        from coepg_dagster.assets.ledger import Loop

        owner = Loop(experiment, seed, project.root).owner("dataset")  # of an overlay that takes it: the parent
        found = trace_place(_archive(project), f"{owner}/s{seed}", k, place.what)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        from coepg_dagster.auditing.text import trace_text

        typer.echo(trace_text(found))
    if found["row"]["tampered"]:
        for line in found["row"]["tampered"]:
            _print(f"tampered: {line}", "red")
        raise typer.Exit(1)


@app.command()
def audit(
    reference: Reference,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Compares every artifact of a loop, and all they were made from, with the hashes that were recorded at the making.

    And every row of every D_k with its screenshot, its candidate and its verdicts. What was tampered with is named, and the
    exit code is 1.
    """
    project, experiment, seed = _open(reference)
    from coepg_dagster.auditing.check import check

    found = check(_archive(project), f"{experiment.name}/s{seed}")
    if as_json:
        typer.echo(json.dumps(found))
    else:
        for line in found["tampered"]:
            typer.echo(f"tampered: {line}")
        looked_at = ", ".join(f"{found[what]} {what}" for what in ("artifacts", "files", "rows"))
        typer.echo(f"looked at {looked_at}: {len(found['tampered']) or 'none'} tampered with")
    if found["tampered"]:
        raise typer.Exit(1)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="EXPERIMENT@k", help="from this one")],
    b: Annotated[str, typer.Argument(metavar="EXPERIMENT@k", help="to this one")],
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Says what differs between two iterations, of one experiment or two: rows of D_k and why, models, results."""
    from coepg_dagster.auditing.differences import Side, differences

    sides = []
    for name in (a, b):
        project, experiment, seed, k = _open_iteration(name)
        from coepg_dagster.assets.ledger import Loop

        loop = Loop(experiment, seed, project.root)
        sides.append(Side(f"{loop.name}@{k}", k, loop.owner, seed))
    found = differences(_archive(project), *sides)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        from coepg_dagster.auditing.text import diff_text

        typer.echo(diff_text(found))


@app.command()
def gc(
    keep: Annotated[int, typer.Option(help="newest versions of each artifact that stay", min=1)] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would go")] = False,
) -> None:
    """Removes what nothing needs any more: older versions, leftovers of finished jobs, old outputs of `coepg play`.

    What a current artifact was made from stays, however old. Refuses while anything is running.
    """
    project = find_project()
    from coepg_dagster.assets.ledger import end_dead_runs, finished_jobs, open_instance, unfinished_runs
    from coepg_dagster.auditing.cleaning import leftovers

    instance = open_instance(project)
    end_dead_runs(instance, project.store)
    busy = unfinished_runs(instance)
    if busy:
        _refuse(f"run {busy[0][:8]} is not finished: wait for it, or cancel it, then run this again")
    found = leftovers(_archive(project), finished_jobs(project, instance), keep)
    for leftover in found:
        if not dry_run:
            leftover.remove()
        name = leftover.folder.relative_to(project.store)
        typer.echo(f"{leftover.kind:8} {leftover.size:>14,} bytes  {name}")
    total = sum(leftover.size for leftover in found)
    typer.echo(f"{'would remove' if dry_run else 'removed'} {len(found)} folders, {total:,} bytes")


@app.command()
def report(
    reference: Reference,
    out: Annotated[Path, typer.Option(help="folder of the pages")],
) -> None:
    """Writes the pages of an experiment as HTML files and prints the path of their index.

    The lineage map, the evolution report, an audit page for each D_k and a page for each model. They need no server and no
    network. What is there and current is not written again. `coepg ui` serves the same pages, and the trace of each row.
    """
    project, experiment, seed = _open(reference)
    from coepg_dagster.assets.ledger import Loop, open_instance

    instance = open_instance(project)
    from coepg_dagster.assets.pages import write_pages

    typer.echo(str(write_pages(project, Loop(experiment, seed, project.root), instance, out)[0]))


@app.command()
def ui(
    port: Annotated[int, typer.Option(help="of Dagster's web UI, on the loopback address", min=1, max=65535)] = 3000,
    pages_port: Annotated[
        int, typer.Option(help="of lineage maps and reports, on the loopback address", min=1, max=65535)
    ] = 3001,
) -> None:
    """Starts Dagster's web server and daemon for this project, and the server of its pages, until Ctrl-C."""
    project = find_project()
    if port == pages_port:
        _refuse(f"--port and --pages-port are both {port}: choose two")
    from coepg_dagster.assets.ledger import end_dead_runs, open_instance

    instance = open_instance(project)
    from coepg_dagster.assets.about import PAGES
    from coepg_dagster.assets.pages import page_server

    end_dead_runs(instance, project.store)
    dagster, address = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{pages_port}"
    try:
        socket.create_server(("127.0.0.1", port)).close()  # Dagster's own message would scroll away
    except OSError as error:
        _refuse(f"port {port} cannot be used ({error.strerror}): choose another --port")
    try:
        pages = page_server(project, instance, pages_port, dagster)
    except OSError as error:
        _refuse(f"port {pages_port} cannot be used ({error.strerror}): choose another --pages-port")
    threading.Thread(target=pages.serve_forever, daemon=True).start()
    tools = Path(sys.executable).parent
    commands = [
        [str(tools / "dagster-daemon"), "run", "-w", "workspace.yaml"],
        [str(tools / "dagster-webserver"), "-h", "127.0.0.1", "-p", str(port), "-w", "workspace.yaml"],
    ]
    # a code location takes its time to load while training keeps every core busy
    env = {"DAGSTER_GRPC_TIMEOUT_SECONDS": "300"} | os.environ | {PAGES: address}
    processes = [subprocess.Popen(command, cwd=project.root, env=env) for command in commands]
    err.print(f"Dagster is at {dagster} when the lines below say so, lineage maps at {address}; Ctrl-C ends both")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a service manager's way to say Ctrl-C
    try:
        while all(process.poll() is None for process in processes):
            time.sleep(0.5)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(metavar="EXPERIMENT", help="with its overlays in experiments/ablations/")],
    jobs: Annotated[
        int, typer.Option(help="iterations made at the same time, each in its own process", min=1, max=1024)
    ] = 2,
    seeds: Annotated[
        str | None, typer.Option(help="only these, e.g. 13,42; all of the experiment's if left out")
    ] = None,
    device: Annotated[Device, typer.Option(help="of what answers and trains")] = "cpu",
    train_device: Annotated[
        Device | None, typer.Option(help="the same for training, if it differs; several GPUs take turns")
    ] = None,
    processes: Annotated[
        int, typer.Option(help="that share the inference of one iteration on a CPU", min=1, max=1024)
    ] = 1,
    only_collect: Annotated[bool, typer.Option("--collect", help="make nothing; write what is there so far")] = False,
    out: Annotated[Path, typer.Option(help="folder of results.md, results.json and figures")] = Path("docs"),
) -> None:
    """Runs every loop of a study, the experiment and its ablations with all seeds; writes tables, figures and findings.

    Each iteration is a `coepg evolve` of its own. What is there and current is not made again, so this goes on where it was
    after any interruption. Ends with 1 where something could not be made;
    the page names it.
    """
    chosen = None
    if seeds is not None:
        if not all(seed.isascii() and seed.isdecimal() and len(seed) <= 10 for seed in seeds.split(",")):
            _refuse(f"--seeds {seeds}: give whole numbers with commas between them, e.g. 13,42")
        chosen = [int(seed) for seed in seeds.split(",")]
    if "/" in name:
        _refuse(f"{name}: name the experiment alone; --seeds chooses among its seeds")
    project, _, _ = _open(name)
    if not only_collect:
        _require(device, train_device)
    from coepg_dagster.assets.ledger import end_dead_runs, open_instance

    instance = open_instance(project)
    from coepg_dagster.assets.reproduce import Reproduction, find_study, one_at_a_time
    from coepg_dagster.assets.reproduce import collect as collect_study

    study = find_study(project, name, chosen)
    out.mkdir(parents=True, exist_ok=True)  # before the hours, not after them
    failed = []
    if not only_collect:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what was started, as Ctrl-C does
        with one_at_a_time(project):
            end_dead_runs(instance, project.store)
            failed = Reproduction(project, instance, err, jobs, device, train_device or device, processes).run(study)
    page = collect_study(project, instance, find_study(project, name), out)
    typer.echo(str(page))
    raise typer.Exit(1 if failed else 0)


@app.command()
def collect(
    benchmark: Annotated[Literal["miniwob"], typer.Argument(help="the one that can be collected")],
    out: Annotated[Path, typer.Option(help="folder of the shards")] = Path("cache/miniwob"),
    screens_per_family: Annotated[int, typer.Option(help="training screens for pretraining, about", min=0)] = 0,
    snapshot: Annotated[Path | None, typer.Option(help="folder of the snapshot to write")] = None,
    processes: Annotated[int, typer.Option(help="browsers at work", min=1, max=256)] = 2,
) -> None:
    """Renders MiniWoB++ episodes in headless Chromium, solved by DOM oracles with real mouse and key events.

    Only episodes that the environment rewards are kept. What is there is not collected again; a killed run goes on.
    Needs Chromium, ChromeDriver and the extra `miniwob`.
    """
    from coepg_dagster.miniwob.browser import find_pages, find_programs
    from coepg_dagster.miniwob.collect import STEPS_PER_SHARD, Progress, benchmark_plan, plan
    from coepg_dagster.miniwob.collect import collect as collect_shards
    from coepg_dagster.miniwob.snapshot import build_snapshot

    find_programs()
    find_pages()
    out.mkdir(parents=True, exist_ok=True)
    shards = benchmark_plan()
    if screens_per_family:
        shards += plan("pretrain", -(-screens_per_family // STEPS_PER_SHARD["pretrain"]))

    def show(state: Progress) -> None:
        done = state.skipped + state.shards
        err.print(f"{done}/{state.of_shards} shards, {state.steps} steps, {state.seconds:.0f} s", highlight=False)

    collect_shards(out, shards, processes, show)
    if snapshot is not None:
        typer.echo(yaml_files.dump(build_snapshot(out, snapshot)))


@app.command()
def pretrain(
    benchmark: Annotated[Literal["sandbox"], typer.Argument(help="the one whose models are made here")],
    recipe: Annotated[
        Path, typer.Option(help="towers, checkpoints and their settings", exists=True, dir_okay=False)
    ] = Path("models/recipe.yaml"),
    screens: Annotated[Path, typer.Option(help="folder of `coepg collect`")] = Path("cache/miniwob"),
    out: Annotated[Path, typer.Option(help="folder of the checkpoints")] = Path("models"),
    only: Annotated[list[str] | None, typer.Option(help="name of a checkpoint; again for more")] = None,
    device: Annotated[Device, typer.Option(help="where they are trained")] = "cpu",
    parallel: Annotated[int, typer.Option(help="models trained at the same time", min=1, max=256)] = 1,
    loaders: Annotated[
        int, typer.Option(help="processes that prepare batches, per model; 2 to 4 on a GPU", min=0, max=256)
    ] = 0,
    snapshot: Annotated[Path, typer.Option(help="the benchmark, for the model cards", exists=True)] = Path(
        "data/miniwob"
    ),
) -> None:
    """Makes the tiny models of the embedded benchmark again, from scratch: vision warm-up, grounders, planners.

    Writes a model card for each, with results per split. The full recipe wants a GPU (minutes); a CPU takes many hours.
    """
    _require(device)
    from coepg_dagster.pretraining import cards
    from coepg_dagster.pretraining import recipe as recipes
    from coepg_dagster.pretraining import screens as pages
    from coepg_dagster.pretraining.train import run

    def show(stage: str, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        numbers = " ".join(f"{name}={value:.4g}" for name, value in metrics.items())
        err.print(f"{stage} {step}/{steps} {numbers}", highlight=False)

    settings = recipes.read(recipe)
    if unknown := sorted(set(only or ()) - settings.checkpoints.keys()):
        _refuse(f"--only {unknown[0]}: {recipe} has {', '.join(settings.checkpoints)}")
    out.mkdir(parents=True, exist_ok=True)
    shards = sorted((screens / "pretrain").glob("*/*.parquet"))
    if not shards:
        _refuse(f"{screens}/pretrain holds no screens: `coepg collect miniwob --screens-per-family 600` makes them")
    pictures = pages.read(shards)
    run(settings, pictures, out, device, show, only=only, parallel=parallel, loaders=loaders)
    cards.write(out, settings, pictures, snapshot, only=only, device=device)


@app.command()
def play(
    agent: Annotated[str, typer.Argument(metavar="EXPERIMENT@k", help="planner and grounder of iteration k")],
    split: Annotated[str, typer.Option(help="whose episodes are played")] = "test_seed",
    episodes: Annotated[int, typer.Option(help="of each family", min=1)] = 3,
    family: Annotated[list[str] | None, typer.Option(help="only this one; again for more")] = None,
    first_seed: Annotated[int | None, typer.Option(help="fresh episodes, from this seed on", min=0)] = None,
    max_steps: Annotated[int, typer.Option(help="of an episode", min=1)] = 16,
    shown: Annotated[int, typer.Option(help="episodes of each family on the page", min=0)] = 2,
    device: Annotated[Device, typer.Option(help="of planner and grounder")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads; more than one slow tiny models", min=1, max=1024)] = 1,
    out: Annotated[Path | None, typer.Option(help="folder to write to instead of the store")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Lets the agent of iteration k act on MiniWoB++ pages in headless Chromium; the page says whether it succeeded.

    Plays the first episodes of a split that is scored offline, or fresh ones of the same families, which need not be
    solvable. Prints success rates; keeps every frame, plan and point, and a page to look at. Needs Chromium, ChromeDriver
    and the extra `miniwob`.
    """
    project, experiment, seed, k = _open_iteration(agent)
    _require(device)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    from coepg_dagster.assets.ledger import Loop, open_instance
    from coepg_dagster.assets.live import play_iteration
    from coepg_dagster.reports.play import rate, why

    def show(done: int, of: int, figures: Mapping[str, float]) -> None:
        if done % 10 == 0 or done == of:
            err.print(f"{done}/{of} episodes, {figures['solved']:g} solved", highlight=False)

    about = play_iteration(
        project,
        Loop(experiment, seed, project.root),
        open_instance(project),
        k,
        split=split,
        per_family=episodes,
        families=family,
        first_seed=first_seed,
        max_steps=max_steps,
        shown=shown,
        device=device,
        threads=threads,
        out=out,
        report=show,
    )
    for ref, reason in about["stale"].items():
        _print(f"stale: {ref}: {reason}", "yellow")
    if as_json:
        typer.echo(json.dumps(about))
        return
    view = Table("family", "solved", "episodes", "steps", "why not", title=f"{agent}, live on MiniWoB++")
    for name, row in about["families"].items():
        view.add_row(name, *(str(row[key]) for key in ("solved", "episodes", "steps")), why(row["failures"]))
    console = Console()
    console.print(view)
    typer.echo(f"solved: {about['solved']} of {about['episodes']}, {rate(about['success'])} (95 % over episodes)")
    typer.echo(f"macro over families: {rate(about['macro'])} (95 % over families)")
    console.print(f"page: {about['page']}", highlight=False, soft_wrap=True)


@app.command()
def score(
    file: Annotated[Path, typer.Argument(help="predictions that somebody made")],
    format: Annotated[str, typer.Option(help="coepg (our own), gui_r1, ui_genie or uground")],
    protocol: Annotated[str, typer.Option(help="see `coepg protocols`")],
    labels: Annotated[Path | None, typer.Option(help="uground: the file of labelled steps")] = None,
    answers: Annotated[Path | None, typer.Option(help="uground: the grounder's answers")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Scores a file of predictions under a named protocol: the number that the protocol's owner would get."""
    from coepg_dagster.evaluation.case import NO_PREDICTION, UNREADABLE
    from coepg_dagster.evaluation.score import score_file

    result = score_file(file, format, protocol, labels=labels, answers=answers)
    if as_json:
        typer.echo(result.to_json())
        return
    lacking = {what: result.notes[what] for what in (NO_PREDICTION, UNREADABLE) if what in result.notes}
    view = Table(
        *("metric", "micro", "macro", "95 % of macro", "n"),
        title=f"{protocol}: {result.scored} scored",
        caption="\n".join(f"{what}: {count}" for what, count in lacking.items()) or None,
    )
    for name, metric in result.metrics.items():
        interval = f"[{metric.ci95[0]:.2f}, {metric.ci95[1]:.2f}]" if metric.ci95 else "–"
        view.add_row(name, _two(metric.micro), _two(metric.macro), interval, str(metric.n))
    Console().print(view)
    for reason, count in (*result.skipped.items(), *result.notes.items()):
        if reason not in lacking:
            typer.echo(f"{reason}: {count}")


@app.command()
def compare(
    a: Annotated[str, typer.Argument(help="a file of predictions, or EXPERIMENT@k")],
    b: Annotated[str, typer.Argument(help="another one, of the same steps")],
    protocol: Annotated[str, typer.Option(help="for files; experiments have their own")] = "miniwob/point",
    format: Annotated[str, typer.Option(help="of the files: coepg (our own), gui_r1, ui_genie or uground")] = "coepg",
) -> None:
    """Says whether two results differ: paired by step, with a 95 % interval clustered by task."""
    from coepg_dagster.evaluation.score import compare as compare_results

    first, second = (_result_of(name, protocol, format) for name in (a, b))
    typer.echo(compare_results(first, second).to_json())


@app.command()
def protocols() -> None:
    """Lists the protocols with what they count, as Markdown."""
    from coepg_dagster.evaluation.protocols import protocols_markdown

    typer.echo(protocols_markdown())


@app.command()
def check_data(
    path: Annotated[Path, typer.Argument(help="your JSONL files and images, see docs/protocols.md", exists=True)],
    reference: Annotated[
        str | None, typer.Option("--experiment", help="NAME whose splits and prompts the data must fit")
    ] = None,
) -> None:
    """Reads your own data as an import would, and says everything that is wrong with it."""
    from coepg_dagster.readers.importing import check_data as check

    if reference is None:
        report = check(path)
    else:
        from coepg_dagster.readers.benchmark import options_of

        _, experiment, _ = _open(reference)
        benchmark = experiment.benchmark
        splits = [benchmark.train, benchmark.validation, *benchmark.test]
        report = check(path, options_of(benchmark, experiment.models.prompts), splits)
    typer.echo(report.text())
    raise typer.Exit(0 if report.ok else 1)


@rewards.command("recompute")
def rewards_recompute(
    reference: Iteration,
    variant: Annotated[str, typer.Option(help="no_cdrem, uniform, prior, literal, probability or temperature")],
    temperature: Annotated[float | None, typer.Option(help="τ of the variant `temperature`; default 0.25")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
    out: Annotated[Path | None, typer.Option(help="Parquet file for the rewards of every rollout")] = None,
) -> None:
    """Rewards and advantages that another variant of C-DREM would have given the rollouts of π'_k. Asks no model."""
    import pyarrow.parquet as pq

    from coepg_dagster.artifacts import ROLLOUTS, write_table
    from coepg_dagster.rewards.variants import recompute, summary, variant_named

    record, folder = _record_of(reference, "planner")
    if not (folder / ROLLOUTS).exists():
        _refuse(f"{reference} has no {ROLLOUTS}: this planner was not made by GRPO, so nothing was rewarded")
    made = recompute(pq.read_table(folder / ROLLOUTS), variant_named(variant), temperature)
    logged = record.config["confidence"]
    facts = {"of": reference, "variant": variant, "temperature": temperature, "logged_confidence": logged} | summary(
        made
    )
    if out is not None:
        write_table(made, out)
    if as_json:
        typer.echo(json.dumps(facts))
        return
    view = Table("", variant, f"as trained ({logged})", title=f"{reference}: {facts['rollouts']} rollouts")
    for label, name in (("mean reward", "mean_reward"), ("groups without spread, %", "groups_without_spread")):
        view.add_row(label, f"{facts[name]:.4g}", f"{facts[f'{name}_logged']:.4g}")
    Console().print(view)
    for name in ("same_reward", "same_advantage", "same_sign"):
        typer.echo(f"{name.replace('_', ' ')}: {facts[name]:.1f} % of the rollouts")
    typer.echo(f"largest difference of a reward: {facts['largest_difference']:.4g}")


@rewards.command("calibration")
def rewards_calibration(
    reference: Iteration,
    out: Annotated[Path | None, typer.Option(help="folder for calibration.json and the figures")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Whether the grounders' confidence is worth anything: ECE, Brier score, AUROC and reliability curve of each.

    From the verdicts of iteration k, and from the rollouts of π'_k where it was trained with GRPO.
    """
    import pyarrow.parquet as pq

    from coepg_dagster.artifacts import ROLLOUTS, VERDICTS
    from coepg_dagster.reports.calibration import reliability_figure
    from coepg_dagster.rewards.calibration import as_json as plain
    from coepg_dagster.rewards.calibration import of_rollouts, of_verdicts

    found = {"verdicts": of_verdicts(pq.read_table(_record_of(reference, "verdicts")[1] / VERDICTS))}
    rollouts = _record_of(reference, "planner")[1] / ROLLOUTS
    if rollouts.exists():
        found["rollouts"] = of_rollouts(pq.read_table(rollouts))
    facts = {source: plain(calibrations) for source, calibrations in found.items()}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "calibration.json").write_text(json.dumps(facts, indent=1))
        for source, calibrations in found.items():
            reliability_figure(calibrations).savefig(out / f"reliability-{source}.png", dpi=110)
    if as_json:
        typer.echo(json.dumps(facts))
        return
    heads = ("grounder", "answers", "hit rate, %", "confidence, %", "ECE, %", "Brier", "AUROC")
    for source, calibrations in found.items():
        view = Table(*heads, title=f"{reference}: confidence against hits, {source}")
        for name, one in calibrations.items():
            rates = (f"{100 * rate:.1f}" for rate in (one.hit_rate, one.confidence, one.ece))
            view.add_row(name, str(one.n), *rates, f"{one.brier:.3f}", _two(one.auroc))
        Console().print(view)


def _record_of(reference: str, asset: Asset) -> tuple[Record, Path]:
    """The current version of an asset of `EXPERIMENT@k` and its folder; ends with the message where there is none."""
    project, experiment, seed, k = _open_iteration(reference)
    from coepg_dagster.assets.ledger import Loop, open_instance
    from coepg_dagster.provenance import Ref

    loop = Loop(experiment, seed, project.root)
    record = loop.record(open_instance(project), Ref(asset, k))
    if record is None:
        _refuse(f"{reference} has no {asset}: run `coepg evolve {experiment.name}/s{seed} --through {k}` first")
    _whole(loop, record)
    return record, project.store / record.folder


def _whole(loop: Loop, *records: Record) -> None:
    """Ends with the message where files of an artifact are gone."""
    for record in records:
        if gone := loop.lost(record):
            _refuse(f"{record.ref}: {gone}: run `coepg evolve {loop.name} --through {record.iteration or 0}` first")


def _refuse(message: str, code: int = Refusal.code) -> NoReturn:
    """Says why a command cannot go on, and ends it."""
    _print(message, "red")
    leave_words(message)
    raise typer.Exit(code) from None


def _two(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _result_of(name: str, protocol: str, format: str) -> Result:
    """The result of a prediction file, or of an experiment's test splits at iteration k."""
    from coepg_dagster.evaluation.score import score_file, score_steps

    if "@" not in name or Path(name).exists():
        return score_file(Path(name), format, protocol)
    project, experiment, seed, k = _open_iteration(name)
    import pyarrow.parquet as pq

    from coepg_dagster.artifacts import PREDICTIONS, STEPS, all_steps
    from coepg_dagster.assets.ledger import Loop, open_instance
    from coepg_dagster.provenance import Ref

    loop, instance = Loop(experiment, seed, project.root), open_instance(project)
    record = loop.record(instance, Ref("evaluation", k))
    if record is None:
        _refuse(f"{name} has no evaluation: run `coepg evolve {experiment.name}/s{seed} --through {k}` first")
    steps_made = loop.record(instance, Ref("benchmark_steps"))
    _whole(loop, *[record, steps_made] if steps_made else [record])
    predictions = pq.read_table(project.store / record.folder / PREDICTIONS)
    steps = all_steps(project.store / record.input("benchmark_steps").folder / STEPS)
    tests = [split in experiment.benchmark.test for split in steps["split"].to_pylist()]
    scored = set(predictions["step_id"].to_pylist())
    steps = steps.filter(pa.array(t and s in scored for t, s in zip(tests, steps["step_id"].to_pylist(), strict=True)))
    wanted = set(steps["step_id"].to_pylist())
    predictions = predictions.filter(pa.array(s in wanted for s in predictions["step_id"].to_pylist()))
    return score_steps(experiment.benchmark.protocol, steps, predictions)


if __name__ == "__main__":
    app()
