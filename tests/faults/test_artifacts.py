"""Artifacts whose files changed on the disk are not read, whatever the change, and are made again with the same content."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from coepg_dagster.assets.shared import recorded

from coepg_dagster.auditing.archive import MODELS
from coepg_dagster.provenance import LOOP, Asset, NotUsable, Ref
from coepg_dagster.store import DAMAGED, digests
from tests.assets.conftest import InProcess
from tests.assets.light import CONTENT, steps_log
from tests.faults.damage import cut_off, flip_a_bit


def versions(light: InProcess) -> dict[Ref, str]:
    return {ref: record.data_version for ref, record in light.loop.records(light.instance).items()}


def folder(light: InProcess, ref: Ref) -> Path:
    record = light.loop.record(light.instance, ref)
    assert record is not None
    return light.project.store / record.folder


@pytest.mark.long
def test_a_flipped_bit_in_any_input_stops_the_step_that_would_read_it(light: InProcess) -> None:
    """Its size and times are the same: only its hash tells."""
    light.make(0)
    for asset in LOOP:
        light.run(1, asset)
    before, steps = versions(light), len(steps_log(light.project))
    read: dict[Ref, Asset] = {}  # input → a step of iteration 1 that reads it
    for asset in LOOP:
        read |= {used: asset for used in light.loop.inputs_of(Ref(asset, 1))}
    assert {ref.iteration for ref in read} == {None, 0, 1}
    for seed, (ref, reader) in enumerate(read.items()):
        place = folder(light, ref)
        content = (place / CONTENT).read_bytes()
        flip_a_bit(place / CONTENT, seed)
        why = light.why(light.run(1, reader))
        assert f"{ref} {before[ref]} is damaged: {CONTENT} has other content than when it was made" in why
        aside = [path for path in (light.project.store / DAMAGED).iterdir() if before[ref] in path.name]
        assert f"it was moved to {aside[0]}: materialize {ref} again, or run `coepg evolve`" in why
        assert not place.exists() and Ref(ref.asset, ref.iteration) in light.loop.records(light.instance).lost
        aside[0].rename(place)
        (place / CONTENT).write_bytes(content)
    assert len(steps_log(light.project)) == steps, "no step read any of it"
    assert versions(light) == before


def test_what_is_damaged_is_made_again_alone(light: InProcess) -> None:
    light.make(0)
    before, steps = versions(light), len(steps_log(light.project))
    flip_a_bit(folder(light, Ref("dataset", 0)) / CONTENT)
    assert "dataset[0] " in light.why(light.run(1, "planner_sft"))
    cut_off(folder(light, Ref("grounder", 0)) / CONTENT)
    _, output = light.evolve(0)
    for asset in ("grounder", "dataset"):
        assert f"{asset}[0]: its files are gone from the store" in output
    made = {(step["asset"], step["k"]) for step in steps_log(light.project)[steps:]}
    assert made == {("grounder", 0), ("dataset", 0)}
    assert versions(light) == before


def test_an_open_model_is_loaded_only_as_it_was_recorded(light: InProcess) -> None:
    root, name = light.project.root, "models/base"
    weights = root / name / "model.safetensors"
    weights.write_bytes(bytes(1000))
    entry = {"checkpoint": name, "version": "v", "files": digests(root / name)}
    (root / name / "README.md").write_text("somebody's notes")
    assert recorded(root, json.loads(json.dumps({MODELS: entry}))[MODELS]) == name
    flip_a_bit(weights)
    with pytest.raises(NotUsable, match=r"models/base/model.safetensors has other content .* materialize open_models"):
        recorded(root, entry)
