"""The commands that need no artifact: scores of prediction files, protocols, checks of a user's own data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coepg_dagster.cli.common import open_experiment, print_table, two_decimals

app = typer.Typer()


@app.command()
def score(
    file: Annotated[Path, typer.Argument(help="file of predictions")],
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
    rows = []
    for name, metric in result.metrics.items():
        interval = f"[{metric.ci95[0]:.2f}, {metric.ci95[1]:.2f}]" if metric.ci95 else "–"
        rows.append([name, two_decimals(metric.micro), two_decimals(metric.macro), interval, str(metric.n)])
    print_table(
        f"{protocol}: {result.scored} scored",
        ("metric", "micro", "macro", "95 % of macro", "n"),
        rows,
        "\n".join(f"{what}: {count}" for what, count in lacking.items()) or None,
    )
    for reason, count in (*result.skipped.items(), *result.notes.items()):
        if reason not in lacking:
            typer.echo(f"{reason}: {count}")


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
    """Reads your own data as an import would, and lists everything that is wrong with it."""
    from coepg_dagster.readers.importing import check_data as check

    if reference is None:
        report = check(path)
    else:
        from coepg_dagster.benchmark import options_of

        _, experiment, _ = open_experiment(reference)
        benchmark = experiment.benchmark
        splits = [benchmark.train, benchmark.validation, *benchmark.test]
        report = check(path, options_of(benchmark, experiment.models.prompts), splits)
    typer.echo(report.text())
    raise typer.Exit(0 if report.ok else 1)
