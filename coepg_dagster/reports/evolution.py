"""The evolution report: Step SR, data quality and time over the iterations, as one page with its figures inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from coepg_dagster.reports.figures import figure, over_k, png
from coepg_dagster.results import HEADLINES, headline

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # slow to import: only where a figure is drawn

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{{ name }}</title>
<style>
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}th,td{padding:.3rem .8rem;text-align:right;border-bottom:1px solid #ddd}
th:first-child,td:first-child{text-align:left}img{max-width:100%}.stale{color:#b00}
</style>
<h1>{{ name }}</h1>
<p>Planner and grounder after each iteration of co-evolution; iteration 0 is the base pair. Rates in per cent, macro over
tasks, with 95 % bootstrap intervals clustered by task.</p>
{% for title, image in figures %}<h2>{{ title }}</h2><img alt="{{ title }}" src="data:image/png;base64,{{ image }}">{% endfor %}
<h2>Numbers</h2>
<table><tr>{% for head in heads %}<th>{{ head }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</table>
{% if stale %}<h2>Stale</h2><ul class="stale">{% for line in stale %}<li>{{ line }}</li>{% endfor %}</ul>{% endif %}
</html>
"""


def write_report(table: Mapping[str, Any], page: Path) -> str:
    """Writes the page for a table of `results.results`; returns its first figure as Markdown, for the Dagster UI."""
    name = f"{table['experiment']}/s{table['seed']}"
    iterations = table["iterations"]
    figures = [
        ("Step success rate by split", png(step_sr_figure(iterations))),
        ("Quality of D_k", png(quality_figure(iterations))),
    ]
    heads, rows = rows_of(iterations)
    stale = [f"{asset}[{row['iteration']}]: {why}" for row in iterations for asset, why in row["stale"].items()]
    environment = jinja2.Environment(autoescape=True)
    page.write_text(
        environment.from_string(_PAGE).render(name=name, figures=figures, heads=heads, rows=rows, stale=stale)
    )
    return "\n\n".join(f"**{title}**\n\n![{title}](data:image/png;base64,{image})" for title, image in figures)


def measure(iterations: Sequence[Mapping[str, Any]]) -> str:
    """What people call the headline metric of the protocol by which these iterations were scored."""
    scores = (score for row in iterations for score in row["splits"].values() if score)
    return next((HEADLINES[headline(score)] for score in scores), "Step SR")


def rows_of(iterations: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """(heads, rows) of the table that people read, one row per iteration."""
    splits = list(iterations[0]["splits"]) if iterations else []
    heads = ["k", *(f"{split} {measure(iterations)}" for split in splits), "purity", "diversity", "coverage", "minutes"]
    rows = []
    for row in iterations:
        cells = [str(row["iteration"])]
        cells += [_score(row["splits"][split]) for split in splits]
        cells += [_number(row[name]) for name in ("purity", "diversity", "coverage")]
        cells.append(f"{sum(row['seconds'].values()) / 60:.1f}")
        rows.append(cells)
    return heads, rows


def _score(split: Mapping[str, Any] | None) -> str:
    score = split and split[headline(split)]
    if not score or score["macro"] is None:
        return "–"
    value, interval = score["macro"], score["ci95"]
    return f"{value:.1f}" + (f" [{interval[0]:.1f}, {interval[1]:.1f}]" if interval else "")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def step_sr_figure(iterations: Sequence[Mapping[str, Any]]) -> Figure:
    """The headline metric (macro, with its interval) over k, a line per test split."""
    drawn = figure()
    axes = drawn.subplots()
    for split in iterations[0]["splits"]:
        points = [(row["iteration"], score[headline(score)]) for row in iterations if (score := row["splits"][split])]
        points = [(k, score) for k, score in points if score["macro"] is not None]
        if not points:
            continue
        k, values = [k for k, _ in points], [score["macro"] for _, score in points]
        intervals = [score["ci95"] or (score["macro"], score["macro"]) for _, score in points]
        low = [value - bounds[0] for value, bounds in zip(values, intervals, strict=True)]
        high = [bounds[1] - value for value, bounds in zip(values, intervals, strict=True)]
        axes.errorbar(k, values, yerr=[low, high], marker="o", capsize=3, label=split)
    axes.set_ylim(0, 100)
    over_k(axes, [row["iteration"] for row in iterations], f"{measure(iterations)}, %")
    return drawn


def quality_figure(iterations: Sequence[Mapping[str, Any]]) -> Figure:
    """Purity and coverage (left axis, per cent) and diversity (right axis, plans per step) of D_k over k."""
    drawn = figure()
    axes = drawn.subplots()
    right = axes.twinx()
    for name, target, style in (("purity", axes, "o-"), ("coverage", axes, "s-"), ("diversity", right, "^--")):
        points = [(row["iteration"], row[name]) for row in iterations if row[name] is not None]
        color = "tab:green" if target is right else None
        target.plot([k for k, _ in points], [value for _, value in points], style, label=name, color=color)
    right.set_ylabel("verified plans per step")
    right.legend(frameon=False, loc="lower right")
    axes.set_ylim(0, 100)
    over_k(axes, [row["iteration"] for row in iterations], "%")
    return drawn
