"""The commands that need no artifact: scores of prediction files, protocols, checks of a user's own data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress as RichProgress

from coepg_dagster.cli.common import echo, err, open_experiment, print_table, two_decimals
from coepg_dagster.geometry import Space
from coepg_dagster.progress import Report

if TYPE_CHECKING:
    from coepg_dagster.evaluation.result import Result
    from coepg_dagster.evaluation.score import PredictionFile

app = typer.Typer()


@app.command()
def score(
    file: Annotated[Path, typer.Argument(help="file of predictions")],
    format: Annotated[str, typer.Option(help="coepg (our own), gui_r1, mai_ui, ui_genie or uground")],
    protocol: Annotated[str | None, typer.Option(help="see `coepg protocols`")] = None,
    every: Annotated[bool, typer.Option("--all", help="every protocol that fits the file, side by side")] = False,
    exclude: Annotated[Path | None, typer.Option(help="list of wrong labels: the score without them beside it")] = None,
    labels: Annotated[
        Path | None,
        typer.Option(help="label files of a board, for predictions with ids alone; uground: labelled steps"),
    ] = None,
    answers: Annotated[Path | None, typer.Option(help="uground: the grounder's answers")] = None,
    space: Annotated[
        Space | None, typer.Option(help="mai_ui: the space of points, where `pred` is not pixels of the screenshot")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Scores a file of predictions under a named protocol: the number that the protocol's owner would get.

    Where labels of the board are known to be wrong, the score without them is printed beside the whole one.
    """
    from coepg_dagster.evaluation.exclusions import read_exclusions, shipped
    from coepg_dagster.evaluation.result import EXCLUDED
    from coepg_dagster.evaluation.score import PredictionFile, score_predictions, without

    if every == (protocol is not None) or (every and exclude is not None):
        raise typer.BadParameter("give --protocol NAME, with or without --exclude, or --all")
    predictions = PredictionFile(file, format, labels, answers, space)
    if protocol is None:
        _score_all(predictions, as_json)
        return
    exclusions = shipped(protocol) if exclude is None else read_exclusions(exclude)
    with _reading() as report:
        result = score_predictions(predictions, protocol, exclusions=exclusions, report=report)
    results = [result]
    if exclusions is not None and (exclude is not None or EXCLUDED in result.steps.column_names):
        results.append(without(result, exclusions))
    if as_json:
        whole, *rest = (json.loads(each.to_json()) for each in results)
        echo(json.dumps(whole | ({"without exclusions": rest[0]} if rest else {}), indent=2))
        return
    for each in results:
        _print_result(each)


@app.command()
def label_changes(
    board: Annotated[str, typer.Argument(help="screenspot, screenspot_v2, …, as the protocols are named")],
    old: Annotated[Path, typer.Argument(help="the labels that predictions were made for")],
    next_board: Annotated[str, typer.Argument(help="the board of the next version")],
    new: Annotated[Path, typer.Argument(help="the labels of the next version")],
    source: Annotated[str, typer.Option(help="who published the next version, and where")],
) -> None:
    """Prints the items of a board whose target its next version moved or dropped, as a list for `score --exclude`."""
    from coepg_dagster.evaluation.exclusions import list_of_changes
    from coepg_dagster.evaluation.labels import readable_labels

    found = list_of_changes(
        f"{board}: changed in {next_board}", source, *map(readable_labels, (board, next_board), (old, new))
    )
    echo(json.dumps(found, indent=1, ensure_ascii=False))


