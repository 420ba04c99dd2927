"""The labelled steps of an experiment: read by its reader, and checked before anything is trained.

`coepg plan` and the import of a benchmark use the checks `refuse_files` and `refuse_steps`, which do not read screenshots. This
is the only module of the method that imports the sandbox, and only if an experiment uses its reader.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from coepg_dagster.artifacts import NoSteps, limited
from coepg_dagster.evaluation.case import ScoringError
from coepg_dagster.evaluation.labels import BoardLabels
from coepg_dagster.evaluation.score import OPTIONAL_STEP_COLUMNS, STEP_COLUMNS, score_steps
from coepg_dagster.experiment.schema import Benchmark, Experiment, GroundingBoard
from coepg_dagster.experiment.strict import fingerprint
from coepg_dagster.jobs import BoardItems
from coepg_dagster.prompts import Style
from coepg_dagster.readers import android_control, boards, jsonl, mind2web
from coepg_dagster.readers.importing import (
    Dataset,
    Options,
    imported,
    load_benchmark,
    source_files,
    version_now,
    version_read,
)
from coepg_dagster.readers.rows import ReaderError, Reject, RejectedRow
from coepg_dagster.store import digests

SOURCE = "source"
"""The figure of an unpartitioned asset that holds the fingerprint of its source files."""


def options_of(config: Benchmark, style: Style = "web") -> Options:
    """The options with which a benchmark is read for prompts of `style`."""
    return Options(
        view=config.view,
        level=config.level,
        trained=tuple(sorted((config.train, config.validation))),
        style=style if config.reader == "jsonl" else "web",
        max_bad_share=config.max_bad_share,
    )


def read_benchmark(
    config: Benchmark, root: Path, imports: Path, style: Style = "web"
) -> tuple[pa.Table, dict[str, Any]]:
    """The steps of a benchmark, and figures of its import: rows left out, warnings, and SOURCE.

    Imported files are kept under `imports`. Raises ReaderError.
    """
    if config.reader == "miniwob":
        from coepg_dagster.sandbox.miniwob.reader import load_snapshot

        return load_snapshot(root / config.path), {}
    place, options = _import_of(config, root, imports), options_of(config, style)
    table, counts = load_benchmark(config.reader, *place, options)
    figures = {name: counted for name, counted in counts.to_json().items() if name in ("rejected", "noticed", "lost")}
    return table, figures | {SOURCE: version_read(config.reader, *place, options)}


def benchmark_version(config: Benchmark, root: Path, imports: Path, style: Style = "web") -> str:
    """SOURCE of the benchmark's present files."""
    if config.reader == "miniwob":  # a few megabytes, which a checkout writes anew with other times
        return fingerprint(digests(root / config.path))
    return version_now(config.reader, *_import_of(config, root, imports), options_of(config, style))


def read_board(config: GroundingBoard, root: Path, imports: Path) -> BoardItems:
    """The items of a grounding board, imported under `imports` unless they are. Raises ReaderError."""
    dataset, place, options = _board_import(config, root, imports)
    _, counts = load_benchmark(dataset, *place, options)
    return BoardItems(
        steps=imported(dataset, *place, options),
        labels=root / config.path,
        protocol=config.protocol,
        max_steps=config.max_steps,
        lost=dict(counts.lost),
        source=version_read(dataset, *place, options),
    )


def board_version(config: GroundingBoard, root: Path, imports: Path) -> str:
    """`BoardItems.source` of the board's present files."""
    dataset, place, options = _board_import(config, root, imports)
    return version_now(dataset, *place, options)


def _board_import(config: GroundingBoard, root: Path, imports: Path) -> tuple[boards.Board, tuple[Path, Path], Options]:
    """The reader of a board, (its path, the folder of its import), and how it is read."""
    board = boards.board_of(config.protocol)
    assert board is not None  # the experiment file was checked
    out = imports / fingerprint([board, str(config.path), str(config.images)])
    images = None if config.images is None else str(root / config.images)
    return board, (root / config.path, out), Options(images=images, trained=())


def refuse_boards(experiment: Experiment, root: Path) -> list[str]:
    """Why the grounding boards of an experiment cannot be used; empty: no reason is known. Images are not read."""
    why = []
    for name, config in experiment.evaluation.boards.items():
        key = f"key `evaluation.boards.{name}"
        try:
            if not (root / config.path).exists():
                raise ReaderError(f"{root / config.path}: there is no such file or folder")
            if config.images is not None and not (root / config.images).is_dir():
                key = f"{key}.images"
                raise ReaderError(f"{root / config.images}: there is no such folder")
            BoardLabels.read(config.protocol.split("/")[0], root / config.path)
        except (ReaderError, ScoringError, OSError) as error:
            why.append(f"{key}`: {error}")
    return why


@dataclass(frozen=True)
class BoardSize:
    """How much of a grounding board an evaluation reads."""

    items: int
    screen: (
        tuple[int, int] | None
    )  # (width, height) px of a screenshot of median area as a model sees it; None: not stated
    images: int  # bytes that its import takes in the store, which keeps a screenshot with each item of the whole board


