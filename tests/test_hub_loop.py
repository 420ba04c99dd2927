"""The loop with models that are named as the hub names them: downloaded once, then with no network at all."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.hub import served
from tests.project import REPOSITORY, coepg, make_project

pytestmark = [pytest.mark.slow, pytest.mark.long]

EXPERIMENT = """
parent: tiny
description: Tiny models by their hub names.
seeds: [7]
iterations: 1
benchmark: {test: [test_seed], max_train_steps: 12, max_eval_steps: 4}
models:
  base_planner: acme/base-planner
  base_grounder: acme/base-grounder
  planners: {planner_a: acme/planner-a}
  verifiers: {verifier_a: acme/verifier-a@v1}
  judge: acme/base-grounder
sft: {max_steps: 1}
grpo: {max_steps: 1}
evaluation: {base_planner: false, attempts: null}
"""


def test_the_loop_runs_on_one_commit_of_each_model_online_and_offline(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project", REPOSITORY / "tests" / "experiments" / "tiny.yaml")
    (project / "experiments" / "named.yaml").write_text(EXPERIMENT)
    with served() as hub:
        folders = ("base-planner", "base-grounder", "planner-a", "verifier-a")
        commits = {
            f"acme/{name}": hub.publish(
                f"acme/{name}", REPOSITORY / "models" / name, "v1" if "verifier" in name else "main"
            )
            for name in folders
        }
        hub.cuts["model.safetensors"] = [500_000]
        online = coepg(project, "evolve", "named", "--through", "0", **hub.environment(tmp_path / "home"))
        out, err = online.communicate(timeout=3000)
        assert online.returncode == 0, f"{out}\n{err}"
        downloads = [line for line in hub.requests if line.startswith("GET") and line.endswith(".safetensors")]
        assert len(downloads) == len(folders) + 1, "each once, and one again after the cut"
    [listed] = (project / "store" / "named" / "open_models" / "all").glob("*/models.json")
    checkpoints = json.loads(listed.read_text())
    assert {entry["checkpoint"]: entry["version"] for entry in checkpoints.values()} == commits
    offline = coepg(project, "evolve", "named", "--through", "1", **hub.environment(tmp_path / "home", offline=True))
    out, err = offline.communicate(timeout=3000)
    assert offline.returncode == 0, f"{out}\n{err}"
    home = project / "store" / "named" / "s7"
    [card] = (home / "planner_sft" / "1").glob("*/README.md")
    base = "acme/base-planner"
    assert f"| base | `{base}` | `{commits[base]}` |" in card.read_text()
    assert re.search(rf"^base_model: {base}$", card.read_text(), re.MULTILINE)
    assert f"`{commits['acme/verifier-a']}`" in next((home / "planner" / "1").glob("*/README.md")).read_text()
    assert list((home / "evaluation" / "1").iterdir())
