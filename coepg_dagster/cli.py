"""The `coepg` command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar, cast

import pyarrow as pa
import typer
import yaml
from rich.console import Console
from rich.table import Table

from coepg_dagster.experiment import Experiment, ExperimentError, split_reference
from coepg_dagster.project import ABLATIONS, Project, find_project

if TYPE_CHECKING:
    from coepg_dagster.auditing.archive import Archive
    from coepg_dagster.evaluation.result import Result
    from coepg_dagster.provenance import Asset, Record, Ref

T = TypeVar("T")
app = typer.Typer(
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
err = Console(stderr=True)


def _open(reference: str) -> tuple[Project, Experiment, int]:
    """The project, experiment and seed that the user named; ends with the message where that cannot be."""
    try:
        project = find_project()
        return project, *split_reference(reference, project.experiments() | project.experiments(ABLATIONS))
    except ExperimentError as error:
        err.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


def _archive(project: Project) -> Archive:
    """Every version that the project's event log knows of."""
    from coepg_dagster.assets.ledger import archive, open_instance

    return archive(project, open_instance(project))


def _refused(error: Exception) -> typer.Exit:
    """Says why a command cannot go on; to be raised."""
    err.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(2)


@app.command()
def evolve(
    reference: Reference,
    through: Annotated[int, typer.Option(help="the last iteration to make", min=0)],
    first: Annotated[int, typer.Option("--from", help="the first iteration to make", min=0)] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one")] = None,
    train_device: Annotated[str | None, typer.Option(help="the same for training, if it differs")] = None,
    processes: Annotated[int | None, typer.Option(help="that share inference on a CPU", min=1)] = None,
    ray: Annotated[str | None, typer.Option(help="address of a Ray cluster for the heavy steps")] = None,
) -> None:
    """Makes iterations FROM..THROUGH in order, through the Dagster instance; skips what is there and current.

    Every iteration is one run: watch it in the web UI too. A run that was killed goes on where it was when you call this
    again.
    """
    project, experiment, seed = _open(reference)
    if through > experiment.iterations:
        err.print(
            f"{experiment.name} has iterations 0..{experiment.iterations}: lower --through, or raise `iterations`"
        )
        raise typer.Exit(2)
    if first > through:
        err.print(f"--from {first} lies behind --through {through}")
        raise typer.Exit(2)
    from coepg_dagster.assets.ledger import Loop, open_instance

    instance = open_instance(project)
    from coepg_dagster.assets.evolve import RunFailed, evolve_through, place_of

    if experiment.name in project.experiments(ABLATIONS):
        from coepg_dagster.reproductions import defs
    else:
        from coepg_dagster.definitions import defs

    loop = Loop(experiment, seed, project.root)
    try:
        place = place_of(device, train_device, processes, ray)
        made = evolve_through(defs, instance, loop, through, err, place, first)
    except RunFailed as error:
        err.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
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
    from coepg_dagster.results import results as table_of

    loop = Loop(experiment, seed, project.root)
    records = loop.records(instance)
    table = table_of(experiment, seed, records, loop.stale(records))
    if as_json:
        typer.echo(json.dumps(table))
        return
    from coepg_dagster.reports.evolution import rows_of

    heads, rows = rows_of(table["iterations"])
    view = Table(*heads, title=f"{experiment.name}/s{seed} (per cent, macro over tasks, 95 % interval)")
    for row in rows:
        view.add_row(*row)
    console = Console()
    console.print(view)
    for iteration in table["iterations"]:
        for asset, why in iteration["stale"].items():
            console.print(f"stale: {asset}[{iteration['iteration']}]: {why}", style="yellow", highlight=False)
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
    strategy: Annotated[str, typer.Option(help="of training on several: ddp, zero2, zero3 or fsdp")] = "zero3",
) -> None:
    """Validates an experiment, prints its resolved configuration, what `evolve` would run and what that would take.

    Touches no model: memory per GPU, main memory, disk, steps, tokens and GPU-hours of each stage are computed from sizes
    and from measured rates. Ends with code 3 where a stage cannot fit, and names three settings that would help.
    """
    project, experiment, seed = _open(reference)
    from coepg_dagster.assets.ledger import Loop, open_instance

    instance = open_instance(project)
    loop = Loop(experiment, seed, project.root)
    typer.echo(yaml.safe_dump(experiment.model_dump(mode="json"), sort_keys=False, allow_unicode=True))
    records = loop.records(instance)
    stale = loop.stale(records)
    for ref, why in stale.items():
        typer.echo(f"# stale: {ref}: {why}")
    todo = loop.to_make(records, stale, experiment.iterations)
    for k, assets in todo.items():
        typer.echo(f"# would run iteration {k}: {', '.join(assets)}")
    changed = [ref for ref, record in records.items() if ref.asset in loop.shared and loop.source_changed(record)]
    for ref in changed:
        typer.echo(
            f"# would run {ref}: the files that it was read from changed, and all that follows may be made again"
        )
    if not todo and not changed:
        typer.echo("# everything is there and current")
    _dry_run(project, experiment, records, gpu, gpus, strategy)


