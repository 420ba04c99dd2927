"""From a dataset's files to Arrow files of steps: streaming, restartable, counted.

Each source file becomes one Arrow file of READER_SCHEMA, which is memory-mapped where it is used, and one of
REJECT_SCHEMA. A killed import resumes after the last finished file. A file is imported again where it, or an image that its rows
name, has changed. Memory holds a few rows at a time.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from coepg_dagster.artifacts import whole
from coepg_dagster.prompts import ACTION_TYPES, MOBILE_ACTION_TYPES, Style, needs_target
from coepg_dagster.readers import android_control, boards, jsonl, mind2web, screenspot
from coepg_dagster.readers.files import Files, Version, contents, same_content, version, versions_now
from coepg_dagster.readers.images import Resize
from coepg_dagster.readers.rows import (
    EXPECTED,
    READER_SCHEMA,
    REASONS,
    REJECT_SCHEMA,
    TRAINED,
    UNKNOWN_SPLIT,
    Item,
    ReaderError,
    Reject,
    Step,
)
from coepg_dagster.readers.source_rows import SourceRow, converted, named
from coepg_dagster.readers.views import Rule

Dataset = Literal["mind2web", "mind2web_blocks", "android_control", "screenspot", "jsonl"] | boards.Board
"""`screenspot` reads ScreenSpot's files in any folder; the boards (`readers.boards`) as their owners publish them."""


@dataclass(frozen=True)
class Options:
    """How a dataset is read. Everything here changes the result, and is stored with it."""

    view: Rule = "target_block"  # web pages: which part of the page (see `views`)
    level: android_control.Level = "high"
    resize: Resize = field(default_factory=Resize)  # what the legibility check assumes
    shrink: bool = False  # store screenshots as resized
    images: str | None = None  # folder of images; None: that of the annotations
    trained: tuple[str, ...] = tuple(sorted(TRAINED))  # splits that leave out rows without a needed target
    style: Style = "web"  # of the prompts for a user's own data: on the web a TYPE needs a target
    max_bad_share: float = 0.05  # most rows that may be left out for a reason that is not EXPECTED
    workers: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.max_bad_share <= 1:
            raise ReaderError(f"max_bad_share is a share from 0 to 1, not {self.max_bad_share}")


def lost_of(lost: Mapping[str, int], split: str) -> dict[str, int]:
    """The steps of `Counts.lost` that `split` lacks, by reason. Rows of an unknown split count too: they may belong to it."""
    steps = {}
    for key, n in lost.items():
        of, _, reason = key.rpartition(": ")
        if of in (split, UNKNOWN_SPLIT):
            steps[reason if of == split else f"{reason}, {UNKNOWN_SPLIT}"] = n
    return steps


COUNTERS: Final = ("steps", "rejected", "noticed", "lost")


@dataclass
class Counts:
    """Running counts of an import."""

    steps: Counter[str] = field(default_factory=Counter)  # by split
    rejected: Counter[str] = field(default_factory=Counter)  # rows, by reason
    noticed: Counter[str] = field(default_factory=Counter)  # by "split: fact"
    # steps left out for a reason that is not EXPECTED, by "split: reason"
    lost: Counter[str] = field(default_factory=Counter)

    @property
    def bad(self) -> int:
        return sum(n for reason, n in self.rejected.items() if reason not in EXPECTED)

    def leave_out(self, reject: Reject) -> None:
        self.rejected[reject.reason] += 1
        if reject.reason not in EXPECTED:
            self.lost[f"{reject.split or UNKNOWN_SPLIT}: {reject.reason}"] += reject.steps

    @property
    def rows(self) -> int:
        return self.steps.total() + self.rejected.total()

    def to_json(self) -> dict[str, Any]:
        return {name: dict(sorted(getattr(self, name).items())) for name in COUNTERS} | {"rows": self.rows}


