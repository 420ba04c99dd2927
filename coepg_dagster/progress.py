"""Progress of long work: how it is reported, and its rate and expected end in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime

from coepg_dagster.refusal import Refusal

Report = Callable[[int, int, Mapping[str, float]], None]
"""Called with (done, of, figures) as the work advances; `figures` may be empty."""


class Ended(Refusal, RuntimeError):
    """A job ended before it was done; the message says why and what to do."""


class Pace:
    """How fast counted work advances. Work that begins anew, with a lower count or another total, is measured anew."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._last = 0, 0

    def text(self, done: int, of: int, now: float) -> str:
        """`12/40, 3.2/min, ends about 2026-11-29 12:09`: the rate since the first count, which may be of an earlier attempt.

        `now` is in seconds of Unix time. Rate and end are left out until two counts are known.
        """
        if self._first is None or done < self._last[0] or of != self._last[1]:
            self._first = now, done
        self._last = done, of
        start, before = self._first
        words = [f"{done}/{of}"]
        if done > before and now > start:
            per_second = (done - before) / (now - start)
            words.append(_rate(per_second))
            if done < of:
                words.append(f"ends about {local_time(now + (of - done) / per_second)[:-3]}")
        return ", ".join(words)


def _rate(per_second: float) -> str:
    seconds, unit = next((span for span in ((1, "s"), (60, "min")) if per_second * span[0] >= 1), (3600, "h"))
    return f"{per_second * seconds:.3g}/{unit}"


def local_time(seconds: float) -> str:
    """Unix time as `2026-11-29 12:09:30`, in the zone of this machine."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def span_text(seconds: float) -> str:
    """A length of time: `0.4 s`, `34 s`, `5 min 12 s`, `3 h 20 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, left = divmod(round(seconds), 60)
    return f"{minutes} min {left} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
