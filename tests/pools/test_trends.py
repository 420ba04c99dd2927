"""What an iteration's numbers warn of."""

from __future__ import annotations

from typing import Any

import pytest

from coepg_dagster.experiment.schema import Quality
from coepg_dagster.experiment.training import Grpo, Sft
from coepg_dagster.pools.trends import WARNINGS, warnings
from coepg_dagster.provenance import Record, Ref
from tests.test_provenance import whole_loop

SOUND = {
    "purity": 70.0,
    "coverage": 90.0,
    "rows": 100,
    "duplicates": 1,
    "share_by_planner": {"a": 60.0, "b": 40.0},
    "plan_shuffle": {"v": {"pairs": 50, "own": 90.0, "shuffled": 25.0, "chance": 20.0}},
    "illegible": 1.0,
    "unreadable_by_verifier": {"v": 5.0, "w": 0.0},
}


def records(asset: Any, *figures: dict[str, Any]) -> dict[Ref, Record]:
    loop = whole_loop()
    for k, each in enumerate(figures):
        loop[Ref(asset, k)] = loop[Ref(asset, k)].model_copy(update={"figures": each})
    return loop


def score(macro: float, low: float, high: float) -> dict[str, Any]:
    return {"rows": 9, "metrics": {"step_sr": {"macro": macro, "micro": macro, "ci95": [low, high]}}}


@pytest.mark.parametrize(
    ("change", "check", "words"),
    [
        ({"purity": 64.9}, "purity_holds", "purity fell from 70.0 to 64.9, by more than 5 points"),
        ({"coverage": 87.9}, "coverage_holds", "coverage fell from 90.0 to 87.9"),
        ({"share_by_planner": {"a": 71.0, "b": 29.0}}, "no_planner_dominates", "a wrote 71.0 % of the rows, over 70 %"),
        (
            {"plan_shuffle": {"v": {"pairs": 50, "own": 90.0, "shuffled": 35.1, "chance": 20.0}}},
            "plans_are_read",
            "v hits 35.1 % of targets when given another step's plan; chance is 20.0 %",
        ),
        (
            {"unreadable_by_verifier": {"v": 5.0, "w": 97.3}},
            "answers_are_read",
            "97.3 % of the answers of w name no point",
        ),
        ({"illegible": 5.1}, "targets_are_legible", "5.1 % of the rows have a target of less than 8 px"),
        ({"duplicates": 2}, "rows_say_different_things", "2.0 % of the rows say the same"),
    ],
)
def test_each_warning_speaks_when_its_limit_is_passed(change: dict[str, Any], check: str, words: str) -> None:
    checks = warnings("data_quality", 1, records("data_quality", SOUND, SOUND | change), Quality())
    assert set(checks) == set(WARNINGS["data_quality"])
    assert [name for name, why in checks.items() if why] == [check] and words in str(checks[check])


def test_what_is_within_limits_or_was_not_measured_warns_of_nothing() -> None:
    held = SOUND | {"purity": 65.0, "coverage": 88.0}
    one_planner = {"share_by_planner": {"only": 100.0}, "purity": None}
    for figures in ((SOUND, held), (SOUND, one_planner), ({}, SOUND), (SOUND, {})):
        assert not any(warnings("data_quality", 1, records("data_quality", *figures), Quality()).values())
    assert not any(warnings("data_quality", 0, records("data_quality", SOUND), Quality()).values())


def test_success_below_its_former_interval_is_named_with_its_split() -> None:
    before = {"easy": score(50, 45, 55), "hard": score(30, 20, 40)}
    after = {"easy": score(44.9, 40, 50), "hard": score(20, 10, 30)}
    warned = warnings("evaluation", 1, records("evaluation", before, after), Quality())
    assert warned["success_holds"] == "easy: 44.9, below 45.0 to 55.0 before"
    assert warned["no_text_misleads"] is None
    assert warnings("verdicts", 1, whole_loop(), Quality()) == {}


@pytest.mark.parametrize(
    ("asset", "check", "split", "settings"),
    [
        ("planner", "grpo_learns", "train", Grpo(learning_rate=3e-4)),
        ("planner_sft", "sft_learns", "validation", Sft(learning_rate=3e-4)),
        ("grounder", "sft_learns", "validation", Sft(learning_rate=3e-4)),
    ],
)
def test_a_training_that_did_not_learn_is_named_with_the_settings_it_had(
    asset: Any, check: str, split: str, settings: Any
) -> None:
    def why(low: float) -> str | None:
        change = {"before": 50.0, "after": 54.0, "difference": 4.0, "ci95": [low, 8.0]}
        others = {"train": None, "validation": None, "steps": {"train": 99, "validation": 99}, "judge": "one"}
        of_both = records(asset, {}, {"probe": others | {split: change}, "optimizer_steps": 3, "prompts": 200})
        of_both[Ref(asset, 1)] = of_both[Ref(asset, 1)].model_copy(update={"config": settings.model_dump(mode="json")})
        assert set(warnings(asset, 1, of_both, Quality())) == set(WARNINGS[asset]) == {check}
        assert warnings(asset, 0, of_both, Quality()) == {check: None}, "iteration 0 trains nothing"
        return warnings(asset, 1, of_both, Quality())[check]

    assert why(0.1) is None
    for low in (0.0, -1.0):
        warning = why(low)
        assert warning is not None and "50.0 → 54.0 (+4.0" in warning and "learning_rate (0.0003)" in warning
