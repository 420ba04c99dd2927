"""Reward functions of other systems, by name: scores of a place against target boxes, and terms about an answer.

A function's positional parameters name what it gets (`answers.Answers`): of the B answers to one step, `points` (B, 2), `areas`
(B, 4), `texts`, `plans`, `candidates`; of the step, `boxes` (M, 4), `size`, `references`. Its keyword-only parameters are its
settings. It returns (B,) scores from 0, or from the `lowest` that its decorator names, to 1. With several boxes the best one
counts. All coordinates are pixels of the stored screenshot, and boxes include their borders.

A function that asks for nothing but places, boxes and size can be the `point_score`: it then takes the place of Acc_j in Eq. 4.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Final

import numpy as np
from annotated_types import Ge, Gt, Interval

from coepg_dagster.plugins import plugin
from coepg_dagster.rewards.answers import Floats
from coepg_dagster.rewards.cdrem import token_f1

Share = Annotated[float, Interval(ge=0, le=1)]
Positive = Annotated[float, Gt(0)]
Weight = Annotated[float, Ge(0)]


@plugin("reward", "Co-EPG, arXiv 2511.10705, Eq. 3")
def hit(points: Floats, boxes: Floats) -> Floats:
    """Acc: 1 if the point is in a box, borders included. The default.

    >>> hit(np.array([[10, 10], [21, 10]]), np.array([[0, 0, 20, 20]]))
    array([1., 0.])
    """
    return _best(_inside(points, boxes))


@plugin("reward", "SE-GUI, arXiv 2505.12370")
def se_gui(points: Floats, boxes: Floats, size: tuple[float, float]) -> Floats:
    """Dense point: (1[in box] + 1 - (d / d_max)²) / 2, with d to the box's centre and d_max from it to the farthest corner.

    Departures: halved, so that it is from 0 to 1; a point outside the image has no decay term (the code's is below 0 there).

    >>> se_gui(np.array([[50, 50], [0, 0], [200, 50]]), np.array([[40, 40, 60, 60]]), (100, 100))
    array([1., 0., 0.])
    """
    corners = np.array([[x, y] for x in (0, size[0]) for y in (0, size[1])])
    centres = _centres(boxes)
    farthest = np.linalg.norm(centres[:, None] - corners, axis=-1).max(axis=1)
    decay = 1 - (np.linalg.norm(points[:, None] - centres, axis=-1) / farthest) ** 2
    screen = np.array([[0.0, 0.0, *size]])
    decay = _inside(points, screen) * np.clip(decay, 0, 1)
    return _best((_inside(points, boxes) + decay) / 2)


@plugin("reward", "GUI-G², arXiv 2507.15846")
def gui_g2(points: Floats, boxes: Floats, *, alpha: Positive = 0.5) -> Floats:
    """Gaussian point: exp(-½ [(x-μx)²/σx² + (y-μy)²/σy²]), μ the box's centre, σ = alpha · its width and height.

    >>> gui_g2(np.array([[50, 50], [60, 50]]), np.array([[40, 40, 60, 60]])).round(4)
    array([1.    , 0.6065])
    """
    return _best(_gaussian(points, boxes, alpha))


@plugin("reward", "GUI-G², arXiv 2507.15846")
def gui_g2_coverage(areas: Floats, boxes: Floats, *, alpha: Positive = 0.5, point: Share = 0.5) -> Floats:
    """Gaussian point and coverage of a predicted box: point · R_point + (1 - point) · R_coverage.

    R_coverage is the Bhattacharyya coefficient of the two boxes' Gaussians (σ = alpha · side, axes apart):
    Π √(2 σ₁σ₂ / (σ₁² + σ₂²)) · exp(-Δμ² / (4 (σ₁² + σ₂²))). Departure: the weights sum to 1 (in the paper they are 1 and 1).

    >>> gui_g2_coverage(np.array([[40, 40, 60, 60], [45, 45, 55, 55]]), np.array([[40, 40, 60, 60]]))
    array([1. , 0.9])
    """
    predicted, wanted = alpha * _sides(areas)[:, None], alpha * _sides(boxes)[None]
    spread = predicted**2 + wanted**2
    apart = (_centres(areas)[:, None] - _centres(boxes)[None]) ** 2
    coverage = (np.sqrt(2 * predicted * wanted / spread) * np.exp(-apart / (4 * spread))).prod(axis=-1)
    return _best(point * _gaussian(_centres(areas), boxes, alpha) + (1 - point) * coverage)


@plugin("reward", "LPO, arXiv 2506.09373")
def lpo(points: Floats, boxes: Floats, size: tuple[float, float]) -> Floats:
    """Location preference: 1 - d / (diagonal of the screen), d to the box's centre; 0 from one diagonal on.

    Departures: LPO's idea of a reward by physical distance, in this project's formula, and without its window entropy term,
    which needs the pixels.

    >>> lpo(np.array([[30, 40], [27, 36]]), np.array([[30, 40, 30, 40]]), (30, 40))
    array([1. , 0.9])
    """
    distance = np.linalg.norm(points[:, None] - _centres(boxes), axis=-1)
    return _best(np.clip(1 - distance / np.hypot(*size), 0, 1))


@plugin("reward", "Step-GUI, arXiv 2512.15431")
def step_gui(points: Floats, boxes: Floats, *, tolerance: Positive = 1.0) -> Floats:
    """Fourth power: exp(-(δx⁴ + δy⁴)), δ the distance to the box's centre in units of `tolerance` · half its sides.

    >>> step_gui(np.array([[50, 50], [60, 50], [55, 50]]), np.array([[40, 40, 60, 60]])).round(4)
    array([1.    , 0.3679, 0.9394])
    """
    delta = (points[:, None] - _centres(boxes)) / (tolerance * _sides(boxes) / 2)
    return _best(np.exp(-(delta**4).sum(axis=-1)))


@plugin("reward", "Step-GUI, arXiv 2512.15431")
def step_gui_box(areas: Floats, boxes: Floats, *, tolerance: Positive = 1.0, iou: Share = 0.2) -> Floats:
    """Fourth power of a predicted box: (1 - iou) · exp(-E) + iou · IoU, E = δcx⁴ + δcy⁴ + ½ δw⁴ + ½ δh⁴.

    >>> step_gui_box(np.array([[40, 40, 60, 60]]), np.array([[40, 40, 60, 60]]))
    array([1.])
    """
    unit = tolerance * _sides(boxes) / 2
    moved = (_centres(areas)[:, None] - _centres(boxes)) / unit
    resized = (_sides(areas)[:, None] - _sides(boxes)) / unit
    power = (moved**4).sum(axis=-1) + (resized**4).sum(axis=-1) / 2
    return _best((1 - iou) * np.exp(-power) + iou * _iou(areas, boxes))


@plugin("reward", "MagicGUI, arXiv 2508.03700")
def magicgui(points: Floats, boxes: Floats, size: tuple[float, float], *, tolerance: Share = 0.14) -> Floats:
    """Tolerance: 1 if the point is within `tolerance` of the screen's sides from the box's centre, as an ellipse.

    >>> magicgui(np.array([[63, 50], [65, 50]]), np.array([[50, 50, 50, 50]]), (100, 100))
    array([1., 0.])
    """
    apart = (points[:, None] - _centres(boxes)) / np.array(size)
    return _best((np.linalg.norm(apart, axis=-1) <= tolerance).astype(np.float64))


@plugin("reward", "GUI-G1, arXiv 2505.15810")
def gui_g1(
    areas: Floats, boxes: Floats, size: tuple[float, float], *, alpha: Weight = 0.25, beta: Weight = 0.125
) -> Floats:
    """Hit, IoU and box size of a predicted box: (R_hit + alpha · R_IoU + beta · R_box) / (1 + alpha + beta).

    R_box is the harmonic mean of 1 - |Δ| / (width or height) over the four sides, 0 if one of them is not positive.
    Departure: divided by the sum of the weights, so that it is from 0 to 1.

    >>> gui_g1(np.array([[40, 40, 60, 60]]), np.array([[40, 40, 60, 60]]), (100, 100))
    array([1.])
    """
    near = 1 - np.abs(areas[:, None] - boxes) / np.array([*size, *size])
    with np.errstate(divide="ignore"):
        box = np.where((near > 0).all(axis=-1), 4 / (1 / near).sum(axis=-1), 0.0)
    score = _inside(_centres(areas), boxes) + alpha * _iou(areas, boxes) + beta * box
    return _best(score / (1 + alpha + beta))


@plugin("reward", "InfiGUI-R1, arXiv 2504.14239")
def infigui_r1_box(areas: Floats, boxes: Floats, *, enough: Annotated[float, Interval(gt=0, le=1)] = 0.7) -> Floats:
    """A predicted box: 1 if IoU ≥ `enough`, else IoU / `enough`.

    >>> infigui_r1_box(np.array([[0, 0, 10, 10], [0, 0, 10, 3.5]]), np.array([[0, 0, 10, 10]]))
    array([1. , 0.5])
    """
    return _best(np.minimum(_iou(areas, boxes) / enough, 1))


OF_A_BOX: Final = frozenset({step_gui_box.__name__, infigui_r1_box.__name__})
"""Rewards that are 0, or nearly, for an answer that is a point."""


@plugin("reward", "InfiGUI-G1, InfiXAI/InfiGUI-G1", lowest=-1.0)
def infigui_g1(candidates: Sequence[Floats], boxes: Floats) -> Floats:
    """Several places in one answer: 1 / √(N k) if the k-th of N is the first hit, else -1 / N, and -1 without a place.

    Three or more places on one line are invalid: -1. It is from -1 to 1. The shipped prompts ask for one place; for one it is
    1 or -1.

    >>> places = [np.array([[50.0, 50.0], [0.0, 0.0]]), np.array([[0.0, 0.0], [50.0, 50.0]]), np.array([[0.0, 0.0]])]
    >>> infigui_g1(places, np.array([[40, 40, 60, 60]])).round(4)
    array([ 0.7071,  0.5   , -1.    ])
    """
    return np.array([_first_hit(places, boxes) for places in candidates])


def _first_hit(places: Floats, boxes: Floats) -> float:
    n = len(places)
    if not n or (n > 2 and np.linalg.matrix_rank(places - places[0], tol=1e-6) < 2):
        return -1.0
    hits = np.flatnonzero(_inside(places, boxes).any(axis=1))
    return float(1 / np.sqrt(n * (hits[0] + 1))) if hits.size else -1 / n


_POINT: Final = re.compile(r"\(\s*[0-9]+\s*,\s*[0-9]+\s*\)")


@plugin("reward", "GUI-R1, arXiv 2504.10458", name="format")
def exact_format(texts: Sequence[str]) -> Floats:
    """Hard format: 1 if the whole answer is one JSON object, or one point "(x,y)", as the prompts demand; else 0.

    >>> exact_format(['{"plan": "p", "action_type": "CLICK"}', "(3,4)", "It is at (3,4)."])
    array([1., 1., 0.])
    """
    return np.array([float(_POINT.fullmatch(text.strip()) is not None or _is_object(text)) for text in texts])


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


@plugin("reward", "GuirlVG, arXiv 2508.04389")
def guirlvg_format(texts: Sequence[str], *, coordinates: Annotated[int, Ge(1)] = 2) -> Floats:
    """Soft format: (<think> ½ + </think> ½ + <answer> ⅓ + </answer> ⅓ + the right number of coordinates ⅓) / 2.

    Coordinates are the whole numbers of the answer's part. The shipped prompts ask for no such tags.

    >>> guirlvg_format(["<think>a</think><answer>(3, 4)</answer>", "<answer>(3, 4)", "(3,4)"]).round(4)
    array([1.    , 0.3333, 0.1667])
    """
    scores = []
    for text in texts:
        answer = text.partition("<answer>")[2] or text
        numbers = re.findall(r"[0-9]+", answer.partition("</answer>")[0])
        tags = [("<think>" in text) / 2, ("</think>" in text) / 2, ("<answer>" in text) / 3, ("</answer>" in text) / 3]
        scores.append((sum(tags) + (len(numbers) == coordinates) / 3) / 2)
    return np.array(scores)


@plugin("reward", "A²FM's penalty of long plans")
def length(texts: Sequence[str], *, free: Annotated[int, Ge(0)] = 120, most: Annotated[int, Ge(1)] = 400) -> Floats:
    """Cost of length: 1 up to `free` characters, from there down to 0 at `most`.

    >>> length(["a" * 120, "a" * 260, "a" * 1000])
    array([1. , 0.5, 0. ])
    """
    if free >= most:
        raise ValueError(f"length: `free` ({free}) must be below `most` ({most})")
    return np.array([float(np.clip((most - len(text)) / (most - free), 0, 1)) for text in texts])


_THOUGHT: Final = re.compile(r"<(?:think|thinking|thought|reasoning)>", re.IGNORECASE)


@plugin("reward", "UIShift and GTA1: arXiv 2505.12493, 2507.05791")
def no_thinking(texts: Sequence[str]) -> Floats:
    """1 if the answer has no reasoning part.

    >>> no_thinking(["(3,4)", "<think>Where?</think>(3,4)"])
    array([1., 0.])
    """
    return np.array([float(_THOUGHT.search(text) is None) for text in texts])


_CONFIDENCE: Final = re.compile(r"<confidence>\s*([01](?:\.[0-9]{1,9})?)\s*</confidence>")


@plugin("reward", "HyperClick, arXiv 2510.27266")
def hyperclick(texts: Sequence[str], points: Floats, boxes: Floats, *, alpha: Weight = 0.25) -> Floats:
    """Spoken confidence: 1 - (ĉ - C)², with ĉ from <confidence>, C = exp(-½ d²) in the box and 0 outside; σ = alpha · side.

    alpha 0 is the binary target C = 1[in box]. Without a confidence in the answer it is 0. Refused without correctness, since
    the term alone is hacked by a low confidence.

    >>> texts = ["(50,50)<confidence>1.000</confidence>", "(0,0)<confidence>0.5</confidence>", "(50,50)"]
    >>> hyperclick(texts, np.array([[50, 50], [0, 0], [50, 50]]), np.array([[40, 40, 60, 60]]))
    array([1.  , 0.75, 0.  ])
    """
    target = _inside(points, boxes).astype(np.float64)
    if alpha:
        target *= _gaussian(points, boxes, alpha)
    scores = []
    for text, wanted in zip(texts, _best(target), strict=True):
        spoken = _CONFIDENCE.search(text)
        valid = spoken is not None and float(spoken[1]) <= 1
        scores.append(1 - (float(spoken[1]) - wanted) ** 2 if spoken is not None and valid else 0.0)
    return np.array(scores)


@plugin("reward", "InfiGUI-R1, arXiv 2504.14239")
def sub_goal(plans: Sequence[str], references: Sequence[str]) -> Floats:
    """How near a plan is to the step's sub-goal: token F1 with the nearest verified plan of D_{k-1}; 0 if there is none.

    Departure: the paper's grade is a model's, from 1 to 10, divided by 10.

    >>> sub_goal(["click the red button", "scroll"], ["click red button", "press it"]).round(4)
    array([0.8571, 0.    ])
    """
    return np.array([max((token_f1(plan, known) for known in references if plan), default=0.0) for plan in plans])


@plugin("reward", "GUI-RCPO, arXiv 2508.05615")
def gui_rcpo(areas: Floats, size: tuple[float, float], *, side: Positive = 50.0) -> Floats:
    """Region consistency within a group, without labels: Σ of v over the region / (|region| · v_max).

    v(x, y) counts the regions of the group that contain the place; a point becomes a square of `side` px (100 in the code).
    Regions are cut at the screen's borders; one without an area has 0. Computed exactly, on the grid of all borders.

    >>> gui_rcpo(np.array([[50, 50, 50, 50], [50, 50, 50, 50], [200, 200, 200, 200]]), (300, 300))
    array([1. , 1. , 0.5])
    """
    points = (areas[:, :2] == areas[:, 2:]).all(axis=1)
    grown = np.where(points[:, None], areas + np.array([-1, -1, 1, 1]) * side / 2, areas)
    grown = np.clip(grown, 0, np.array([*size, *size]))
    x, y = np.unique(grown[:, ::2]), np.unique(grown[:, 1::2])
    across = (grown[:, None, 0] <= x[:-1]) & (x[1:] <= grown[:, None, 2])
    down = (grown[:, None, 1] <= y[:-1]) & (y[1:] <= grown[:, None, 3])
    cells = across[:, :, None] & down[:, None, :]
    votes = cells.sum(axis=0)
    surface = np.diff(x)[:, None] * np.diff(y)[None, :]
    covered = (cells * surface).sum(axis=(1, 2))
    if not votes.size or not votes.max():
        return np.zeros(len(areas))
    agreed = (cells * surface * votes).sum(axis=(1, 2))
    return np.where(covered > 0, agreed / np.maximum(covered, 1e-12) / votes.max(), 0.0)


def _best(of_boxes: Floats) -> Floats:
    """The best of each answer's scores, shape (B, M) → (B,)."""
    best: Floats = of_boxes.max(axis=1)
    return best


def _inside(points: Floats, boxes: Floats) -> Floats:
    """1 where point b is in box m, shape (B, M)."""
    inside: Floats = ((points[:, None] >= boxes[:, :2]) & (points[:, None] <= boxes[:, 2:])).astype(np.float64)
    return inside[..., 0] * inside[..., 1]


def _centres(boxes: Floats) -> Floats:
    return (boxes[:, :2] + boxes[:, 2:]) / 2


def _sides(boxes: Floats) -> Floats:
    """Width and height, at least 1 px: some labels are points, and a width divides."""
    return np.maximum(boxes[:, 2:] - boxes[:, :2], 1.0)


def _gaussian(points: Floats, boxes: Floats, alpha: float) -> Floats:
    apart = (points[:, None] - _centres(boxes)) / (alpha * _sides(boxes))
    gauss: Floats = np.exp(-(apart**2).sum(axis=-1) / 2)
    return gauss


def _iou(areas: Floats, boxes: Floats) -> Floats:
    """Intersection over union, shape (B, M); 0 where both have no area."""
    overlap = np.minimum(areas[:, None, 2:], boxes[:, 2:]) - np.maximum(areas[:, None, :2], boxes[:, :2])
    shared = np.maximum(overlap, 0).prod(axis=-1)
    union = (areas[:, 2:] - areas[:, :2]).prod(axis=1)[:, None] + (boxes[:, 2:] - boxes[:, :2]).prod(axis=1) - shared
    return np.where(union > 0, shared / np.maximum(union, 1e-12), 0.0)
