"""The reward from live pages: what is performed, what is recorded, and that GRPO learns from it."""

from __future__ import annotations

import doctest
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from coepg_dagster.artifacts import ROLLOUTS
from coepg_dagster.cli import app, rewards
from coepg_dagster.experiment.files import load_experiment
from coepg_dagster.experiment.strict import ExperimentError
from coepg_dagster.experiment.training import Environment, Grpo
from coepg_dagster.geometry import Space
from coepg_dagster.inference.agents import Grounder
from coepg_dagster.inference.engine import Failure
from coepg_dagster.inference.screens import Screens
from coepg_dagster.prompts import planner_answer
from coepg_dagster.rewards.cdrem import NoVerdict
from coepg_dagster.steps import DATASET_SCHEMA, short_hash
from coepg_dagster.training import page_reward
from coepg_dagster.training.environments import LOST
from coepg_dagster.training.grpo import train_grpo
from coepg_dagster.training.page_reward import PageReward, agreement
from tests.inference.scripted import RESIZE, Scripted, generation
from tests.jobs import grpo_job, quiet
from tests.miniwob import labelled_steps
from tests.project import REPOSITORY


class Pages:
    """Environments that reward every action of one type, and lose others at first."""

    def __init__(self, rewarded: str = "CLICK", lost: str = "") -> None:
        self.asked: list[Mapping[str, Any]] = []
        self._rewarded, self._lost = rewarded, lost

    def ask(self, questions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        self.asked += questions
        lost, self._lost = self._lost, ""
        return [
            {"success": q["action_type"] == self._rewarded, "why": LOST if q["action_type"] == lost else ""}
            for q in questions
        ]


def reward_by(pages: Any, steps: pa.Table, point: str = "(18,28)", **graders: Scripted) -> PageReward:
    """A reward whose only grader answers with `point`, or the reward by `graders`."""
    screens = Screens(steps, RESIZE)
    engines = graders or {"phi": Scripted(lambda _: generation(point))}
    grounders = {name: Grounder(engine, screens, "compact", Space.RESIZED, 8) for name, engine in engines.items()}
    config = Grpo(confidence="constant")
    return PageReward(grounders, dict.fromkeys(grounders, 1.0), steps, screens, config, environments=pages)


def test_the_page_decides_whatever_the_label_says(steps: pa.Table) -> None:
    pages = Pages(rewarded="TYPE")
    reward = reward_by(pages, steps)
    labelled = next(row for row in steps.to_pylist() if row["action_type"] == "CLICK" and row["step_id"] == "s0")
    right, other = planner_answer("press it", "CLICK", ""), planner_answer("write", "TYPE", "red")
    unread, unknown = "press it", planner_answer("go on", "SCROLL", "down")
    texts = [right, other, unread, unknown, right]
    assert reward.score(texts, ["s0"] * 5) == [0, 1, 0, 0, 0]
    assert [(q["action_type"], q["value"]) for q in pages.asked] == [("CLICK", ""), ("TYPE", "red")], "each action once"
    for question in pages.asked:
        assert {name: question[name] for name in ("family", "seed", "step_index", "goal")} == {
            name: labelled[name] for name in ("family", "seed", "step_index", "goal")
        }
        assert (question["label_type"], question["label_boxes"]) == ("CLICK", labelled["boxes"])
    said = [{part["name"]: part["score"] for part in row["parts"]} for row in reward.rows]
    assert [part["page"] for part in said] == [0, 1, 0, 0, 0]
    assert [part["cdrem"] for part in said] == [1, 0, 0, 0, 1], "the point hits, and the label is a click"
    assert [row["reward"] for row in reward.rows] == [0, 1, 0, 0, 0]
    reward.score([other], ["s0"])
    assert len(pages.asked) == 2, "pages are deterministic"


@pytest.mark.parametrize("point", ["(0,9000)", "(-4,8)", "nowhere"])
def test_what_cannot_be_performed_is_no_success(point: str, steps: pa.Table) -> None:
    pages = Pages()
    assert reward_by(pages, steps, point).score([planner_answer("press it", "CLICK", "")], ["s0"]) == [0]
    assert not pages.asked


def test_without_an_answer_of_the_grounder_there_is_no_reward(steps: pa.Table) -> None:
    pages, other = Pages(), Scripted(lambda _: generation("(18,28)"))
    reward = reward_by(pages, steps, phi=Scripted(lambda _: Failure("status 500")), other=other)
    with pytest.raises(NoVerdict, match=r"grounder phi gave no answer for 1 of 1 plans.*status 500"):
        reward.score([planner_answer("press it", "CLICK", "")], ["s0"])
    assert not pages.asked and other.requests, "C-DREM had an answer, of another grader"


def test_a_question_that_was_lost_is_asked_again(steps: pa.Table) -> None:
    pages = Pages(lost="CLICK")
    reward = reward_by(pages, steps)
    click = planner_answer("press it", "CLICK", "")
    assert reward.score([click], ["s0"]) == [0] and reward.score([click], ["s0"]) == [1]


def verdicts(cdrem: float, page: float) -> dict[str, Any]:
    """A rollout that no grader was asked about."""
    return {"parts": [{"name": "cdrem", "score": float(cdrem)}, {"name": "page", "score": float(page)}], "graders": []}


def test_agreement_by_hand() -> None:
    assert doctest.testmod(page_reward) == (0, 3)
    rows = [verdicts(*both) for both in [(1, 1)] * 6 + [(0, 1)]]
    said = agreement([*rows, verdicts(0.2, 0), {"parts": None}])
    # by chance both say yes 6/8 · 7/8, both no 2/8 · 1/8
    assert said["agree"] == 87.5 and said["kappa"] == pytest.approx((7 / 8 - 44 / 64) / (1 - 44 / 64))
    assert said["cdrem_is_right"] == 100 and said["page_is_found"] == pytest.approx(100 * 6 / 7)
    assert said["own_hit_agrees"] == 12.5, "where no grader was asked there is no hit"
    assert agreement([]) == dict.fromkeys(said) | {"rollouts": 0}


def test_the_command_prints_the_agreement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [verdicts(1, 1), verdicts(0, 1)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / ROLLOUTS)
    monkeypatch.setattr(rewards, "_record_of", lambda reference, asset: (None, tmp_path))
    said = CliRunner().invoke(app, ["rewards", "agreement", "live_pages@1", "--json"])
    assert said.exit_code == 0 and json.loads(said.stdout) == agreement(rows)
    shown = CliRunner().invoke(app, ["rewards", "agreement", "live_pages@1"]).stdout
    assert "both say the same, %" in shown and "50.00" in shown and "100.00" in shown


def test_it_is_for_planners_on_these_pages_and_decides_alone(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="`environment` decides the reward alone: remove terms"):
        Grpo.model_validate({"environment": {}, "terms": {"format": 0.1}})
    shutil.copy(REPOSITORY / "experiments" / "sandbox.yaml", tmp_path)
    alone = "description: x\nparent: sandbox\nagent: end_to_end\ntake: [dataset]\ngrpo: {environment: {}}\n"
    (tmp_path / "alone.yaml").write_text(alone)
    with pytest.raises(ExperimentError, match="performs the actions of a planner with ϕ_k on the pages"):
        load_experiment(tmp_path / "alone.yaml")
    assert Grpo.model_validate({"environment": {}}).environment == Environment(processes=8)
    assert Grpo.model_validate({"environment": {}}).by_labels().environment is None


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.long
def test_grpo_on_live_pages(tmp_path: Path) -> None:
    """One step of the shipped pair in eight browsers; the rollouts tell both verdicts, and the record how often they agree."""
    pytest.importorskip("selenium")
    pytest.importorskip("miniwob")
    from coepg_dagster.sandbox.miniwob.browser import BrowserMissing, find_programs

    try:
        find_programs()
    except BrowserMissing as missing:
        pytest.skip(str(missing))
    table = labelled_steps()
    families = ("click-dialog", "click-link", "click-color", "click-collapsible-nodelay")
    mine = [
        i
        for i, (split, family) in enumerate(zip(table["split"].to_pylist(), table["family"].to_pylist(), strict=True))
        if split == "train" and family in families
    ]
    steps = table.take(pa.array(mine[:: max(1, len(mine) // 8)][:8]))
    rows = [
        {
            **{name: row[name] for name in ("step_id", "action_type", "value")},
            **{"plan": "x", "box": row["boxes"][0], "candidate_id": row["step_id"], "planner": "open", "made_in": 0},
            **{"hits": 1, "answered": 1, "score": 1.0, "row_id": row["step_id"]},
            "screenshot_hash": short_hash(row["screenshot"]),
        }
        for row in steps.to_pylist()
    ]
    models = load_experiment(REPOSITORY / "experiments" / "sandbox.yaml").models
    config = Grpo.model_validate(
        {
            "environment": {"processes": 8},
            "prompts_per_step": 8,
            "group_size": 4,
            "micro_batch_size": 32,
            "max_steps": 1,
        }
        | {"max_plan_tokens": 48, "temperature": 1.0, "kl_beta": 0.0, "learning_rate": 1e-3}
    )
    shipped = REPOSITORY / "models"
    data = (pa.Table.from_pylist(rows, DATASET_SCHEMA), steps, models)
    job = grpo_job(tmp_path / "out", data, shipped / "base-planner", shipped / "base-grounder", config)
    figures = train_grpo(job, quiet)
    rollouts = pq.read_table(job.out / "rollouts.parquet").to_pylist()
    assert len(rollouts) == 32 and figures["page"]["rollouts"] == 32 and figures["page"]["lost"] == 0
    assert {row["reward"] for row in rollouts} == {0.0, 1.0}, "the shipped pair solves some"
    for row in rollouts:
        parts = {part["name"]: part["score"] for part in row["parts"]}
        assert row["reward"] == parts["page"]
    assert 50 < figures["page"]["agree"] <= 100
