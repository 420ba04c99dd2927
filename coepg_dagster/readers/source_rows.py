"""Source rows and their conversion in threads, which decode while the file is read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from coepg_dagster import jsonlines
from coepg_dagster.readers.rows import STRANGE, Item, ReaderError, Reject, RejectedRow, Step, strange


@dataclass(frozen=True)
class SourceRow:
    """One source row and how to convert it into steps; `convert` raises RejectedRow to leave it out."""

    file: str
    row: str
    convert: Callable[[], Sequence[Item]]

    def run(self) -> Sequence[Item]:
        try:
            items = self.convert()
            return [replace(item, row=self.row) if isinstance(item, Step) and not item.row else item for item in items]
        except RejectedRow as rejected:
            return [rejected.reject(self.file, self.row)]
        except STRANGE as error:
            return [strange(error).reject(self.file, self.row)]


def converted(tasks: Iterable[SourceRow | Reject], workers: int = 2) -> Iterator[Item]:
    """The items of `tasks`, in their order; at most `workers` + 1 rows are held at a time."""
    waiting: deque[Future[Sequence[Item]] | Reject] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for task in tasks:
            waiting.append(pool.submit(task.run) if isinstance(task, SourceRow) else task)
            if len(waiting) > workers:
                yield from _items(waiting.popleft())
        while waiting:
            yield from _items(waiting.popleft())


def _items(done: Future[Sequence[Item]] | Reject) -> Sequence[Item]:
    return [done] if isinstance(done, Reject) else done.result()


Row = Mapping[str, Any]


def of_lines(path: Path, convert: Callable[[bytes, int], Sequence[Item]]) -> Iterator[SourceRow | Reject]:
    """A SourceRow per line of a JSON-lines file, named from 1 as editors do; `convert` gets its content and its number from 0."""
    try:
        with path.open("rb") as file:
            for i, line in jsonlines.lines(file):
                yield SourceRow(str(path), str(i + 1), partial(convert, line, i))
    except OSError as error:
        yield Reject(str(path), "", "bad_file", str(error))


def named(paths: Iterable[Path], field: str) -> set[str]:
    """The distinct texts in `field` of JSON-lines files; invalid lines are ignored. Raises ReaderError."""
    values = set()
    for path in paths:
        try:
            with path.open("rb") as file:
                for _, line in jsonlines.lines(file):
                    with suppress(jsonlines.NotJson):
                        data = jsonlines.parse(line)
                        if isinstance(data, dict) and isinstance(data.get(field), str):
                            values.add(data[field])
        except OSError as error:
            raise ReaderError(f"{path}: cannot be read ({error.strerror or error}): let this user read it") from error
    return values


def of_parquet(
    path: Path, columns: Sequence[str], convert: Callable[[Row, int], Sequence[Item]]
) -> Iterator[SourceRow | Reject]:
    """A SourceRow per row of a Parquet file; `convert` gets its `columns` and number from 0. Not a Parquet file: one Reject."""
    try:
        with pq.ParquetFile(path, memory_map=True, pre_buffer=False) as parquet:
            missing = [name for name in columns if name not in parquet.schema_arrow.names]
            if missing:
                for i in range(parquet.metadata.num_rows):
                    yield Reject(str(path), str(i), "missing_column", f"{missing[0]!r} is missing")
                return
            i = 0
            for batch in parquet.iter_batches(batch_size=8, columns=list(columns)):
                for at in range(batch.num_rows):
                    yield SourceRow(str(path), str(i), partial(_of_batch, batch, at, i, convert))
                    i += 1
    except (pa.ArrowException, OSError, UnicodeEncodeError) as error:
        yield Reject(str(path), "", "bad_file", str(error))


def _of_batch(batch: pa.RecordBatch, at: int, i: int, convert: Callable[[Row, int], Sequence[Item]]) -> Sequence[Item]:
    row = {}
    for name in batch.schema.names:
        try:
            row[name] = batch.column(name)[at].as_py()
        except UnicodeDecodeError as error:
            raise RejectedRow("bad_field", f"{name!r} is not UTF-8 text ({error})") from error
    return convert(row, i)
