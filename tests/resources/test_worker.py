"""What a worker writes into its run's log."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from coepg_dagster.assets.evolve import _PROGRESS
from coepg_dagster.resources import worker

from coepg_dagster.progress import local_time


def test_the_log_says_what_is_new_and_the_rest_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now, lines = 0.0, list[tuple[float, str]]()
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: now, time=lambda: now))
    log = SimpleNamespace(info=lambda line: lines.append((now, line)))
    report = worker.Reporter(cast(Any, SimpleNamespace(log=log)))
    for tick in range(20 * 100):  # a chunk takes 90 seconds; then the processes end, which takes ten
        now = tick / 20
        report(1 if now < 90 else 2, 2, {})
    report(2, 2, {"loss": 0.25})
    assert lines == [(0, "1/2"), (60, "1/2"), (90, "2/2, 40/h"), (now, "2/2, 36/h; loss=0.25")]


def test_what_a_worker_writes_is_read_by_evolve(monkeypatch: pytest.MonkeyPatch) -> None:
    now, lines = 0.0, list[str]()
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: now, time=lambda: now))
    report = worker.Reporter(cast(Any, SimpleNamespace(log=SimpleNamespace(info=lines.append))))
    report(10, 40, {})
    for at, done in ((1.0, 11), (60.0, 20), (61.0, 21)):  # within two seconds: none
        now = at
        report(done, 40, {"loss": 0.5, "kl": 0.1, "unknown": 1.0})
    assert lines == ["10/40", f"20/40, 10/min, ends about {local_time(180.0)[:-3]}; loss=0.5 kl=0.1"]
    assert [m and m.groups() for m in map(_PROGRESS.fullmatch, lines)] == [
        ("10", "40", None),
        ("20", "40", "loss=0.5 kl=0.1"),
    ]
