"""Jobs in chunks: found again after a kill, with the same result."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coepg_dagster import running
from coepg_dagster.artifacts import FOLD, PAIR_PREDICTIONS, PAIRS, PREDICTIONS, SEAL, write_steps
from coepg_dagster.experiment.models import Member, Models
from coepg_dagster.experiment.schema import Regeneration
from coepg_dagster.inference.agents import Grounder, Planner
from coepg_dagster.inference.screens import Screens
from coepg_dagster.inference.transformers_engine import TransformersEngine
from coepg_dagster.jobs import CandidatesJob, EvaluationJob, VerdictsJob
from coepg_dagster.pools.verdicts import to_verify
from coepg_dagster.steps import CANDIDATE_SCHEMA, fold_of
from tests.faults.damage import flip_a_bit
from tests.jobs import quiet

COMMON: dict[str, Any] = {"device": "cpu", "batch_size": 8, "seed": 3}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """How many tasks and plans really reached the models, in chunks of two."""
    counts = {"plan": 0, "ground": 0}
    answers, ground = Planner.answers, Grounder.ground

    def planned(self: Planner, tasks: Any, *args: Any) -> Any:
        counts["plan"] += len(tasks)
        return answers(self, tasks, *args)

    def grounded(self: Grounder, plans: Any, *args: Any) -> Any:
        counts["ground"] += len(plans)
        return ground(self, plans, *args)

    monkeypatch.setattr(Planner, "answers", planned)
    monkeypatch.setattr(Grounder, "ground", grounded)
    monkeypatch.setattr(running, "CHUNK", 2)
    yield counts


def test_work_that_was_done_before_a_kill_is_not_done_again(
    trained: Callable[[str, int], Path],
    random_checkpoint: Callable[[int], Path],
    models: Models,
    steps: pa.Table,
    tmp_path: Path,
    counted: dict[str, int],
) -> None:
    """Candidates, then their verdicts: whole; with some chunks there; and the results are the same bytes."""
    write_steps(steps, tmp_path / "steps.arrow", ["train"])
    config = Regeneration(plans_per_planner=2, max_plan_tokens=24, max_point_tokens=8)

    def folders(name: str) -> dict[str, Any]:
        places = {"out": tmp_path / name / "out", "scratch": tmp_path / name / "scratch"}
        for place in places.values():
            place.mkdir(parents=True, exist_ok=True)
        return COMMON | places | {"models": models, "steps": tmp_path / "steps.arrow"}

    def candidates(name: str, processes: int = 1) -> dict[str, Any]:
        members = {"learnt": str(trained("planner", 0)), "random": str(random_checkpoint(5))}
        settings = {"members": members, "train_split": "train", "max_steps": 5, "config": config}
        return running.run(CandidatesJob(**folders(name), **settings, processes=processes), report)

    progress: list[tuple[int, int]] = []

    def report(done: int, of: int, _: Any) -> None:
        progress.append((done, of))

    figures = candidates("whole")
    assert counted["plan"] == 2 * 5
    assert progress == sorted(progress)
    assert progress[-1] == (6, 6)
    table = pq.read_table(tmp_path / "whole" / "out" / "candidates.parquet")
    assert table.schema.names == CANDIDATE_SCHEMA.names
    assert table.num_rows == figures["rows"] == 5 * 2 * 2
    assert len(set(table["candidate_id"].to_pylist())) == table.num_rows

    chunks = sorted((tmp_path / "whole" / "scratch").glob("*.parquet"))
    assert len(chunks) == 2 * 3
    folders("killed")
    for chunk in chunks[:4]:  # the third was damaged since, the fourth was not finished
        for file in (chunk, chunk.with_name(chunk.name + SEAL)):
            (tmp_path / "killed" / "scratch" / file.name).write_bytes(file.read_bytes())
    flip_a_bit(tmp_path / "killed" / "scratch" / chunks[2].name)
    (tmp_path / "killed" / "scratch" / (chunks[3].name + SEAL)).unlink()
    (tmp_path / "killed" / "scratch" / f".{chunks[4].name}.1.partial").write_bytes(b"half a file")
    counted["plan"] = 0
    assert candidates("killed") == figures
    assert counted["plan"] == 10 - 4
    assert candidates("shared", processes=2) == figures
    results = [(tmp_path / n / "out" / "candidates.parquet").read_bytes() for n in ("whole", "killed", "shared")]
    assert results[0] == results[1] == results[2]

    def verdicts(name: str) -> dict[str, Any]:
        members = {"learnt": str(trained("grounder", 0)), "random": str(random_checkpoint(3))}
        job = VerdictsJob(
            **folders(name),
            members=members,
            candidates=tmp_path / "whole" / "out" / "candidates.parquet",
            train_split="train",
            config=config,
            shuffled_plans=3,
            processes=1,
        )
        return running.run(job, quiet)

    with_target = [row["step_id"] for row in steps.select(["step_id", "boxes"]).to_pylist() if row["boxes"]]
    table = table.filter(pa.compute.is_in(table["step_id"], pa.array(with_target)))
    n = to_verify(table).num_rows
    assert 3 <= n <= figures["to_verify"]
    result = verdicts("whole")
    moved = pq.read_table(tmp_path / "whole" / "out" / "shuffled.parquet").num_rows // 2
    assert counted["ground"] == 2 * (n + moved) and 1 <= moved <= 3
    assert result["rows"] == 2 * n and result["resize_learnt"] == result["resize_random"]
    given_ = pq.read_table(tmp_path / "whole" / "out" / "verdicts.parquet")
    pending = to_verify(table)
    for name in ("learnt", "random"):
        mine = given_.filter(pa.compute.equal(given_["verifier"], name))
        assert sorted(mine["candidate_id"].to_pylist()) == sorted(pending["candidate_id"].to_pylist())

    kept = ("verdicts-learnt", "resize-learnt")
    done = [chunk for chunk in (tmp_path / "whole" / "scratch").iterdir() if chunk.name.startswith(kept)]
    for chunk in done:
        (tmp_path / "killed" / "scratch" / chunk.name).write_bytes(chunk.read_bytes())
    counted["ground"] = 0
    assert verdicts("killed") == result
    assert counted["ground"] == n + moved, "only the second verifier's"

    # the grounders of folds verify the episodes that they were not trained on, and ϕ_k itself the plan shuffle
    folded = tmp_path / "folded"
    shutil.copytree(trained("grounder", 0), folded)
    for i, checkpoint in enumerate((trained("grounder", 0), random_checkpoint(3))):
        shutil.copytree(checkpoint, folded / FOLD.format(i))
    job = VerdictsJob(
        **folders("folds"),
        members={"grounder_1": str(folded)},
        folds={"grounder_1": 2},
        candidates=tmp_path / "whole" / "out" / "candidates.parquet",
        train_split="train",
        config=config,
        shuffled_plans=3,
        processes=1,
    )
    assert running.run(job, quiet)["rows"] == n
    by_fold = pq.read_table(tmp_path / "folds" / "out" / "verdicts.parquet").to_pylist()
    theirs = {(row["verifier"], row["candidate_id"]): row["text"] for row in given_.to_pylist()}
    episodes = dict(zip(steps["step_id"].to_pylist(), steps["episode_id"].to_pylist(), strict=True))
    assert {row["verifier"] for row in by_fold} == {"grounder_1"}
    folds = {fold_of(episodes[row["step_id"]], 2) for row in by_fold}
    assert folds == {0, 1}
    for row in by_fold:
        model = ("learnt", "random")[fold_of(episodes[row["step_id"]], 2)]
        assert row["text"] == theirs[model, row["candidate_id"]]
    shuffled_ = [pq.read_table(tmp_path / name / "out" / "shuffled.parquet") for name in ("folds", "whole")]
    mine = shuffled_[1].filter(pa.compute.equal(shuffled_[1]["verifier"], "learnt"))
    assert shuffled_[0]["text"].to_pylist() == mine["text"].to_pylist()
    for file in ("verdicts.parquet", "shuffled.parquet"):
        results = [(tmp_path / name / "out" / file).read_bytes() for name in ("whole", "killed")]
        assert results[0] == results[1]


def test_other_pairs_are_scored_as_if_each_were_the_agent(
    trained: Callable[[str, int], Path],
    random_checkpoint: Callable[[int], Path],
    models: Models,
    steps: pa.Table,
    tmp_path: Path,
) -> None:
    """On both splits by the judge; on the first by the base planner, by several attempts and by reference plans."""
    half = steps.num_rows // 2
    names = ["validation"] * half + ["test"] * (steps.num_rows - half)
    split = steps.schema.get_field_index("split")
    write_steps(
        steps.set_column(split, steps.schema.field(split), pa.array(names)),
        tmp_path / "steps.arrow",
        ["validation", "test"],
    )
    agent = {"planner": str(trained("planner", 0)), "grounder": str(trained("grounder", 0))}
    judge, base = str(random_checkpoint(3)), str(random_checkpoint(5))

    def evaluate(name: str, **change: Any) -> dict[str, Any]:
        places = {"out": tmp_path / name / "out", "scratch": tmp_path / name / "scratch"}
        for place in places.values():
            place.mkdir(parents=True)
        settings = {"max_steps": None, "protocol": "miniwob/point", "max_plan_tokens": 24, "max_point_tokens": 8}
        common = COMMON | places | {"models": models, "steps": tmp_path / "steps.arrow"} | settings
        splits = ["validation", "test"]
        return running.run(EvaluationJob(**common | agent | {"splits": splits, "processes": 1} | change), quiet)

    alone, by_judge, by_base = evaluate("alone"), evaluate("judge", grounder=judge), evaluate("base", planner=base)
    oracle = {name: f"click the red box {name}" for name in steps["step_id"].to_pylist()[:half]}
    others = {"judge": Member(model=judge), "base_planner": base, "attempts": 3, "oracle_plans": oracle}
    together = evaluate("together", **others)
    pairs = together.pop(PAIRS)
    assert together == alone and pairs["judge"] == by_judge
    assert pairs["base_planner"] == {"validation": by_base["validation"]}
    assert pairs["attempts"].keys() == {"validation"} and pairs["attempts"]["validation"]["rows"] == half
    shared = evaluate("shared", **others, processes=2)
    assert shared.pop(PAIRS) == pairs and shared == alone
    files = [(tmp_path / name / "out" / PREDICTIONS).read_bytes() for name in ("alone", "together", "shared")]
    assert files[0] == files[1] == files[2]
    stored = pq.read_table(tmp_path / "together" / "out" / PAIR_PREDICTIONS)
    assert stored.num_rows == steps.num_rows + half + 3 * half + half
    assert not (tmp_path / "alone/out" / PAIR_PREDICTIONS).exists()

    with_plans = stored.filter(pa.compute.equal(stored["pair"], "oracle_plan")).to_pylist()
    labels = steps.slice(0, half).select(["step_id", "action_type", "value"]).to_pylist()
    assert [{name: row[name] for name in ("step_id", "action_type", "value")} for row in with_plans] == labels
    assert {row["step_id"]: row["plan"] for row in with_plans} == oracle
    engine = TransformersEngine(trained("grounder", 0), dtype=models.dtype, device="cpu", batch_size=4)
    grounder = Grounder(engine, Screens(steps, engine.resize), models.prompts, models.coordinates, 8)
    points = [grounding.point for grounding in grounder.ground(list(oracle.items()))]
    assert [(row["x"], row["y"]) for row in with_plans] == [(p.x, p.y) if p else (None, None) for p in points]
    score = pairs["oracle_plan"]["validation"]["metrics"]
    assert score["op_f1"]["micro"] == 100 and score["step_sr"] == score["ele_acc"]
