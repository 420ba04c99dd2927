"""Probes measure a model before and after training, and change nothing of the training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from accelerate import PartialState
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainerState

from coepg_dagster.evaluation.score import score_steps
from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.training import Grpo, Lora, Sft
from coepg_dagster.inference.predict import predict
from coepg_dagster.inference.screens import Screens
from coepg_dagster.inference.transformers_engine import TransformersEngine
from coepg_dagster.jobs import Placement
from coepg_dagster.rewards.cdrem import NoVerdict
from coepg_dagster.steps import whole_episodes
from coepg_dagster.training.grpo import train_grpo
from coepg_dagster.training.probe import Probe, judge_of, probe_sft, probe_steps_between, probed_steps, writer_of
from coepg_dagster.training.sft import train_sft
from coepg_dagster.training.validation import Questions, requests_of
from tests.conftest import step, step_table
from tests.jobs import grpo_job, quiet, sft_job

CONFIG = Grpo(
    prompts_per_step=3,
    group_size=2,
    micro_batch_size=6,
    max_steps=2,
    learning_rate=3e-3,
    max_plan_tokens=24,
    probe_between=1,
)


@pytest.fixture
def train(
    trained: Callable[[str, int], Path],
    random_checkpoint: Callable[[int], Path],
    dataset: pa.Table,
    steps: pa.Table,
    models: Models,
    tmp_path: Path,
) -> Callable[..., tuple[dict[str, Any], Path]]:
    """Two steps of GRPO; probed on the training steps, of which those of validation are some."""

    def run(name: str, probed: pa.Table | None, placement: Placement | None = None, **change: Any) -> Any:
        out = tmp_path / name
        used = trained("planner", 0), trained("grounder", 0), CONFIG.model_copy(update=change)
        others = {"stranger": random_checkpoint(3)}
        placed = {"placement": placement or Placement(), "validation": probed}
        return train_grpo(grpo_job(out, (dataset, steps, models), *used, others, **placed), quiet), out

    return run


def logged(out: Path) -> list[dict[str, float]]:
    """The lines of the probes in the log of a trainer."""
    lines = [json.loads(line) for line in (out / "training_log.jsonl").read_text().splitlines()]
    return [line for line in lines if "probe_train_greedy" in line]


def test_a_run_is_the_same_with_and_without_and_the_rates_are_the_agents(
    train: Any, trained: Callable[[str, int], Path], steps: pa.Table, models: Models
) -> None:
    validation = steps.slice(0, 5)
    figures, out = train("asked", validation)
    silent, plain = train("plain", None)
    assert (out / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()
    assert "probe" not in silent and not logged(plain)

    probe = figures["probe"]
    assert probe["steps"] == {"train": 6, "validation": 5} and probe["judge"] == "grounder_1" and probe["seconds"] > 0
    for when, planner in (("before", trained("planner", 0)), ("after", out)):
        agent = [
            TransformersEngine(folder, dtype="float32", device="cpu", batch_size=6)
            for folder in (planner, trained("grounder", 0))
        ]
        result = score_steps("miniwob/point", validation, predict(*agent, validation, models, 24, 8))
        assert probe["validation"][when] == pytest.approx(result.metrics["step_sr"].macro), when
    assert probe["train"]["before"] > probe["train"]["after"], "at this rate it forgets; of little use otherwise"
    assert set(probe["sampled"]) == {"train", "validation"} and probe["sampled"]["train"]["before"] > 0
    rates = logged(out)
    assert [line["step"] for line in rates] == [0, 1, 2]
    assert rates[0]["probe_train_greedy"] == probe["train"]["before"]
    assert rates[2]["probe_validation_sampled"] == probe["sampled"]["validation"]["after"]


def test_adapters_are_probed_too(train: Any, steps: pa.Table) -> None:
    figures, _ = train("out", steps, lora=Lora(rank=4), learning_rate=1e-2, probe_between=0)
    assert figures["probe"]["train"]["before"] > 50 and figures["probe"]["train"] == figures["probe"]["validation"]
    assert figures["probe"]["train"]["after"] != figures["probe"]["train"]["before"]


def test_where_no_process_can_answer_the_run_says_so_and_goes_on(
    train: Any, steps: pa.Table, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, _ = train("out", steps, Placement(strategy="zero3"), max_steps=1)
    assert "probe" not in figures
    assert "no probe: with strategy zero3 no process can answer alone" in capsys.readouterr().out


class LongAnswers:
    """Rewards half of the answers, by their length; keeps the ids of their steps."""

    def __init__(self) -> None:
        self.step_ids: list[str] = []

    def score(self, texts: Any, step_ids: Any) -> list[float]:
        self.step_ids += step_ids
        return [float(len(text) % 2) for text in texts]


class NoVerdicts(LongAnswers):
    """Fails in the second of two processes."""

    def score(self, texts: Any, step_ids: Any) -> list[float]:
        if PartialState().process_index == 1:
            raise NoVerdict("no grounder answered")
        return super().score(texts, step_ids)


def ask_alone(
    checkpoint: Path, steps: pa.Table, models: Models, folder: Path, kind: type[LongAnswers] = LongAnswers
) -> tuple[dict[str, Any], list[str]]:
    """A probe before and one at the end of a run that trained nothing; the figures, and the steps judged here."""
    engine = TransformersEngine(checkpoint, dtype="float32", device="cpu", batch_size=2)
    splits = {"train": steps, "validation": steps.slice(0, 0)}
    screens = Screens(steps, engine.resize)
    questions = Questions(requests_of(steps, screens, models.prompts, "decoupled"), engine._processor, 2)
    reward = kind()
    probe = Probe(splits, questions, reward, "nobody", CONFIG, 7, folder)
    state = TrainerState(global_step=0, max_steps=2)
    with torch.no_grad():
        probe.on_train_begin(None, state, None, engine._model)  # type: ignore[arg-type]
        state.global_step = 2
        figures = probe.end(state, engine._model)
        return figures.get("probe", figures), reward.step_ids


def one_of_two(rank: int, meet: Path, checkpoint: Path, steps: pa.Table, models: Models, folder: Path) -> None:
    torch.distributed.init_process_group("gloo", f"file://{meet}", rank=rank, world_size=2)
    PartialState._reset_state()
    processes = PartialState(cpu=True)
    assert (processes.num_processes, processes.process_index) == (2, rank)
    result = ask_alone(checkpoint, steps, models, folder)
    (folder / f"{rank}.json").write_text(json.dumps(result))
    failed, _ = ask_alone(checkpoint, steps, models, folder, NoVerdicts)
    (folder / f"failed{rank}.json").write_text(json.dumps(failed))


def test_each_process_asks_about_its_share(
    trained: Callable[[str, int], Path],
    steps: pa.Table,
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner = trained("planner", 0)
    alone, all_steps = ask_alone(planner, steps, models, tmp_path / "alone")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    arguments = (tmp_path / "meet", planner, steps, models, tmp_path)
    torch.multiprocessing.start_processes(one_of_two, arguments, 2, start_method="fork")
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for figures, judged in results:
        assert figures["train"] == alone["train"] and figures["validation"] is None
        assert len(judged) == len(all_steps) / 2
    assert results[0][0]["sampled"] == results[1][0]["sampled"]
    assert sorted(results[0][1] + results[1][1]) == sorted(all_steps)
    for rank in (0, 1):  # none waits for the one that failed
        [warning] = json.loads((tmp_path / f"failed{rank}.json").read_text())["warnings"]
        assert warning.endswith("the model is kept without it: no grounder answered")


def test_the_change_by_sft_is_measured_with_the_checkpoints(
    trained: Callable[[str, int], Path],
    random_checkpoint: Callable[[int], Path],
    dataset: pa.Table,
    steps: pa.Table,
    models: Models,
    tmp_path: Path,
) -> None:
    """A random base, and what learnt the answers by heart."""
    learnt = {role: str(trained(role, 0)) for role in ("planner", "grounder")}
    able = Models.model_validate(
        models.model_dump() | {"verifiers": {"able": learnt["grounder"]}, "planners": {"able": learnt["planner"]}}
    )
    base = str(random_checkpoint(0))

    def probed(role: str, before: str, after: str) -> Any:
        job = sft_job(
            tmp_path / "job", (dataset, steps, able), role, before, Sft(probe_steps=5), validation=steps.slice(0, 3)
        )
        job = job.model_copy(update={"out": Path(after), "max_plan_tokens": 24})
        return probe_sft(job, dataset, steps)["probe"]

    planner = probed("planner", base, learnt["planner"])
    assert planner["judge"] == "able" and planner["steps"] == {"train": 5, "validation": 3}
    assert planner["train"]["before"] == 0 and planner["train"]["after"] > 50 and planner["train"]["ci95"][0] > 0
    assert probed("planner", learnt["planner"], base)["train"]["difference"] < -50

    grounder = probed("grounder", base, learnt["grounder"])
    assert grounder["judge"] == "labels" and grounder["steps"]["train"] == 5, "a step without a target is not asked"
    assert 0 < grounder["steps"]["validation"] <= 3, "those whose plan passes the gate"
    assert grounder["train"]["after"] > 50 > grounder["train"]["before"]
    same = probed("grounder", learnt["grounder"], learnt["grounder"])
    assert same["train"]["difference"] == same["validation"]["difference"] == 0


def test_a_judge_that_cannot_be_loaded_costs_no_sft(
    random_checkpoint: Callable[[int], Path], dataset: pa.Table, steps: pa.Table, models: Models, tmp_path: Path
) -> None:
    (tmp_path / "judge").mkdir()
    lost = Models.model_validate(models.model_dump() | {"verifiers": {"lost": str(tmp_path / "judge")}})
    config = Sft(max_steps=1, batch_size=1, micro_batch_size=1, probe_steps=2)
    data = (dataset, steps, lost)
    job = sft_job(tmp_path / "out", data, "planner", random_checkpoint(0), config, validation=steps)
    figures = train_sft(job, quiet)
    assert "probe" not in figures and (job.out / "model.safetensors").exists()
    [warning] = figures["warnings"]
    assert warning.startswith("the probe measured nothing") and str(tmp_path / "judge") in warning


def test_who_judges_plans_and_who_writes_them_are_checkpoints() -> None:
    far = {"model": "tiny", "engine": "openai", "base_url": "http://10.0.0.7:8000/v1"}

    def models(pool: dict[str, Any]) -> Models:
        return Models(base_planner="p", base_grounder="g", planners=pool, verifiers=pool)

    near = models({"second": "l", "far": far, "near": "n"})
    assert judge_of(near) == writer_of(near) == ("near", "n")
    assert judge_of(models({"far": far})) == ("base_grounder", "g")
    assert writer_of(models({"far": far})) == ("base_planner", "p")


@given(st.integers(1, 500), st.integers(0, 12))
def test_probes_between_are_spread_and_never_at_the_ends(steps: int, probes: int) -> None:
    at = sorted(probe_steps_between(steps, probes))
    assert len(at) <= probes and all(0 < step < steps for step in at)
    if steps > probes:
        assert len(at) == probes
        gaps = [b - a for a, b in zip([0, *at], [*at, steps], strict=True)]
        assert max(gaps) - min(gaps) <= 1


def test_what_an_earlier_draw_left_over_is_probed_evenly() -> None:
    """D_k covers 190 of the 200 steps that `max_train_steps` drew: the 10 others are as likely to be probed as the rest."""
    table = step_table(*(step(f"s{i}", episode_id=f"e{i}") for i in range(400)))
    drawn = whole_episodes(table, 200)["step_id"].to_pylist()
    missed = set(drawn[::20])
    asked = [name for name in table["step_id"].to_pylist() if name not in set(drawn) - missed]
    probed = probed_steps(table, asked, table, 42)["train"]["step_id"].to_pylist()
    assert len(asked) == 210 and len(probed) == 42
    assert 0 < len(missed & set(probed)) <= 5, "2 of 10 are expected"


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 20), st.sets(st.integers(0, 29)))
def test_probed_steps_are_whole_episodes_of_what_is_trained_on(
    episodes: list[int], limit: int, trained_on: set[int]
) -> None:
    table = step_table(*(step(f"s{i}", episode_id=f"e{episode}") for i, episode in enumerate(episodes)))
    names = [f"s{i}" for i in sorted(trained_on)]
    probed = probed_steps(table, names, table, limit)
    assert probed == probed_steps(table, [*reversed(names), *names], table, limit), "the order decides nothing"
    assert probed["validation"] == whole_episodes(table, limit)
    for split, among in (("train", set(names)), ("validation", {f"s{i}" for i in range(len(episodes))})):
        chosen = probed[split].to_pylist()
        assert len(chosen) <= limit
        whole = {row["episode_id"] for row in chosen}
        there = [row for row in table.to_pylist() if row["episode_id"] in whole and row["step_id"] in among]
        assert chosen == there
