"""Training that goes wrong ends with a reason and a remedy."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.training import GrounderRl, Grpo, Sft
from coepg_dagster.jobs import GrounderRlJob, Placement
from coepg_dagster.progress import Ended
from coepg_dagster.training import monitor
from coepg_dagster.training.grpo import train_grounder_rl, train_grpo
from coepg_dagster.training.monitor import MEMORY_WINDOW, MEMORY_WINDOWS, WINDOW, MemoryGrowth
from coepg_dagster.training.sft import train_sft
from tests.jobs import grpo_job, quiet, sft_job, training_job

Line = dict[str, float]
find_anomaly = partial(monitor.find_anomaly, part="grpo")


def grpo(reward: float, spreadless: float = 0.1, kl: float = 0.01) -> Line:
    return {"loss": 0.0, "reward": reward, "frac_reward_zero_std": spreadless, "kl": kl}


# real trainers


def test_a_diverged_sft_ends_and_saves_nothing(
    random_checkpoint: Callable[[int], Path], dataset: pa.Table, steps: pa.Table, models: Models, tmp_path: Path
) -> None:
    config = Sft(max_steps=20, batch_size=6, micro_batch_size=6, learning_rate=1e20, warmup_ratio=0)
    out = tmp_path / "out"
    job = sft_job(out, (dataset, steps, models), "planner", random_checkpoint(2), config, seed=7)
    job = job.model_copy(update={"placement": Placement(save_every=1, on_anomaly="warn")})
    with pytest.raises(Ended, match=r"step \d+ of 20: \w+ is (nan|inf): .*`sft.learning_rate` \(now 1e\+20\)"):
        train_sft(job, quiet)
    assert not list(out.glob("*.safetensors"))


def train_without_spread(
    init: Path, grounder: Path, data: tuple[pa.Table, pa.Table, Models], out: Path, on_anomaly: Any
) -> dict[str, Any]:
    """GRPO of a planner that never writes a plan: every reward is 0."""
    config = Grpo(prompts_per_step=1, group_size=2, micro_batch_size=2, max_steps=WINDOW + 2, max_plan_tokens=8)
    return train_grpo(grpo_job(out, data, init, grounder, config, placement=Placement(on_anomaly=on_anomaly)), quiet)


def test_grpo_without_spread_is_ended_and_goes_on_with_a_warning(
    random_checkpoint: Callable[[int], Path],
    dataset: pa.Table,
    steps: pa.Table,
    models: Models,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    init, data, out = random_checkpoint(3), (dataset, steps, models), tmp_path / "out"
    with pytest.raises(Ended, match=rf"step {WINDOW} of {WINDOW + 2}: groups without spread: 100 %.*`sft.epochs`"):
        train_without_spread(init, init, data, out, "stop")
    assert not list(out.glob("*.safetensors"))

    figures = train_without_spread(init, init, data, out, "warn")
    assert f"continues from checkpoint-{WINDOW}" in capfd.readouterr().out
    assert figures["optimizer_steps"] == WINDOW + 2
    [warning] = figures["warnings"]
    assert warning.startswith(f"step {WINDOW + 1} of {WINDOW + 2}: groups without spread"), "once, not every step"


def test_the_remedies_name_the_section_that_trains(
    random_checkpoint: Callable[[int], Path], dataset: pa.Table, steps: pa.Table, models: Models, tmp_path: Path
) -> None:
    """A grounder that never answers a point."""
    size = {"prompts_per_step": 1, "group_size": 2, "micro_batch_size": 2, "max_plan_tokens": 8}
    config = GrounderRl.model_validate({"max_steps": WINDOW + 2, **size})
    job = training_job(GrounderRlJob, tmp_path / "out", (dataset, steps, models), random_checkpoint(3), config=config)
    with pytest.raises(Ended, match=r"of 0\.00\. ϕ_k hardly ever gets a reward: .*`grounder_rl\.group_size`"):
        train_grounder_rl(job, quiet)


# what counts as trouble


def test_the_remedy_depends_on_the_reward() -> None:
    for reward, remedy in ((0.0, "sft.epochs"), (0.5, "grpo.temperature"), (1.0, "grpo.enabled: false")):
        anomaly = find_anomaly([grpo(reward, spreadless=1.0)] * WINDOW)
        assert anomaly is not None and remedy in anomaly


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ([grpo(0.5, kl=0.01)] * 20 + [grpo(0.5, kl=3.0)] * WINDOW, "KL runs away: 3.00"),
        ([grpo(0.8)] * 20 + [grpo(0.3)] * WINDOW, "reward collapses: 0.30 over 10 steps; its best was 0.80"),
        ([{"loss": 2.0}] * 20 + [{"loss": 3.5}] * WINDOW, "loss grows: 3.5 over 10 steps, it began at 2"),
    ],
)
def test_what_runs_away_is_reported_once_it_lasts(log: list[Line], message: str) -> None:
    assert find_anomaly(log[: 20 + WINDOW // 4]) is None, "a few steps are no trend"
    anomaly = find_anomaly(log)
    assert anomaly is not None and anomaly.startswith(message) and "learning_rate" in anomaly


def test_prompts_from_easy_to_hard_end_with_little_reward() -> None:
    """The sandbox's curriculum: 0.94 in its first steps, 0.44 at step 39."""
    falls = [grpo(0.94)] * WINDOW + [grpo(0.44)] * WINDOW + [grpo(0.0, spreadless=1.0)] * WINDOW
    assert find_anomaly(falls[: 2 * WINDOW]) is not None and find_anomaly(falls) is not None
    assert find_anomaly(falls[: 2 * WINDOW], ordered=True) is None and find_anomaly(falls, ordered=True) is None
    away = [*falls, *[grpo(0.1, kl=3.0)] * WINDOW]
    assert "KL runs away" in str(find_anomaly(away, ordered=True)), "that the prompts do not explain"


