"""ϕ_k alone on grounding boards: a real evaluation in its own process, its record and tables, and what makes it stale."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg
import pyarrow.parquet as pq
import pytest
from coepg_dagster.assets import ledger
from coepg_dagster.assets.loop import MAKERS

from coepg_dagster.artifacts import BOARD_PREDICTIONS, BOARDS
from coepg_dagster.provenance import SHARED, Asset, Ref
from tests.assets.conftest import InProcess
from tests.assets.light import EXPERIMENT, LIGHT_MAKERS, light_project
from tests.project import run, tell
from tests.readers.samples import user_row, write_board, write_user_rows

MADE: tuple[Asset, ...] = ("planner_sft", "grounder", "planner", "evaluation")
BOARDS_OF = """
evaluation:
  boards:
    pro: {path: pro, protocol: screenspot_pro/items}
    world: {path: world, protocol: osworld_g/polygons, max_steps: 2}
"""


@pytest.fixture
def boards(
    tmp_path: Path, random_checkpoint: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[InProcess]:
    project = light_project(tmp_path / "project")
    mine = EXPERIMENT.replace(
        "{reader: miniwob, path: data, test: [test_seed]", "{reader: jsonl, path: own, test: [test]"
    )
    mine = mine.replace("models/base", str(random_checkpoint(0))).replace(
        "models:", "models:\n  prompts: compact\n  dtype: float32"
    )
    (project.root / "experiments" / "light.yaml").write_text(mine + "grpo: {prompts_per_step: 1}\n" + BOARDS_OF)
    splits = ("train", "validation", "test")
    write_user_rows(project.root / "own", [user_row(split, split=split, episode_id=split) for split in splits])
    write_board(project.root / "pro", "screenspot_pro")
    write_board(project.root / "world", "osworld_g")
    with dg.DagsterInstance.ephemeral() as instance:
        monkeypatch.setattr(ledger, "open_instance", lambda _: instance)
        real = {asset: MAKERS[asset] for asset in (*SHARED, *MADE)}
        yield InProcess(project, instance, {"makers": LIGHT_MAKERS | real})


@pytest.mark.slow
@pytest.mark.long
def test_a_board_is_in_the_record_the_tables_and_its_changes_are_noticed(boards: InProcess) -> None:
    root = boards.project.root
    (root / "world/benchmark/OSWorld-G.json").rename(root / "gone.json")
    code, out, err = tell(root, "plan", "light")
    assert code == 1 and "key `evaluation.boards.world`" in out + err and "holds no labels of osworld_g" in out + err
    (root / "gone.json").rename(root / "world/benchmark/OSWorld-G.json")

    assert boards.run(None).success
    made = boards.run(0, *MADE)
    assert made.success, boards.why(made)
    record = boards.loop.record(boards.instance, Ref("evaluation", 0))
    assert record is not None
    pro, world = (record.figures[BOARDS][name] for name in ("pro", "world"))
    assert (pro["protocol"], pro["rows"], world["protocol"], world["rows"]) == (
        *("screenspot_pro/items", 2),
        *("osworld_g/polygons", 2),
    )
    assert pro["metrics"]["acc"]["by"]["application"]["groups"].keys() == {"vscode"}
    predictions = pq.read_table(boards.project.store / record.folder / BOARD_PREDICTIONS)
    assert predictions["step_id"].to_pylist() == ["vscode_macos_0", "vscode_macos_1", "X-0", "X-1"]
    assert set(predictions["plan"].to_pylist()) == {"close the window"} and set(record.figures) == {
        *("validation", "test", BOARDS)
    }

    text = " ".join(run(root, "results", "light").split())
    assert "ϕ_k alone on pro" in text and "of acc_micro: osworld_g/polygons, micro" in text
    [iteration] = json.loads(run(root, "results", "light", "--json"))["iterations"]
    assert iteration[BOARDS]["world"]["acc"]["micro"] == world["metrics"]["acc"]["micro"]
    run(root, "report", "light", "--out", str(root / "pages"))
    [evolution] = [page for page in (root / "pages").rglob("evolution.html") if page.parent.name != ".made"]
    assert "alone on world" in evolution.read_text()
    model = evolution.with_name("grounder-0.html").read_text()
    assert "Alone on pro: " in model and "by screenspot_pro/items" in model

    assert not boards.loop.stale(boards.loop.records(boards.instance))
    write_board(root / "pro", "screenspot_pro", {"id": "vscode_macos_2"})
    [(ref, why)] = boards.loop.stale(boards.loop.records(boards.instance)).items()
    assert ref == Ref("evaluation", 0) and "the files of the grounding board pro have changed" in str(why)

    # also with an imported benchmark, since the evaluation of later iterations would fail
    (root / "world/benchmark/OSWorld-G.json").unlink()
    code, out, err = tell(root, "plan", "light")
    assert code == 1 and "key `evaluation.boards.world`" in out + err