def source_files(dataset: Dataset, source: Path) -> list[Path]:
    """The files that are read, in order. Raises ReaderError where there are none."""
    finders: dict[str, Callable[[Path], list[Path]]] = {
        "mind2web": mind2web.files,
        "mind2web_blocks": mind2web.block_files,
        "android_control": android_control.files,
        "screenspot": screenspot.files,
        "jsonl": jsonl.files,
        **{board: partial(boards.annotation_files, board) for board in boards.BOARDS},
    }
    if dataset not in finders:
        raise ReaderError(f"reader {dataset!r} is not known; choose from {', '.join(finders)}")
    if not source.exists():
        raise ReaderError(f"{source}: there is no such file or folder")
    if files := finders[dataset](source):
        return files
    there = sorted(path.name for path in source.iterdir() if not path.name.startswith("."))
    others = f"there are {', '.join(there[:5])}{', …' if len(there) > 5 else ''}" if there else "it is empty"
    packed = "; unpack *.gz first" if any(name.endswith(".gz") for name in there) else ""
    raise ReaderError(f"{source}: holds no files of a {dataset} dataset, named {NAMES[dataset]}: {others}{packed}")


NAMES: Final[Mapping[str, str]] = {
    "mind2web": "*.parquet",
    "mind2web_blocks": "*_blocks.jsonl",
    "android_control": "*-of-*",
    "screenspot": "*.json, *.jsonl or *.parquet",
    "jsonl": "*.jsonl, in no folder below it",
}
"""How files are named that a reader finds in a folder; the boards say it themselves."""


def _folder(source: Path) -> Path:
    return source if source.is_dir() else source.parent


def _files(source: Path, options: Options) -> Files:
    return Files(_folder(source), Path(options.images) if options.images else None)


def _tasks(dataset: Dataset, source: Path, path: Path, options: Options, files: Files) -> Iterator[SourceRow | Reject]:
    match dataset:
        case "mind2web":
            return mind2web.rows(path, options.view, options.resize, options.shrink)
        case "mind2web_blocks":
            return mind2web.block_rows(path, files, options.resize)
        case "android_control":
            splits = android_control.Splits.of(_folder(source), files)
            return android_control.rows(path, splits, options.level, options.resize, options.shrink)
        case "screenspot":
            return screenspot.rows(path, files, options.resize, options.shrink)
        case "jsonl":
            return jsonl.rows(path, files, options.resize, options.shrink)
        case _:
            return boards.rows(dataset, source, path, files, options.resize, options.shrink)


def _outside(counts: Counts) -> int:
    """Rows with a box that leaves its image, whether they were left out or not."""
    reason = "box_outside_image"
    return counts.rejected[reason] + sum(n for fact, n in counts.noticed.items() if fact.endswith(f": {reason}"))


MANY_BAD: Final = 100
"""From this many bad rows on, their share is checked after each row, not only at the end: a wrong folder fails early."""


def read_items(
    dataset: Dataset, source: Path, options: Options, counts: Counts, seen: set[str], path: Path, files: Files
) -> Iterator[Item]:
    """The items of one file: steps with new ids, and rejects. Updates `counts`, `seen`, `files`. Raises ReaderError."""
    for item in converted(_tasks(dataset, source, path, options, files), options.workers):
        kept = _judged(dataset, item, path, options, seen) if isinstance(item, Step) else item
        if isinstance(kept, Step):
            seen.add(kept.values["step_id"])
            counts.steps[kept.values["split"]] += 1
            counts.noticed.update(f"{kept.values['split']}: {fact}" for fact in kept.noticed)
        else:
            counts.leave_out(kept)
        if counts.bad >= MANY_BAD:
            _judge(counts, options, path)
        yield kept


def _judged(dataset: Dataset, step: Step, path: Path, options: Options, seen: set[str]) -> Item:
    """`step`, or a Reject where its id came before or it lacks a needed target."""
    about = step.values
    if about["step_id"] in seen:
        return Reject(str(path), step.row, "duplicate_id", f"{about['step_id']!r} came before", about["split"])
    style = "mobile" if dataset == "android_control" else options.style
    if about["split"] in options.trained and not about["boxes"] and needs_target(about["action_type"], style):
        reason = "missing_target" if dataset == "jsonl" else "no_target"
        unless = ", unless `models.prompts` is `mobile`" if about["action_type"] == "TYPE" else ""
        why = f"a {about['action_type']} of split {about['split']} needs a target box{unless}"
        return Reject(str(path), step.row, reason, why, about["split"])
    return step


def _judge(counts: Counts, options: Options, path: Path) -> None:
    if counts.rows and counts.bad > options.max_bad_share * counts.rows:
        worst = [(reason, n) for reason, n in counts.rejected.most_common() if reason not in EXPECTED]
        why = ", ".join(f"{n} × {reason} ({REASONS[reason]})" for reason, n in worst[:3])
        raise ReaderError(
            f"{path}: {counts.bad} of {counts.rows} rows are bad, over the allowed {options.max_bad_share:.0%}: {why}. "
            "Look at the rejected rows, correct the data, or raise `benchmark.max_bad_share` in the experiment"
        )


