"""The commands that look into what was made: lineage, rows and their marks, damage, differences, and what may be deleted."""

from __future__ import annotations

import getpass
import json
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from coepg_dagster.cli.common import (
    Reference,
    echo,
    name_left_out,
    open_experiment,
    open_iteration,
    print_table,
    refuse,
    say,
)
from coepg_dagster.project import Project, find_project

if TYPE_CHECKING:
    from coepg_dagster.auditing.archive import Archive
    from coepg_dagster.auditing.marks import Mark


app = typer.Typer()


def _archive(project: Project) -> Archive:
    """Every version that the project's event log knows of."""
    from coepg_dagster.assets.ledger import archive, open_instance

    return archive(project, open_instance(project))


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
    title, head = f"{owner}/s{seed}: marks that count", ("mark", "row", "from", "step", "plan", "reason", "by", "on")
    print_table(title, head, [_mark_row(mark) for mark in found])


def _mark_row(mark: Mark) -> list[str]:
    plan = "the whole step" if mark.plan is None else json.dumps(mark.plan, ensure_ascii=False)[1:-1]  # on one line
    return [mark.mark, mark.of, f"D_{mark.iteration}", mark.step_id, plan, mark.reason, mark.by, f"{mark.at:%Y-%m-%d}"]


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
    """Compares two iterations, of one experiment or of two: rows of D_k and why, models, results."""
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
