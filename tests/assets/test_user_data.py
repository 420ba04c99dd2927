"""A benchmark of a user's data, with its real maker: a change is noticed, and a missing split is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from coepg_dagster.assets import ledger
from coepg_dagster.assets.automation import Todo, next_todo
from coepg_dagster.assets.shared import benchmark_steps

from tests.assets.conftest import InProcess
from tests.assets.light import EXPERIMENT, LIGHT_MAKERS, light_project
from tests.project import tell
from tests.readers.samples import picture, user_row, write_user_rows

MINE = EXPERIMENT.replace("{reader: miniwob, path: data, test: [test_seed]", "{reader: jsonl, path: own, test: [test]")
MINE += "\ngrpo: {prompts_per_step: 1}\n"  # there is one training step


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InProcess]:
    project = light_project(tmp_path / "project")
    (project.root / "experiments" / "light.yaml").write_text(MINE)
    write_user_rows(
        project.root / "own", [user_row(split, split=split, episode_id=split) for split in ("train", "test")]
    )
    with dg.DagsterInstance.ephemeral() as instance:
        monkeypatch.setattr(ledger, "open_instance", lambda _: instance)  # for `coepg plan`
        yield InProcess(project, instance, {"makers": LIGHT_MAKERS | {"benchmark_steps": benchmark_steps}})


def test_a_mended_screenshot_and_a_missing_split(mine: InProcess) -> None:
    root = mine.project.root
    assert "no usable step in split validation (there are test, train)" in mine.why(mine.run(None, "benchmark_steps"))
    code, out, _ = tell(root, "check-data", str(root / "own"), "--experiment", "light")
    assert code == 1 and "no step in split validation, which the experiment needs" in out
    assert tell(root, "check-data", str(root / "own"))[0] == 0
    with (root / "own/steps.jsonl").open("a") as file:
        file.write(json.dumps(user_row("v", split="validation", episode_id="v")))

    assert next_todo(mine.instance, mine.loop, 0) == Todo(None, ("benchmark_steps", "open_models"))
    assert mine.run(None).success
    first = mine.version("benchmark_steps", None)
    changed = "would run first: benchmark_steps"
    assert (todo := next_todo(mine.instance, mine.loop, 0)) is not None and todo.iteration == 0
    assert changed not in tell(root, "plan", "light")[1]

    (root / "own/images/1.png").write_bytes(picture(100, 60, "PNG", (0, 0, 50, 50)))
    assert changed in tell(root, "plan", "light")[1]
    assert next_todo(mine.instance, mine.loop, 0) == Todo(None, ("benchmark_steps",))
    assert mine.run(None, "benchmark_steps").success and mine.version("benchmark_steps", None) != first


@pytest.mark.parametrize("protocol", ["android_control/strict14", "screenspot/uground", "mind2web/uground"])
def test_what_check_data_calls_ok_for_an_experiment_is_imported(mine: InProcess, protocol: str) -> None:
    root = mine.project.root
    (root / "experiments" / "light.yaml").write_text(MINE.replace("miniwob/point", protocol))
    splits = ("train", "validation", "test")
    write_user_rows(root / "own", [user_row(split, split=split, episode_id=split) for split in splits])
    code, out, _ = tell(root, "check-data", str(root / "own"), "--experiment", "light")
    run = mine.run(None, "benchmark_steps")
    assert run.success == (code == 0) == (protocol == "mind2web/uground"), out
    if not run.success:
        why = mine.why(run)
        assert "key `benchmark.protocol`" in why and all(line in out for line in why.split("; ")), (why, out)


def test_a_study_that_was_not_begun_has_no_page(mine: InProcess) -> None:
    root = mine.project.root
    code, _, err = tell(root, "reproduce", "light", "--collect")
    assert code == 1 and "no iteration of this study is made: run `coepg evolve light --through 0`" in err
    assert not list(root.rglob("results.*"))
