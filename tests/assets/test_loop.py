"""The steps of an iteration by themselves, on small tables."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from coepg_dagster.assets.loop import data_quality, dataset

from coepg_dagster.artifacts import CANDIDATES, SHUFFLED, STEPS, VERDICTS, write_steps, write_table
from coepg_dagster.experiment.files import load_experiment
from coepg_dagster.experiment.schema import Experiment
from coepg_dagster.experiment.versions import code_version
from tests.conftest import png, step, step_table
from tests.pools.tables import candidate, candidates, verdict, verdicts
from tests.project import REPOSITORY


def with_rule(rule: str) -> Experiment:
    experiment = load_experiment(REPOSITORY / "experiments" / "sandbox.yaml")
    regeneration = experiment.regeneration.model_copy(update={"rule": rule})
    return experiment.model_copy(update={"regeneration": regeneration})


def test_quality_is_measured_by_the_rule_that_chose_d_k(tmp_path: Path) -> None:
    """Verdicts depend on no rule: after another one they stay, and D_k and its quality are made again."""
    first = with_rule("any")
    for name in ("benchmark_steps", "candidate_plans", "verdicts", "dataset"):
        (tmp_path / name).mkdir()
    steps = step_table(*[step(name, screenshot=png()) for name in "ab"])
    write_steps(steps, tmp_path / "benchmark_steps" / STEPS, [first.benchmark.train])
    plans = candidates(candidate("a", "p", 0, "one two"), candidate("b", "p", 0, "three four"))
    write_table(plans, tmp_path / "candidate_plans" / CANDIDATES)
    one, *others = first.models.verifiers
    votes = [verdict(f"{name}#p#0", each, name == "a" or each == one) for name in "ab" for each in (one, *others)]
    write_table(verdicts(*votes), tmp_path / "verdicts" / VERDICTS)
    write_table(verdicts(), tmp_path / "verdicts" / SHUFFLED)

    def made(experiment: Experiment) -> tuple[int, float]:
        def record(asset: str) -> Any:
            of = first if asset == "verdicts" else experiment
            return SimpleNamespace(
                config=of.regeneration.model_dump(mode="json"), figures={"resize_phi": [28, 3136, 1003520]}
            )

        work: Any = SimpleNamespace(
            loop=SimpleNamespace(experiment=experiment, marks=lambda _: tmp_path / "marks"),
            store=SimpleNamespace(root=tmp_path),
            k=0,
            process=SimpleNamespace(resolve=lambda config: config),
            read_by=lambda _, asset: tmp_path / asset,
            folder=lambda asset: tmp_path / asset,
            record=record,
            previous_folder=lambda _: None,
            draft=tmp_path / "dataset",
        )
        rows = dataset(work).figures["rows"]
        return rows, data_quality(work).figures["purity"]

    assert made(first) == (2, pytest.approx(100))
    assert made(with_rule("all")) == (1, pytest.approx(50))
    assert code_version(first, "verdicts") == code_version(with_rule("all"), "verdicts")
    assert code_version(first, "data_quality") != code_version(with_rule("all"), "data_quality")
