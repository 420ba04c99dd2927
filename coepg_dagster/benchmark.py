"""What of its labelled steps would stop an experiment later on, found before anything is trained.

`coepg plan` and the import of a benchmark ask this. Screenshots are not looked at.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from coepg_dagster.artifacts import NoSteps, limited
from coepg_dagster.evaluation.case import ScoringError
from coepg_dagster.evaluation.score import OPTIONAL_STEP_COLUMNS, STEP_COLUMNS, score_steps
from coepg_dagster.experiment import Benchmark, Experiment
from coepg_dagster.miniwob.splits import SPLITS
from coepg_dagster.readers import android_control, mind2web
from coepg_dagster.readers.importing import source_files
from coepg_dagster.readers.miniwob import TARGETS_FILE
from coepg_dagster.readers.rows import ReaderError


def wanted_splits(benchmark: Benchmark) -> tuple[str, ...]:
    """Every split that an experiment reads."""
    return (benchmark.train, benchmark.validation, *benchmark.test)


def is_to_be_fetched(benchmark: Benchmark, root: Path) -> bool:
    """Whether a public benchmark has no files yet: what a run would take can be said before they are downloaded."""
    return benchmark.reader in ("mind2web", "android_control") and not (root / benchmark.path).exists()


def refuse_files(experiment: Experiment, root: Path) -> list[str]:
    """Why the files of a benchmark that was not imported yet cannot be used; empty: nothing is known against them.

    The splits are those that file names, lists of splits, or lines name. Rows of the MiniWoB++ snapshot are counted, those
    of others are not: `refuse_steps` sees to these once they are imported.
    """
    benchmark = experiment.benchmark
    place = root / benchmark.path
    try:
        if not place.exists():
            raise ReaderError(f"{place}: there is no such file or folder; correct `benchmark.path`, or fetch the data")
        if benchmark.reader == "miniwob":
            return refuse_steps(experiment, _snapshot(place))
        return _missing(benchmark, _splits(benchmark, place))
    except (ReaderError, OSError, pa.ArrowException) as error:
        return [f"benchmark: {error}"]


def refuse_steps(experiment: Experiment, steps: pa.Table, covered: Mapping[int, int] | None = None) -> list[str]:
    """Why an experiment cannot be made from these steps (STEP_SCHEMA, screenshots not needed); empty: it can.

    Args:
        covered: k → the number of steps that D_k covers, as far as it is made.
    """
    benchmark = experiment.benchmark
    why = _missing(benchmark, sorted(pc.unique(steps["split"]).to_pylist()))
    if why:
        return why
    columns = [name for name in (*STEP_COLUMNS, *OPTIONAL_STEP_COLUMNS, "split") if name in steps.column_names]
    limits = {benchmark.train: benchmark.max_train_steps}
    for split in wanted_splits(benchmark):
        key = "benchmark.max_train_steps" if split == benchmark.train else "benchmark.max_eval_steps"
        mine = steps.select(columns).filter(pc.field("split") == split)
        try:
            mine = limited(mine, limits.get(split, benchmark.max_eval_steps))
            if split == benchmark.train:
                why += _too_few_prompts(experiment, {f"split {split!r}, with `max_train_steps`,": mine.num_rows})
            elif not why:
                score_steps(benchmark.protocol, mine, _right_answers(mine))
            if split == benchmark.validation and experiment.grpo.validate_every is not None:
                key = "grpo.validation_steps"
                limited(mine, experiment.grpo.validation_steps)
        except ScoringError as error:
            why.append(f"key `benchmark.protocol`: {error}")
        except NoSteps as error:
            why.append(f"key `{key}`: {error}")
    return why + _too_few_prompts(experiment, {f"D_{k}": steps for k, steps in (covered or {}).items()})


def _missing(benchmark: Benchmark, found: Sequence[str]) -> list[str]:
    missing = [split for split in wanted_splits(benchmark) if split not in found]
    there = ", ".join(found) or "none"
    return [f"benchmark: no steps in split {', '.join(missing)} (there are: {there})"] if missing else []


def _too_few_prompts(experiment: Experiment, steps: Mapping[str, int]) -> list[str]:
    config = experiment.grpo
    if not config.enabled or not {"planner", "end_to_end"} & set(experiment.made):
        return []
    return [
        f"key `grpo.prompts_per_step`: it is {config.prompts_per_step}, and {source} has {n} training steps: lower it"
        for source, n in steps.items()
        if n < config.prompts_per_step
    ]


def _right_answers(steps: pa.Table) -> pa.Table:
    """The labels as predictions."""
    points: list[Any] = []
    for row in steps.select([name for name in ("boxes", "point") if name in steps.column_names]).to_pylist():
        box = row["boxes"][0] if row["boxes"] else None
        middle = [(box[0] + box[2]) / 2, (box[1] + box[3]) / 2] if box else [None, None]
        points.append(row.get("point") or middle)
    labels = {name: steps[name] for name in ("step_id", "action_type", "value")}
    x, y = (pa.array([point[i] for point in points], pa.float64()) for i in (0, 1))
    return pa.table(labels | {"x": x, "y": y})


def _snapshot(place: Path) -> pa.Table:
    """What the files of a MiniWoB++ snapshot say of their steps."""
    missing = [
        name for name in (*(f"{split}.parquet" for split in SPLITS), TARGETS_FILE) if not (place / name).is_file()
    ]
    if missing:
        raise ReaderError(f"{place}: is no MiniWoB++ snapshot, {missing[0]} is missing; correct `path` or `reader`")
    tables = []
    for file in (place / f"{split}.parquet" for split in SPLITS):
        _require_columns(file, ("split", *STEP_COLUMNS), "a MiniWoB++ snapshot")
        tables.append(pq.read_table(file, columns=["split", *STEP_COLUMNS]))
    return pa.concat_tables(tables)


def _require_columns(file: Path, columns: Sequence[str], what: str) -> None:
    there = pq.read_schema(file).names
    if lacking := [name for name in columns if name not in there]:
        raise ReaderError(f"{file}: is no file of {what}, column {lacking[0]!r} is missing; correct `path` or `reader`")


def _splits(benchmark: Benchmark, place: Path) -> list[str]:
    """The splits of a benchmark's files."""
    if benchmark.reader == "miniwob":
        return list(SPLITS)
    files = source_files(benchmark.reader, place)
    match benchmark.reader:
        case "mind2web":
            _require_columns(files[0], mind2web.COLUMNS, "Multimodal-Mind2Web")
            named = [file.name.split("-")[0].removesuffix(".parquet") for file in files]
            found = [str(split) for split in mind2web.SPLITS if split in named]
            return [*found, "validation"] if "train" in found else found
        case "android_control":
            splits = android_control.Splits.of(place if place.is_dir() else place.parent)
            return sorted(set(splits.split.values()))
        case "mind2web_blocks" | "screenspot":
            return list(wanted_splits(benchmark))  # their names were checked with the experiment file
        case "jsonl":
            return sorted({split for file in files for split in _named_in(file)})


def _named_in(file: Path) -> set[str]:
    """The splits that the lines of a user's own data name; lines that cannot be read are the import's business."""
    found = set()
    with file.open("rb") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and isinstance(row.get("split"), str):
                found.add(row["split"])
    return found
