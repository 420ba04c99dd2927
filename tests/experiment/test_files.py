"""Experiment files: parents, overlays, names, and that a bad file costs no other."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster import yaml_files
from coepg_dagster.experiment.files import find_experiments, load_experiment, split_reference
from coepg_dagster.experiment.models import Member
from coepg_dagster.experiment.schema import Experiment
from coepg_dagster.experiment.strict import ExperimentError
from coepg_dagster.project import Project
from tests.experiment.sample import content, error, write
from tests.project import REPOSITORY


def test_the_name_is_the_files(tmp_path: Path) -> None:
    experiment = load_experiment(write(tmp_path, content()))
    assert (experiment.name, experiment.grpo.group_size, experiment.regeneration.rule) == ("exp", 7, "any")


@pytest.mark.parametrize("file", sorted((REPOSITORY / "experiments").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_experiments_of_the_repository_load(file: Path) -> None:
    assert load_experiment(file).description


def test_a_number_may_be_written_in_any_way_of_yaml_1_2(tmp_path: Path) -> None:
    raw = yaml_files.dump(content()) + "sft: {learning_rate: 1e-5, epochs: 2}\nbatch_size: 0x10\n"
    experiment = load_experiment(write(tmp_path, raw))
    assert (experiment.sft.learning_rate, experiment.sft.epochs, experiment.batch_size) == (1e-5, 2.0, 16)
    assert isinstance(experiment.sft.epochs, float)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("a: [", "not valid YAML"),
        ("- a\n- b", "must hold a mapping"),
        ("", "must hold a mapping"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
        ("[" * 1000, "not valid YAML"),
    ],
)
def test_what_is_no_experiment_file(tmp_path: Path, raw: str, expected: str) -> None:
    message = error(tmp_path, raw)
    assert message.startswith(str(tmp_path / "exp.yaml"))
    assert expected in message


def test_keys_that_are_no_names(tmp_path: Path) -> None:
    assert "exp.yaml" in error(tmp_path, yaml_files.dump(content()) + "\n1: 2\n")


def test_a_file_name_that_is_no_name(tmp_path: Path) -> None:
    assert "lower-case letters, digits and _" in error(tmp_path, content(), "My-Exp")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"nothing\.yaml: there is no such file"):
        load_experiment(tmp_path / "nothing.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ExperimentError, match=r"binary\.yaml: cannot be read"):
        load_experiment(tmp_path / "binary.yaml")
    with pytest.raises(ExperimentError, match="cannot be read"):
        load_experiment(tmp_path)


def test_references(tmp_path: Path) -> None:
    write(tmp_path, content(), "one")
    write(tmp_path, content(seeds=[5]), "two")
    experiments = find_experiments(tmp_path)
    assert list(experiments) == ["one", "two"]
    assert split_reference("one", experiments.named) == (experiments["one"], 1)
    assert split_reference("one/s2", experiments.named) == (experiments["one"], 2)
    with pytest.raises(ExperimentError, match="no experiment 'three'; known: one, two"):
        split_reference("three", experiments.named)
    with pytest.raises(ExperimentError, match=r"no experiment 'onee'; did you mean one\?; known: one, two"):
        experiments.named("onee")
    for wrong in ("two/s1", "two/5", "two/s", "two/s5x", "two/s5/s5", "two/", "two/s²", "two/s٥", "two/s05"):
        with pytest.raises(ExperimentError, match="two/s5"):
            split_reference(wrong, experiments.named)


OVERLAY: dict[str, Any] = {"description": "an ablation", "parent": "exp", "grpo": {"kl_beta": 0.5}}


ONE_MODEL: dict[str, Any] = {"agent": "end_to_end", "take": ["dataset"]}


def overlay(folder: Path, **change: Any) -> Path:
    """An overlay of `content()`, in a folder of its own below it."""
    write(folder, content(grpo={"group_size": 6, "kl_beta": 0.1}, automation=["refresh"]))
    (folder / "ablations").mkdir(exist_ok=True)
    return write(folder / "ablations", OVERLAY | change, "over")


def test_an_overlay_says_only_what_differs(tmp_path: Path) -> None:
    experiment = load_experiment(overlay(tmp_path, variant="other", models={"verifiers": {"open_v": "d"}}))
    assert (experiment.grpo.kl_beta, experiment.grpo.group_size, experiment.seeds) == (0.5, 6, [1, 2])
    assert experiment.models.verifiers == {"open_v": Member(model="d")} and experiment.models.base_planner == "a"
    assert (experiment.table, experiment.variant, experiment.taken) == ("exp", "other", frozenset())
    assert experiment.automation == []  # as it is not inherited
    again = write(tmp_path / "ablations", {"description": "of an overlay", "parent": "over", "iterations": 1}, "third")
    third = load_experiment(again)
    assert (third.grpo.kl_beta, third.iterations, third.variant, third.table) == (0.5, 1, "full", "third")


def test_what_is_taken_brings_what_it_was_made_from(tmp_path: Path) -> None:
    experiment = load_experiment(overlay(tmp_path, take=["planner_sft", "grounder"]))
    assert experiment.made == ("planner", "evaluation")
    assert {"dataset", "verdicts", "data_quality", "benchmark_steps", "open_models"} < experiment.taken
    data_only = load_experiment(overlay(tmp_path, take=["dataset"], grpo={}))
    assert data_only.made == ("planner_sft", "grounder", "planner", "evaluation")
    one_model = load_experiment(overlay(tmp_path, take=["dataset"], agent="end_to_end"))
    assert one_model.made == ("end_to_end", "evaluation")


@pytest.mark.parametrize(
    ("change", "key", "remedy"),
    [
        ({"parent": "nothing"}, "parent", "there is no nothing.yaml in"),
        ({"parent": "over"}, "parent", "has this file as its parent, or is it"),
        ({"description": None}, "description", "valid string"),
        ({"grpo": {"kl_betta": 0.5}}, "grpo.kl_betta", "did you mean `kl_beta`?"),
        ({"take": ["evaluation"]}, "take.0", "'dataset'"),
        ({"take": ["dataset"], "seeds": [1, 9]}, "seeds", "exp has [1, 2] only"),
        ({"take": ["dataset"], "iterations": 3}, "iterations", "exp has 2 only: raise it there"),
        ({"take": ["grounder"], "sft": {"epochs": 1}}, "take", "grounder is exp's, but this file changes settings"),
        ({"take": ["open_models"], "models": {"base_planner": "z"}}, "take", "open_models is exp's, but"),
        ({"take": ["planner_sft", "grounder"], "init": "previous"}, "take", "grounder is exp's, but this file changes"),
        ({"agent": "end_to_end"}, "(whole file)", "add `take: [dataset]`"),
        ({"agent": "end_to_end", "take": ["dataset", "grounder"]}, "(whole file)", "take `dataset` only"),
        ({**ONE_MODEL, "sft": {"folds": 2, "target": "box"}}, "(whole file)", "sft.folds: set `folds"),
        ({**ONE_MODEL, "sft": {"target": "box"}}, "(whole file)", "sft.target: set `target"),
        (
            {**ONE_MODEL, "evaluation": {"inference": {"zoom": {}}}},
            "(whole file)",
            "evaluation.inference: leave it out",
        ),
        (
            {**ONE_MODEL, "grpo": {"curation": {"transition_pairs": {}}}},
            "(whole file)",
            "transition_pairs is for planners",
        ),
        ({"take": ["dataset"], "automation": ["regenerate_weekly"]}, "(whole file)", "belongs where D_k is made"),
    ],
)
def test_what_is_refused_in_an_overlay(tmp_path: Path, change: dict[str, Any], key: str, remedy: str) -> None:
    with pytest.raises(ExperimentError) as refused:
        load_experiment(overlay(tmp_path, **change))
    named = [line for line in str(refused.value).splitlines() if f"over.yaml: key `{key}`" in line]
    assert named and remedy.split(":")[0] in named[0]


def test_a_broken_parent_is_named_by_its_file(tmp_path: Path) -> None:
    file = overlay(tmp_path)
    write(tmp_path, content(sed=1))
    with pytest.raises(ExperimentError, match=r"over\.yaml: key `parent`: exp cannot be used: .*exp\.yaml: key `sed`"):
        load_experiment(file)


def test_a_bad_file_costs_only_its_experiment_and_what_builds_on_it(tmp_path: Path) -> None:
    write(tmp_path, content(), "good")
    write(tmp_path, OVERLAY | {"parent": "good"}, "child")
    write(tmp_path, "description: [half a dra", "draft")
    write(tmp_path, OVERLAY | {"parent": "draft"}, "grandchild")
    write(tmp_path, content(), "good copy")
    write(tmp_path, OVERLAY | {"parent": "good", "take": ["planner_sft", "grounder"], "init": "previous"}, "taker")
    write(tmp_path, OVERLAY | {"parent": "taker"}, "of_taker")
    shutil.copy(tmp_path / "good.yaml", os.fsencode(tmp_path) + b"/caf\xe9.yaml")
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "gone.yaml").symlink_to("nowhere")
    for hidden in ("._good.yaml", ".yaml", ".good.yaml.swp"):
        (tmp_path / hidden).write_bytes(b"\x00\x05\x16\x07 Mac OS X \xb0")
    (tmp_path / ".#good.yaml").symlink_to("me@here.1234")
    experiments = find_experiments(tmp_path)
    assert list(experiments) == ["child", "good"]
    reasons = {
        "draft": "draft.yaml, line 1, column 25: not valid YAML",
        "grandchild": "grandchild.yaml: key `parent`: draft cannot be used",
        "good copy": "good copy.yaml: the name of the file: use lower-case letters, digits and _",
        "taker": "taker.yaml: key `take`: grounder is good's, but this file changes settings",
        "of_taker": "of_taker.yaml: key `parent`: taker cannot be used: ",
        r"caf\udce9": r"caf\udce9.yaml: the name of the file: use lower-case letters, digits and _",
        "folder": "folder.yaml: cannot be read",
        "gone": "gone.yaml: there is no such file",
    }
    assert experiments.left_out.keys() == reasons.keys()
    for name, why in reasons.items():
        assert why in experiments.left_out[name]
        with pytest.raises(ExperimentError, match=re.escape(why)):
            split_reference(name, experiments.named)
    with pytest.raises(ExperimentError, match="no experiment 'other'; known: child, good"):
        split_reference("other", experiments.named)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(Experiment.model_fields)), VALUES, st.booleans())
def test_whatever_a_file_holds_it_costs_no_other(key: str, value: Any, parent: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, content(), "good")
        raw = {"description": "x", "parent": "good", key: value} if parent else content() | {key: value}
        (folder / "other.yaml").write_text(json.dumps(raw), "utf-8")
        found = find_experiments(folder)
        assert "good" in found and ("other" in found) is not ("other" in found.left_out)
        assert found.left_out.get("other", "other.yaml").find("other.yaml") >= 0


def test_an_ablation_has_a_unique_name(tmp_path: Path) -> None:
    folder = tmp_path / "experiments"
    (folder / "ablations").mkdir(parents=True)
    for file in (folder / "one", folder / "ablations" / "one", folder / "ablations" / "two"):
        write(file.parent, content(description=str(file)), file.name)
    experiments = Project(tmp_path).all_experiments()
    assert {name: one.description for name, one in experiments.items()} == {
        "one": str(folder / "one"),
        "two": str(folder / "ablations" / "two"),
    }
    assert "has the same name: rename one" in experiments.left_out["one"]


def test_an_experiment_that_is_named_is_found_as_among_all_and_no_other_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read, actually = tmp_path / "experiments", list[str](), yaml_files.read
    (folder / "ablations").mkdir(parents=True)
    for place, name in ((folder, "one"), (folder, "bad"), (folder / "ablations", "one"), (folder / "ablations", "bad")):
        write(place, content(description=str(place)), name)
    write(folder / "ablations", {"parent": "one", "description": "its child"}, "child")
    (folder / "bad.yaml").write_text("seeds: none")
    (folder / ".hidden.yaml").write_bytes((folder / "one.yaml").read_bytes())
    project = Project(tmp_path)
    known = project.all_experiments()
    for name in ("one", "child"):
        with monkeypatch.context() as patch:
            patch.setattr("coepg_dagster.yaml_files.read", lambda path: (read.append(path.stem), actually(path))[1])
            assert project.experiment(name) == known.named(name)
    assert read == ["one", "child", "one"]
    for name in ("bad", ".hidden", "../experiments/one", "none", "", "\udcff"):
        with pytest.raises(ExperimentError) as among_all:
            known.named(name)
        with pytest.raises(ExperimentError, match=re.escape(str(among_all.value))):
            project.experiment(name)


@pytest.mark.parametrize("parent", ["../exp", "/etc/passwd", "x" * 5000, ["exp"], 3, True, "Exp", ""])
def test_a_parent_is_a_name(tmp_path: Path, parent: Any) -> None:
    with pytest.raises(ExperimentError, match=r"over\.yaml: key `parent`: .* is no name of an experiment"):
        load_experiment(overlay(tmp_path, parent=parent))


def test_nothing_is_taken_from_an_overlay_that_takes(tmp_path: Path) -> None:
    overlay(tmp_path, take=["dataset"], grpo={})
    second = write(tmp_path / "ablations", {"description": "x", "parent": "over", "take": ["dataset"]}, "second")
    with pytest.raises(ExperimentError, match="over takes artifacts itself"):
        load_experiment(second)


def test_ablations_of_the_repository_differ_from_the_sandbox_in_what_they_say_only() -> None:
    folder = REPOSITORY / "experiments"
    sandbox = load_experiment(folder / "sandbox.yaml")
    changes = {
        "no_cdrem": {"grpo.ensemble"},
        "no_grpo": {"grpo.enabled"},
        "before_grpo": {"grpo.enabled"},
        "uniform": {"grpo.own_prior", "grpo.verifier_prior"},
        "prior_only": {"grpo.confidence"},
        "literal": {"grpo.confidence"},
        "temperature": {"grpo.confidence_temperature"},
        "validated": {"grpo.validate_every"},
        "labels_25": {"benchmark.max_train_steps", "grpo.max_prompts"},
        "labels_50": {"benchmark.max_train_steps", "grpo.max_prompts"},
        "init_base": {"init"},
    }
    for name, expected in changes.items():
        other = load_experiment(folder / "ablations" / f"sandbox_{name}.yaml")
        before, after = (experiment.model_dump(mode="json") for experiment in (sandbox, other))
        different = {
            f"{part}.{key}"
            for part in ("benchmark", "models", "sft", "grpo", "regeneration")
            for key in before[part]
            if before[part][key] != after[part][key]
        } | {key for key in ("init",) if before[key] != after[key]}
        assert different == expected
        assert all(before[key] == after[key] for key in ("iterations", "seeds", "batch_size", "pool"))


def combined(folder: Path, first: Any, second: Any, **own: Any) -> Path:
    """A file that combines two overlays of another experiment."""
    write(folder, content(grpo={"group_size": 6}))
    (folder / "plugins").mkdir(exist_ok=True)
    for name, grpo in (("one", first), ("two", second)):
        write(folder / "plugins", {"description": name, "parent": "elsewhere", "take": ["dataset"], "grpo": grpo}, name)
    return write(folder, {"description": "both", "parent": "exp", "overlays": ["one", "two"], **own}, "both")


def test_two_overlays_combine_without_code(tmp_path: Path) -> None:
    first = {"point_score": {"name": "gui_g2", "alpha": 0.25}, "terms": {"format": 0.1}}
    both = load_experiment(combined(tmp_path, first, {"advantage": ["sngs"], "terms": {"length": 0.2}}))
    assert both.grpo.point_score == {"name": "gui_g2", "alpha": 0.25} and set(both.grpo.terms) == {"format", "length"}
    assert both.grpo.advantage[0]["name"] == "sngs" and both.grpo.group_size == 6 and not both.take
    same = load_experiment(combined(tmp_path, first, first))
    assert same.grpo.point_score == first["point_score"]


def test_overlays_that_conflict_are_refused_with_key_and_files(tmp_path: Path) -> None:
    values = ({"point_score": "gui_g2"}, {"point_score": "se_gui"})
    with pytest.raises(
        ExperimentError, match=r"one\.yaml and .*two\.yaml differ in `grpo\.point_score`.*give it in this"
    ):
        load_experiment(combined(tmp_path, *values))
    assert load_experiment(combined(tmp_path, *values, grpo={"point_score": "lpo"})).grpo.point_score == {"name": "lpo"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"overlays": ["three"]}, "key `overlays`: there is no three.yaml in"),
        ({"overlays": ["both"]}, "key `overlays`: both has this file among its overlays, or is it"),
        ({"overlays": ["exp"]}, "is no overlay, since it has no `parent`"),
        ({"overlays": ["../one"]}, "is no name of an experiment"),
        ({"overlays": "one"}, "valid list"),
    ],
)
def test_what_is_no_overlay_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(ExperimentError, match=re.escape(message)):
        load_experiment(combined(tmp_path, {"kl_beta": 0.2}, {"clip_epsilon": 0.1}, **change))


def test_overlays_of_plugins_are_in_a_code_location_that_the_ui_does_not_load() -> None:
    project = Project(REPOSITORY)
    assert project.location_of("se_gui") == ("plugins", "coepg_dagster.plugged")
    assert (
        project.location_of("sandbox_no_cdrem")[0] == "reproductions" and project.location_of("sandbox")[0] == "coepg"
    )
    assert "se_gui" in project.all_experiments() and "se_gui" not in project.experiments()
    assert "plugged" not in (REPOSITORY / "workspace.yaml").read_text()
