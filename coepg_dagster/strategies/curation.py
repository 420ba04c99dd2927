"""Data strategies (plug-ins of kind `data`): which rows of D_{k-1} SFT trains on and which prompts GRPO asks about, in which
order, with which weights.

`sft.curation` and `grpo.curation` of an experiment file name them. A strategy is a function of Rows or of Prompts, as the type
of its first parameter says; its keyword-only parameters are its settings. What models must say about the items it takes from
`Measures`. Strategies are applied in the order in which the file has them, each to what those before have kept.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from coepg_dagster.geometry import Box, Point, Size, Space
from coepg_dagster.plugins import find, plugin
from coepg_dagster.refusal import Refusal
from coepg_dagster.steps import NO_VALUE

Floats = npt.NDArray[np.float64]
Share = Annotated[float, Field(ge=0, le=1)]
Samples = Annotated[int, Field(ge=2, le=64)]
Name = Annotated[str, Field(min_length=1)]


class Measures(Protocol):
    """What models say about items: a value for each of `places`, positions in all rows or prompts of a training.

    Each value is computed once. A measure that a training cannot make raises Refusal.
    """

    def pass_rates(self, places: Sequence[int], samples: int) -> list[float]: ...
    def perplexities(self, places: Sequence[int]) -> list[float]: ...
    def boxes(self, places: Sequence[int], by: str) -> list[Box | Point | None]: ...
    def attention(self, places: Sequence[int], layers: int) -> list[Floats | None]: ...


@dataclass(frozen=True)
class Items:
    """What a strategy chooses from. `steps` has the step of each item (STEP_SCHEMA without the screenshot)."""

    steps: Sequence[Mapping[str, Any]]
    places: Sequence[int]  # among all items of the training
    measures: Measures

    def __len__(self) -> int:
        return len(self.places)


@dataclass(frozen=True)
class Rows(Items):
    """Rows of D_{k-1} before SFT (DATASET_SCHEMA)."""

    rows: Sequence[Mapping[str, Any]]

    def pass_rates(self, samples: int) -> list[float]:
        """The share of the verifiers that hit with the row's plan (1 where the action has no target); nothing is sampled."""
        return [row["hits"] / row["answered"] if row["answered"] else 1.0 for row in self.rows]

    def perplexities(self) -> list[float]:
        """exp(−mean log p) of each row's answer, by the model that training starts from."""
        return self.measures.perplexities(self.places)

    def boxes(self, by: str) -> list[Box | Point | None]:
        """The box that the open verifier `by` answers for each row's plan, in pixels of the stored screenshot.

        It is a point if the verifier answers points, None if it names no place.
        """
        return self.measures.boxes(self.places, by)

    def attention(self, layers: int) -> list[Floats | None]:
        """The attention map (`attention_map`) of the model that training starts from, over its last `layers` layers, while it
        answers; None: its answer is empty."""
        return self.measures.attention(self.places, layers)


@dataclass(frozen=True)
class Prompts(Items):
    """Steps that GRPO is to ask about."""

    def pass_rates(self, samples: int) -> list[float]:
        """Share, 0 to 1, of `samples` answers of π_k to each prompt that have the label's action and whose plan ϕ_k grounds."""
        return self.measures.pass_rates(self.places, samples)


@dataclass(frozen=True)
class Choice:
    """What a strategy chose.

    Args:
        left_out: position of an item → why, in a word or two; all others stay.
        order: the positions of all items, if training is to take what stays in this order; None: in its usual random order.
        weights: of the items in the loss, with mean 1; None: all 1.
        figures: what the record should say besides.
        pairs: positions of a prompt and of a later one of its episode: GRPO also asks which action leads from the screen of the
            first to that of the second (`training.transitions`).
    """

    left_out: Mapping[int, str] = field(default_factory=dict)
    order: Sequence[int] | None = None
    weights: Sequence[float] | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)
    pairs: Sequence[tuple[int, int]] = ()


# --- filters ----------------------------------------------------------------------------------------------------------


