"""The lineage map: every node and edge, what is stale, and nothing that a name could smuggle in."""

from __future__ import annotations

import re
from pathlib import Path

from coepg_dagster.auditing.archive import BASE
from coepg_dagster.experiment.files import load_experiment
from coepg_dagster.experiment.schema import Experiment
from coepg_dagster.provenance import LOOP, SHARED, Record, Ref, inputs_of, staleness
from coepg_dagster.reports.lineage import LineageView, key_number, lineage_page
from tests.assets.light import EXPERIMENT
from tests.test_provenance import CODE, REFS, K, whole_loop


def experiment(tmp_path: Path, text: str = EXPERIMENT) -> Experiment:
    file = tmp_path / "light.yaml"
    file.write_text(text.replace("iterations: 2", f"iterations: {K}"))
    return load_experiment(file)


def page(tmp_path: Path, records: dict[Ref, Record], text: str = EXPERIMENT) -> str:
    times = dict.fromkeys(records, 1_900_000_000.0)
    stale = staleness(records, CODE)
    return lineage_page(LineageView(experiment(tmp_path, text), 1, records, stale, times), "http://127.0.0.1:3000")


def test_every_artifact_is_a_node_and_every_input_an_edge(tmp_path: Path) -> None:
    html = page(tmp_path, whole_loop())
    nodes = re.findall(r'<g class="(\w+)" id="([\w-]+)"', html)
    assert {name for _, name in nodes} == {f"{ref.asset}-{ref.iteration}" for ref in REFS}
    assert {state for state, _ in nodes} == {"current"}
    edges = re.findall(r"<title>([^<]+) → ([^<]+)</title>", html)
    assert sorted(edges) == sorted((str(used), str(ref)) for ref in REFS for used in inputs_of(ref))
    assert html.count("2030-03-17 17:46:40 UTC") == len(SHARED) + (K + 1) * len(LOOP)
    assert "http://127.0.0.1:3000/assets/light/s1/dataset?view=partitions&amp;partition=2" in html


def test_stale_nodes_show_their_root_cause_and_missing_ones_are_shown(tmp_path: Path) -> None:
    records = whole_loop()
    records[Ref("dataset", 1)] = records[Ref("dataset", 1)].model_copy(update={"data_version": "b"})
    del records[Ref("evaluation", 3)]
    html = page(tmp_path, records)
    states = {name: state for state, name in re.findall(r'<g class="(\w+)" id="([\w-]+)"', html)}
    assert states["planner_sft-2"] == "stale" and states["planner_sft-1"] == "current"
    assert states["evaluation-3"] == "missing"
    assert "dataset[1] is now b, it read a" in html


def test_markup_in_a_description_or_a_version_is_shown_as_text(tmp_path: Path) -> None:
    records = whole_loop()
    bad = "<script>alert(1)</script>"
    records[Ref("dataset", 0)] = records[Ref("dataset", 0)].model_copy(
        update={"data_version": bad, "failed_checks": [bad]}
    )
    html = page(tmp_path, records, EXPERIMENT.replace("a loop of small JSON files", f'"{bad}"'))
    assert "<script" not in html and "&lt;script&gt;" in html


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    html = lineage_page(LineageView(experiment(tmp_path), 1, whole_loop(), {}, {}))
    assert "http" not in html.replace("http-equiv", "") and "src=" not in html


def test_the_map_goes_down_to_the_open_models(tmp_path: Path) -> None:
    models = {
        "base_planner": {"checkpoint": "models/base", "version": "0123456789abcdef", "files": {}},
        "verifiers/big": {"checkpoint": "org/<big>", "version": "fedcba9876543210fedcba9876543210fedcba98"},
    }
    html = lineage_page(LineageView(experiment(tmp_path), 1, whole_loop(), {}, {}), models=models)
    assert "weights 0123456789abcdef" in html and "revision fedcba9876543210" in html
    assert "org/&lt;big&gt;" in html and "<big>" not in html


def test_overlays_are_drawn_under_their_parent_with_what_they_take(tmp_path: Path) -> None:
    light = experiment(tmp_path)
    child = light.model_copy(update={"name": "child", "parent": "light", "take": ["grounder"], "seeds": [1, 7]})
    html = lineage_page(
        LineageView(light, 1, whole_loop(), {}, {}), experiments=[child, light], map_of=lambda n, s: f"../../{n}/s{s}"
    )
    places = {
        name: int(y)
        for name, y in re.findall(r'id="experiment-(\w+)">\s*<title>[^<]*</title>\s*<rect x="\d+" y="(\d+)"', html)
    }
    assert places["light"] < places["child"] and "takes grounder" in html
    assert 'href="../../child/s7"' in html and "Experiments and seeds" in html
    assert "Experiments and seeds" not in lineage_page(LineageView(light, 1, whole_loop(), {}, {}), experiments=[light])


def test_a_model_that_nobody_trained_has_no_time_but_says_so(tmp_path: Path) -> None:
    light = experiment(tmp_path)
    records = whole_loop()
    for asset in LOOP:
        text = key_number(light, records[Ref(asset, 0)].model_copy(update={"seconds": 0.004, "files": {BASE: "0"}}))
        assert text == ("" if asset in ("evaluation", "data_quality") else "an open model as it is")
    same = records[Ref("planner", 2)].model_copy(update={"files": {BASE: "0"}})  # GRPO is off
    assert key_number(light, same) == "the model before, as it is"
    assert key_number(light, records[Ref("dataset", 1)].model_copy(update={"seconds": 0.31})) == "made in 0.3 s"


def test_a_drawing_shrinks_to_its_window(tmp_path: Path) -> None:
    html = page(tmp_path, whole_loop())
    (drawing,) = re.findall(r'<svg style="([^"]*)" viewBox="0 0 (\d+)', html)
    width = int(drawing[1])
    assert f"width:100%;max-width:{width}px;min-width:{width * 3 // 4}px" in drawing[0]
    # the four iterations of the demo in a window of 1400 pixels, less the margins of the page and a scroll bar
    assert width * 3 // 4 <= 1400 - 48 - 2 - 15
