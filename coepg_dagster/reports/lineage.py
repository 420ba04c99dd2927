"""The lineage map: D_0 → π_1, ϕ_1 → π'_1 → D_1 → … over k, drawn from the records of a loop.

Each node shows its data version, run, time and key number; stale nodes are marked with their root cause. The page stands
alone: one file, no script, no network.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import jinja2

from coepg_dagster.experiment import Experiment
from coepg_dagster.provenance import ORDER, SHARED, Asset, Record, Ref, Stale, inputs_of
from coepg_dagster.results import HEADLINES, headline

WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 208, 86, 78, 34, 24
SYMBOLS: Final[dict[Asset, str]] = {
    "benchmark_steps": "benchmark_steps",
    "open_models": "open_models  Π, Φ, M₀",
    "planner_sft": "π",
    "grounder": "ϕ",
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
class Node:
    """A box of the map."""

    ref: Ref
    x: int
    y: int
    record: Record | None
    stale: Stale | None
    time: str
    whose: str  # " of PARENT" where it is taken

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
    """The one number by which people judge an artifact."""
    figures = record.figures
    if record.asset == "evaluation":
        split = figures.get(experiment.benchmark.validation)
        if not split:
            return ""
        name = headline(split["metrics"])
        value = split["metrics"][name]["macro"]
        return "" if value is None else f"validation {HEADLINES[name]} {value:.1f} %"
    if record.asset == "data_quality":
        value = figures.get("purity")
        return "" if value is None else f"purity {value:.1f} %"
    for name, text in (
        ("rows", "{:,} rows"),
        ("models", "{} models"),
        ("reward", "reward {:.3f}"),
        ("loss", "loss {:.3f}"),
    ):
        if isinstance(figures.get(name), int | float):
            return text.format(figures[name])
    steps = figures.get("steps")
    return f"{sum(steps.values()):,} steps" if isinstance(steps, dict) else f"{record.seconds:.0f} s"


def lineage_page(
    experiment: Experiment,
    seed: int,
    records: Mapping[Ref, Record],
    stale: Mapping[Ref, Stale],
    times: Mapping[Ref, float],
    dagster: str | None = None,
    page_of: Callable[[Ref], str | None] = lambda ref: None,
) -> str:
    """The map as HTML.

    Args:
        times: when each artifact was made, seconds since 1970.
        dagster: address of the web UI, for links.
        page_of: the address of the page of an artifact, relative to the map's.
    """
    nodes = {node.ref: node for node in _nodes(experiment, records, stale, times)}
    edges = [(nodes[used], node) for node in nodes.values() for used in _drawn_inputs(experiment, node.ref)]
    edges.sort(key=lambda edge: edge[0].ref.iteration is not None)  # what everything reads lies behind
    width = max(node.x for node in nodes.values()) + WIDTH + MARGIN
    height = max(node.y for node in nodes.values()) + HEIGHT + MARGIN
    name = f"{experiment.name}/s{seed}"
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_PAGE).render(
        name=name,
        description=experiment.description,
        nodes=list(nodes.values()),
        edges=[(_path(start, end), _kind(start, end), start.ref, end.ref) for start, end in edges],
        numbers={ref: key_number(experiment, record) for ref, record in records.items()},
        width=width,
        height=height,
        box=(WIDTH, HEIGHT),
        iterations=[(k, _x(k) + WIDTH // 2) for k in range(experiment.iterations + 1)],
        causes=[(node.ref, node.why) for node in nodes.values() if node.why],
        link=lambda ref: _asset_link(
            dagster, str(experiment.parent) if ref.asset in experiment.taken else experiment.name, seed, ref
        ),
        page_of=page_of,
        run_link=lambda run_id: f"{dagster}/runs/{run_id}" if dagster else None,
    )


def _whose(experiment: Experiment, ref: Ref) -> str:
    return f" of {experiment.parent}" if ref.asset in experiment.taken else ""


def _drawn_inputs(experiment: Experiment, ref: Ref) -> list[Ref]:
    """The arrows that end at an artifact. How the parent made what is taken is on its own map."""
    return [] if ref.asset in experiment.taken else inputs_of(ref, experiment.agent)


def _x(k: int) -> int:
    return MARGIN + (k + 1) * (WIDTH + GAP_X)


def _nodes(
    experiment: Experiment,
    records: Mapping[Ref, Record],
    stale: Mapping[Ref, Stale],
    times: Mapping[Ref, float],
) -> list[Node]:
    rows = [asset for asset in ORDER if asset in (*experiment.made, *experiment.taken)]
    places: list[tuple[Ref, int, int]] = [(Ref(asset), MARGIN, row) for row, asset in enumerate(SHARED)]
    places += [(Ref(asset, k), _x(k), row) for k in range(experiment.iterations + 1) for row, asset in enumerate(rows)]
    top = MARGIN + 30
    return [
        Node(
            ref,
            x,
            top + row * (HEIGHT + GAP_Y),
            records.get(ref),
            stale.get(ref),
            _when(times.get(ref)),
            _whose(experiment, ref),
        )
        for ref, x, row in places
    ]


def _when(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _path(start: Node, end: Node) -> str:
    """An arrow: down between neighbours of a column, along its left side to others, across to another column."""
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


def _kind(start: Node, end: Node) -> str:
    if start.ref.iteration is None:
        return "shared"
    return end.state if start.ref.iteration == end.ref.iteration else f"{end.state} between"


def _asset_link(dagster: str | None, name: str, seed: int, ref: Ref) -> str | None:
    if dagster is None:
        return None
    if ref.iteration is None:
        return f"{dagster}/assets/{name}/{ref.asset}"
    return f"{dagster}/assets/{name}/s{seed}/{ref.asset}?view=partitions&partition={ref.iteration}"


_PAGE: Final = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Lineage of {{ name }}</title>
<style>
body{font:15px/1.5 system-ui,sans-serif;margin:1.5rem;color:#222}
.map{overflow-x:auto;border:1px solid #ddd;border-radius:6px}
svg text{font:12px system-ui,sans-serif;fill:#222}svg .title{font-weight:600;font-size:13px}svg .head{font-size:14px;fill:#555}
rect{fill:#f2f8f3;stroke:#3a7d44;stroke-width:1.3}.stale rect{fill:#fff6e0;stroke:#b86e00;stroke-dasharray:5 3}
.failed rect{fill:#fdecea;stroke:#b3261e}.missing rect{fill:#fafafa;stroke:#bbb;stroke-dasharray:2 3}.missing text{fill:#888}
path{fill:none;stroke:#9bb;stroke-width:1.1}path.stale{stroke:#d9a441}path.missing{stroke:#ddd}
path.shared{stroke:#e4e9ea}path.between{stroke-width:2;stroke:#37699c}
svg a text{fill:#1a5fb4;text-decoration:underline}.cause{fill:#8a5200}
dt{font-weight:600}.key span{display:inline-block;padding:0 .6rem;margin-right:.8rem;border:1px solid}
</style>
<h1>Lineage of {{ name }}</h1>
<p>{{ description }}</p>
<p>What each artifact was made from, over the iterations k: D₀ → π₁, ϕ₁ → π′₁ → D₁ → … Bold arrows cross into the next
iteration.</p>
<p class="key"><span style="background:#f2f8f3;border-color:#3a7d44">current</span>
<span style="background:#fff6e0;border-color:#b86e00;border-style:dashed">stale</span>
<span style="background:#fdecea;border-color:#b3261e">blocking check failed</span>
<span style="border-color:#bbb;border-style:dotted;color:#888">not made yet</span></p>
<div class="map"><svg width="{{ width }}" height="{{ height }}" viewBox="0 0 {{ width }} {{ height }}" role="img"
 aria-label="lineage of {{ name }}">
<defs><marker id="tip" markerWidth="7" markerHeight="7" refX="4" refY="3" orient="auto"><path d="M0,0 L6,3 L0,6 z"
 style="fill:#78909c;stroke:none"/></marker></defs>
{% for k, x in iterations %}<text class="head" x="{{ x }}" y="26" text-anchor="middle">iteration {{ k }}</text>
{% endfor %}
{% for path, kind, start, end in edges %}
<path d="{{ path }}" marker-end="url(#tip)" class="{{ kind }}"><title>{{ start }} → {{ end }}</title></path>
{% endfor %}
{% for node in nodes %}
<g class="{{ node.state }}" id="{{ node.ref.asset }}-{{ node.ref.iteration }}">
<title>{{ node.ref }}{{ node.whose }} {{ node.why }}</title>
<rect x="{{ node.x }}" y="{{ node.y }}" width="{{ box[0] }}" height="{{ box[1] }}" rx="6"/>
{% set href = link(node.ref) %}
{% set page = page_of(node.ref) if node.record else none %}
{% if page %}<a href="{{ page }}">{% endif %}
<text class="title" x="{{ node.x + 9 }}" y="{{ node.y + 18 }}">{{ node.title }}{{ node.whose }}</text>
{% if page %}</a>{% endif %}
{% if href %}<a href="{{ href }}">
<text x="{{ node.x + box[0] - 9 }}" y="{{ node.y + 66 }}" text-anchor="end">in Dagster</text></a>{% endif %}
{% if node.record %}
<text x="{{ node.x + 9 }}" y="{{ node.y + 36 }}">{{ numbers[node.ref] }}</text>
<text x="{{ node.x + 9 }}" y="{{ node.y + 52 }}">version {{ node.record.data_version }}</text>
{% set run = run_link(node.record.run_id) %}
{% if run %}<a href="{{ run }}">{% endif %}
<text x="{{ node.x + 9 }}" y="{{ node.y + 66 }}">run {{ node.record.run_id[:8] }}</text>
{% if run %}</a>{% endif %}
<text x="{{ node.x + 9 }}" y="{{ node.y + 80 }}">{{ node.time }}</text>
{% if node.stale %}
<text class="cause" x="{{ node.x + box[0] - 9 }}" y="{{ node.y + 18 }}" text-anchor="end">stale</text>
{% endif %}
{% else %}
<text x="{{ node.x + 9 }}" y="{{ node.y + 36 }}">not made yet</text>
{% endif %}
</g>
{% endfor %}
</svg></div>
{% if causes %}<h2>Stale or failed, with the root cause</h2>
<dl>{% for ref, why in causes %}<dt>{{ ref }}</dt><dd>{{ why }}</dd>{% endfor %}</dl>{% endif %}
</html>
"""
