"""Makes iteration 1 of the overlay of each plug-in, and compares it with its parent's: `make plugins`.

Only the first seed. An overlay that fails is named at the end, and the others are made. What is there and current is not made
again, so a run that was ended goes on. Per cent and points, with 95 % intervals, on the test splits (`coepg compare`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coepg_dagster.experiment.files import PLUGINS
from coepg_dagster.project import find_project

COEPG = (sys.executable, "-m", "coepg_dagster.cli")


def made(reference: str) -> bool:
    """Makes iterations 0 and 1 of an experiment, without D_1; whether that went well."""
    return subprocess.run([*COEPG, "evolve", reference, "--through", "1", "--no-data"], check=False).returncode == 0


def compared(before: str, after: str) -> dict[str, Any]:
    """Split → the paired comparison of iteration 1 of two experiments."""
    done = subprocess.run(
        [*COEPG, "compare", f"{before}@1", f"{after}@1", "--json"], check=True, stdout=subprocess.PIPE, text=True
    )
    splits: dict[str, Any] = json.loads(done.stdout)["splits"]
    return splits


def main(names: Sequence[str]) -> int:
    """Makes the overlays of these names, all without any; writes build/plugins.json; the number of those that failed."""
    project = find_project()
    overlays = project.experiments(PLUGINS)
    numbers, failed = dict[str, Any](), dict(overlays.left_out)
    for name in names or sorted(overlays):
        experiment = overlays.named(name)
        parent, seed = str(experiment.parent), experiment.seeds[0]
        if made(f"{parent}/s{seed}") and made(f"{name}/s{seed}"):
            numbers[name] = compared(f"{parent}/s{seed}", f"{name}/s{seed}")
        else:
            failed[name] = "an iteration failed: see above"
    out = project.root / "build" / "plugins.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"numbers": numbers, "failed": failed}, indent=1))
    print(f"{len(numbers)} compared, {len(failed)} failed: {Path(out)}")
    for name, why in failed.items():
        print(f"{name}: {why}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