@plugin("data", "GUI-Libra (arXiv 2602.22190), Step-GUI (arXiv 2512.15431), SE-GUI (arXiv 2505.12370)")
def pass_rate(items: Rows | Prompts, *, at_least: Share = 0.0, at_most: Share = 1.0, samples: Samples = 8) -> Choice:
    """Leaves out items whose pass rate lies below `at_least` or above `at_most`, borders included.

    The pass rate of a prompt is that of `samples` answers of π_k, that of a row the share of the verifiers that hit. GUI-Libra
    drops below 0.3 of 10 answers of another model (`at_least: 0.3, samples: 10`), SE-GUI drops what all of 8 answers solve
    (`at_most: 0.99`), Step-GUI asks several models once each, as the verifiers of a row do.
    """
    if at_least > at_most:
        raise ValueError(f"at_least {at_least:g} is above at_most {at_most:g}: nothing would stay")
    rates = items.pass_rates(samples)
    out = {i: "too_hard" if p < at_least else "too_easy" for i, p in enumerate(rates) if not at_least <= p <= at_most}
    return Choice(out, figures=_mean(rates))


@plugin("data", "GUI-G1 (arXiv 2505.15810), MagicGUI (arXiv 2508.03700)")
def mixed_results(prompts: Prompts, *, samples: Samples = 8) -> Choice:
    """Leaves out the prompts of which `samples` answers of π_k are all right or all wrong: their groups would have no spread."""
    rates = prompts.pass_rates(samples)
    return Choice(
        {i: "all_wrong" if p == 0 else "all_right" for i, p in enumerate(rates) if p in (0, 1)}, figures=_mean(rates)
    )


def _mean(rates: Sequence[float]) -> dict[str, float]:
    return {"pass_rate": float(np.mean(rates))} if len(rates) else {}


_GENERIC: Final = re.compile(
    r"(?:please )?(?:(?:left |double )?(?:click|tap|press|select|choose|type|touch|open|use)(?: on| in| into)? ?)?"
    r"(?:here|it|there|(?:the |a |an |this |that )?(?:button|link|icon|element|field|box|text ?box|"
    r"input|image|item|text|area|option|target)?)",
    re.IGNORECASE,
)
_RAW: Final = re.compile(
    r"[A-Za-z0-9]+_[A-Za-z0-9_]+"  # snake_case
    r"|\b[a-z]{3,}(?:[A-Z][a-z0-9]+)+\b"  # camelCase, but no iPhone
    r"|//\w|</?\w+[ />]|\b\w+\[\w+[~|^$*]?="  # XPath, HTML, CSS
)


@plugin("data", "SE-GUI (arXiv 2505.12370), seed curation")
def seed_rules(rows: Rows, *, area_at_most: Share = 0.25, side_at_least: Annotated[float, Field(ge=0)] = 1.0) -> Choice:
    """Leaves out rows whose plan is generic ("click the button") or holds a raw element name (`submit_btn`), and rows whose box
    takes more than `area_at_most` of the screenshot or has a side below `side_at_least` px.

    These are SE-GUI's rules; its patterns are not published, these are this project's. Its grading of instructions by a
    multimodal model is what the verifiers of D_k do, its difficulty filter is `pass_rate`, and `label_check` stands for its
    classifier of boxes.
    """
    out = {}
    for i, (row, step) in enumerate(zip(rows.rows, rows.steps, strict=True)):
        plan = " ".join(row["plan"].strip().rstrip(".!").split())
        if _GENERIC.fullmatch(plan):
            out[i] = "generic_plan"
        elif _RAW.search(plan.replace(row["value"], "") if row["value"] else plan):
            out[i] = "raw_name"
        elif row["box"] is not None:
            x1, y1, x2, y2 = row["box"]
            if min(x2 - x1, y2 - y1) < side_at_least:
                out[i] = "small_box"
            elif (x2 - x1) * (y2 - y1) > area_at_most * step["width"] * step["height"]:
                out[i] = "large_box"
    return Choice(out)


@plugin("data", "GUI-Libra (arXiv 2602.22190), label check")
def label_check(rows: Rows, *, by: Name, side: Annotated[float, Field(gt=0)] = 50.0) -> Choice:
    """Leaves out rows whose label's point, the centre of the box, does not lie in the box that the open verifier `by` answers
    for the plan, borders included.

    Departs: if the verifier answers points, its box is a square of `side` px around the point (GUI-RC's). Rows without a
    target stay.
    """
    out = {}
    for i, (row, place) in enumerate(zip(rows.rows, rows.boxes(by), strict=True)):
        if row["box"] is None:
            continue
        if place is None:
            out[i] = "no_box"
            continue
        box = square(place, side) if isinstance(place, Point) else place
        if not box.contains(_box(row).centre):
            out[i] = "outside_the_box"
    return Choice(out)