def _dry_run(
    project: Project,
    experiment: Experiment,
    records: Mapping[Ref, Record],
    gpu: str | None,
    gpus: int | None,
    strategy: str,
) -> None:
    """The part of `plan` that says what a run would take."""
    from coepg_dagster import dryrun
    from coepg_dagster.architecture import UnknownModel
    from coepg_dagster.estimates import CARDS, STRATEGIES, Strategy, rates_of
    from coepg_dagster.provenance import Ref

    if gpu is not None and gpu not in CARDS:
        raise typer.BadParameter(f"--gpu {gpu} is not known; known: {', '.join(CARDS)}")
    if strategy not in STRATEGIES:
        raise typer.BadParameter(f"--strategy {strategy} is not known; known: {', '.join(STRATEGIES)}")
    here = dryrun.found_card() if gpu is None else (CARDS[gpu], gpus or 1)
    if here is None and experiment.pool != "cpu":
        here = CARDS["A100-80GB"], gpus or 8  # the paper's machine
    card, count = here or (None, 1)
    hardware = dryrun.Hardware(card, gpus or count, cast(Strategy, strategy))
    benchmark = records.get(Ref("benchmark_steps"))
    try:
        dry = dryrun.DryRun(experiment, project.root, benchmark.figures["steps"] if benchmark else None)
    except UnknownModel as error:
        err.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    rates = rates_of(card or dryrun.CPU, project.root / "benchmarks" / "baselines")
    report = dryrun.report(dry, hardware, rates)
    for line in report.lines:
        typer.echo(f"# {line}")
    for line in report.refused:
        err.print(line, style="red", markup=False, highlight=False, soft_wrap=True)
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

    typer.echo(write_lineage(project, Loop(experiment, seed, project.root), instance))


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
    from coepg_dagster.auditing.archive import NotFound
    from coepg_dagster.auditing.trace import find_row, parse_place, trace_row
    from coepg_dagster.auditing.trace import trace as trace_place

    try:
        place = parse_place(row)
        if place.reference is None or place.k is None:
            archive = _archive(find_project())
            found = trace_row(archive, *find_row(archive, place.what))
        else:
            project, experiment, seed = _open(place.reference)
            from coepg_dagster.assets.ledger import Loop

            owner = Loop(experiment, seed, project.root).owner("dataset")  # of an overlay that takes it: the parent
            found = trace_place(_archive(project), f"{owner}/s{seed}", place.k, place.what)
    except (ExperimentError, NotFound) as error:
        raise _refused(error) from None
    if as_json:
        typer.echo(json.dumps(found))
    else:
        from coepg_dagster.auditing.text import trace_text

        typer.echo(trace_text(found))
    if found["row"]["tampered"]:
        for line in found["row"]["tampered"]:
            err.print(f"tampered: {line}", style="red", markup=False, highlight=False, soft_wrap=True)
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
    from coepg_dagster.auditing.archive import NotFound
    from coepg_dagster.auditing.check import check

    try:
        found = check(_archive(project), f"{experiment.name}/s{seed}")
    except NotFound as error:
        raise _refused(error) from None
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
    from coepg_dagster.auditing.archive import NotFound
    from coepg_dagster.auditing.differences import Side, differences

    sides = []
    for name in (a, b):
        reference, _, k = name.rpartition("@")
        if not (reference and k.isdecimal()):
            raise typer.BadParameter(f"{name!r} names no iteration: write EXPERIMENT@k, e.g. sandbox@1")
        project, experiment, seed = _open(reference)
        from coepg_dagster.assets.ledger import Loop

        loop = Loop(experiment, seed, project.root)
        sides.append(Side(f"{loop.name}@{k}", int(k), loop.owner, seed))
    try:
        found = differences(_archive(project), *sides)
    except NotFound as error:
        raise _refused(error) from None
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
    try:
        project = find_project()
    except ExperimentError as error:
        raise _refused(error) from None
    from coepg_dagster.assets.ledger import end_dead_runs, finished_jobs, open_instance, unfinished_runs
    from coepg_dagster.auditing.archive import NotFound
    from coepg_dagster.auditing.cleaning import leftovers

    instance = open_instance(project)
    end_dead_runs(instance, project.store)
    busy = unfinished_runs(instance)
    if busy:
        err.print(f"run {busy[0][:8]} is not finished: wait for it, or cancel it, then run this again")
        raise typer.Exit(2)
    try:
        found = leftovers(_archive(project), finished_jobs(project, instance), keep)
    except (ExperimentError, NotFound) as error:
        raise _refused(error) from None
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
    from coepg_dagster.auditing.archive import NotFound

    try:
        written = write_pages(project, Loop(experiment, seed, project.root), instance, out)
    except NotFound as error:
        raise _refused(error) from None
    typer.echo(str(written[0]))


