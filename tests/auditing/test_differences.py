"""What differs between two iterations, and why."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from safetensors.numpy import save_file

from coepg_dagster.artifacts import PREDICTIONS, write_table
from coepg_dagster.auditing.archive import NotFound
from coepg_dagster.auditing.differences import Side, data, differences, weights_distance
from coepg_dagster.auditing.text import diff_text
from coepg_dagster.experiment.schema import Benchmark
from coepg_dagster.provenance import Ref
from tests.auditing.loop import GIVEN, WRITTEN, Hand
from tests.pools.tables import candidate, candidates, verdict, verdicts


def side(k: int) -> Side:
    return Side(f"hand/s1@{k}", k, lambda asset: "hand", 1)


def test_rows_gained_and_lost_say_why(hand: Hand) -> None:
    diff = differences(hand.archive, side(0), side(1))["data"]
    assert (diff["rows"], diff["same"]) == ([2, 2], 0)
    assert [(one["plan"], one["why"]) for one in diff["gained"]] == [
        ("one more", "planner_1 was not in the pool there")
    ]
    assert [(one["plan"], one["why"]) for one in diff["lost"]] == [("one", "open was not in the pool there")]
    assert [(one["plan"], one["changes"]) for one in diff["changed"]] == [("two", {"carried_over": [False, True]})]


def test_each_reason(hand: Hand) -> None:
    before = hand.newest[Ref("dataset", 1)]
    plans = candidates(
        *WRITTEN[1].to_pylist(),
        candidate("t", "planner_1", 1, "fresh"),
        candidate("s", "planner_1", 2, "beyond"),
    )
    votes = [row for row in GIVEN[1].to_pylist() if row["candidate_id"] != "s#planner_1#0"]
    hits = [verdict(name, "judge", True) for name in ("t#planner_1#1", "s#planner_1#1", "s#planner_1#2")]
    hand.data(1, plans, verdicts(*votes, verdict("s#planner_1#0", "judge", False), *hits))
    diff = data(hand.archive, before, hand.newest[Ref("dataset", 1)])
    assert {one["plan"]: one["why"] for one in diff["gained"]} == {
        "way off": "written there too, and dropped: not_verified",
        "beyond": "planner_1 did not write it there",
        "fresh": "planner_1 did not write it there",
    }
    assert {one["plan"]: one["why"] for one in diff["lost"]} == {
        "one more": "written there too, and dropped: not_verified",
        "two": "carried over from an earlier iteration here, not written there",
    }
    assert diff["why"]["gained"]["planner_1 did not write it there"] == 2


def test_a_version_does_not_differ_from_itself(hand: Hand) -> None:
    diff = differences(hand.archive, side(1), side(1))
    assert (diff["data"]["same"], diff["data"]["gained"], diff["data"]["lost"]) == (2, [], [])
    assert all(model["same_weights"] and not model["inputs"] for model in diff["models"].values())


def evaluated(hand: Hand, k: int, right: list[str]) -> None:
    """An evaluation of u (test_seed) and s (train stands for another split) in which the steps `right` succeed."""
    rows = [
        {"step_id": s, "plan": "", "action_type": "CLICK", "value": "", "x": 15.0 if s in right else 1.0, "y": 15.0}
        for s in "su"
    ]

    def write(draft: Path) -> list[str]:
        write_table(pa.Table.from_pylist(rows), draft / PREDICTIONS)
        return [PREDICTIONS]

    config = Benchmark(reader="miniwob", path=Path("x"), test=["test_seed"], protocol="miniwob/point")
    hand.make("evaluation", k, write, config.model_dump(mode="json"))


def test_models_and_results(hand: Hand) -> None:
    evaluated(hand, 0, ["s"])
    evaluated(hand, 1, ["s", "u"])
    diff = differences(hand.archive, side(0), side(1))
    planner = diff["models"]["planner"]
    assert planner["same_weights"] is False
    assert planner["inputs"]["previous/dataset"] == [None, f"dataset[0] {hand.newest[Ref('dataset', 0)].data_version}"]
    results = {split: one["differences"]["step_sr"]["macro"] for split, one in diff["results"].items()}
    assert results == {"test_seed": 100.0, "train": 0.0}
    text = diff_text(diff)
    assert "1 gained, 1 lost, 1 changed" in text and "step_sr  +100.0" in text


def test_weights_that_cannot_be_read_any_more_are_named(hand: Hand) -> None:
    (hand.store.root / hand.newest[Ref("planner", 1)].folder / "model.safetensors").write_text("other")
    with pytest.raises(NotFound, match=r"cannot be read.*planner\[1\].*model.safetensors has other content"):
        differences(hand.archive, side(0), side(1))


def test_without_the_weights_of_a_model_the_rest_is_compared(hand: Hand) -> None:
    evaluated(hand, 0, ["s"])
    evaluated(hand, 1, ["s", "u"])
    known = differences(hand.archive, side(0), side(1))
    shutil.rmtree(hand.store.root / hand.newest[Ref("planner", 1)].folder)
    planner = known["models"]["planner"] | {"distance": None}
    assert differences(hand.archive, side(0), side(1)) == known | {"models": known["models"] | {"planner": planner}}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_distance_of_weights(tmp_path: Path, dtype: type) -> None:
    for name, shift in (("a", 0), ("b", 1)):
        (tmp_path / name).mkdir()
        save_file({"x": np.full((2, 2), 2 + shift, dtype)}, tmp_path / name / "1.safetensors")
        save_file({"y": np.full(3, 1, dtype)}, tmp_path / name / "2.safetensors")
    assert weights_distance(tmp_path / "a", tmp_path / "b") == pytest.approx(math.sqrt(4 / (16 + 3)))
    assert weights_distance(tmp_path / "a", tmp_path / "a") == 0
    save_file({"y": np.full(4, 1, dtype)}, tmp_path / "b" / "2.safetensors")
    assert weights_distance(tmp_path / "a", tmp_path / "b") is None
    assert weights_distance(tmp_path / "a", tmp_path) is None
