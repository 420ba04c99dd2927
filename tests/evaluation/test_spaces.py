"""A file whose points may be in another space than pixels is refused, whatever its labels hold; no other file is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coepg_dagster.evaluation.case import ScoringError

from .shared import score_file

SIZE = (1920, 1440)
TARGETS = [(1400 + 10 * i, 1100 + 5 * i) for i in range(40)]
SIDES = {"unit": (1.0, 1.0), "norm_1000": (1000.0, 1000.0), "original": SIZE}

# protocol, name of a click, what a label has beside its point
BOARDS = [
    ("android_control/strict14", "click", ("point",)),
    ("android_control/qwen", "click", ("point", "boxes")),
    ("gui_odyssey/ams", "CLICK", ("point",)),
    ("aitw/action_matching", "DUAL_POINT", ("point",)),
    ("guiact/steps", "tap", ("point",)),
    ("mind2web/seeclick", "CLICK", ("boxes",)),
    ("omniact/action_score", "click", ("actions", "box")),
    ("omniact/action_score", "script", ("actions", "boxes")),
    ("aitz/action_matching", "click", ("point", "predicted box")),
]


def row(n: int, space: str, protocol: str, name: str, has: tuple[str, ...], point: Any = None) -> dict[str, Any]:
    """A row whose prediction is right in `space`, or is `point`."""
    x, y = TARGETS[n]
    box = [x - 20, y - 20, x + 20, y + 20]
    there = point or [x * SIDES[space][0] / SIZE[0], y * SIDES[space][1] / SIZE[1]]
    label: dict[str, Any] = {"action_type": name, "point": [x, y] if "point" in has else None}
    label |= {"boxes": [box]} if "boxes" in has else {}
    predicted: dict[str, Any] = {"action_type": name, "point": there}
    if "predicted box" in has:
        predicted = {"action_type": name, "box": there * 2}
    if "actions" in has:
        action = {"action_type": "click", "point": [x, y], "box": box}
        script = f"pyautogui.click({x}, {y})", f"pyautogui.click({there[0]}, {there[1]})"
        label = {"actions": [script[0] if name == "script" else action]} | (
            {"boxes": [box]} if name == "script" else {}
        )
        predicted = {"actions": [script[1] if name == "script" else {"action_type": "click", "point": there}]}
    about = {"step_id": str(n), "episode_id": "e", "step_index": n, "group": "g", "width": SIZE[0], "height": SIZE[1]}
    return about | {"label": label, "prediction": predicted}


def micro(folder: Path, rows: list[dict[str, Any]], protocol: str) -> float:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return list(score_file(path, "coepg", protocol).metrics.values())[-1].micro or 0.0


@pytest.mark.parametrize("board", BOARDS)
@pytest.mark.parametrize("odd", [None, [1.002, 0.5], [1001, 3], [-0.002, 0.5], [-1, -1]])
def test_unconverted_points_are_refused_whatever_the_labels_hold(
    tmp_path: Path, board: tuple[str, str, tuple[str, ...]], odd: Any
) -> None:
    for space in ("unit", "norm_1000"):
        rows = [row(n, space, *board) for n in range(len(TARGETS))]
        if odd is not None:
            rows[3] = row(3, space, *board, point=odd)
        with pytest.raises(
            ScoringError, match=r"fit two spaces: read as pixels 0 of them .* (39|40) of them .* `space`"
        ):
            micro(tmp_path, [each | {"space": None} for each in rows], board[0])
        said = micro(tmp_path, [each | {"space": space} for each in rows], board[0])
        assert said > 90 or "predicted box" in board[2]  # IoU and elements are another matter


@pytest.mark.parametrize("protocol", ["android_control/strict14", "aitw/action_matching", "omniact/action_score"])
def test_points_in_0_to_1_are_refused_also_where_both_readings_score_the_same(tmp_path: Path, protocol: str) -> None:
    """Targets near the corner, or a model that hits nothing."""
    _, name, has = next(board for board in BOARDS if board[0] == protocol)
    for point in ([0.1, 0.1], [1, 1]):
        rows = [row(0, "unit", protocol, name, has, point) | {"step_id": str(n)} for n in range(3)]
        if point == [0.1, 0.1]:
            rows = json.loads(json.dumps(rows).replace("1400", "150").replace("1100", "100"))
        with pytest.raises(ScoringError, match="all 3 points fit two spaces"):
            micro(tmp_path, rows, protocol)


@pytest.mark.parametrize("board", BOARDS)
def test_points_in_pixels_are_scored(tmp_path: Path, board: tuple[str, str, tuple[str, ...]]) -> None:
    rows = [row(n, "original", *board) for n in range(len(TARGETS))]
    assert micro(tmp_path, rows, board[0]) > 90 or "predicted box" in board[2]
    # as are those of a model that answers in a corner of the screen, and a few in 0..1
    assert micro(tmp_path, [row(n, "original", *board, point=[9.0 + n, 7.0]) for n in range(40)], board[0]) < 50
    few = [row(n, "unit" if n < 4 else "original", *board) for n in range(len(TARGETS))]
    assert micro(tmp_path, few, board[0]) > 80 or "predicted box" in board[2]


@pytest.mark.parametrize("board", [board for board in BOARDS if "actions" not in board[2]])
@pytest.mark.parametrize("space", ["original", "unit", "norm_1000"])
def test_labels_in_0_to_1_beside_points_in_pixels_are_refused(
    tmp_path: Path, board: tuple[str, str, tuple[str, ...]], space: str
) -> None:
    rows = [row(n, space, *board) | {"space": space} for n in range(len(TARGETS))]
    for each in rows:
        label = each["label"]
        if label["point"] is not None:
            label["point"] = [label["point"][0] / SIZE[0], label["point"][1] / SIZE[1]]
        if "boxes" in label:
            label["boxes"] = [
                [x1 / SIZE[0], y1 / SIZE[1], x2 / SIZE[0], y2 / SIZE[1]] for x1, y1, x2, y2 in label["boxes"]
            ]
    with pytest.raises(ScoringError, match=r"40 of 40 labels are in 0\.\.1, and their predictions are beyond it"):
        micro(tmp_path, rows, board[0])