def _box(row: Mapping[str, Any]) -> Box:
    x1, y1, x2, y2 = row["box"]
    return Box(x1, y1, x2, y2, Space.ORIGINAL)


def square(point: Point, side: float) -> Box:
    """The square of `side` around a point, in its space."""
    return Box(point.x - side / 2, point.y - side / 2, point.x + side / 2, point.y + side / 2, point.space)


@plugin("data", "SE-GUI (arXiv 2505.12370), attention filter")
def attention_filter(rows: Rows, *, threshold: Share = 0.2, layers: Annotated[int, Field(ge=1, le=256)] = 4) -> Choice:
    """Leaves out rows whose answer does not look at the target: keeps a row iff the largest value of its attention map A over
    the box exceeds `threshold` (τ, 0.2 in the paper), and the mean over the box exceeds the mean over the screenshot.

    Departs: the last `layers` layers instead of all. As in the code of SE-GUI, data are filtered before training; with
    `init: previous` the model of the last stage is what looks. Rows without a target stay.
    """
    out = {}
    for i, (row, step, looks) in enumerate(zip(rows.rows, rows.steps, rows.attention(layers), strict=True)):
        if row["box"] is None:
            continue
        if looks is None:
            out[i] = "no_answer"
            continue
        highest, mean = over_box(looks, _box(row), Size(step["width"], step["height"]))
        if highest <= threshold or mean <= float(looks.mean()):
            out[i] = "looks_elsewhere"
    return Choice(out)


def attention_map(attention: npt.ArrayLike, visual: npt.ArrayLike, grid: tuple[int, int]) -> Floats:
    """SE-GUI's map A, the largest value 1: where a model looks while it answers.

    Position 0, where attention rests that goes nowhere, is set to zero; then: renormalised over keys, mean over layers,
    renormalised over visual tokens, mean over generated tokens, divided by the largest value.

    Args:
        attention: mean over heads, shape (layers, generated tokens, keys).
        visual: positions of the visual tokens among the keys, row by row, shape (rows * columns,).
        grid: (rows, columns) of the visual tokens.
    Returns:
        A, shape (rows, columns).
    Raises:
        ValueError: shapes that do not fit, or a token without any attention to the image.
    """
    weights, places = np.array(attention, dtype=np.float64), np.asarray(visual, dtype=np.int64)
    if weights.ndim != 3 or 0 in weights.shape or places.shape != (grid[0] * grid[1],):
        raise ValueError(f"attention {weights.shape} and {places.size} visual tokens do not make a map of {grid}")
    weights[..., 0] = 0
    weights /= weights.sum(-1, keepdims=True)
    seen = weights.mean(0)[:, places]
    seen = (seen / seen.sum(-1, keepdims=True)).mean(0)
    if not np.all(np.isfinite(seen)):
        raise ValueError("a generated token has no attention to the image")
    looks: Floats = (seen / seen.max()).reshape(grid)
    return looks


def over_box(looks: Floats, box: Box, screenshot: Size) -> tuple[float, float]:
    """(largest, mean) value of a map over a box, each pixel having the value of its cell; a box without area: its cell's.

    Args:
        looks: shape (rows, columns), laid over the whole screenshot.
    """
    rows, columns = looks.shape
    down = _overlaps(box.y1 * rows / screenshot.height, box.y2 * rows / screenshot.height, rows)
    across = _overlaps(box.x1 * columns / screenshot.width, box.x2 * columns / screenshot.width, columns)
    weights = np.outer(down, across)
    return float(looks[weights > 0].max()), float((looks * weights).sum() / weights.sum())


def _overlaps(low: float, high: float, cells: int) -> Floats:
    """The length of [low, high] in each of `cells` cells of length 1; where it has none, 1 in the nearest cell."""
    edges = np.arange(cells + 1, dtype=np.float64)
    lengths: Floats = np.clip(np.minimum(edges[1:], high) - np.maximum(edges[:-1], low), 0, None)
    if not lengths.any():
        lengths[min(max(int((low + high) / 2), 0), cells - 1)] = 1
    return lengths


# --- samplers, orders, weights ----------------------------------------------------------------------------------------


def difficulty_bin(step: Mapping[str, Any]) -> str:
    """The bin of a step: its structural side, the position in the episode (0, 1, 2, 3 and more), and its semantic side, the
    action type and whether it takes a value."""
    position = min(step["step_index"], 3)
    return f"{'3+' if position == 3 else position} {step['action_type']}{' value' if step['value'] != NO_VALUE else ''}"