@contextmanager
def _reading() -> Iterator[Report]:
    """Shows how much of a long file is read, where standard error is a terminal."""
    with RichProgress(console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("reading", total=None)

        def report(done: int, of: int, figures: Mapping[str, float]) -> None:
            bar.update(task, completed=done, total=of, description=f"{figures.get('rows', 0):,.0f} rows")

        yield report


def _print_result(result: Result) -> None:
    from coepg_dagster.evaluation.case import NO_PREDICTION, UNREADABLE
    from coepg_dagster.evaluation.protocols import find_protocol
    from coepg_dagster.evaluation.result import mean_of

    classes_are = "group" if find_protocol(result.protocol).macro == "group" else "action"
    lacking = {what: result.notes[what] for what in (NO_PREDICTION, UNREADABLE) if what in result.notes}
    rows = []
    for name, metric in result.metrics.items():
        interval = f"[{metric.ci95[0]:.2f}, {metric.ci95[1]:.2f}]" if metric.ci95 else "–"
        rows.append([name, two_decimals(metric.micro), two_decimals(metric.macro), interval, str(metric.n)])
    left_out = ", without items whose labels are known to be wrong" if "excluded" in result.notes else ""
    print_table(
        f"{result.protocol}: {result.scored} scored{left_out}",
        ("metric", "micro", "macro", "95 % of macro", "n"),
        rows,
        "\n".join(f"{what}: {count}" for what, count in lacking.items()) or None,
    )
    for name, metric in result.metrics.items():
        for grouping, classes in ({classes_are: metric.groups} | dict(metric.by)).items():
            if grouping == classes_are and len(classes) < 2 and not metric.by:
                continue
            means = ", ".join(f"{label} {mean:.2f} ({n})" for label, (mean, n) in classes.items())
            echo(f"{name} by {grouping}, mean of {len(classes)}: {two_decimals(mean_of(classes))}; {means}")
    for reason, count in (*result.skipped.items(), *result.notes.items()):
        if reason not in lacking:
            echo(f"{reason}: {count}")


def _score_all(file: PredictionFile, as_json: bool) -> None:
    from coepg_dagster.evaluation.score import differing_steps, score_under_every

    with _reading() as report:
        results, refused = score_under_every(
            file.path, file.format, labels=file.labels, answers=file.answers, space=file.space, report=report
        )
    differing = differing_steps(results)
    if as_json:
        scores = {name: json.loads(result.to_json()) for name, result in results.items()}
        echo(json.dumps({"protocols": scores, "differ": differing, "do not fit": refused}, indent=2))
        return
    rows = [
        [name, metric_name, two_decimals(metric.micro), two_decimals(metric.macro), str(metric.n)]
        for name, result in results.items()
        for metric_name, metric in result.metrics.items()
    ]
    print_table(f"{file.path}: every protocol that fits", ("protocol", "metric", "micro", "macro", "n"), rows)
    for step, values in differing.items():
        echo(f"{step}: " + ", ".join(f"{name} {'–' if v is None else f'{v:g}'}" for name, v in values.items()))
    echo(f"{len(differing)} rows on which they differ; protocols that do not fit: {', '.join(refused) or 'none'}")


@app.command()
def protocols() -> None:
    """Lists the protocols with what they count, as Markdown."""
    from coepg_dagster.evaluation.protocols import protocols_markdown

    echo(protocols_markdown())


@app.command()
def plugins(
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON list and nothing else")] = False,
) -> None:
    """Lists the plug-ins that an experiment file can name, and those that are planned: see docs/methods.md."""
    import coepg_dagster.pools.threats  # noqa: F401 (its checks)
    from coepg_dagster.planned import PLANNED
    from coepg_dagster.plugins import plugins as known

    built = [(one.kind, one.name, one.source, "built") for one in known()]
    planned = [(*one, "planned") for one in PLANNED]
    rows = [dict(zip(("kind", "name", "source", "status"), row, strict=True)) for row in (*built, *planned)]
    if as_json:
        echo(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    print_table(
        "plug-ins",
        ("kind", "name", "status", "source"),
        [[r["kind"], r["name"], r["status"], r["source"]] for r in rows],
    )


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
        from coepg_dagster.benchmark import options_of, refuse_steps

        _, experiment, _ = open_experiment(reference)
        benchmark = experiment.benchmark
        splits = [benchmark.train, benchmark.validation, *benchmark.test]
        options = options_of(benchmark, experiment.models.prompts)
        report = check(path, options, splits, partial(refuse_steps, experiment))
    echo(report.text())
    raise typer.Exit(0 if report.ok else 1)
