"""Reads the messages of a job's process while it writes them, one JSON object a line.

Dagster's own reader (`PipesTempFileMessageReader`, 1.13) takes what is there of a line for the whole of it. A line that crosses a
page of memory is seen in two parts on a busy machine; its thread then ends, and no further progress is shown.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import IO, Any, Final

import dagster as dg
from dagster_pipes import PipesDefaultMessageWriter

POLL_SECONDS: Final = 0.05


class Messages(dg.PipesMessageReader):
    """The messages that a process appends to a temporary file, whole lines only."""

    @contextmanager
    def read_messages(self, handler: Any) -> Iterator[dict[str, Any]]:
        """Hands messages to Dagster's `handler` while open; yields where the process is to write them."""
        over = Event()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "messages")
            path.touch()
            thread = Thread(target=_hand_over, args=(path, handler, over), daemon=True)
            thread.start()
            try:
                yield {PipesDefaultMessageWriter.FILE_PATH_KEY: str(path)}
            finally:
                over.set()
                thread.join()

    def no_messages_debug_text(self) -> str:
        return "Attempted to read messages from a temporary file."


def _hand_over(path: Path, handler: Any, over: Event) -> None:
    try:
        with path.open("rb") as file:
            for line in whole_lines(file, lambda: not over.wait(POLL_SECONDS)):
                handler.handle_message(json.loads(line))
    except Exception:
        handler.report_pipes_framework_exception("reader of a job's messages", sys.exc_info())
        raise


def whole_lines(file: IO[bytes], more: Callable[[], bool]) -> Iterator[bytes]:
    """Each line of a file that grows, when its end is there; a last line without one is left out.

    `more` is called where the file ends: it waits, and says whether something may still come.
    """
    begun = b""
    last = False
    while not last:
        last = not more()  # what was written before it said so is read below
        while piece := file.readline():
            begun += piece
            if begun.endswith(b"\n"):
                yield begun
                begun = b""
