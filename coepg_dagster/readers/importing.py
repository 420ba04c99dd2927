"""From a dataset's files to Arrow files of steps: streaming, restartable, counted.

Each source file becomes one Arrow file of READER_SCHEMA, which is memory-mapped where it is used, and one of
REJECT_SCHEMA. An import that was killed goes on after the last finished file. Memory holds a few rows at a time.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from coepg_dagster.readers import android_control, mind2web, own, screenspot
from coepg_dagster.readers.images import Resize
from coepg_dagster.readers.rows import (
    EXPECTED,
    READER_SCHEMA,
    REASONS,
    REJECT_SCHEMA,
    UNKNOWN_SPLIT,
    Item,
    ReaderError,
    Reject,
    Step,
)
from coepg_dagster.readers.tasks import Task, converted
from coepg_dagster.readers.views import Rule

Dataset = Literal["mind2web", "mind2web_blocks", "android_control", "screenspot", "jsonl"]
HUB: Final[Mapping[str, tuple[str, str]]] = {
    "mind2web": ("osunlp/Multimodal-Mind2Web", "data/*.parquet"),
    "screenspot": ("rootsautomation/ScreenSpot", "data/*.parquet"),
}
"""Datasets that `fetch` finds on the hub: repository and file pattern."""


@dataclass(frozen=True)
class Options:
    """How a dataset is read. Everything here changes the result, and is stored with it."""

    view: Rule = "target_block"  # web pages: which part of the page (see `views`)
    level: android_control.Level = "high"
    resize: Resize = field(default_factory=Resize)  # what the legibility check assumes
    shrink: bool = False  # store screenshots as resized
    images: str | None = None  # folder of images, where it is not the annotations' own
    max_bad_share: float = 0.05  # of rows, left out for a reason that is not EXPECTED
    workers: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.max_bad_share <= 1:
            raise ReaderError(f"max_bad_share is a share from 0 to 1, not {self.max_bad_share}")


def lost_of(lost: Mapping[str, int], split: str) -> dict[str, int]:
    """How many steps `split` lacks, by reason, of `Counts.lost`; rows whose split is unknown may be of this one too."""
    found = {}
    for key, n in lost.items():
        of, _, reason = key.rpartition(": ")
        if of in (split, UNKNOWN_SPLIT):
            found[reason if of == split else f"{reason}, {UNKNOWN_SPLIT}"] = n
    return found


COUNTERS: Final = ("steps", "rejected", "noticed", "lost")


@dataclass
class Counts:
    """What an import saw; grows while it runs."""

    steps: Counter[str] = field(default_factory=Counter)  # by split
    rejected: Counter[str] = field(default_factory=Counter)  # rows, by reason
    noticed: Counter[str] = field(default_factory=Counter)  # by "split: fact"
    lost: Counter[str] = field(default_factory=Counter)  # steps that were not EXPECTED to go, by "split: reason"

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
        "jsonl": own.files,
    }
    if dataset not in finders:
        raise ReaderError(f"reader {dataset!r} is not known; choose from {', '.join(finders)}")
    found = finders[dataset](source) if source.exists() else []
    if not found:
        raise ReaderError(f"{source}: holds no files of a {dataset} dataset")
    return found


def _tasks(dataset: Dataset, source: Path, path: Path, options: Options) -> Iterator[Task | Reject]:
    folder = source if source.is_dir() else source.parent
    images = Path(options.images) if options.images else folder
    match dataset:
        case "mind2web":
            return mind2web.rows(path, options.view, options.resize, options.shrink)
        case "mind2web_blocks":
            return mind2web.block_rows(path, images, options.resize)
        case "android_control":
            splits = android_control.Splits.of(folder)
            return android_control.rows(path, splits, options.level, options.resize, options.shrink)
        case "screenspot":
            return screenspot.rows(path, images, options.resize, options.shrink)
        case "jsonl":
            return own.rows(path, options.resize, options.shrink)


MIN_ROWS: Final = 20
"""The share of bad rows is first judged after this many, and at the end of the dataset."""


def read_items(
    dataset: Dataset, source: Path, options: Options, counts: Counts, seen: set[str], path: Path
) -> Iterator[Item]:
    """The items of one file: steps with new ids, and rejects; `counts` and `seen` grow. Raises ReaderError."""
    for item in converted(_tasks(dataset, source, path, options), options.workers):
        kept = item
        if isinstance(item, Step):
            if item.values["step_id"] in seen:
                again = f"{item.values['step_id']!r} came before"
                kept = Reject(str(path), item.row, "duplicate_id", again, item.values["split"])
            else:
                seen.add(item.values["step_id"])
                counts.steps[item.values["split"]] += 1
                counts.noticed.update(f"{item.values['split']}: {fact}" for fact in item.noticed)
        if isinstance(kept, Reject):
            counts.leave_out(kept)
        if counts.rows >= MIN_ROWS:
            _judge(counts, options, path)
        yield kept


def _judge(counts: Counts, options: Options, path: Path) -> None:
    if counts.rows and counts.bad > options.max_bad_share * counts.rows:
        worst = [(reason, n) for reason, n in counts.rejected.most_common() if reason not in EXPECTED]
        why = ", ".join(f"{n} × {reason} ({REASONS[reason]})" for reason, n in worst[:3])
        raise ReaderError(
            f"{path}: {counts.bad} of {counts.rows} rows are bad, over the allowed {options.max_bad_share:.0%}: {why}. "
            "Look at the rejects, mend the data, or allow a larger max_bad_share"
        )


def batches(items: Iterable[Item], rejects: list[Reject], size: int = 32) -> Iterator[pa.RecordBatch]:
    """The steps among `items` as record batches of READER_SCHEMA; rejects are appended to `rejects`."""
    held: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, Reject):
            rejects.append(item)
            continue
        held.append(item.values)
        if len(held) == size:
            yield pa.RecordBatch.from_pylist(held, schema=READER_SCHEMA)
            held = []
    if held:
        yield pa.RecordBatch.from_pylist(held, schema=READER_SCHEMA)


def rejects_table(rejects: Iterable[Reject]) -> pa.Table:
    return pa.Table.from_pylist([asdict(reject) for reject in rejects], schema=REJECT_SCHEMA)


def stream(dataset: Dataset, source: Path, options: Options | None = None) -> Iterator[pa.RecordBatch]:
    """Record batches of a whole dataset, without storing anything; raises ReaderError past the share of bad rows."""
    options, counts, seen = options or Options(), Counts(), set[str]()
    for path in source_files(dataset, source):
        yield from batches(read_items(dataset, source, options, counts, seen, path), [])
        _judge(counts, options, path)


def import_dataset(dataset: Dataset, source: Path, out: Path, options: Options | None = None) -> Counts:
    """Import every file of `source` into `out`, which then `load`s; finished files of the same import are kept.

    Rejects are written also where the import stops for them. Raises ReaderError, with what to do.
    """
    options, counts, seen = options or Options(), Counts(), set[str]()
    out.mkdir(parents=True, exist_ok=True)
    for path in source_files(dataset, source):
        key = _key(dataset, path, source, options)
        steps_file, rejects_file, counts_file = (out / f"{key}.{kind}" for kind in ("arrow", "rejects.parquet", "json"))
        if counts_file.is_file():
            done = json.loads(counts_file.read_text())
            for name in COUNTERS:
                getattr(counts, name).update(done[name])
            seen.update(_mapped(steps_file)["step_id"].to_pylist())
            continue
        before, rejects = {name: getattr(counts, name).copy() for name in COUNTERS}, list[Reject]()
        draft = steps_file.with_suffix(".draft")
        try:
            with pa.OSFile(str(draft), "wb") as sink, pa.ipc.new_file(sink, READER_SCHEMA) as writer:
                for batch in batches(read_items(dataset, source, options, counts, seen, path), rejects):
                    writer.write_batch(batch)
        finally:
            pq.write_table(rejects_table(rejects), rejects_file)
        own_counts = Counts(**{name: getattr(counts, name) - before[name] for name in COUNTERS})
        draft.replace(steps_file)
        facts = {"source": str(path), "options": asdict(options), "key": _chosen(dataset, options)}
        _write(counts_file, own_counts.to_json() | facts)
    _judge(counts, options, out)
    return counts


def _write(path: Path, data: Mapping[str, Any]) -> None:
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(data, indent=1))
    draft.replace(path)


def _key(dataset: Dataset, path: Path, source: Path, options: Options) -> str:
    """Names the outputs of one source file: its place, version, and the options that change what is read."""
    name, version = path.relative_to(source if source.is_dir() else source.parent).as_posix(), path.stat()
    said = json.dumps([name, version.st_size, version.st_mtime_ns, _chosen(dataset, options)])
    return f"{path.stem}-{hashlib.sha256(said.encode()).hexdigest()[:10]}"


CODE: Final = 2
"""Raise it when a reader's code changes so that the same files would give other rows or counts: they are read again."""