@plugin("data", "MobileGen (arXiv 2601.22781), in its spirit; the formula is this project's own")
def frontier(
    prompts: Prompts,
    *,
    share: Annotated[float, Field(gt=0, le=1)] = 0.5,
    target: Share = 0.5,
    width: Annotated[float, Field(ge=0.001)] = 0.2,
    uniform: Share = 0.1,
    samples: Samples = 8,
) -> Choice:
    """Draws `share` of the prompts at the frontier of what π_k can do: its difficulty profile, then a weighted sample.

    MobileGen's formulas are not known to this project; these are its own. Profile: p_b = (s_b + 1) / (n_b + 2) for each bin
    (`difficulty_bin`), s_b of the n_b sampled answers being right. Weight of a prompt of bin b: exp(−(p_b − target)² /
    (2 width²)), normalised and mixed with `uniform` of the uniform distribution. Drawn without replacement (Efraimidis and
    Spirakis; in logarithms, since the weights of a narrow width are too small for numbers) with numbers from the hashes of the
    ids, so that the same profile draws the same prompts. The profile is in the record, and is not averaged over iterations.
    """
    rates = prompts.pass_rates(samples)
    bins = [difficulty_bin(step) for step in prompts.steps]
    prompts_of, right = Counter(bins), defaultdict[str, float](float)
    for name, p in zip(bins, rates, strict=True):
        right[name] += p * samples
    profile = {name: (right[name] + 1) / (n * samples + 2) for name, n in sorted(prompts_of.items())}
    raw = np.array([-((profile[name] - target) ** 2) / (2 * width**2) for name in bins])
    ids = [hashlib.sha256(step["step_id"].encode()).digest() for step in prompts.steps]
    draws = np.array([(int.from_bytes(digest[:6]) + 1) / 2**48 for digest in ids])
    with np.errstate(divide="ignore"):  # `uniform` may be 0 or 1
        near = np.log1p(-uniform) + raw - np.logaddexp.reduce(raw)
        weights = np.logaddexp(near, np.log(uniform) - math.log(len(raw)))
        keys = np.log(-np.log(draws)) - weights
    drawn = set(np.argsort(keys, kind="stable")[: max(1, round(share * len(raw)))].tolist())
    figures = {"profile": {name: {"prompts": prompts_of[name], "p": p} for name, p in profile.items()}}
    return Choice({i: "not_drawn" for i in range(len(raw)) if i not in drawn}, figures=figures | _mean(rates))


@plugin("data", "CRAFT-GUI and UItron, curriculum by difficulty; the measure is this project's own")
def curriculum(items: Rows | Prompts, *, samples: Samples = 8) -> Choice:
    """Training takes the items from easy to hard: by falling pass rate (see `pass_rate`), then by position in the episode.

    The systems' own measures of difficulty need trajectories of a device. One order holds for every pass over the data.
    """
    rates = items.pass_rates(samples)
    order = sorted(range(len(items)), key=lambda i: (-rates[i], items.steps[i]["step_index"], i))
    return Choice(order=order, figures=_mean(rates))


@plugin("data", "LAMO, perplexity-weighted cross-entropy; the formula is this project's own")
def perplexity_weighted(
    rows: Rows, *, at_least: Annotated[float, Field(gt=0, le=1)] = 0.5, at_most: Annotated[float, Field(ge=1)] = 2.0
) -> Choice:
    """Weighs the rows of SFT by how unlikely their answers are to the model that training starts from.

    w_i = clip(ppl_i / mean ppl, at_least, at_most), then divided by the mean weight. LAMO's formula is not known to this
    project.
    """
    perplexities = np.asarray(rows.perplexities(), dtype=np.float64)
    clipped = np.clip(perplexities / perplexities.mean(), at_least, at_most)
    return Choice(weights=(clipped / clipped.mean()).tolist(), figures={"perplexity": float(perplexities.mean())})


# --- further prompts --------------------------------------------------------------------------------------------------