@app.command()
def ui(
    port: Annotated[int, typer.Option(help="of Dagster's web UI, on the loopback address")] = 3000,
    pages_port: Annotated[int, typer.Option(help="of lineage maps and reports, on the loopback address")] = 3001,
) -> None:
    """Starts Dagster's web server and daemon for this project, and the server of its pages, until Ctrl-C."""
    try:
        project = find_project()
    except ExperimentError as error:
        raise typer.BadParameter(str(error)) from None
    from coepg_dagster.assets.ledger import end_dead_runs, open_instance

    instance = open_instance(project)
    from coepg_dagster.assets.about import PAGES
    from coepg_dagster.assets.pages import page_server

    end_dead_runs(instance, project.store)
    dagster, address = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{pages_port}"
    try:
        pages = page_server(project, instance, pages_port, dagster)
    except OSError as error:
        raise typer.BadParameter(
            f"port {pages_port} is taken ({error.strerror}): choose another --pages-port"
        ) from None
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
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a service manager's way to say Ctrl-C
    try:
        while all(process.poll() is None for process in processes):
            time.sleep(0.5)
    except KeyboardInterrupt:
        pass
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(metavar="EXPERIMENT", help="with its overlays in experiments/ablations/")],
    jobs: Annotated[int, typer.Option(help="iterations made at the same time, each in its own process", min=1)] = 2,
    seeds: Annotated[
        str | None, typer.Option(help="only these, e.g. 13,42; all of the experiment's if left out")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    train_device: Annotated[
        str | None, typer.Option(help="the same for training, if it differs; several GPUs take turns")
    ] = None,
    processes: Annotated[int, typer.Option(help="that share the inference of one iteration on a CPU", min=1)] = 1,
    only_collect: Annotated[bool, typer.Option("--collect", help="make nothing; write what is there so far")] = False,
    out: Annotated[Path, typer.Option(help="folder of results.md, results.json and figures")] = Path("docs"),
) -> None:
    """Runs every loop of a study, the experiment and its ablations with all seeds; writes tables, figures and findings.

    Each iteration is a `coepg evolve` of its own. What is there and current is not made again, so this goes on where it was
    after any interruption. Ends with 1 where something could not be made;
    the page names it.
    """
    from coepg_dagster.assets.ledger import end_dead_runs, open_instance

    try:
        project = find_project()
        instance = open_instance(project)
        from coepg_dagster.assets.reproduce import Reproduction, find_study, one_at_a_time
        from coepg_dagster.assets.reproduce import collect as collect_study

        chosen = [int(seed) for seed in seeds.split(",")] if seeds else None
        study = find_study(project, name, chosen)
        failed = []
        if not only_collect:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what was started, as Ctrl-C does
            with one_at_a_time(project):
                end_dead_runs(instance, project.store)
                failed = Reproduction(project, instance, err, jobs, device, train_device or device, processes).run(
                    study
                )
        page = collect_study(project, instance, find_study(project, name), out)
    except ExperimentError as error:
        err.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    typer.echo(str(page))
    raise typer.Exit(1 if failed else 0)


