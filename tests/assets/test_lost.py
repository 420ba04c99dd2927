"""What the log names and the disk lacks: it is stale with its reason, is made again, and makes nothing else stale."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg
import pytest
from coepg_dagster.assets.automation import Todo, next_todo
from coepg_dagster.assets.ledger import archive
from coepg_dagster.assets.stage import Outcome, StageContext

from coepg_dagster.auditing.archive import BASE
from coepg_dagster.auditing.cleaning import leftovers
from coepg_dagster.provenance import LOOP, Ref
from tests.assets.conftest import InProcess
from tests.assets.light import CONTENT, LIGHT_MAKERS, light_project, plant, steps_log

NOTES = "notes"
GONE = "its files are gone from the store: "


def with_notes(work: StageContext) -> Outcome:
    """A model with a file beside its content that another run writes otherwise, as the log of a training is."""
    outcome = LIGHT_MAKERS["grounder"](work)
    (work.draft / NOTES).write_text(work.context.run.run_id)
    return outcome


def pointing(work: StageContext) -> Outcome:
    """A planner that stands for the model that it read, as without GRPO."""
    outcome = LIGHT_MAKERS["planner"](work)
    (work.draft / CONTENT).rename(work.draft / BASE)
    return Outcome([BASE], {}, outcome.checks)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    """Two iterations, whole and current."""
    makers = LIGHT_MAKERS | {"grounder": with_notes, "planner": pointing}
    with dg.DagsterInstance.ephemeral() as instance:
        light = InProcess(light_project(tmp_path_factory.mktemp("lost") / "project"), instance, {"makers": makers})
        assert light.evolve(1)[0] == 4
        yield light


def folder(light: InProcess, ref: Ref) -> Path:
    record = light.loop.record(light.instance, ref)
    assert record is not None
    return light.project.store / record.folder


def stale(light: InProcess) -> dict[Ref, str]:
    return {ref: str(why) for ref, why in light.loop.stale(light.loop.records(light.instance)).items()}


def made_since(light: InProcess, before: int) -> list[tuple[str, int | None]]:
    return [(step["asset"], step["k"]) for step in steps_log(light.project)[before:]]


def truncate(place: Path) -> None:
    (place / CONTENT).write_text("{")


def without_notes(place: Path) -> None:
    (place / NOTES).unlink()


def other_notes(place: Path) -> None:
    (place / NOTES).write_text("")


LOST: dict[Ref, tuple[Callable[[Path], object], str]] = {
    Ref("benchmark_steps"): (shutil.rmtree, ""),
    Ref("grounder", 0): (other_notes, f"/{NOTES} (it has 0 bytes, not 36)"),
    Ref("verdicts", 0): (lambda place: (place / CONTENT).unlink(), f"/{CONTENT}"),
    Ref("grounder", 1): (without_notes, f"/{NOTES}"),
    Ref("dataset", 1): (lambda place: shutil.rmtree(place.parent), ""),
    Ref("evaluation", 1): (truncate, f"/{CONTENT} (it has 1 bytes, not "),
}
"""Artifact → how it is lost, and the message about it."""


def test_what_is_gone_is_stale_and_made_again_alone(made: InProcess) -> None:
    before = {ref: record.data_version for ref, record in made.loop.records(made.instance).items()}
    places = {ref: folder(made, ref) for ref in LOST}
    whole = {ref: sorted(path.name for path in place.iterdir()) for ref, place in places.items()}
    for ref, (lose, _) in LOST.items():
        lose(places[ref])
    why = stale(made)
    assert set(why) == set(LOST)
    for ref, (_, says) in LOST.items():
        assert why[ref].startswith(f"{GONE}{places[ref].relative_to(made.project.store)}{says}")
    steps = len(steps_log(made.project))
    runs, output = made.evolve(1)
    # D_1 follows from the grounder through verdicts that are there: they stay, since it comes out the same
    assert runs == 4 and made_since(made, steps) == [(ref.asset, ref.iteration) for ref in LOST]
    assert all(f"{ref}: {why[ref]}; it is made again" in output for ref in LOST)
    assert {ref: record.data_version for ref, record in made.loop.records(made.instance).items()} == before
    assert {ref: sorted(path.name for path in place.iterdir()) for ref, place in places.items()} == whole
    assert stale(made) == {} and made.evolve(1)[0] == 0
    archived = archive(made.project, made.instance)
    assert leftovers(archived, set()) == []
    # what was made from the first grounder names its record: nobody tampered with the notes of the second
    assert [line for record in archived.records if record.ref in LOST for line in archived.damage(record)] == []


def test_the_model_that_a_planner_stands_for_is_checked_too(made: InProcess) -> None:
    shutil.rmtree(place := folder(made, Ref("planner_sft", 1)))
    name = f"{GONE}{place.relative_to(made.project.store)}"
    assert stale(made) == {Ref("planner_sft", 1): name, Ref("planner", 1): name}
    before = len(steps_log(made.project))
    assert made.evolve(1)[0] == 1
    assert made_since(made, before) == [("planner_sft", 1), ("planner", 1)] and stale(made) == {}


def test_what_is_gone_is_not_read(made: InProcess) -> None:
    place = folder(made, Ref("dataset", 1))
    aside = place.with_name("aside")
    place.rename(aside)
    try:
        why = made.why(made.run(2))
        assert f"dataset[1]: {GONE}light/s1/dataset/1/" in why and "materialize dataset[1] again" in why
        accepted = {"resources": {"store": {"config": {"accept_stale_input": True}}}}
        assert GONE in made.why(made.run(2, config=accepted))  # there is nothing to accept
        gone = f"dataset[1]: {GONE}{place.relative_to(made.project.store)}"
        assert next_todo(made.instance, made.loop, 2) == Todo(1, ("dataset",), (gone,))
        assert [step for step in steps_log(made.project) if step["k"] == 2] == []
    finally:
        aside.rename(place)
    assert stale(made) == {} and next_todo(made.instance, made.loop, 2) == Todo(2, LOOP)


def test_what_comes_out_differently_makes_its_readers_stale(made: InProcess) -> None:
    shutil.rmtree(folder(made, Ref("verdicts", 1)))
    plant(made.project, "salt", "light/s1", Ref("verdicts", 1))
    steps = len(steps_log(made.project))
    assert made.evolve(1)[0] == 3  # the verdicts, what was made from them, the report
    assert made_since(made, steps) == [("verdicts", 1), ("dataset", 1), ("data_quality", 1)]