def _chosen(dataset: Dataset, options: Options) -> str:
    """The dataset, how it is read, and the options that change what is read, as one text."""
    chosen = {name: value for name, value in asdict(options).items() if name not in ("workers", "max_bad_share")}
    return json.dumps([CODE, dataset, chosen], sort_keys=True)


def load(out: Path) -> pa.Table:
    """The steps of the one import that `out` holds, memory-mapped.

    Raises ReaderError where there is none, one that was not finished, or several of different options or file versions.
    """
    done = sorted(out.glob("*.json"))
    if not done:
        raise ReaderError(f"{out}: holds no finished import")
    if any(out.glob("*.draft")):
        raise ReaderError(f"{out}: the import was cut off; run it again, it goes on where it stopped")
    facts = [json.loads(file.read_text()) for file in done]
    if len({fact["source"] for fact in facts}) < len(facts) or any(f["key"] != facts[0]["key"] for f in facts):
        raise ReaderError(
            f"{out}: holds imports of different options or file versions; import each into its own folder"
        )
    return pa.concat_tables([_mapped(file.with_suffix(".arrow")) for file in done])


def load_benchmark(
    dataset: Dataset, source: Path, out: Path, options: Options | None = None
) -> tuple[pa.Table, Counts]:
    """The steps of a dataset (READER_SCHEMA, memory-mapped) and what its import counted.

    Files are imported into `out`, those excepted that an earlier import with the same options has finished there; what
    else lies in `out` is not looked at.
    """
    options = options or Options()
    counts = import_dataset(dataset, source, out, options)
    files = [out / f"{_key(dataset, path, source, options)}.arrow" for path in source_files(dataset, source)]
    return pa.concat_tables([_mapped(file) for file in files]), counts


