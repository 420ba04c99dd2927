"""A unit of conversion work, so that both cores can decode while the file is read on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from coepg_dagster.readers.rows import Item, Reject, RejectedRow, Step


@dataclass(frozen=True)
class Task:
    """One source row and how to convert it into steps; RejectedRow means that it is left out."""

    file: str
    row: str
    convert: Callable[[], Sequence[Item]]

    def run(self) -> Sequence[Item]:
        try:
            items = self.convert()
            return [replace(item, row=self.row) if isinstance(item, Step) and not item.row else item for item in items]
        except RejectedRow as rejected:
            return [rejected.reject(self.file, self.row)]


def converted(tasks: Iterable[Task | Reject], workers: int = 2) -> Iterator[Item]:
    """The items of `tasks`, in their order; at most `workers` + 1 rows are held at a time."""
    waiting: deque[Future[Sequence[Item]] | Reject] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for task in tasks:
            waiting.append(pool.submit(task.run) if isinstance(task, Task) else task)
            if len(waiting) > workers:
                yield from _items(waiting.popleft())
        while waiting:
            yield from _items(waiting.popleft())


def _items(done: Future[Sequence[Item]] | Reject) -> Sequence[Item]:
    return [done] if isinstance(done, Reject) else done.result()
