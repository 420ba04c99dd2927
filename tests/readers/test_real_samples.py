"""The readers on real samples; they are read where they lie, see tests/evaluation/shared.py."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from coepg_dagster.readers.importing import Options, import_dataset
from coepg_dagster.readers.views import choose
from tests.evaluation.shared import SAMPLES, needs_data

from .samples import load, write_mind2web

pytestmark = needs_data


@pytest.mark.parametrize(("name", "same", "different", "without"), [("task", 1254, 2, 82), ("website", 973, 2, 44)])
def test_our_blocks_are_ugrounds(name: str, same: int, different: int, without: int) -> None:
    """Block and shifted boxes of every step whose target lies in a block; the rest got a random crop there."""
    counts: Counter[str] = Counter()
    for line in (SAMPLES / f"mind2web_uground/cross_{name}_blocks.jsonl").read_text().splitlines():
        row = json.loads(line)
        boxes = [(x, y, x + w, y + h) for x, y, w, h in row["bbox"]]
        theirs = {int(block): held for block, held in row["target_blocks"].items() if held}
        if not boxes or not theirs:
            counts["without"] += 1
            continue
        view, held, rule = choose(boxes, 1280, 30_000, "target_block")
        ours = [[x1 - view[0], y1 - view[1], x2 - x1, y2 - y1] for x1, y1, x2, y2 in held]
        agree = rule == f"block {min(theirs)}" and ours == [pytest.approx(box) for box in theirs[min(theirs)]]
        counts["same" if agree else "different"] += 1
    assert counts == {"same": same, "different": different, "without": without}


def test_a_real_step_with_its_candidates_and_page(tmp_path: Path) -> None:
    row = json.loads((SAMPLES / "seeact_step/queries.jsonl").read_text())
    page = (SAMPLES / "seeact_step/images/0.jpg").read_bytes()
    write_mind2web(
        tmp_path / "data/test_task-00000-of-00001.parquet",
        [
            {
                "action_uid": row["action_uid"],
                "operation": json.dumps(row["operation"]),
                "pos_candidates": [json.dumps(candidate) for candidate in row["pos_candidates"]],
                "neg_candidates": [json.dumps(candidate) for candidate in row["neg_candidates"]],
                "website": row["website"],
                "annotation_id": row["annotation_id"],
                "confirmed_task": row["confirmed_task"],
                "screenshot": {"bytes": page, "path": None},
                "action_reprs": [*row["previous_actions"], "[button]  Search -> CLICK"],
                "target_action_index": "2",
            }
        ],
    )
    counts = import_dataset("mind2web", tmp_path / "data", tmp_path / "out", Options(max_bad_share=0))
    (step,) = load(tmp_path / "out").to_pylist()
    assert counts.rejected == {} and step["view_rule"] == "block 0"
    assert step["boxes"] == [[587.0, pytest.approx(596.59375), 680.0, pytest.approx(650.59375)]]
    assert step["history"] == row["previous_actions"] and (step["width"], step["height"]) == (1280, 1000)
