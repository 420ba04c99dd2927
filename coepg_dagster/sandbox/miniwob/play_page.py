"""The page of live play: success rates, and filmstrips of episodes with the agent's point on each frame."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
import pyarrow as pa
import pyarrow.compute as pc

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{{ title }}</title>
<style>
body{font:15px/1.45 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}th,td{padding:.2rem .8rem;text-align:right;border-bottom:1px solid #ddd}
th:first-child,td:first-child,th:last-child,td:last-child{text-align:left}tr.all{font-weight:600}
.film{display:flex;flex-wrap:wrap;gap:.9rem;margin:.4rem 0 1.6rem}
figure{margin:0;width:202px}figcaption{font-size:13px;overflow-wrap:anywhere}svg{border:1px solid #bbb;display:block}
code{background:#f2f2f2;padding:0 .2rem}.yes{color:#07702c}.no{color:#b00020}.goal{margin:.2rem 0}.dim{color:#666}
</style>
<h1>{{ title }}</h1>
<p>The agent acts in Chromium by real mouse and key events; the page itself says whether it succeeded. Solved:
<b>{{ about.solved }} of {{ about.episodes }}</b> episodes, {{ rate(about.success) }}; macro over families
{{ rate(about.macro) }} (95 % bootstrap: over episodes, over families).</p>
<p class="dim">{% for name, value in about.made_from.items() %}{{ name }} {{ value }}{{ "" if loop.last else " · " }}
{% endfor %}</p>
<table><tr><th>family</th><th>solved</th><th>episodes</th><th>steps</th><th>why not</th></tr>
{% for name, row in about.families.items() %}<tr><td><a href="#{{ name }}">{{ name }}</a></td><td>{{ row.solved }}</td>
<td>{{ row.episodes }}</td><td>{{ row.steps }}</td><td>{{ why(row.failures) }}</td></tr>
{% endfor %}<tr class="all"><td>all</td><td>{{ about.solved }}</td><td>{{ about.episodes }}</td><td>{{ about.steps }}</td>
<td>{{ why(about.failures) }}</td></tr></table>
<p class="dim">Below: the first {{ shown }} episodes of each family. The cross is the grounder's point; under each frame the
planner's plan, then the action, then what the page answered.</p>
{% for family, episodes in films %}<h2 id="{{ family }}">{{ family }}</h2>
{% for episode in episodes %}{% set last = episode[-1] %}
<p class="goal"><b>{{ last.goal }}</b> <span class="dim">seed {{ last.seed }}</span>
{% if last.failure %}<span class="no">{{ last.failure }}</span>{% else %}<span class="yes">solved</span>{% endif %}</p>
<div class="film">{% for step in episode %}<figure>
<svg width="200" viewBox="0 0 {{ step.width }} {{ step.height }}" role="img" aria-label="step {{ step.step_index + 1 }}">
<image href="data:image/png;base64,{{ step.png }}" width="{{ step.width }}" height="{{ step.height }}"/>
{% if step.x is not none %}<g transform="translate({{ step.x }} {{ step.y }})" fill="none">
<path d="M-9 0H-3M3 0H9M0 -9V-3M0 3V9" stroke="#fff" stroke-width="4"/><circle r="5" stroke="#fff" stroke-width="4"/>
<path d="M-9 0H-3M3 0H9M0 -9V-3M0 3V9" stroke="#d0021b" stroke-width="1.6"/>
<circle r="5" stroke="#d0021b" stroke-width="1.6"/></g>{% endif %}</svg>
<figcaption>{% if step.plan is none %}<span class="no">no plan:</span> <code>{{ step.planner_text }}</code>
{% else %}{{ step.plan }}<br><b>{{ step.action_type }}</b>{% if step.value %} <code>{{ step.value }}</code>{% endif %}
{% if step.x is none %} <span class="no">no point:</span> <code>{{ step.grounder_text }}</code>
{% else %} at ({{ "%g" | format(step.x) }}, {{ "%g" | format(step.y) }}){% endif %}
{% if step.entry is not none %}<br><span class="dim">{{ step.entry }}</span>{% endif %}{% endif %}
{% if step.done %}<br><span class="{{ 'yes' if step.reward > 0 else 'no' }}">reward {{ "%g" | format(step.reward) }}</span>
{% endif %}</figcaption></figure>
{% endfor %}</div>
{% endfor %}{% endfor %}</html>
"""


def write_page(table: pa.Table, about: Mapping[str, Any], title: str, shown: int, page: Path) -> None:
    """Writes the page of episodes (`play.EPISODE_SCHEMA`), the first `shown` of each family, images inside.

    `about`: the result of `play.summarize`, and `made_from`: names and versions of models and pages.
    """
    heads = table.filter(pc.equal(table["step_index"], 0)).select(["episode_id", "family"]).to_pylist()
    wanted: list[str] = []
    for _, group in groupby(sorted(heads, key=lambda row: str(row["family"])), key=lambda row: row["family"]):
        wanted += [row["episode_id"] for row in group][:shown]
    rows = table.filter(pc.is_in(table["episode_id"], pa.array(wanted, pa.string()))).to_pylist()
    for row in rows:
        row["png"] = base64.b64encode(row.pop("screenshot")).decode()
    episodes: dict[str, list[list[dict[str, Any]]]] = {}
    for _, steps in groupby(rows, key=lambda row: row["episode_id"]):
        episode = list(steps)
        episodes.setdefault(episode[0]["family"], []).append(episode)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(_PAGE, globals={"rate": rate, "why": why})
    text = template.render(title=title, about=about, shown=shown, films=sorted(episodes.items()))
    page.write_text(text, "utf-8")


def rate(score: Mapping[str, Any]) -> str:
    """A success rate as people read it: `41.2 % [33.0, 50.1]`."""
    bounds = score["ci95"]
    return f"{score['rate']:.1f} %" + (f" [{bounds[0]:.1f}, {bounds[1]:.1f}]" if bounds else "")


def why(failures: Mapping[str, int]) -> str:
    """Failure reasons with their counts, the most frequent first."""
    return ", ".join(f"{reason} {count}" for reason, count in sorted(failures.items(), key=lambda item: -item[1]))
