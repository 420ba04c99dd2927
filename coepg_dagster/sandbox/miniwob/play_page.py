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

from coepg_dagster.characters import visible

_TEMPLATES = Path(__file__).with_name("templates")


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
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    template = environment.get_template("play.html", globals={"rate": rate, "why": why})
    text = template.render(title=title, about=about, shown=shown, films=sorted(episodes.items()))
    page.write_text(text, "utf-8")


def rate(score: Mapping[str, Any]) -> str:
    """A success rate as people read it: `41.2 % [33.0, 50.1]`."""
    bounds = score["ci95"]
    return f"{score['rate']:.1f} %" + (f" [{bounds[0]:.1f}, {bounds[1]:.1f}]" if bounds else "")


def why(failures: Mapping[str, int]) -> str:
    """Failure reasons with their counts, the most frequent first."""
    return ", ".join(f"{reason} {count}" for reason, count in sorted(failures.items(), key=lambda item: -item[1]))