def batches(items: Iterable[Item], rejects: list[Reject]) -> Iterator[pa.RecordBatch]:
    """The steps among `items` as record batches of READER_SCHEMA; rejects are appended to `rejects`."""
    held: list[dict[str, Any]] = []
    held_bytes = 0
    for item in items:
        if isinstance(item, Reject):
            rejects.append(item)
            continue
        held.append(item.values)
        held_bytes += len(item.values["screenshot"])
        if len(held) == BATCH or held_bytes > MAX_BATCH:
            yield pa.RecordBatch.from_pylist(held, schema=READER_SCHEMA)
            held, held_bytes = [], 0
    if held:
        yield pa.RecordBatch.from_pylist(held, schema=READER_SCHEMA)


BATCH: Final = 32
"""Steps of a record batch."""
MAX_BATCH: Final = 1 << 29
"""Bytes of screenshots after which a batch is full: Arrow's binary columns hold 2 GiB."""


def rejects_table(rejects: Iterable[Reject]) -> pa.Table:
    """A table of REJECT_SCHEMA. Text that is not valid UTF-8, such as a file name in another encoding, is escaped."""

    def plain(value: Any) -> Any:
        return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value

    rows = [{name: plain(value) for name, value in asdict(reject).items()} for reject in rejects]
    return pa.Table.from_pylist(rows, schema=REJECT_SCHEMA)


def import_dataset(dataset: Dataset, source: Path, out: Path, options: Options | None = None) -> Counts:
    """Import every file of `source` into `out`; skip files that an earlier import with the same options has finished.

    Rejects are also written where too many of them stop the import. Raises ReaderError, which says what to do.
    """
    options, counts, seen = options or Options(), Counts(), set[str]()
    out.mkdir(parents=True, exist_ok=True)
    paths = source_files(dataset, source)
    for path in paths:
        one = _Outputs(out, _key(dataset, path, source, options))
        if (done := one.finished(_folder(source), seen)) is not None:
            for name in COUNTERS:
                getattr(counts, name).update(done[name])
            seen.update(_mapped(one.steps)["step_id"].to_pylist())
            continue
        one.counts.unlink(missing_ok=True)
        if dataset == "jsonl" and (why := jsonl.not_pixels(path)):
            raise ReaderError(why)
        before, rejects = {name: getattr(counts, name).copy() for name in COUNTERS}, list[Reject]()
        ids_before, files = _digest(seen), _files(source, options)
        files.note(path)
        draft = one.steps.with_suffix(".draft")
        try:
            with pa.OSFile(str(draft), "wb") as sink, pa.ipc.new_file(sink, READER_SCHEMA) as writer:
                for batch in batches(read_items(dataset, source, options, counts, seen, path, files), rejects):
                    writer.write_batch(batch)
            if path == paths[-1]:
                _judge(counts, options, path)
        except ReaderError as error:
            why = jsonl.not_pixels(path, _outside(counts)) if dataset == "jsonl" else None
            raise ReaderError(f"{error}. {why + '. ' if why else ''}Rejected rows: {one.rejects}") from error
        finally:
            pq.write_table(rejects_table(rejects), one.rejects)
            _write(one.read, files.versions)
        file_counts = Counts(**{name: getattr(counts, name) - before[name] for name in COUNTERS})
        draft.replace(one.steps)  # a draft that remains means that the import was cut off
        facts = {"source": str(path), "options": asdict(options), "key": _chosen(dataset, options)}
        _write(one.counts, file_counts.to_json() | facts | {"ids_before": ids_before})
    _judge(counts, options, out)
    return counts


