"""The loop runs unchanged on data in the formats of Multimodal-Mind2Web and AndroidControl.

The files are real Parquet and TFRecord files made here from MiniWoB++ screens, which the tiny models can read; the target
is the whole screen, so that some plan is verified whatever the tiny grounders say.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from PIL import Image

from tests.miniwob import labelled_steps
from tests.project import REPOSITORY, Forked, make_project, run
from tests.readers.samples import candidate, episode, forest, mind2web_row, write_android_control, write_mind2web

pytestmark = [pytest.mark.slow, pytest.mark.long]
SIZE = 168, 224


def screens(count: int) -> list[tuple[str, bytes]]:
    """(goal, PNG) of MiniWoB++ steps whose label is a click, no two of them the same."""
    rows = labelled_steps().to_pylist()
    clicks = list(
        {
            row["screenshot"]: row
            for row in rows
            if row["family"] in ("click-test-2", "click-button") and row["action_type"] == "CLICK"
        }.values()
    )
    assert len(clicks) >= count
    return [(row["goal"], plain_png(row["screenshot"])) for row in clicks[:count]]


def plain_png(encoded: bytes) -> bytes:
    """The screen as an RGB PNG, as the datasets hold them."""
    out = io.BytesIO()
    Image.open(io.BytesIO(encoded)).convert("RGB").save(out, "PNG")
    return out.getvalue()


def mind2web(folder: Path) -> None:
    """Twenty tasks for training and, from a hash of their names, validation; two tasks in each test split."""
    whole = [candidate(0, 0, *SIZE)]
    operation = json.dumps({"op": "CLICK", "original_op": "CLICK", "value": ""})

    def rows(name: str, pages: list[tuple[str, bytes]]) -> list[dict[str, object]]:
        return [
            mind2web_row(
                f"{name}{i}",
                confirmed_task=goal,
                operation=operation,
                pos_candidates=whole,
                screenshot={"bytes": png, "path": None},
            )
            for i, (goal, png) in enumerate(pages)
        ]

    pages = screens(26)
    write_mind2web(folder / "train-0.parquet", rows("train", pages[:20]))
    for i, split in enumerate(("test_task", "test_website", "test_domain")):
        write_mind2web(folder / f"{split}-0.parquet", rows(split, pages[20 + 2 * i : 22 + 2 * i]))


def android_control(folder: Path) -> None:
    """Twelve episodes of one click, eight of them for training."""
    whole = forest(((0, 0, *SIZE), True, 0, "root"))
    records = [
        episode(
            i,
            [{"action_type": "click", "x": 80, "y": 120}],
            goal=[goal.encode()],
            screenshots=[png] * 2,
            accessibility_trees=[whole] * 2,
            screenshot_widths=[SIZE[0]] * 2,
            screenshot_heights=[SIZE[1]] * 2,
        )
        for i, (goal, png) in enumerate(screens(12))
    ]
    write_android_control(folder, records, {"train": list(range(8)), "validation": [8, 9], "test": [10, 11]})


SMALLER = {
    "max_steps: 3": "max_steps: 1",
    "max_steps: 2": "max_steps: 1",
    "{base_planner: true, attempts: 2}": "{}",
    ", planner_b: models/planner-b": "",
    ", verifier_b: models/verifier-b": "",
}
FORMATS = {
    "mind2web": (mind2web, "[test_task, test_website, test_domain]", "mind2web/uground"),
    "android_control": (android_control, "[test]", "android_control/os_atlas"),
}


def test_the_loop_runs_on_both_formats(tmp_path: Path) -> None:
    running = {}
    for name, (make, tests, protocol) in FORMATS.items():
        tiny = (REPOSITORY / "tests" / "experiments" / "tiny.yaml").read_text()
        for old, new in SMALLER.items():
            assert old in tiny
            tiny = tiny.replace(old, new)
        start, end = tiny.index("benchmark:"), tiny.index("models:")
        benchmark = f"benchmark:\n  reader: {name}\n  path: sample\n  test: {tests}\n  protocol: {protocol}\n\n"
        file = tmp_path / f"{name}.yaml"
        file.write_text(tiny[:start] + benchmark + tiny[end:])
        project = make_project(tmp_path / "projects" / name, file)
        make(project / "sample")
        running[name] = project, Forked(project, "evolve", name, "--through", "1", "--processes", "1")
    for name, (project, process) in running.items():
        out, err = process.communicate(timeout=3000)
        assert process.returncode == 0, f"{name}\n{out}\n{err}"
        table = json.loads(run(project, "results", name, "--json"))
        assert [row["iteration"] for row in table["iterations"]] == [0, 1]
        assert all(row["coverage"] > 0 for row in table["iterations"])
        scored = [split for row in table["iterations"] for split in row["splits"].values()]
        assert all(split["steps"] > 0 for split in scored)
