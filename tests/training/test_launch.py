"""How training is spread over processes."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.training import Grpo, Lora, Sft
from coepg_dagster.jobs import Placement
from coepg_dagster.progress import Ended
from coepg_dagster.running import run
from coepg_dagster.training.launch import divides, hardware_refusals, launch_ranks, refusals, see_one_gpu
from tests.jobs import grpo_job, quiet, sft_job


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp"])
def test_what_accelerate_leaves_out_on_a_cpu_is_refused(strategy: Any, tmp_path: Path) -> None:
    with pytest.raises(Ended, match=f"strategy {strategy} needs GPUs: use `ddp`"):
        launch_ranks(Placement(processes=2, strategy=strategy), tmp_path, "no.such.module", [], on_gpu=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
@pytest.mark.parametrize(
    ("config", "why"),
    [
        (Sft(lora=Lora()), r"`lora` with strategy {}: .*Use `ddp` or `zero2`"),
        (Grpo(lora=Lora()), r"`lora` with strategy {}: .*Use `ddp` or `zero2`"),
        (Grpo(validate_every=1), r"grpo.validate_every with strategy {}: .*use `ddp` or `zero2`"),
    ],
)
def test_what_needs_the_whole_model_is_refused_where_no_process_has_it(
    config: Sft | Grpo,
    why: str,
    strategy: Any,
    dataset: pa.Table,
    steps: pa.Table,
    models: Models,
    tmp_path: Path,
) -> None:
    """Before anything is loaded: there is no such checkpoint."""
    data, none = (dataset, steps, models), "no/checkpoint"
    spread: dict[str, Any] = {"device": "cuda", "placement": Placement(processes=2, strategy=strategy)}
    job = (
        sft_job(tmp_path, data, "planner", none, config, **spread)
        if isinstance(config, Sft)
        else grpo_job(tmp_path, data, none, none, config, **spread)
    )
    with pytest.raises(Ended, match=why.format(strategy)):
        run(job, quiet)
    assert refusals(config, Placement(processes=2, strategy="zero2"), "sft") == []


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp"])
@pytest.mark.parametrize("processes", [1, 2])
def test_whole_episodes_are_played_in_one_plain_process(strategy: Any, processes: int) -> None:
    """A pass of them may be empty; DeepSpeed needs a row in each, also in one process."""
    config = Grpo.model_validate({"environment": {"episodes": "whole"}})
    placement = Placement(processes=processes, strategy=strategy)
    why = [each for each in refusals(config, placement, "mine") if each.startswith("grpo.environment.episodes")]
    named = {"`training_processes: 1`": processes > 1, "`strategy: ddp`": strategy != "ddp"}
    assert bool(why) == any(named.values())
    assert all((remedy in line) == asked for line in why for remedy, asked in named.items())
    recorded = config.model_copy(update={"environment": None})
    assert refusals(recorded, Placement(strategy=strategy), "mine") == []


@settings(max_examples=150)
@given(
    rows=st.integers(1, 64),
    micro=st.integers(1, 16),
    group=st.integers(2, 12),
    processes=st.integers(1, 16),
    attention=st.sampled_from(["sdpa", "flash_attention_2"]),
    grpo=st.booleans(),
)
def test_a_batch_that_does_not_divide_is_refused_with_settings_that_do(
    rows: int, micro: int, group: int, processes: int, attention: Any, grpo: bool
) -> None:
    config: Sft | Grpo
    try:
        config = (
            Grpo(prompts_per_step=rows, group_size=group, micro_batch_size=micro, attention=attention)
            if grpo
            else Sft(batch_size=rows, micro_batch_size=micro)
        )
    except ValueError:
        assume(False)
    why = refusals(config, Placement(processes=processes), "mine")
    assert bool(why) != divides(config, processes)
    for line in why:
        others = re.findall(r"`(\w+)\.(\w+): (\d+)`", line)
        assert ("prompts_per_step" if grpo else "batch_size") in {name for _, name, _ in others}
        for _, name, value in others:
            other = type(config).model_validate(config.model_dump() | {name: int(value)})
            assert refusals(other, Placement(processes=processes), "mine") == []
        (fewer,) = re.findall(r"`training_processes: (\d+)` of mine", line)
        assert int(fewer) < processes and refusals(config, Placement(processes=int(fewer)), "mine") == []


def test_the_papers_batch_on_eight_cards() -> None:
    (why,) = refusals(Grpo(), Placement(processes=8, strategy="zero3"), "grpo_cdrem")
    assert "the 294 rollouts (prompts_per_step 42 x group_size 7)" in why
    assert "`training_processes: 7` of grpo_cdrem" in why and "`grpo.prompts_per_step: 40`" in why


def test_more_processes_than_gpus_are_refused() -> None:
    assert (
        hardware_refusals(Placement(processes=8), 8, "sft") == hardware_refusals(Placement(processes=8), 0, "sft") == []
    )
    (why,) = hardware_refusals(Placement(processes=8), 4, "sft")
    assert "`training_processes: 4`" in why


@pytest.mark.parametrize(
    ("seen", "left"),
    [(None, "0"), ("0,1", "0"), ("3,1", "3"), ("GPU-610ad1dd,GPU-f336699f", "GPU-610ad1dd"), ("", "")],
)
def test_training_in_one_process_sees_one_gpu(seen: str | None, left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two, TRL ends at once: Trainer would take both, by threads."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen or "")
    if seen is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    see_one_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == left
