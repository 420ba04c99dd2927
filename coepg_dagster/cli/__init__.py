"""The `coepg` command.

All but `files` open the Dagster instance, `sandbox` for `play` alone: with `definitions` they are the top of the Dagster shell.
Nothing imports this package.
"""

import atexit
import gc

import typer

from coepg_dagster.cli import audit, files, loop, results, rewards, sandbox
from coepg_dagster.cli.common import Commands

# what a command imports stays: looking for garbage in it takes a fifth of a short command, and collecting it at the end another
gc.set_threshold(100_000, 50, 100)
atexit.register(gc.freeze)

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="""Co-evolution of a planner and a grounder for GUI agents (Co-EPG, arXiv 2511.10705).

Start with `coepg plan sandbox`, then `coepg evolve sandbox --through 2`, then `coepg results sandbox`. `make ui` opens
the same runs in Dagster's web UI. EXPERIMENT is NAME (a file under experiments/, its first seed) or NAME/sSEED.""",
)
PANELS = {
    "Run the loop": loop.app,
    "See what came out": results.app,
    "Look into it": audit.app,
    "The embedded benchmark": sandbox.app,
    "Files, without a loop": files.app,
}
"""Heading in `coepg --help` → its commands."""
for heading, commands in PANELS.items():
    for command in commands.registered_commands:
        command.rich_help_panel = heading
    app.add_typer(commands)
app.add_typer(rewards.app, name="rewards", rich_help_panel="Look into it")
