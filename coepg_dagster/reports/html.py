"""Common parts of all pages: templates, screenshots as files, scripts with data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Protocol

import jinja2
import pyarrow as pa

from coepg_dagster.artifacts import whole
from coepg_dagster.characters import visible

TEMPLATES = Path(__file__).with_name("templates")
SCREENS = "screens"
"""Folder of the screenshots of a set of pages."""


def render(template: str, **values: Any) -> str:
    """A page from one of the templates beside this module; in HTML every value is escaped, and `visible`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=jinja2.select_autoescape(disabled_extensions=("md",), default=True),
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: visible(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)


def script(head: str, value: Any, tail: str = "") -> str:
    """A script of plain data, `HEAD VALUE TAIL;`, since a page that is opened from a file can load scripts only."""
    return f"{head}{json.dumps(value, separators=(',', ':'), allow_nan=False)}{tail};\n"


def image_type(start: bytes) -> str:
    """`png`, `webp` or `jpeg`, from the first bytes of an encoded image."""
    return {b"\x89PNG": "png", b"RIFF": "webp"}.get(start[:4], "jpeg")


class ScreenTarget(Protocol):
    """Where the screenshots of a page go."""

    def put(self, image: bytes | pa.Buffer) -> str:
        """Keeps an encoded image; returns its address on the page."""


class ScreenFiles:
    """Screenshots as files below `folder`, named by hash, so that equal ones are stored once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, image: bytes | pa.Buffer) -> str:
        """Keeps an encoded image; returns its address relative to the pages."""
        view = memoryview(image)
        ending = image_type(bytes(view[:4]))
        name = hashlib.sha256(view).hexdigest()[:20]
        file = self._folder / SCREENS / name[:2] / f"{name}.{ending}"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with whole(file) as draft:
                draft.write_bytes(view)
        return f"{SCREENS}/{name[:2]}/{name}.{ending}"


def shown_steps(steps: pa.Table, wanted: Collection[str], screens: ScreenTarget) -> Iterator[dict[str, Any]]:
    """Each wanted step as pages show it, in the order of the table; its screenshot is put into `screens`.

    `steps` may be mapped memory: screenshots are read one at a time.
    """
    for batch in steps.to_batches(max_chunksize=256):
        texts = batch.drop_columns(["screenshot"]).to_pylist()
        for row, text in enumerate(texts):
            if text["step_id"] in wanted:
                yield {
                    "id": text["step_id"],
                    "family": text["family"],
                    "goal": text["goal"],
                    "instruction": text.get("instruction"),
                    "history": text["history"],
                    "width": text["width"],
                    "height": text["height"],
                    "boxes": [[round(edge, 2) for edge in box] for box in text["boxes"]],
                    "action": text["action_type"],
                    "value": text["value"],
                    "screenshot": screens.put(batch.column("screenshot")[row].as_buffer()),
                }
