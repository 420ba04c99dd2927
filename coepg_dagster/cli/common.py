"""What the commands share: how they name an experiment, and how they end with an error."""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import pyarrow as pa
import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coepg_dagster.characters import print_line, visible
from coepg_dagster.experiment.files import Experiments, split_iteration, split_reference
from coepg_dagster.experiment.schema import Experiment
from coepg_dagster.planning.machine import MACHINE
from coepg_dagster.processes import leave_words
from coepg_dagster.progress import local_time
from coepg_dagster.project import Project, find_project
from coepg_dagster.refusal import Refusal, machine_trouble

if TYPE_CHECKING:
    from coepg_dagster.assets.ledger import Loop
    from coepg_dagster.provenance import Record

err = Console(stderr=True)


class Commands(typer.core.TyperGroup):
    """Ends a command that cannot do its work with one message and exit status 1; usage errors end with 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Refusal as error:
            refuse(str(error))
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader is gone, as in `coepg results … | head`
                raise
            what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            refuse(machine_trouble(error) or f"{what}: name another path, or repair this one")
        except pa.ArrowException as error:
            refuse(f"a stored table cannot be read: {error}: `coepg audit EXPERIMENT` names what is damaged")
        except ModuleNotFoundError as error:
            if error.name not in _EXTRAS:
                raise
            extra = _EXTRAS[error.name]
            refuse(f"the package {error.name} is not installed: pip install 'coepg-dagster[{extra}]'")
        except Exception as error:
            if (why := machine_trouble(error)) is None:  # as of SQLite, below Dagster
                raise
            refuse(why)


_EXTRAS = {"miniwob": "miniwob", "selenium": "miniwob", "websocket": "miniwob", "ray": "ray", "vllm": "vllm"}
"""Optional packages, and the extras that bring them."""

Reference = Annotated[str, typer.Argument(metavar="EXPERIMENT", help="NAME or NAME/sSEED")]
Iteration = Annotated[str, typer.Argument(metavar="EXPERIMENT@k", help="iteration k of NAME or NAME/sSEED")]
Device = Literal["cpu", "cuda"]
On = Annotated[
    str | None, typer.Option("--on", metavar="NAME", help=f"the profile machines/NAME.yaml; else that in {MACHINE}")
]


def open_experiment(reference: str) -> tuple[Project, Experiment, int]:
    """The project, experiment and seed that the user named. Raises ExperimentError."""
    project = find_project()
    return project, *split_reference(reference, project.experiment)


def open_iteration(reference: str) -> tuple[Project, Experiment, int, int]:
    """The project, experiment, seed and k of `EXPERIMENT@k`. Raises ExperimentError."""
    project = find_project()
    return project, *split_iteration(reference, project.experiment)


def name_left_out(known: Experiments) -> None:
    """Warns of each experiment file that cannot be used."""
    for _, why in sorted(known.left_out.items()):
        first, *more = why.splitlines()
        say(f"left out: {first}{f' (and {len(more)} more)' if more else ''}", "yellow")


def require_device(*devices: Device | None) -> None:
    """Ends with a message where a GPU is requested and there is none."""
    if "cuda" in devices:
        import torch

        if not torch.cuda.is_available():
            refuse("cuda: torch sees no GPU here: use `cpu`, or look at the driver and at CUDA_VISIBLE_DEVICES")


def echo(text: str) -> None:
    """Prints to standard output; nothing in `text`, which may come from data or models, steers the terminal."""
    typer.echo(visible(text))


def say(text: str, style: str = "") -> None:
    """Prints a line to standard error."""
    print_line(err, text, style)


def log_line(text: str) -> None:
    """Prints a line of long work with the time, for people who read it in a file."""
    print_line(err, f"{local_time(time.time())} {text}")


def refuse(message: str) -> NoReturn:
    """Prints why a command cannot go on, and exits with status 1."""
    say(message, "red")
    leave_words(message)
    raise typer.Exit(1) from None


def refuse_lost(loop: Loop, *records: Record) -> None:
    """Exits with a message where files of an artifact are gone."""
    for record in records:
        if gone := loop.lost(record):
            refuse(f"{record.ref}: {gone}: run `coepg evolve {loop.name} --through {record.iteration or 0}` first")


def print_table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    caption: str | None = None,
    width: int | None = None,
) -> None:
    """Prints a table on a terminal of `width` columns (None: this one's). No cell is cut and no word of its header.

    Columns that do not fit stand in another table below, with the first column again.
    """
    console = Console(width=width)
    columns = list(zip(header, *rows, strict=True))
    needed = [max(map(cell_len, [*head.split(), *cells]), default=0) for head, *cells in columns]
    parts = _columns_that_fit(needed, console.width)
    for part in parts:
        view = Table(title=title if part is parts[0] else None, caption=caption if part is parts[-1] else None)
        for i in part:
            # Rich would break cells rather than heads
            view.add_column(
                Text(fill(header[i], max(needed[i], 1), break_long_words=False, break_on_hyphens=False)),
                overflow="fold",
            )
        for row in rows:
            view.add_row(*(Text(visible(row[i])) for i in part))
        console.print(view)


def _columns_that_fit(widths: Sequence[int], width: int) -> list[list[int]]:
    """The columns of each table, the first column in all; a column takes three more for its borders, a table one."""
    parts: list[list[int]] = []
    for i in range(1, len(widths)):
        if not parts or 1 + sum(widths[j] + 3 for j in (*parts[-1], i)) > width:
            parts.append([0])
        parts[-1].append(i)
    return parts or [[0]]


def two_decimals(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