@app.command()
def collect(
    benchmark: Annotated[str, typer.Argument(help="miniwob")],
    out: Annotated[Path, typer.Option(help="folder of the shards")] = Path("cache/miniwob"),
    screens_per_family: Annotated[int, typer.Option(help="training screens for pretraining, about", min=0)] = 0,
    snapshot: Annotated[Path | None, typer.Option(help="folder of the snapshot to write")] = None,
    processes: Annotated[int, typer.Option(help="browsers at work", min=1)] = 2,
) -> None:
    """Renders MiniWoB++ episodes in headless Chromium, solved by DOM oracles with real mouse and key events.

    Only episodes that the environment rewards are kept. What is there is not collected again; a killed run goes on.
    Needs Chromium, ChromeDriver and the extra `miniwob`.
    """
    _only(benchmark, "miniwob")
    from coepg_dagster.miniwob.collect import STEPS_PER_SHARD, Progress, benchmark_plan, plan
    from coepg_dagster.miniwob.collect import collect as collect_shards
    from coepg_dagster.miniwob.snapshot import build_snapshot

    shards = benchmark_plan()
    if screens_per_family:
        shards += plan("pretrain", -(-screens_per_family // STEPS_PER_SHARD["pretrain"]))

    def show(state: Progress) -> None:
        done = state.skipped + state.shards
        err.print(f"{done}/{state.of_shards} shards, {state.steps} steps, {state.seconds:.0f} s", highlight=False)

    collect_shards(out, shards, processes, show)
    if snapshot is not None:
        typer.echo(yaml.safe_dump(build_snapshot(out, snapshot)))


@app.command()
def pretrain(
    benchmark: Annotated[str, typer.Argument(help="sandbox")],
    recipe: Annotated[Path, typer.Option(help="towers, checkpoints and their settings")] = Path("models/recipe.yaml"),
    screens: Annotated[Path, typer.Option(help="folder of `coepg collect`")] = Path("cache/miniwob"),
    out: Annotated[Path, typer.Option(help="folder of the checkpoints")] = Path("models"),
    only: Annotated[list[str] | None, typer.Option(help="name of a checkpoint; again for more")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    parallel: Annotated[int, typer.Option(help="models trained at the same time", min=1)] = 1,
    loaders: Annotated[int, typer.Option(help="processes that prepare batches, per model; 2 to 4 on a GPU")] = 0,
    snapshot: Annotated[Path, typer.Option(help="the benchmark, for the model cards")] = Path("data/miniwob"),
) -> None:
    """Makes the tiny models of the embedded benchmark again, from scratch: vision warm-up, grounders, planners.

    Writes a model card for each, with results per split. The full recipe wants a GPU (minutes); a CPU takes many hours.
    """
    _only(benchmark, "sandbox")
    from coepg_dagster.pretraining import cards
    from coepg_dagster.pretraining import recipe as recipes
    from coepg_dagster.pretraining import screens as pages
    from coepg_dagster.pretraining.train import run

    def show(stage: str, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        numbers = " ".join(f"{name}={value:.4g}" for name, value in metrics.items())
        err.print(f"{stage} {step}/{steps} {numbers}", highlight=False)

    shards = sorted((screens / "pretrain").glob("*/*.parquet"))
    settings, pictures = recipes.read(recipe), pages.read(shards)
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
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads; more than one slow tiny models", min=1)] = 1,
    out: Annotated[Path | None, typer.Option(help="folder to write to instead of the store")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Lets the agent of iteration k act on MiniWoB++ pages in headless Chromium; the page says whether it succeeded.

    Plays the first episodes of a split that is scored offline, or fresh ones of the same families, which need not be
    solvable. Prints success rates; keeps every frame, plan and point, and a page to look at. Needs Chromium, ChromeDriver
    and the extra `miniwob`.
    """
    reference, _, k = agent.rpartition("@")
    if not (reference and k.isdecimal()):
        raise typer.BadParameter(f"{agent!r} names no iteration: write EXPERIMENT@k, e.g. sandbox@0")
    project, experiment, seed = _open(reference)
    try:
        from coepg_dagster.assets.live import play_iteration
        from coepg_dagster.miniwob.browser import BrowserMissing
    except ModuleNotFoundError as error:
        raise typer.BadParameter(
            f"the package {error.name} is not installed: pip install 'coepg-dagster[miniwob]'"
        ) from None
    from coepg_dagster.assets.ledger import Loop, open_instance
    from coepg_dagster.provenance import NotUsable
    from coepg_dagster.reports.play import rate, why

    def show(done: int, of: int, figures: Mapping[str, float]) -> None:
        if done % 10 == 0 or done == of:
            err.print(f"{done}/{of} episodes, {figures['solved']:g} solved", highlight=False)

    try:
        about = play_iteration(
            project,
            Loop(experiment, seed, project.root),
            open_instance(project),
            int(k),
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
    except (BrowserMissing, NotUsable) as error:
        err.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    for ref, reason in about["stale"].items():
        err.print(f"stale: {ref}: {reason}", style="yellow", highlight=False)
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
    from coepg_dagster.evaluation.score import score_file

    result = _scored(lambda: score_file(file, format, protocol, labels=labels, answers=answers))
    if as_json:
        typer.echo(result.to_json())
        return
    view = Table("metric", "micro", "macro", "95 % of macro", "n", title=f"{protocol}: {result.scored} scored")
    for name, metric in result.metrics.items():
        interval = f"[{metric.ci95[0]:.2f}, {metric.ci95[1]:.2f}]" if metric.ci95 else "–"
        view.add_row(name, _two(metric.micro), _two(metric.macro), interval, str(metric.n))
    Console().print(view)
    for reason, count in (*result.skipped.items(), *result.notes.items()):
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
    typer.echo(_scored(lambda: compare_results(first, second)).to_json())


@app.command()
def protocols() -> None:
    """Lists the protocols with what they count, as Markdown."""
    from coepg_dagster.evaluation.protocols import protocols_markdown

    typer.echo(protocols_markdown())


@app.command()
def check_data(
    path: Annotated[Path, typer.Argument(help="your JSONL files and images, see docs/protocols.md")],
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

    from coepg_dagster.rewards.cdrem import NoVerdict
    from coepg_dagster.rewards.variants import recompute, summary, variant_named
    from coepg_dagster.workers import ROLLOUTS, write_table

    record, folder = _record_of(reference, "planner")
    if not (folder / ROLLOUTS).exists():
        _refuse(f"{reference} has no {ROLLOUTS}: this planner was not made by GRPO, so nothing was rewarded")
    try:
        made = recompute(pq.read_table(folder / ROLLOUTS), variant_named(variant), temperature)
    except (NoVerdict, ValueError) as error:
        _refuse(str(error))
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

    from coepg_dagster.reports.calibration import reliability_figure
    from coepg_dagster.rewards.calibration import as_json as plain
    from coepg_dagster.rewards.calibration import of_rollouts, of_verdicts
    from coepg_dagster.workers import ROLLOUTS, VERDICTS

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
    name, _, k = reference.rpartition("@")
    if not (name and k.isdecimal()):
        raise typer.BadParameter(f"{reference!r} names no iteration: write EXPERIMENT@k, e.g. sandbox@1")
    project, experiment, seed = _open(name)
    from coepg_dagster.assets.ledger import Loop, open_instance
    from coepg_dagster.provenance import Ref

    record = Loop(experiment, seed, project.root).record(open_instance(project), Ref(asset, int(k)))
    if record is None:
        _refuse(f"{reference} has no {asset}: run `coepg evolve {name} --through {k}` first")
    return record, project.store / record.folder


def _refuse(message: str) -> NoReturn:
    err.print(message, style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(2)


def _only(given: str, known: str) -> None:
    if given != known:
        raise typer.BadParameter(f"{given!r} is not known; there is {known!r}")


def _two(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _scored(make: Callable[[], T]) -> T:
    """What `make` returns; ends with the message where the files cannot be scored."""
    from coepg_dagster.evaluation.case import ScoringError

    try:
        return make()
    except ScoringError as error:
        err.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


def _result_of(name: str, protocol: str, format: str) -> Result:
    """The result of a prediction file, or of an experiment's test splits at iteration k."""
    from coepg_dagster.evaluation.score import score_file, score_steps

    reference, at, k = name.rpartition("@")
    if not at or Path(name).exists():
        return _scored(lambda: score_file(Path(name), format, protocol))
    project, experiment, seed = _open(reference)
    import pyarrow.parquet as pq

    from coepg_dagster.assets.ledger import Loop, open_instance
    from coepg_dagster.provenance import Ref
    from coepg_dagster.workers import PREDICTIONS, STEPS, all_steps

    record = Loop(experiment, seed, project.root).record(open_instance(project), Ref("evaluation", int(k)))
    if record is None:
        err.print(f"{name} has no evaluation: run `coepg evolve {reference} --through {k}` first")
        raise typer.Exit(2)
    predictions = pq.read_table(project.store / record.folder / PREDICTIONS)
    steps = all_steps(project.store / record.input("benchmark_steps").folder / STEPS)
    tests = [split in experiment.benchmark.test for split in steps["split"].to_pylist()]
    scored = set(predictions["step_id"].to_pylist())
    steps = steps.filter(pa.array(t and s in scored for t, s in zip(tests, steps["step_id"].to_pylist(), strict=True)))
    wanted = set(steps["step_id"].to_pylist())
    predictions = predictions.filter(pa.array(s in wanted for s in predictions["step_id"].to_pylist()))
    return _scored(lambda: score_steps(experiment.benchmark.protocol, steps, predictions))


if __name__ == "__main__":
    app()
