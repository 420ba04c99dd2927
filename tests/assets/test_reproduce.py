"""`coepg reproduce`: which loops and iterations, in which order. The whole of it, with real tiny models, is in test_loop.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from coepg_dagster.assets.evolve import evolve_through, place_of, placed_machine
from coepg_dagster.assets.ledger import end_dead_runs
from coepg_dagster.assets.reproduce import (
    Reproduction,
    find_study,
    loop_tasks,
    one_at_a_time,
    pool_slots,
    pretrained_on,
)

from coepg_dagster.experiment.files import ABLATIONS
from coepg_dagster.experiment.strict import ExperimentError
from coepg_dagster.planning.machine import Machine, TrainingSettings
from tests.assets.conftest import InProcess
from tests.assets.test_evolve import QUIET
from tests.project import REPOSITORY

SHARING = "description: x\nparent: light\nvariant: single\ntake: [planner_sft, grounder]\ngrpo: {ensemble: false}\n"


@pytest.fixture
def study(light: InProcess) -> InProcess:
    """The light project with an ablation that shares π_k, a control, and one whose base model is not there."""
    folder = light.project.root / "experiments" / ABLATIONS
    folder.mkdir()
    (folder / "light_single.yaml").write_text(SHARING)
    (folder / "light_control.yaml").write_text("description: x\nparent: light\niterations: 1\n")
    (folder / "light_large.yaml").write_text(
        "description: x\nparent: light\nmodels: {base_planner: models/large/base-planner}\n"
    )
    (folder / "light_large_single.yaml").write_text(SHARING.replace("parent: light", "parent: light_large"))
    return light


def test_a_study_is_an_experiment_with_what_descends_from_it(study: InProcess) -> None:
    whole = find_study(study.project, "light")
    names = [loop.name for loop in whole.loops]
    assert names == [f"{name}/s{seed}" for name in ("light", "light_single", "light_control") for seed in (1, 2)]
    assert set(whole.left_out) == {"light_large", "light_large_single"}
    assert "models/large/base-planner is not there" in whole.left_out["light_large"]
    assert [loop.seed for loop in find_study(study.project, "light", [2]).loops] == [2, 2, 2]
    with pytest.raises(ExperimentError, match=r"light has the seeds \[1, 2\], not \[9\]"):
        find_study(study.project, "light", [9])
    with pytest.raises(ExperimentError, match="no experiment 'dark'"):
        find_study(study.project, "dark")


def test_what_is_there_is_not_made_again_and_what_is_taken_comes_first(study: InProcess) -> None:
    whole = find_study(study.project, "light", [1])
    tasks = {task.key: task for task in loop_tasks(whole, study.instance)}
    # what takes its data is compared at the last iteration, and made there alone
    assert tasks["light_single/s1", 2].after == [("light/s1", 2)] and ("light_single/s1", 1) not in tasks
    assert tasks["light_control/s1", 1].after == [("light_control/s1", 0)] and len(tasks) == 6
    evolve_through(study.defs, study.instance, study.loop, 0, QUIET)
    left = {task.key for task in loop_tasks(whole, study.instance)}
    assert ("light/s1", 0) not in left and {("light/s1", 1), ("light_single/s1", 2)} < left


def test_iterations_share_the_gpus(study: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")

    def on(machine: Machine | None = None, *, device: str) -> Reproduction:
        placed = placed_machine(place_of(device, machine=machine), machine)
        return Reproduction(study.project, study.instance, QUIET, 4, [], placed)

    made = on(device="cuda")
    seen = []
    for k, task in enumerate(loop_tasks(find_study(study.project, "light", [1]), study.instance)[:4]):
        task.gpu = made._free_gpu()
        made.running[str(k), k] = task, None  # type: ignore[assignment]
        seen.append(task.gpu["CUDA_VISIBLE_DEVICES"])
    assert seen == ["2", "5", "2", "5"]
    assert on(device="cpu")._free_gpu() == {}
    together = Machine(name="two", card="H100-80GB", gpus=2, sft=TrainingSettings(training_processes=2))
    assert on(together, device="cuda")._free_gpu() == {}  # its trainings take both


def test_pools_have_their_slots_back_afterwards(study: InProcess) -> None:
    storage = study.instance.event_log_storage
    storage.set_concurrency_slots("gpu", 1)
    with one_at_a_time(study.project), pool_slots(study.project, study.instance, {"gpu", "cpu"}, 7):
        end_dead_runs(study.instance, study.project.store)  # as each of its `coepg evolve` does
        assert {pool.name: pool.limit for pool in storage.get_pool_limits()} == {"gpu": 7, "cpu": 7}
    assert {pool.name: pool.limit for pool in storage.get_pool_limits()} == {"gpu": 1}


def test_they_have_them_back_where_it_was_killed(study: InProcess) -> None:
    storage, store = study.instance.event_log_storage, study.project.store
    storage.set_concurrency_slots("gpu", 2)
    killed = [pool_slots(study.project, study.instance, {"gpu", "cpu"}, 7) for _ in range(2)]  # they never end
    for one in killed:  # the second starts where the first left the limits raised
        with one_at_a_time(study.project):
            one.__enter__()
        assert {pool.name: pool.limit for pool in storage.get_pool_limits()} == {"gpu": 7, "cpu": 7}
    end_dead_runs(study.instance, store)
    assert {pool.name: pool.limit for pool in storage.get_pool_limits()} == {"gpu": 2}


def test_two_at_once_are_refused(study: InProcess) -> None:
    with one_at_a_time(study.project), pytest.raises(ExperimentError, match="`coepg reproduce` is running here"):  # noqa: SIM117
        with one_at_a_time(study.project):
            raise AssertionError("it was let in")


def test_what_a_model_was_pretrained_on_is_in_the_recipe_beside_it(tmp_path: Path) -> None:
    families = pretrained_on(REPOSITORY, "models/base-planner")
    assert {"general-page", "click-button"} < set(families) and "click-shades" not in families
    assert pretrained_on(REPOSITORY, "models/planner-a") == []  # all families
    assert pretrained_on(REPOSITORY, "models/nobody") == [] == pretrained_on(tmp_path, "OWNER/NAME")
