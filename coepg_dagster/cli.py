"""The `coepg` command."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.table import Table

from coepg_dagster.experiment import Experiment, ExperimentError, split_reference
from coepg_dagster.project import Project, find_project

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="""Co-evolution of a planner and a grounder for GUI agents (Co-EPG, arXiv 2511.10705).

Start with `coepg plan sandbox`, then `coepg evolve sandbox --through 2`, then `coepg results sandbox`. `make ui` opens
the same runs in Dagster's web UI. EXPERIMENT is NAME (a file under experiments/, its first seed) or NAME/sSEED.""",
)
Reference = Annotated[str, typer.Argument(metavar="EXPERIMENT", help="NAME or NAME/sSEED")]
err = Console(stderr=True)


def _open(reference: str) -> tuple[Project, Experiment, int]:
    """The project, experiment and seed that the user named; ends with the message where that cannot be."""
    try:
        project = find_project()
        return project, *split_reference(reference, project.experiments())
    except ExperimentError as error:
        err.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


@app.command()
def evolve(
    reference: Reference,
    through: Annotated[int, typer.Option(help="the last iteration to make", min=0)],
) -> None:
    """Makes iterations 0..THROUGH in order, through the Dagster instance; skips what is there and current.

    Every iteration is one run: watch it in the web UI too. A run that was killed goes on where it was when you call this
    again.
    """
    project, experiment, seed = _open(reference)
    if through > experiment.iterations:
        err.print(
            f"{experiment.name} has iterations 0..{experiment.iterations}: lower --through, or raise `iterations`"
        )
        raise typer.Exit(2)
    from coepg_dagster.assets.ledger import Loop, open_instance

    instance = open_instance(project)
    from coepg_dagster.assets.evolve import RunFailed, evolve_through
    from coepg_dagster.definitions import defs

    loop = Loop(experiment, seed, project.root)
    try:
        made = evolve_through(defs, instance, loop, through, err)
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
def plan(reference: Reference) -> None:
    """Validates an experiment, prints its resolved configuration and what `evolve` would run. Touches no model."""
    project, experiment, seed = _open(reference)
    from coepg_dagster.assets.ledger import Loop, open_instance

    instance = open_instance(project)
    from coepg_dagster.provenance import to_make

    loop = Loop(experiment, seed, project.root)
    typer.echo(yaml.safe_dump(experiment.model_dump(mode="json"), sort_keys=False, allow_unicode=True))
    records = loop.records(instance)
    stale = loop.stale(records)
    for ref, why in stale.items():
        typer.echo(f"# stale: {ref}: {why}")
    todo = to_make(records, stale, experiment.iterations)
    for k, assets in todo.items():
        typer.echo(f"# would run iteration {k}: {', '.join(assets)}")
    if not todo:
        typer.echo("# everything is there and current")


@app.command()
def ui(port: Annotated[int, typer.Option(help="on the loopback address")] = 3000) -> None:
    """Starts Dagster's web server and daemon for this project, until Ctrl-C."""
    try:
        project = find_project()
    except ExperimentError as error:
        raise typer.BadParameter(str(error)) from None
    from coepg_dagster.assets.ledger import open_instance

    open_instance(project)
    tools = Path(sys.executable).parent
    commands = [
        [tools / "dagster-daemon", "run", "-w", "workspace.yaml"],
        [tools / "dagster-webserver", "-h", "127.0.0.1", "-p", str(port), "-w", "workspace.yaml"],
    ]
    processes = [subprocess.Popen(command, cwd=project.root) for command in commands]
    err.print(f"Dagster is at http://127.0.0.1:{port} when the lines below say so; Ctrl-C ends it")
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


if __name__ == "__main__":
    app()
