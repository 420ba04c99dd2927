"""`coepg evolve` over light makers, for a process that a fault happens to: `python -m … ROOT LOOP THROUGH`."""

from __future__ import annotations

import sys
from pathlib import Path

from coepg_dagster.assets.evolve import evolve_through
from coepg_dagster.assets.ledger import Loop, open_instance
from coepg_dagster.resources import warm
from rich.console import Console

from coepg_dagster.project import Project
from coepg_dagster.refusal import Refusal
from tests.assets.light import light_definitions


def main(root: Path, name: str, through: int) -> None:
    warm.IMPORTED.clear()  # light workers need nothing for what they do
    project = Project(root)
    experiment, seed = name.split("/s")
    loop = Loop(project.experiments()[experiment], int(seed), root)
    instance = open_instance(project)
    try:
        runs = evolve_through(light_definitions(project), instance, loop, through, Console(stderr=True, soft_wrap=True))
    except Refusal as why:
        sys.exit(str(why))
    print(f"{runs} runs")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
