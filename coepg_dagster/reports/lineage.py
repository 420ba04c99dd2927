"""The lineage map: D_0 → π_1, ϕ_1 → π'_1 → D_1 → … over k, drawn from the records of a loop.

Each node shows its data version, run, time and key number; stale nodes are marked with their root cause. The page stands
alone: one file, no script, no network.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from coepg_dagster.auditing.archive import BASE
from coepg_dagster.auditing.marks import VETOES
from coepg_dagster.experiment.schema import Experiment
from coepg_dagster.progress import span_text
from coepg_dagster.provenance import ORDER, SHARED, Asset, Record, Ref, Stale, inputs_of
from coepg_dagster.reports.html import render
from coepg_dagster.results import HEADLINES, headline

WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 208, 86, 78, 34, 24
SYMBOLS: Final[dict[Asset, str]] = {
    "benchmark_steps": "benchmark_steps",
    "open_models": "open_models",
    "planner_sft": "π",
    "grounder": "ϕ",
    "grounder_rl": "ϕ′",
    "planner": "π′",
    "candidate_plans": "candidate_plans",
    "verdicts": "verdicts",
    "dataset": "D",
    "data_quality": "data_quality",
    "evaluation": "evaluation",
    "end_to_end": "end_to_end",
}
_SUBSCRIPTS: Final = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


@dataclass(frozen=True)
class LineageView:
    """A loop as it is now: its current records, which of them are stale, and when each was made (Unix time)."""

    experiment: Experiment
    seed: int
    records: Mapping[Ref, Record]
    stale: Mapping[Ref, Stale]
    times: Mapping[Ref, float]

    @property
    def name(self) -> str:
        return f"{self.experiment.name}/s{self.seed}"


@dataclass(frozen=True)
class ArtifactNode:
    """A box of the map."""

    ref: Ref
    x: int
    y: int
    record: Record | None
    stale: Stale | None
    time: str
    whose: str  # " of PARENT" where it is taken from the parent

    @property
    def title(self) -> str:
        symbol = SYMBOLS[self.ref.asset]
        if self.ref.iteration is None:
            return symbol
        if len(symbol) > 2:
            return f"{symbol}[{self.ref.iteration}]"
        return f"{symbol}{subscript(self.ref.iteration)}  {self.ref.asset}"

    @property
    def state(self) -> str:
        if self.record is None:
            return "missing"
        if self.record.failed_checks:
            return "failed"
        return "stale" if self.stale else "current"

    @property
    def why(self) -> str:
        if self.record is not None and self.record.failed_checks:
            return f"blocking check failed: {', '.join(self.record.failed_checks)}"
        return f"stale: {self.stale}" if self.stale else ""


def subscript(iteration: int | None) -> str:
    """An iteration as the index of a symbol."""
    return "" if iteration is None else str(iteration).translate(_SUBSCRIPTS)


def key_number(experiment: Experiment, record: Record) -> str:
    """The most telling number of an artifact, as text: a score, rows, loss, steps or time."""
    figures = record.figures
    if record.asset == "evaluation":
        split = figures.get(experiment.benchmark.validation)
        if not split:
            return ""
        name = headline(split["metrics"])
        value = split["metrics"][name]["macro"]
        return "" if value is None else f"validation {HEADLINES[name]} {value:.1f} %"
    if record.asset == "data_quality":
        value = figures.get("purity_open")
        return "" if value is None else f"frozen purity {value:.1f} %"
    learned = (figures.get("probe") or {}).get("train")
    if record.asset in ("planner", "end_to_end") and learned:
        return f"GRPO {learned['difference']:+.1f} on train"
    if vetoes := figures.get(VETOES):
        return f"{figures['rows']:,} rows, {vetoes['left_out']:,} vetoed"
    for name, text in (
        ("rows", "{:,} rows"),
        ("models", "{} models"),
        ("loss", "loss {:.3f}"),
    ):
        if isinstance(figures.get(name), int | float):
            return text.format(figures[name])
    steps = figures.get("steps")
    if isinstance(steps, dict):
        return f"{sum(steps.values()):,} steps"
    if BASE in record.files:
        return "an open model as it is" if record.iteration == 0 else "the model before, as it is"
    return f"made in {span_text(record.seconds)}"


def lineage_page(
    view: LineageView,
    dagster: str | None = None,
    page_of: Callable[[Ref], str | None] = lambda ref: None,
    models: Mapping[str, Mapping[str, Any]] | None = None,
    experiments: Sequence[Experiment] = (),
    map_of: Callable[[str, int], str | None] = lambda name, seed: None,
    crumbs: Sequence[tuple[str, str]] = (),
) -> str:
    """The map as HTML.

    Args:
        dagster: address of the web UI, for links.
        page_of: the address of the page of an artifact, relative to the map's.
        models: what `open_models` lists: name → checkpoint, version (hash of the weights, or revision of the hub).
        experiments: drawn above the map, with arrows from parent to overlay; without them nothing is drawn there.
        map_of: the address of the map of an experiment and seed, relative to this one's.
        crumbs: (text, address) of the pages above.
    """
    experiment, seed, records = view.experiment, view.seed, view.records
    nodes = {node.ref: node for node in _nodes(view)}
    edges = [(nodes[used], node) for node in nodes.values() for used in _drawn_inputs(experiment, node.ref)]
    # edges of shared artifacts are drawn behind the others
    edges.sort(key=lambda edge: edge[0].ref.iteration is not None)
    width = max(node.x for node in nodes.values()) + WIDTH + MARGIN
    height = max(node.y for node in nodes.values()) + HEIGHT + MARGIN
    origins = _origins(models or {}, nodes[Ref("open_models")])
    height = max([height, *(origin.y + ORIGIN + MARGIN for origin in origins)])
    family = _family(experiments)
    return render(
        "lineage.html",
        name=view.name,
        crumbs=crumbs,
        description=experiment.description,
        nodes=list(nodes.values()),
        edges=[(_path(start, end), _kind(start, end), start.ref, end.ref) for start, end in edges],
        numbers={ref: key_number(experiment, record) for ref, record in records.items()},
        width=width,
        height=height,
        box=(WIDTH, HEIGHT),
        iterations=[(k, _x(k) + WIDTH // 2) for k in range(experiment.iterations + 1)],
        causes=[(node.ref, node.why) for node in nodes.values() if node.why],
        origins=origins,
        origin_height=ORIGIN,
        family=family,
        family_edges=[(a, b) for a in family for b in family if b.experiment.parent == a.experiment.name],
        family_size=(
            max([one.x for one in family], default=0) + FAMILY[0] + MARGIN,
            max([one.y for one in family], default=0) + FAMILY[1] + MARGIN,
        ),
        family_box=FAMILY,
        here=(experiment.name, seed),
        map_of=map_of,
        link=lambda ref: _asset_link(
            dagster, str(experiment.parent) if ref.asset in experiment.taken else experiment.name, seed, ref
        ),
        page_of=page_of,
        run_link=lambda run_id: None if dagster is None else f"{dagster}/runs/{run_id}",
    )


def _whose(experiment: Experiment, ref: Ref) -> str:
    return f" of {experiment.parent}" if ref.asset in experiment.taken else ""


def _drawn_inputs(experiment: Experiment, ref: Ref) -> list[Ref]:
    """The artifacts from which arrows lead to this one. An artifact taken from the parent has none here."""
    return [] if ref.asset in experiment.taken else inputs_of(ref, experiment.agent, experiment.init, experiment.phi)


ORIGIN: Final = 58
"""Height of the box of an open model."""
FAMILY: Final = (250, 62)
"""Width and height of the box of an experiment."""


@dataclass(frozen=True)
class Origin:
    """An open model, below the list that holds it."""

    name: str
    checkpoint: str
    version: str
    what: str  # kind of version: "weights" (their hash) or "revision" (of the hub)
    x: int
    y: int


def _origins(models: Mapping[str, Mapping[str, Any]], below: ArtifactNode) -> list[Origin]:
    origins = []
    for row, (name, model) in enumerate(sorted(models.items())):
        what = "weights" if "files" in model else "revision"
        y = below.y + HEIGHT + 22 + row * (ORIGIN + 10)
        origins.append(Origin(name, model["checkpoint"], model["version"], what, below.x + 22, y))
    return origins


@dataclass(frozen=True)
class Relative:
    """An experiment in the drawing of parents and overlays."""

    experiment: Experiment
    x: int
    y: int


def _family(experiments: Sequence[Experiment]) -> list[Relative]:
    """The drawing of parents and overlays: parents on the left, one experiment per row."""
    known = {experiment.name for experiment in experiments}
    relatives: list[Relative] = []

    def place(experiment: Experiment, depth: int) -> None:
        column = MARGIN + depth * (FAMILY[0] + GAP_X)
        relatives.append(Relative(experiment, column, MARGIN + len(relatives) * (FAMILY[1] + 10)))
        for child in experiments:
            if child.parent == experiment.name:
                place(child, depth + 1)

    for experiment in experiments:
        if experiment.parent not in known:
            place(experiment, 0)
    return relatives


def _x(k: int) -> int:
    return MARGIN + (k + 1) * (WIDTH + GAP_X)


def _nodes(view: LineageView) -> list[ArtifactNode]:
    experiment = view.experiment
    rows = [asset for asset in ORDER if asset in (*experiment.made, *experiment.taken)]
    places: list[tuple[Ref, int, int]] = [(Ref(asset), MARGIN, row) for row, asset in enumerate(SHARED)]
    places += [(Ref(asset, k), _x(k), row) for k in range(experiment.iterations + 1) for row, asset in enumerate(rows)]
    top = MARGIN + 30
    return [
        ArtifactNode(
            ref,
            x,
            top + row * (HEIGHT + GAP_Y),
            view.records.get(ref),
            view.stale.get(ref),
            _when(view.times.get(ref)),
            _whose(experiment, ref),
        )
        for ref, x, row in places
    ]


def _when(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _path(start: ArtifactNode, end: ArtifactNode) -> str:
    """The SVG path of an arrow: down to the next box of a column, along the left side to later ones, else across."""
    if start.x == end.x:
        if end.y - start.y == HEIGHT + GAP_Y:
            x = start.x + WIDTH // 2
            return f"M{x},{start.y + HEIGHT} L{x},{end.y - 5}"
        bend = start.x - 10 - (end.y - start.y) // 24
        a, b = start.y + HEIGHT * 2 // 3, end.y + HEIGHT // 3
        return f"M{start.x},{a} C{bend},{a} {bend},{b} {end.x - 5},{b}"
    a, b = start.y + HEIGHT // 2, end.y + HEIGHT // 2
    middle = end.x - GAP_X // 2
    return f"M{start.x + WIDTH},{a} C{middle},{a} {middle},{b} {end.x - 5},{b}"


def _kind(start: ArtifactNode, end: ArtifactNode) -> str:
    if start.ref.iteration is None:
        return "shared"
    return end.state if start.ref.iteration == end.ref.iteration else f"{end.state} between"


def _asset_link(dagster: str | None, name: str, seed: int, ref: Ref) -> str | None:
    if dagster is None:
        return None
    if ref.iteration is None:
        return f"{dagster}/assets/{name}/{ref.asset}"
    return f"{dagster}/assets/{name}/s{seed}/{ref.asset}?view=partitions&partition={ref.iteration}"