@dataclass(frozen=True)
class _Outputs:
    """The files that the import of one source file writes to `out`; `counts` is written last."""

    out: Path
    key: str

    @property
    def steps(self) -> Path:
        return self.out / f"{self.key}.arrow"

    @property
    def rejects(self) -> Path:
        return self.out / f"{self.key}.rejects.parquet"

    @property
    def read(self) -> Path:
        """The versions of every file that was read; an import that stops writes them too."""
        return self.out / f"{self.key}.read"

    @property
    def counts(self) -> Path:
        return self.out / f"{self.key}.json"

    def versions(self) -> dict[str, Version]:
        """Versions of the files as they were when read; empty where no import has started."""
        if not self.read.is_file():
            return {}
        return {name: was and tuple(was) for name, was in json.loads(self.read.read_text()).items()}

    def versions_now(self, folder: Path) -> dict[str, Version]:
        """Present versions of the files that were read. Where only times changed they are stored, to not hash again."""
        was = self.versions()
        now = versions_now(folder, was)
        if now != was and same_content(now, was):
            with suppress(OSError):  # the store may be read-only
                _write(self.read, now)
        return now

    def finished(self, folder: Path, seen: set[str]) -> dict[str, Any] | None:
        """The counts of a finished import, if a new one after the ids `seen` would give the same; else None."""
        if not (self.counts.is_file() and self.steps.is_file() and self.read.is_file()):
            return None
        if not same_content(self.versions(), self.versions_now(folder)):
            return None
        done: dict[str, Any] = json.loads(self.counts.read_text())
        if not seen.isdisjoint(_mapped(self.steps)["step_id"].to_pylist()):
            return None
        return None if "duplicate_id" in done["rejected"] and done["ids_before"] != _digest(seen) else done


def _digest(ids: set[str]) -> str:
    return hashlib.sha256("\0".join(sorted(ids)).encode()).hexdigest()


def version_read(dataset: Dataset, source: Path, out: Path, options: Options) -> str:
    """Hash of names and contents, without times, of all files that the import in `out` read, as they were then."""
    return _version(dataset, source, out, options, lambda one: one.versions())


def version_now(dataset: Dataset, source: Path, out: Path, options: Options) -> str:
    """`version_read` of the files as they are now. Only files whose size or time changed are opened."""
    return _version(dataset, source, out, options, lambda one: one.versions_now(_folder(source)))


def _version(
    dataset: Dataset, source: Path, out: Path, options: Options, look: Callable[[_Outputs], dict[str, Version]]
) -> str:
    try:
        paths = source_files(dataset, source)
    except ReaderError:
        paths = []
    read = []
    for path in paths:
        key = _key(dataset, path, source, options)
        versions = look(_Outputs(out, key)) or {path.name: version(path)}
        read.append([key, sorted(contents(versions).items())])
    return hashlib.sha256(json.dumps(read).encode()).hexdigest()[:12]


def _write(path: Path, data: Mapping[str, Any]) -> None:
    with whole(path) as draft:
        draft.write_text(json.dumps(data, indent=1))


def _key(dataset: Dataset, path: Path, source: Path, options: Options) -> str:
    """Name of the outputs of one source file, from its path and the options that change what is read."""
    text = json.dumps([path.relative_to(_folder(source)).as_posix(), _chosen(dataset, options)])
    name = re.sub(r"[^\w.-]", "_", path.stem)[:80]
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


CODE: Final[Mapping[str, int]] = {"jsonl": 3}
"""Version of a reader's code, 2 where none is named. Raise it when the same files would give other rows or counts: they are
read again."""


def _chosen(dataset: Dataset, options: Options) -> str:
    """The dataset, how it is read, and the options that change what is read, as JSON."""
    chosen = {name: value for name, value in asdict(options).items() if name not in ("workers", "max_bad_share")}
    return json.dumps([CODE.get(dataset, 2), dataset, chosen], sort_keys=True)


def load_benchmark(
    dataset: Dataset, source: Path, out: Path, options: Options | None = None
) -> tuple[pa.Table, Counts]:
    """The steps of a dataset (READER_SCHEMA, memory-mapped), imported into `out`, and the counts of the import.

    Files that an earlier import with the same options has finished are not read again. Other files in `out` are ignored.
    """
    options = options or Options()
    counts = import_dataset(dataset, source, out, options)
    return pa.concat_tables([_mapped(file) for file in imported(dataset, source, out, options)]), counts


def imported(dataset: Dataset, source: Path, out: Path, options: Options) -> list[Path]:
    """The Arrow files of steps of an import (READER_SCHEMA), one for each source file, in order."""
    return [out / f"{_key(dataset, path, source, options)}.arrow" for path in source_files(dataset, source)]


