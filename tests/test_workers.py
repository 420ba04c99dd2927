"""Jobs: to a file and back, found again after a kill, and tables with the same bytes."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from coepg_dagster import workers
from coepg_dagster.experiment import Grpo, Models, Regeneration, Sft
from coepg_dagster.inference.agents import Grounder, Planner
from coepg_dagster.pools.verdicts import to_verify
from coepg_dagster.steps import CANDIDATE_SCHEMA, VERDICT_SCHEMA
from coepg_dagster.training.launch import Placement
from coepg_dagster.workers import (
    CandidatesWork,
    EvaluationWork,
    GrpoWork,
    SftWork,
    VerdictsWork,
    Work,
    read_work,
    steps_of,
    write_steps,
    write_table,
)
from tests.conftest import quiet, step, step_table

COMMON: dict[str, Any] = {
    "out": Path("out"),
    "scratch": Path("scratch"),
    "steps": Path("steps.arrow"),
    "models": Models(base_planner="a", base_grounder="b", planners={"p": "a"}, verifiers={"v": "b"}),
    "device": "cpu",
    "batch_size": 8,
    "seed": 3,
}
WORK = [
    SftWork(
        **COMMON,
        role="planner",
        init="a",
        dataset=Path("d"),
        train_split="train",
        validation_split="validation",
        max_plan_tokens=8,
        max_point_tokens=8,
        config=Sft(),
        placement=Placement(),
    ),
    GrpoWork(
        **COMMON,
        init="a",
        own_grounder=("grounder_1", "g"),
        verifiers={"v": "b"},
        dataset=Path("d"),
        train_split="train",
        validation_split="validation",
        max_point_tokens=8,
        config=Grpo(),
        placement=Placement(processes=2, save_every=7),
    ),
    CandidatesWork(
        **COMMON, members={"p": "a"}, train_split="train", max_steps=None, config=Regeneration(), processes=2
    ),
    VerdictsWork(
        **COMMON,
        members={"v": "b"},
        candidates=Path("c"),
        train_split="train",
        config=Regeneration(),
        shuffled_plans=9,
        processes=2,
    ),
    EvaluationWork(
        **COMMON,
        planner="a",
        grounder="b",
        splits=["test"],
        max_steps=5,
        protocol="miniwob/point",
        max_plan_tokens=8,
        max_point_tokens=8,
        processes=2,
    ),
]


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.kind)
def test_a_job_survives_its_file(work: Work, tmp_path: Path) -> None:
    (tmp_path / "work.json").write_text(work.model_dump_json())
    assert read_work(tmp_path / "work.json") == work


def test_a_job_of_another_version_is_refused(tmp_path: Path) -> None:
    for change in ({"kind": "dance"}, {"extra": 1}, {"seed": "x"}):
        (tmp_path / "work.json").write_text(json.dumps(json.loads(WORK[0].model_dump_json()) | change))
        with pytest.raises(ValidationError):
            read_work(tmp_path / "work.json")


def test_the_device_auto_becomes_the_one_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work.json").write_text(WORK[0].model_copy(update={"device": "auto"}).model_dump_json())
    for there, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr("torch.cuda.is_available", lambda there=there: there)
        assert read_work(tmp_path / "work.json").device == device
    assert WORK[0].device_name() == "cpu"


# tables

VERDICTS = st.lists(
    st.fixed_dictionaries(
        {
            "candidate_id": st.text("ab#", max_size=5),
            "step_id": st.sampled_from(["s", "t"]),
            "verifier": st.just("v"),
            "hit": st.booleans(),
            "x": st.none() | st.floats(0, 99),
            "y": st.none() | st.floats(0, 99),
            "mean_logprob": st.none() | st.floats(-9, 0),
            "tokens": st.integers(0, 9),
            "text": st.text(max_size=5),
            "failure": st.none() | st.just("timeout"),
        }
    ),
    max_size=12,
)


@settings(max_examples=30)
@given(rows=VERDICTS, cuts=st.sets(st.integers(0, 12), max_size=4))
def test_equal_tables_give_equal_bytes_however_they_are_cut(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], cuts: set[int]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    whole = pa.Table.from_pylist(rows, VERDICT_SCHEMA)
    places = sorted({0, len(rows)} | {cut for cut in cuts if cut < len(rows)})
    pieces = [whole.slice(a, b - a) for a, b in itertools.pairwise(places)]
    write_table(whole, folder / "whole.parquet")
    write_table(pa.concat_tables([VERDICT_SCHEMA.empty_table(), *pieces]), folder / "cut.parquet")
    assert (folder / "whole.parquet").read_bytes() == (folder / "cut.parquet").read_bytes()
    assert pq.read_table(folder / "whole.parquet").to_pylist() == whole.to_pylist()


def test_also_where_a_column_takes_several_pages(tmp_path: Path) -> None:
    """Parquet cuts pages along the chunks of a large column: screenshots are such a column."""
    noise = random.Random(0)
    whole = step_table(*(step(f"s{i}", screenshot=noise.randbytes(3000)) for i in range(1000)))
    write_table(whole, tmp_path / "whole.parquet")
    write_table(pa.concat_tables([whole.slice(i, 97) for i in range(0, 1000, 97)]), tmp_path / "cut.parquet")
    assert (tmp_path / "whole.parquet").read_bytes() == (tmp_path / "cut.parquet").read_bytes()


def test_a_table_appears_in_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pq, "write_table", killed)
    with pytest.raises(KeyboardInterrupt):
        write_table(VERDICT_SCHEMA.empty_table(), tmp_path / "table.parquet")
    assert not (tmp_path / "table.parquet").exists()


def test_steps_of_a_split_in_file_order(tmp_path: Path) -> None:
    rows = [step(f"s{i}", split="train" if i % 2 else "test") for i in range(6)]
    write_steps(step_table(*rows), tmp_path / "steps.arrow", ["train", "test"])
    assert steps_of(tmp_path / "steps.arrow", "train")["step_id"].to_pylist() == ["s1", "s3", "s5"]
    some = steps_of(tmp_path / "steps.arrow", "train", 2)["step_id"].to_pylist()
    assert len(some) == 2 and some == sorted(some) and set(some) < {"s1", "s3", "s5"}


# found again after a kill


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """How many tasks and plans the models were really asked, in chunks of two."""
    asked = {"plan": 0, "ground": 0}
    plan, ground = Planner.plan, Grounder.ground

    def planned(self: Planner, tasks: Any, *args: Any) -> Any:
        asked["plan"] += len(tasks)
        return plan(self, tasks, *args)

    def grounded(self: Grounder, plans: Any, *args: Any) -> Any:
        asked["ground"] += len(plans)
        return ground(self, plans, *args)

    monkeypatch.setattr(Planner, "plan", planned)
    monkeypatch.setattr(Grounder, "ground", grounded)
    monkeypatch.setattr(workers, "CHUNK", 2)
    yield asked


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
        work = CandidatesWork(**folders(name), **settings, processes=processes)
        return work.run(report)

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

    chunks = sorted((tmp_path / "whole" / "scratch").iterdir())
    assert len(chunks) == 2 * 3
    folders("killed")
    for chunk in chunks[:2]:
        (tmp_path / "killed" / "scratch" / chunk.name).write_bytes(chunk.read_bytes())
    (tmp_path / "killed" / "scratch" / chunks[2].with_suffix(".partial").name).write_bytes(b"half a file")
    counted["plan"] = 0
    assert candidates("killed") == figures
    assert counted["plan"] == 10 - 4
    assert candidates("shared", processes=2) == figures
    results = [(tmp_path / n / "out" / "candidates.parquet").read_bytes() for n in ("whole", "killed", "shared")]
    assert results[0] == results[1] == results[2]

    def verdicts(name: str) -> dict[str, Any]:
        members = {"learnt": str(trained("grounder", 0)), "random": str(random_checkpoint(3))}
        return VerdictsWork(
            **folders(name),
            members=members,
            candidates=tmp_path / "whole" / "out" / "candidates.parquet",
            train_split="train",
            config=config,
            shuffled_plans=3,
            processes=1,
        ).run(quiet)

    with_target = [row["step_id"] for row in steps.select(["step_id", "boxes"]).to_pylist() if row["boxes"]]
    table = table.filter(pa.compute.is_in(table["step_id"], pa.array(with_target)))
    n = to_verify(table).num_rows
    assert 3 <= n <= figures["to_verify"]
    found = verdicts("whole")
    moved = pq.read_table(tmp_path / "whole" / "out" / "shuffled.parquet").num_rows // 2
    assert counted["ground"] == 2 * (n + moved) and 1 <= moved <= 3
    assert found["rows"] == 2 * n and found["resize_learnt"] == found["resize_random"]
    given_ = pq.read_table(tmp_path / "whole" / "out" / "verdicts.parquet")
    asked = to_verify(table)
    for name in ("learnt", "random"):
        mine = given_.filter(pa.compute.equal(given_["verifier"], name))
        assert sorted(mine["candidate_id"].to_pylist()) == sorted(asked["candidate_id"].to_pylist())

    kept = ("verdicts-learnt", "resize-learnt")
    done = [chunk for chunk in (tmp_path / "whole" / "scratch").iterdir() if chunk.name.startswith(kept)]
    for chunk in done:
        (tmp_path / "killed" / "scratch" / chunk.name).write_bytes(chunk.read_bytes())
    counted["ground"] = 0
    assert verdicts("killed") == found
    assert counted["ground"] == n + moved, "only the second verifier's"
    for file in ("verdicts.parquet", "shuffled.parquet"):
        results = [(tmp_path / name / "out" / file).read_bytes() for name in ("whole", "killed")]
        assert results[0] == results[1]
