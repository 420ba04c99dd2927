"""The commands that show what came out: tables, reports and comparisons."""

from __future__ import annotations

import gc as garbage
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import pyarrow as pa
import typer
from rich.console import Console

from coepg_dagster.characters import print_line
from coepg_dagster.cli.common import (
    Reference,
    echo,
    open_experiment,
    open_iteration,
    print_table,
    refuse,
    refuse_lost,
    say,
    two_decimals,
)
from coepg_dagster.geometry import Space

if TYPE_CHECKING:
    from coepg_dagster.evaluation.result import Comparison, Result


app = typer.Typer()


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
    if table["iterations"]:
        print_table(numbers.title, numbers.header, numbers.rows, numbers.protocols)
    else:
        others = [one for one in experiment.seeds if one != seed and project.is_in_use(experiment, one)]
        there = "; there is " + ", ".join(f"{experiment.name}/s{one}" for one in others) if others else ""
        echo(f"no iteration of {loop.name} was made yet: coepg evolve {loop.name} --through 0{there}")
    for alone in board_tables(experiment, seed, records):
        print_table(alone.title, alone.header, alone.rows, alone.protocols)
    console = Console()
    for asset, why in inputs.items():
        print_line(console, f"stale: {asset}: {why}", "yellow")
    for iteration in table["iterations"]:
        for line in pairs_text(iteration) + learned_text(iteration):
            print_line(console, line)
    for line in probe_lines(records):
        print_line(console, line)
    for line in (*short_splits(table["iterations"]), *left_out):
        print_line(console, line, "yellow")
    for iteration in table["iterations"]:
        for asset, why in iteration["stale"].items():
            print_line(console, f"stale: {asset}[{iteration['iteration']}]: {why}", "yellow")
    report = loop.report(instance)
    if report is not None:
        print_line(console, f"page: {project.store / report.folder / 'report.html'}")


@app.command()
def report(
    reference: Reference,
    out: Annotated[Path, typer.Option(help="folder of the pages")],
) -> None:
    """Writes the pages of an experiment as HTML files and prints the path of their index.

    The lineage map, the evolution report, an audit page for each D_k and a page for each model. They need no server and no
    network. What is there and current is not written again. `coepg ui` serves the same pages, and the trace of each row.
    Ends with code 1 where a page cannot be made since files are gone; it says which.
    """
    project, experiment, seed = open_experiment(reference)
    from coepg_dagster.assets.ledger import Loop, open_instance

    instance = open_instance(project)
    from coepg_dagster.assets.pages import write_pages

    index, left_out = write_pages(project, Loop(experiment, seed, project.root), instance, out)
    for line in left_out:
        say(f"left out: {line}", "yellow")
    echo(str(index))
    raise typer.Exit(1 if left_out else 0)


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
        head = ("metric", "A", "B", "B - A", "differs", "over steps: B - A", "detectable difference")
        print_table(title, head, [_difference_row(name, one) for name in one.differences])
        if any(one.left_out):
            echo(
                f"rows that cannot be read, left out: {one.left_out[0]} of A, {one.left_out[1]} of B (see `coepg score`)"
            )
    echo(
        f"A: {a}, B: {b}. Averages are macro but for those over steps (micro); differences in points, with 95 % intervals. "
        "A true difference of that size is found with a power of 80 %."
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
    refuse_lost(loop, *[record, steps_made] if steps_made else [record])
    predictions = pq.read_table(project.store / record.folder / PREDICTIONS)
    steps = all_steps(project.store / record.input("benchmark_steps").folder / STEPS)
    steps = steps.filter(pc.is_in(steps["step_id"], predictions["step_id"].combine_chunks()))
    tests = experiment.benchmark.test
    there = set(steps["split"].unique().to_pylist())  # an evaluation may be older than a split of the file
    parts = {split: [split] for split in tests if split in there} if apart else {ALL_STEPS: tests}
    results = {}
    for part, splits in parts.items():
        of_part = steps.filter(pc.is_in(steps["split"], pa.array(splits, pa.string())))
        answers = predictions.filter(pc.is_in(predictions["step_id"], of_part["step_id"].combine_chunks()))
        results[part] = score_steps(experiment.benchmark.protocol, of_part, answers)
    return results


ALL_STEPS: Final = "all steps"
"""What `coepg compare` calls the steps of a file, which names no splits."""
