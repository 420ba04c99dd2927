"""A few drawn pages in the form of collected shards."""

from __future__ import annotations

import io
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageDraw

from coepg_dagster.sandbox.pretraining import corpus
from coepg_dagster.sandbox.pretraining.tiny_models import SCREEN_HEIGHT, SCREEN_WIDTH
from coepg_dagster.steps import BOX, STEP_SCHEMA

_ELEMENT = pa.struct([("kind", pa.string()), ("name", pa.string()), ("color", pa.string()), ("box", BOX)])
SHARD_SCHEMA = pa.schema([*STEP_SCHEMA, pa.field("elements", pa.list_(_ELEMENT)), pa.field("target", pa.int32())])
NAMES = ("next", "previous", "Submit", "Onida", "JAzeB8")


def page(number: int, split: str = "pretrain") -> dict[str, Any]:
    """One page: three boxes, each of another kind and name; the goal asks for the second."""
    rng = Random(number)
    image = Image.new("RGB", (SCREEN_WIDTH, SCREEN_HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    elements = []
    for row, (kind, name) in enumerate(zip(("button", "link", "field"), rng.sample(NAMES, 3), strict=True)):
        x, y = rng.randrange(0, 80), 60 + 40 * row
        box = [float(x), float(y), x + 60.0, y + 20.0]
        draw.rectangle(box, outline="black", fill={"button": "silver", "link": "white", "field": "white"}[kind])
        draw.text((x + 4, y + 4), name, fill="blue" if kind == "link" else "black")
        elements.append({"kind": kind, "name": name, "color": "", "box": box})
    stored = io.BytesIO()
    image.save(stored, "PNG")
    typed = number % 2 == 0
    target = 2 if typed else 1
    return {
        "step_id": f"drawn/{number}",
        "split": split,
        "episode_id": f"drawn/{number}",
        "step_index": 0,
        "family": "drawn",
        "seed": number,
        "goal": f'Enter "Kw7{number}" into it.' if typed else f'Click on "{elements[1]["name"]}".',
        "history": ["[tab] Tab #1 -> CLICK"] if number % 3 == 0 else [],
        "screenshot": stored.getvalue(),
        "width": SCREEN_WIDTH,
        "height": SCREEN_HEIGHT,
        "boxes": [elements[target]["box"]],
        "action_type": "TYPE" if typed else "CLICK",
        "value": f"Kw7{number}" if typed else "",
        "elements": elements,
        "target": target,
    }


def write_shard(path: Path, count: int, split: str = "pretrain") -> Path:
    pq.write_table(pa.Table.from_pylist([page(number, split) for number in range(count)], SHARD_SCHEMA), path)
    return path


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> corpus.Corpus:
    """32 drawn pages; those of seeds 15 and 31 are held out."""
    directory = tmp_path_factory.mktemp("drawn")
    return corpus.read([write_shard(directory / "drawn.parquet", 32)], work_dir=directory)