def _mapped(path: Path) -> pa.Table:
    """The table of an Arrow file, memory-mapped: it costs address space and no memory."""
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def rejects(out: Path) -> pa.Table:
    """Every row that an import left out: file, row, reason, detail."""
    files = sorted(out.glob("*.rejects.parquet"))
    return pa.concat_tables([pq.read_table(file) for file in files]) if files else rejects_table([])


@dataclass(frozen=True)
class DataReport:
    """What `check_data` found in a user's own data."""

    counts: Counts
    rejects: pa.Table
    problems: tuple[str, ...]  # of the data as a whole
    notes: tuple[str, ...] = ()  # what is missing that an experiment may need

    @property
    def ok(self) -> bool:
        return not self.problems and not self.counts.bad

    def text(self, most: int = 20) -> str:
        """Summary: counts by split, and the first `most` rows that are left out."""
        lines = [f"{n} steps in split {split}" for split, n in sorted(self.counts.steps.items())]
        lines += [f"noticed {fact}: {n}" for fact, n in sorted(self.counts.noticed.items())]
        lines += [*self.notes, *self.problems]
        for r in self.rejects.to_pylist()[:most]:
            place = f"{r['file']}: line {r['row']}" if r["row"] else r["file"]
            lines.append(f"{place}: {r['reason']}: {r['detail']}")
        if self.rejects.num_rows > most:
            lines.append(f"… and {self.rejects.num_rows - most} more rows")
        return "\n".join([*lines, "ok" if self.ok else "not ok: correct what is named above"])


CHECKED: Final = pa.schema([field for field in READER_SCHEMA if field.name not in ("screenshot", "history")])
"""What `check_data` keeps of a step, for the checks of an experiment."""


def check_data(
    path: Path,
    options: Options | None = None,
    splits: Sequence[str] = (),
    refuse: Callable[[pa.Table], Sequence[str]] | None = None,
) -> DataReport:
    """Read a user's own data (see `jsonl`) as an import would, and list everything that is wrong (`coepg check-data`).

    Args:
        options: reader options of an experiment. Without them, prompts are `mobile` if an action is of phones only, else `web`.
        splits: splits that the experiment needs. Without them a missing split is only noted.
        refuse: why the experiment cannot run on the steps, which have the columns CHECKED (`benchmark.refuse_steps`).
    """
    counts, seen, left_out = Counts(), set[str](), list[Reject]()
    problems, notes = list[str](), list[str]()
    episodes, read = dict[str, set[str]](), list[dict[str, Any]]()
    try:
        paths = source_files("jsonl", path)
    except ReaderError as error:
        return DataReport(counts, rejects_table([]), (str(error),))
    if options is None:
        phone = named(paths, "action_type") & (MOBILE_ACTION_TYPES.keys() - ACTION_TYPES.keys())
        options = Options(style="mobile" if phone else "web")
    options = replace(options, max_bad_share=1.0)
    for file in paths:
        before, smallest = _outside(counts), math.inf
        for item in read_items("jsonl", path, options, counts, seen, file, _files(path, options)):
            if isinstance(item, Reject):
                left_out.append(item)
            else:
                episodes.setdefault(item.values["episode_id"], set()).add(item.values["split"])
                smallest = min(smallest, item.values["width"], item.values["height"])
                if refuse is not None:
                    read.append({name: item.values.get(name) for name in CHECKED.names})
        if why := jsonl.not_pixels(file, _outside(counts) - before):
            problems.append(why)
        elif note := jsonl.may_be_thousandths(file, smallest):
            notes.append(note)
    if torn := sorted(episode for episode, splits_of in episodes.items() if len(splits_of) > 1):
        problems.append(f"{len(torn)} tasks are in more than one split, for example {torn[0]!r}: put each into one")
    if not counts.steps:
        problems.append(f"{path}: no usable step")
    problems += [f"no step in split {split}, which the experiment needs" for split in splits if not counts.steps[split]]
    if refuse is not None and counts.steps and not problems:
        problems += refuse(pa.Table.from_pylist(read, schema=CHECKED))
    if not splits:
        missing = [f"split {name}" for name in ("train", "validation") if not counts.steps[name]]
        missing += [] if set(counts.steps) - {"train", "validation"} else ["any split for tests"]
        notes += [f"no step in {name}: an experiment needs one (`benchmark` names its splits)" for name in missing]
    return DataReport(counts, rejects_table(left_out), tuple(problems), tuple(notes))
