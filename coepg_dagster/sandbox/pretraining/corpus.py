"""Collected MiniWoB++ steps as pretraining reads them: one array of screens, one list of steps.

The Parquet shards have the columns of `steps.STEP_SCHEMA`, and two more: `elements` (kind, name, color, box of every
visible element) and `target` (index of the acted element, -1 where there is none). The shipped snapshot has neither; it
can be scored, not trained on.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from coepg_dagster.pictures import BadPicture, picture
from coepg_dagster.refusal import Refusal
from coepg_dagster.sandbox.pretraining.tiny_models import SCREEN_HEIGHT, SCREEN_WIDTH
from coepg_dagster.sandbox.pretraining.wordings import ScreenElement, askable

PRETRAIN_SPLIT: Final = "pretrain"
HELD_OUT_EVERY: Final = 16
"""Screens of every sixteenth seed are held out from training; the cards' element accuracy is measured on them."""

_IMAGES: Final = "screens.npy"
_STEPS: Final = "steps.json"
_COLUMNS: Final = [
    "split",
    "family",
    "seed",
    "goal",
    "history",
    "screenshot",
    "width",
    "height",
    "boxes",
    "action_type",
    "value",
    "elements",
    "target",
]


class BadShards(Refusal, ValueError):
    """Shards that hold no step, a screen of another size, or a step that must not be trained on."""


@dataclass(frozen=True)
class ScreenStep:
    """One labelled step without its picture. `target` indexes `elements`; -1: none."""

    family: str
    seed: int
    goal: str
    history: tuple[str, ...]
    action_type: str
    value: str
    elements: tuple[ScreenElement, ...]
    target: int
    boxes: tuple[tuple[float, float, float, float], ...]
    askable: tuple[int, ...]


@dataclass(frozen=True)
class Corpus:
    """Steps and their screens.

    Attributes:
        steps: everything but the pixels.
        images: (len(steps), SCREEN_HEIGHT, SCREEN_WIDTH, 3) uint8, mapped from a file in `directory`.
        directory: holds both files, for other processes to `open`.
    """

    steps: Sequence[ScreenStep]
    images: NDArray[np.uint8]
    directory: Path

    @classmethod
    def open(cls, directory: Path) -> Corpus:
        """The corpus that `read` wrote to a directory."""
        rows = json.loads((directory / _STEPS).read_text("utf-8"))
        images = np.load(directory / _IMAGES, mmap_mode="c")
        return cls([_from_json(row) for row in rows], images, directory)

    def __len__(self) -> int:
        return len(self.steps)

    def indices(self, *, held_out: bool, families: Collection[str] | None = None) -> list[int]:
        """Indices of the screens, of these families or of all, that are (or are not) held out from training.

        Raises BadShards for a family without such a screen.
        """
        chosen = [
            i
            for i, step in enumerate(self.steps)
            if is_held_out(step.seed) == held_out and (families is None or step.family in families)
        ]
        if missing := set(families or ()) - {self.steps[i].family for i in chosen}:
            raise BadShards(f"no screen of the family {min(missing)} among {len(self)}: collect it, or leave it out")
        return chosen

    def texts(self) -> Iterator[str]:
        """All words of each training screen as one text, for the tokenizer."""
        for step in self.steps:
            if not is_held_out(step.seed):
                yield "\n".join([step.goal, step.value, *step.history, *(element.name for element in step.elements)])

    def summary(self) -> dict[str, Any]:
        """The description of the data for model cards."""
        families = sorted({step.family for step in self.steps})
        seeds = [step.seed for step in self.steps]
        training = len(self.indices(held_out=False))
        return {
            "screens": training,
            "held_out_screens": len(self) - training,
            "elements": sum(len(step.elements) for step in self.steps if not is_held_out(step.seed)),
            "families": families,
            "seeds": [min(seeds), max(seeds)],
        }


def is_held_out(seed: int) -> bool:
    """Whether screens of this episode seed are held out from pretraining."""
    return seed % HELD_OUT_EVERY == HELD_OUT_EVERY - 1


