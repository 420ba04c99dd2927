"""`make reproducible`: the sandbox twice, from nothing, with the same seed; the same data versions of D_0, D_1, D_2?"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.project import REPOSITORY, coepg, make_project

THROUGH = 2


def dataset_versions(project: Path, experiment: str, through: int) -> list[str]:
    """The data versions of D_0 .. D_`through` that lie in a project's store."""
    folders = (project / "store" / experiment).glob("s*/dataset/*/*")
    versions = {int(folder.parent.name): folder.name for folder in folders}
    return [versions[k] for k in range(through + 1)]


def main() -> None:
    """Runs both, side by side, and compares."""
    with tempfile.TemporaryDirectory() as scratch:
        both = [
            make_project(Path(scratch) / name, REPOSITORY / "experiments" / "sandbox.yaml") for name in ("one", "two")
        ]
        running = [coepg(project, "evolve", "sandbox", "--through", str(THROUGH)) for project in both]
        for process in running:
            out, err = process.communicate()
            if process.returncode:
                sys.exit(f"{out}\n{err}")
        first, second = (dataset_versions(project, "sandbox", THROUGH) for project in both)
    for k, (a, b) in enumerate(zip(first, second, strict=True)):
        print(f"D_{k}: {a} {b} {'same' if a == b else 'DIFFERENT'}")
    sys.exit(0 if first == second else 1)


if __name__ == "__main__":
    main()