def board_size(config: GroundingBoard, root: Path) -> BoardSize:
    """The size of a board from its label files, of which entries that cannot be read count too. No image is opened.

    Raises ReaderError.
    """
    board, (source, _), options = _board_import(config, root, Path())
    images = Path(options.images) if options.images else source if source.is_dir() else source.parent
    items, of_image, screens = 0, Counter[str](), []
    for label in boards.labels(board, source):
        items += 1
        if isinstance(label, Reject):
            continue
        of_image[label.image] += 1
        if label.size is not None:
            with suppress(RejectedRow):
                screens.append(options.resize.of(label.size))
    screens.sort(key=lambda screen: screen[0] * screen[1])
    files = {boards.image_file(board, images, name): n for name, n in of_image.items()}
    return BoardSize(
        min(items, config.max_steps or items),
        screens[len(screens) // 2] if screens else None,
        sum(n * path.stat().st_size for path, n in files.items() if path.is_file()),
    )


def _import_of(config: Benchmark, root: Path, imports: Path) -> tuple[Path, Path]:
    """(the path of the benchmark, the folder of its import)."""
    out = imports / fingerprint([config.reader, str(config.path), config.view, config.level])
    return root / config.path, out


def files_version(root: Path, paths: list[Path]) -> str:
    """The fingerprint of the files in folders below `root`: names, sizes, times."""
    entries = []
    for path in sorted(set(paths)):
        place = root / path
        for file in sorted([place] if place.is_file() else place.rglob("*")):
            if file.is_file():
                about = file.stat()
                entries.append([os.path.relpath(file, root), about.st_size, about.st_mtime_ns])
    return fingerprint(entries)


def source_size(place: Path) -> tuple[int, int]:
    """The number and the bytes of the files of a benchmark, a folder or one file; an import reads all of them or fewer."""
    sizes = [file.stat().st_size for file in ([place] if place.is_file() else place.rglob("*")) if file.is_file()]
    return len(sizes), sum(sizes)


def wanted_splits(benchmark: Benchmark) -> tuple[str, ...]:
    """Every split that an experiment reads."""
    return (benchmark.train, benchmark.validation, *benchmark.test)


def is_to_be_fetched(benchmark: Benchmark, root: Path) -> bool:
    """Whether a public benchmark has no files yet; a plan can be estimated before they are downloaded."""
    return benchmark.reader in ("mind2web", "android_control") and not (root / benchmark.path).exists()


def refuse_files(experiment: Experiment, root: Path) -> list[str]:
    """Why the files of a benchmark that is not imported yet cannot be used; empty: no reason is known.

    Splits are read from file names, lists of splits, or lines. Rows are counted only in the MiniWoB++ snapshot; for other
    benchmarks `refuse_steps` does it after the import.
    """
    benchmark = experiment.benchmark
    place = root / benchmark.path
    try:
        if not place.exists():
            raise ReaderError(f"{place}: there is no such file or folder; correct `benchmark.path`, or fetch the data")
        if benchmark.reader == "miniwob":
            from coepg_dagster.sandbox.miniwob.reader import load_labels

            steps = load_labels(place, ("split", *STEP_COLUMNS))
            return refuse_steps(experiment, steps)
        units = map(jsonl.not_pixels, source_files("jsonl", place)) if benchmark.reader == "jsonl" else ()
        missing = _missing(benchmark, _splits(benchmark, benchmark.reader, place))
        return [*missing, *(f"benchmark: {why}" for why in units if why)]
    except (ReaderError, OSError, pa.ArrowException) as error:
        return [f"benchmark: {error}"]


def refuse_steps(experiment: Experiment, steps: pa.Table, covered: Mapping[int, int] | None = None) -> list[str]:
    """Why an experiment cannot run on these steps (STEP_SCHEMA, without screenshots); empty: it can.

    Args:
        covered: k → the number of steps that D_k covers, for each D_k that exists.
    """
    benchmark = experiment.benchmark
    why = _missing(benchmark, sorted(pc.unique(steps["split"]).to_pylist()))
    if why:
        return why
    plans = ("goal", "instruction") if _reads_plans(experiment) else ()
    names = (*STEP_COLUMNS, *OPTIONAL_STEP_COLUMNS, "split", *plans)
    columns = [name for name in names if name in steps.column_names]
    limits, of_split = {benchmark.train: benchmark.max_train_steps}, dict[str, int]()
    for split in wanted_splits(benchmark):
        key = "benchmark.max_train_steps" if split == benchmark.train else "benchmark.max_eval_steps"
        mine = steps.select(columns).filter(pc.field("split") == split)
        of_split[split] = mine.num_rows
        try:
            mine = limited(mine, limits.get(split, benchmark.max_eval_steps))
            if split == benchmark.train:
                least = mine.num_rows if experiment.grpo.prompts == "dataset" else 0  # that D_k covers is not known yet
                why += refuse_prompts(experiment, f"split {split!r}, with `max_train_steps`,", least, of_split[split])
            elif not why:
                score_steps(benchmark.protocol, mine, _right_answers(mine))
                if split == benchmark.validation and _reads_plans(experiment):
                    reference_plans(benchmark, Path(), mine)
            if split == benchmark.validation and experiment.grpo.validate_every is not None:
                key = "grpo.validation_steps"
                limited(mine, experiment.grpo.validation_steps)
            if split == benchmark.validation and experiment.grpo.enabled and experiment.grpo.probe_steps:
                key = "grpo.probe_steps"
                limited(mine, experiment.grpo.probe_steps)
        except ScoringError as error:
            why.append(f"key `benchmark.protocol`: {error}")
        except NoSteps as error:
            why.append(f"key `{key}`: {error}")
        except ReaderError as error:
            why.append(str(error))
    for k, with_row in (covered or {}).items():
        why += refuse_prompts(experiment, f"D_{k}", with_row, of_split[benchmark.train])
    return why


def _reads_plans(experiment: Experiment) -> bool:
    """Whether an evaluation reads reference plans from columns of the steps."""
    wanted = experiment.oracle_plan and experiment.agent == "decoupled"
    return wanted and experiment.benchmark.reader != "miniwob"


def reference_plans(benchmark: Benchmark, root: Path, steps: pa.Table) -> dict[str, str]:
    """Step id → a plan for the step's label that no model wrote. Raises ReaderError if a step has none.

    It is a gold plan as in pretraining (miniwob), the task itself (screenspot), or the step's instruction.
    """
    if benchmark.reader == "miniwob":
        from coepg_dagster.sandbox.miniwob.reader import load_targets
        from coepg_dagster.sandbox.pretraining.wordings import gold_plan

        targets = load_targets(root / benchmark.path)
        rows = steps.select(["step_id", "boxes", "action_type"]).to_pylist()
        return {
            row["step_id"]: gold_plan(*targets[row["step_id"]][:2], row["boxes"][0], row["action_type"]) for row in rows
        }
    column = "goal" if benchmark.reader == "screenspot" else "instruction"
    plans = dict(zip(steps["step_id"].to_pylist(), steps[column].to_pylist(), strict=True))
    if without := [step_id for step_id, plan in plans.items() if not plan]:
        raise ReaderError(
            f"key `evaluation.oracle_plan`: {len(without)} of {len(plans)} validation steps have no {column}, e.g. "
            f"{without[0]}: add it, or leave the key out"
        )
    return plans


def _missing(benchmark: Benchmark, splits: Sequence[str]) -> list[str]:
    missing = [split for split in wanted_splits(benchmark) if split not in splits]
    there = ", ".join(splits) or "none"
    return [f"benchmark: no steps in split {', '.join(missing)} (there are: {there})"] if missing else []


def refuse_prompts(experiment: Experiment, source: str, covered: int, of: int) -> list[str]:
    """Why GRPO has too few prompts, if `covered` of the `of` training steps have a row in D_k; empty: it has enough."""
    config = experiment.grpo
    prompts = covered if config.prompts == "dataset" else of - covered
    prompts = min(prompts, config.max_prompts or prompts)
    if not config.enabled or not {"planner", "end_to_end"} & set(experiment.made) or prompts >= config.prompts_per_step:
        return []
    if config.prompts == "dataset":
        return [
            f"key `grpo.prompts_per_step`: it is {config.prompts_per_step}, and {source} has {prompts} training steps: lower it"
        ]
    return [
        f"key `grpo.prompts`: it is `unseen`, and {source} leaves {prompts} of {of} training steps without a row, fewer than "
        f"`grpo.prompts_per_step` ({config.prompts_per_step}): lower `benchmark.max_train_steps`, so that steps are left for "
        "GRPO, lower `grpo.prompts_per_step`, or set `dataset`"
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


def _require_columns(file: Path, columns: Sequence[str], what: str) -> None:
    there = pq.read_schema(file).names
    if lacking := [name for name in columns if name not in there]:
        raise ReaderError(f"{file}: is no file of {what}, column {lacking[0]!r} is missing; correct `path` or `reader`")


def _splits(benchmark: Benchmark, reader: Dataset, place: Path) -> list[str]:
    """The splits of a benchmark's files."""
    files = source_files(reader, place)
    match reader:
        case "mind2web":
            _require_columns(files[0], mind2web.COLUMNS, "Multimodal-Mind2Web")
            named = [file.name.split("-")[0].removesuffix(".parquet") for file in files]
            of_files = [str(split) for split in mind2web.SPLITS if split in named]
            return [*of_files, "validation"] if "train" in of_files else of_files
        case "android_control":
            splits = android_control.Splits.of(place if place.is_dir() else place.parent)
            return sorted(set(splits.split.values()))
        case "mind2web_blocks" | "screenspot":
            return list(wanted_splits(benchmark))  # their names were checked with the experiment file
        case "jsonl":
            return sorted({split for file in files for split in _named_in(file)})
        case _:
            return [boards.SPLIT]


def _named_in(file: Path) -> set[str]:
    """The splits named in a JSON Lines file; the import reports lines that cannot be read."""
    splits = set()
    with file.open("rb") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and isinstance(row.get("split"), str):
                splits.add(row["split"])
    return splits