def read(
    shards: Sequence[Path],
    *,
    splits: Collection[str] = (PRETRAIN_SPLIT,),
    work_dir: Path | None = None,
) -> Corpus:
    """Read Parquet shards, in the order of their paths.

    Raises BadShards if a step belongs to none of `splits`, for a screen of another size, or for no step at all.
    The pictures go to a file in `work_dir` and are mapped from there; by default in a temporary directory, which is removed when
    the process ends.
    """
    tables = [pq.ParquetFile(path) for path in sorted(shards)]
    total = sum(table.metadata.num_rows for table in tables)
    if total == 0:
        raise BadShards(f"no steps in {[str(path) for path in shards]}; collect some with `coepg collect miniwob`")
    directory = Path(tempfile.mkdtemp(prefix="coepg-screens-", dir=work_dir))
    if work_dir is None:
        atexit.register(shutil.rmtree, directory, ignore_errors=True)  # forked loaders end without it
    images = np.lib.format.open_memmap(
        directory / _IMAGES, mode="w+", dtype=np.uint8, shape=(total, SCREEN_HEIGHT, SCREEN_WIDTH, 3)
    )
    steps: list[ScreenStep] = []
    for table, path in zip(tables, sorted(shards), strict=True):
        columns = [name for name in _COLUMNS if name in table.schema_arrow.names]
        for batch in table.iter_batches(batch_size=512, columns=columns):
            for row in batch.to_pylist():
                if len(steps) == total:
                    break
                if row["split"] not in splits:
                    raise BadShards(
                        f"{path}: a step of split {row['split']!r}; pretraining reads {sorted(splits)} only"
                    )
                images[len(steps)] = _pixels(row, path)
                steps.append(_step(row))
    images.flush()
    (directory / _STEPS).write_text(json.dumps([_to_json(step) for step in steps]), "utf-8")
    return Corpus(steps, images, directory)


def _to_json(step: ScreenStep) -> list[Any]:
    elements = [[e.kind, e.name, e.color, e.box] for e in step.elements]
    label = [step.action_type, step.value, step.target, step.boxes]
    return [step.family, step.seed, step.goal, step.history, *label, elements]


def _from_json(row: Sequence[Any]) -> ScreenStep:
    family, seed, goal, history, action_type, value, target, boxes, described = row
    elements = tuple(ScreenElement(kind, name, color, _box(box)) for kind, name, color, box in described)
    acted = tuple(_box(box) for box in boxes)
    return ScreenStep(
        family, seed, goal, tuple(history), action_type, value, elements, target, acted, tuple(askable(elements))
    )


def _pixels(row: Mapping[str, Any], path: Path) -> NDArray[np.uint8]:
    if (row["width"], row["height"]) != (SCREEN_WIDTH, SCREEN_HEIGHT):
        size = f"{row['width']} x {row['height']} px"
        raise BadShards(f"{path}: a screen of {size}; these models see {SCREEN_WIDTH} x {SCREEN_HEIGHT} px")
    try:
        image = picture(row["screenshot"])
    except BadPicture as error:
        raise BadShards(f"{path}: a screenshot cannot be decoded: {error}; collect it again") from None
    if image.size != (SCREEN_WIDTH, SCREEN_HEIGHT):
        raise BadShards(f"{path}: a screenshot has another size than its row says; collect it again")
    return np.asarray(image.convert("RGB"))


def _box(values: Sequence[float]) -> tuple[float, float, float, float]:
    x1, y1, x2, y2 = values
    return (float(x1), float(y1), float(x2), float(y2))


def _step(row: Mapping[str, Any]) -> ScreenStep:
    described = row.get("elements") or ()
    elements = tuple(ScreenElement(e["kind"], e["name"], e["color"] or "", _box(e["box"])) for e in described)
    target = row.get("target")
    return ScreenStep(
        family=row["family"],
        seed=int(row["seed"]),
        goal=row["goal"],
        history=tuple(row["history"]),
        action_type=row["action_type"],
        value=row["value"],
        elements=elements,
        target=-1 if target is None else int(target),
        boxes=tuple(_box(box) for box in row["boxes"]),
        askable=tuple(askable(elements)),
    )