@plugin("data", "UIShift (arXiv 2505.12493)")
def transition_pairs(
    prompts: Prompts,
    *,
    k: Annotated[int, Field(ge=1, le=8)] = 1,
    most: Annotated[int, Field(ge=1)] = 2000,
) -> Choice:
    """Adds prompts with two screens of an episode, `k` steps apart: which action leads from the first to the second?

    The answer is the first screen's action. UIShift trains on 2,000 such pairs, where k = 1 is best or nearly so. `most` of them
    are drawn by a hash of their steps. Strategies that come later do not filter them.

    Departures: both screens are one image, side by side; the reward is Eq. 9, not format and action; the other prompts stay.
    """
    at = {(step["episode_id"], step["step_index"]): i for i, step in enumerate(prompts.steps)}
    found = [
        (i, at[step["episode_id"], step["step_index"] + k])
        for i, step in enumerate(prompts.steps)
        if (step["episode_id"], step["step_index"] + k) in at
    ]
    if not found:
        raise Nothing(
            f"transition_pairs: of {len(prompts)} prompts, no episode has two that lie {k} steps apart: lower `k`, or remove it"
        )

    def drawn(pair: tuple[int, int]) -> bytes:
        return hashlib.sha256(str(prompts.steps[pair[0]]["step_id"]).encode()).digest()

    pairs = sorted(sorted(found, key=drawn)[:most])
    return Choice(pairs=pairs, figures={"pairs": len(pairs)})


# --- applying them ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curated:
    """What strategies chose together.

    Args:
        kept: positions of the items that stay, in the order of training if `ordered`, else in theirs.
        weights: of `kept`, or None.
        left_out: position → (strategy, why).
        figures: strategy → its counts, for the record.
        pairs: positions of a prompt and of a later one, as in Choice.
    """

    kept: list[int]
    ordered: bool
    weights: list[float] | None
    left_out: dict[int, tuple[str, str]]
    figures: dict[str, Any]
    pairs: list[tuple[int, int]] = field(default_factory=list)


Some = TypeVar("Some", Rows, Prompts)


def curation_text(figures: Mapping[str, Any]) -> list[str]:
    """What data strategies left out of a training, a sentence for each, from the figures of its record.

    >>> curation_text({"curation": {"seed_rules": {"of": 9, "left_out": 2, "generic_plan": 1, "raw_name": 1}}})
    ['seed_rules left out 2 of 9 (1 generic_plan, 1 raw_name)']
    """
    sentences = []
    for name, counts in (figures.get("curation") or {}).items():
        why = ", ".join(
            f"{n} {reason}" for reason, n in counts.items() if reason not in ("of", "left_out") and isinstance(n, int)
        )
        sentences.append(f"{name} left out {counts['left_out']} of {counts['of']}{f' ({why})' if why else ''}")
    return sentences


class Nothing(Refusal, ValueError):
    """The strategies leave nothing to train on."""


def curate(items: Some, strategies: Mapping[str, Mapping[str, Any]]) -> Curated:
    """Applies strategies (name → settings) to `items`, in order. Raises NoPlugin, Nothing, or what a measure raises."""
    kept, weights, ordered = list(range(len(items))), np.ones(len(items)), False
    left_out: dict[int, tuple[str, str]] = {}
    figures: dict[str, Any] = {}
    pairs: list[tuple[int, int]] = []
    weighted = False
    for name, settings in strategies.items():
        part = _only(items, kept)
        chosen: Choice = find("data", name).function(part, **settings)
        counts = dict(sorted(Counter(chosen.left_out.values()).items()))
        left_out |= {kept[i]: (name, why) for i, why in chosen.left_out.items()}
        pairs += [(kept[i], kept[j]) for i, j in chosen.pairs]
        if chosen.weights is not None:
            weighted = True
            weights[kept] *= np.asarray(chosen.weights)
        figures[name] = {"of": len(kept), "left_out": len(chosen.left_out), **counts, **chosen.figures}
        order = range(len(kept)) if chosen.order is None else chosen.order
        ordered = ordered or chosen.order is not None
        kept = [kept[i] for i in order if i not in chosen.left_out]
        if not kept:
            raise Nothing(f"{name} leaves none of {len(part)} items to train on ({counts}): change its settings")
    chosen_weights = (weights[kept] / weights[kept].mean()).tolist() if weighted else None
    return Curated(kept, ordered, chosen_weights, left_out, figures, pairs)


def _only(items: Some, kept: Sequence[int]) -> Some:
    """The items at the positions `kept`, in that order."""
    more: dict[str, Any] = {"rows": [items.rows[i] for i in kept]} if isinstance(items, Rows) else {}
    return replace(items, steps=[items.steps[i] for i in kept], places=[items.places[i] for i in kept], **more)