def _mapped(path: Path) -> pa.Table:
    """The table of an Arrow file, memory-mapped: it costs address space and no memory."""
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def rejects(out: Path) -> pa.Table:
    """Every row that an import left out: file, row, reason, detail."""
    found = sorted(out.glob("*.rejects.parquet"))
    return pa.concat_tables([pq.read_table(file) for file in found]) if found else rejects_table([])


def fetch(dataset: Dataset) -> Path:
    """A local copy of a dataset of the hub (kept in the hub's cache). Raises ReaderError where it cannot be had."""
    if dataset not in HUB:
        raise ReaderError(f"{dataset} is not fetched from the hub; give the folder of a local copy")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    repository, pattern = HUB[dataset]
    try:
        return Path(snapshot_download(repository, repo_type="dataset", allow_patterns=pattern))
    except (HfHubHTTPError, OSError) as error:
        raise ReaderError(f"{repository} cannot be fetched ({error}); give the folder of a local copy") from error


@dataclass(frozen=True)
class DataReport:
    """What `check_data` found in a user's own data."""

    counts: Counts
    rejects: pa.Table
    problems: tuple[str, ...]  # of the whole, besides single rows

    @property
    def ok(self) -> bool:
        return not self.problems and not self.counts.bad

    def text(self, most: int = 20) -> str:
        """For people: counts by split, and the first `most` rows that are left out."""
        lines = [f"{n} steps in split {split}" for split, n in sorted(self.counts.steps.items())]
        lines += [f"noticed {fact}: {n}" for fact, n in sorted(self.counts.noticed.items())]
        lines += list(self.problems)
        lines += [f"{r['file']}: row {r['row']}: {r['reason']}: {r['detail']}" for r in self.rejects.to_pylist()[:most]]
        if self.rejects.num_rows > most:
            lines.append(f"… and {self.rejects.num_rows - most} more rows")
        return "\n".join([*lines, "ok" if self.ok else "not ok: mend the rows above"])


def check_data(path: Path) -> DataReport:
    """Read a user's own data (see `own`) as an import would, and say everything that is wrong (`coepg check-data`)."""
    options, counts, seen, left_out = Options(max_bad_share=1.0), Counts(), set[str](), list[Reject]()
    problems = []
    episodes: dict[str, set[str]] = {}
    try:
        files = source_files("jsonl", path)
    except ReaderError as error:
        return DataReport(counts, rejects_table([]), (str(error),))
    for file in files:
        for item in read_items("jsonl", path, options, counts, seen, file):
            if isinstance(item, Reject):
                left_out.append(item)
            else:
                episodes.setdefault(item.values["episode_id"], set()).add(item.values["split"])
    if torn := sorted(episode for episode, splits in episodes.items() if len(splits) > 1):
        problems.append(f"{len(torn)} tasks are in more than one split, for example {torn[0]!r}: put each into one")
    if not counts.steps:
        problems.append(f"{path}: no usable step")
    return DataReport(counts, rejects_table(left_out), tuple(problems))