def test_a_model_that_trains_on_may_lose_a_little_at_first() -> None:
    """The sandbox's ϕ_2, of ϕ_1: 0.09 nats a token, 0.14 while the learning rate is high, less than 0.09 at the end."""
    begins = [{"loss": 0.0888}] * 20
    assert find_anomaly([*begins, *[{"loss": 0.136}] * WINDOW]) is None
    assert find_anomaly([*begins, *[{"loss": 0.58}] * WINDOW]) is None
    assert "loss grows: 0.7 over 10 steps, it began at 0.0888" in str(
        find_anomaly([*begins, *[{"loss": 0.7}] * WINDOW])
    )


@given(rewards=st.lists(st.floats(0.5, 0.9), max_size=40), losses=st.lists(st.floats(0.01, 0.9), max_size=40))
def test_training_that_wavers_or_learns_is_left_alone(rewards: list[float], losses: list[float]) -> None:
    assert find_anomaly([grpo(reward, spreadless=0.5, kl=0.1) for reward in rewards]) is None
    assert find_anomaly([{"loss": 1.0}] * WINDOW + [{"loss": loss} for loss in losses]) is None


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=60), st.floats(-5, 0))
def test_negative_rewards_that_do_not_fall_are_left_alone(rewards: list[float], same: float) -> None:
    """Rewards below 0 are legal, e.g. those of `infigui_g1`, and of terms with a negative weight."""
    assert find_anomaly([grpo(reward, spreadless=0.5) for reward in sorted(rewards)]) is None
    assert find_anomaly([grpo(same, spreadless=0.5)] * len(rewards)) is None
    around_0 = [grpo(0.3 * (-1) ** i + (0.02 if i < 20 else -0.02)) for i in range(40)]
    assert find_anomaly(around_0) is None, "a tenth of what single steps differ by"


def test_a_fall_below_0_is_one() -> None:
    fell = find_anomaly([grpo(0.6)] * 20 + [grpo(-0.4)] * WINDOW)
    assert fell is not None and fell.startswith("reward collapses: -0.40 over 10 steps; its best was 0.60")
    assert find_anomaly([grpo(0.6)] * 20 + [grpo(-0.4)] * 2 + [grpo(0.5)] * WINDOW) is None


# memory


def feed(used: list[float]) -> float:
    memory = MemoryGrowth()
    return [memory.growth(bytes_used) for bytes_used in used][-1]


def test_memory_that_grows_all_the_time_is_measured() -> None:
    steps = MEMORY_WINDOW * MEMORY_WINDOWS
    assert feed([1000.0 + 5 * step for step in range(steps)]) == 5.0
    assert feed([1000.0 + 5 * step for step in range(steps - 1)]) == 0.0, "too early to say"


@given(
    st.lists(st.integers(0, 10**9), min_size=MEMORY_WINDOW * MEMORY_WINDOWS, max_size=120),
    st.integers(1, MEMORY_WINDOW * (MEMORY_WINDOWS - 2)),
)
def test_a_cache_that_fills_up_and_peaks_that_come_and_go_are_no_leak(peaks: list[int], filled: int) -> None:
    cache = [min(step, filled) * 1e8 for step in range(len(peaks))]
    assert feed([a + (0 if i % 7 == 0 else b) for i, (a, b) in enumerate(zip(cache, peaks, strict=True))]) == 0.0


def test_memory_that_will_not_last_ends_training(
    random_checkpoint: Callable[[int], Path],
    dataset: pa.Table,
    steps: pa.Table,
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A trainer that holds 8 MB more after every step, in pages of their own, on a machine where 240 MB are free."""
    held: list[mmap.mmap] = []
    monkeypatch.setattr(monitor, "MEMORY_WINDOW", 2)
    monkeypatch.setattr(monitor, "free_memory", lambda: 240e6)

    def leak(done: int, of: int, figures: Any) -> None:
        held.append(mmap.mmap(-1, 8_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        held[-1].write(b"x" * 8_000_000)

    config = Sft(max_steps=100, batch_size=1, micro_batch_size=1, learning_rate=1e-6)
    job = sft_job(tmp_path / "out", (dataset, steps, models), "planner", random_checkpoint(2), config)
    with pytest.raises(Ended, match=r"host memory creeps up: it grew by .* MB a step.*of the \d\d steps to come"):
        train_sft(job, leak)
    assert len(held) < 50
