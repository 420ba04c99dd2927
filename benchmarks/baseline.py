"""The result of a benchmark: benchmarks/baselines/NAME.json, with its log beside it.

Needs only the standard library, and torch if it is installed. A benchmark measures `value`, in `unit`, and in the same
process the alternative, `against`; `ratio` says how many times better the value is (above 1 is better, whatever the unit).
A benchmark that could not run has the value null and a reason.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "baselines"
COMMIT = "COEPG_COMMIT"
"""Environment variable with the commit, for a copy of the tree without its git history."""

_PACKAGES = ("torch", "transformers", "trl", "vllm", "accelerate", "deepspeed", "pillow")


def write(
    name: str,
    *,
    command: str,
    value: float | None,
    unit: str,
    against: float | str | None,
    ratio: float | None,
    repetitions: Sequence[Any] | Mapping[str, Any],
    device: str | None = None,
    log: Path | str | None = None,
    reason: str | None = None,
    folder: Path = FOLDER,
    **more: Any,
) -> Path:
    """Writes the baseline `name` and returns its file.

    Args:
        against: what `value` is compared with: a number in the same unit, or words; `more` describes it.
        repetitions: the raw measurements, all of them.
        device: its common name; default: the GPUs if there are any, else the CPU.
        log: default: NAME.log beside the baseline, if it is there.
        reason: why there is no value; required where `value` is None, and only there.
    """
    if (value is None) != (reason is not None):
        raise ValueError(f"{name}: a value or the reason why there is none, and not both")
    folder.mkdir(parents=True, exist_ok=True)
    log = Path(log) if log else folder / f"{name}.log"
    facts = {
        "name": name,
        "commit": commit(),
        "device": device or device_name(),
        "command": command,
        "value": value,
        "unit": unit,
        "against": against,
        "ratio": ratio,
        "repetitions": repetitions,
        "log": _relative(log) if log.exists() else None,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "versions": versions(),
        **({"reason": reason} if reason else {}),
        **more,
    }
    file = folder / f"{name}.json"
    # NaN and infinity are not JSON: better no baseline than an unreadable one
    write = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
    file.write_text("{\n" + ",\n".join(f" {write(name)}: {write(fact)}" for name, fact in facts.items()) + "\n}\n")
    return file


def write_none(name: str, unit: str, reason: str, **more: Any) -> Path:
    """Writes the baseline of a benchmark that could not run, with the reason; `more`: as in `write`."""
    return write(
        name,
        command=command_line(),
        value=None,
        unit=unit,
        against=None,
        ratio=None,
        repetitions=[],
        reason=reason,
        **more,
    )


def write_scaling(name: str, one: float, together: float, many: int, **more: Any) -> Path:
    """Writes the baseline of a throughput `together` of `many` devices, against `many` times `one`; `more`: as in `write`."""
    return write(
        name,
        command=command_line(),
        value=round(together, 3),
        against=round(many * one, 3),
        ratio=round(together / (many * one), 4),
        **more,
    )


@contextmanager
def alone(folder: Path = FOLDER) -> Iterator[None]:
    """A context in which no other process that asks for it changes the baselines in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def earlier(name: str, folder: Path, device: str) -> dict[str, Any]:
    """The baseline `name`, if it was measured on this device and has a value; else empty."""
    file = folder / f"{name}.json"
    facts: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return facts if facts.get("value") is not None and facts["device"] == device else {}


class Log:
    """Prints lines and appends them to NAME.log beside the baseline; with `keep`, after those of earlier runs."""

    def __init__(self, name: str, folder: Path = FOLDER, *, keep: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{name}.log"
        if not keep:
            self.path.unlink(missing_ok=True)
        with self.path.open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} UTC, {device_name()}, {commit()}\n")

    def __call__(self, line: str) -> None:
        print(line, flush=True)
        with self.path.open("a") as file:
            file.write(line + "\n")


def interleaved(runs: Mapping[str, Callable[[], float]], repetitions: int) -> dict[str, list[float]]:
    """What each run measures, `repetitions` times, in turns, so that noise of the machine affects all of them alike."""
    measured: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repetitions):
        for name, run in runs.items():
            measured[name].append(run())
    return measured


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def commit() -> str | None:
    """The measured commit, with `-dirty` if tracked files differ from it; None outside of git."""
    if given := os.environ.get(COMMIT):
        return given
    root = Path(__file__).parents[1]
    try:
        head = _git(root, "rev-parse", "HEAD")
        # baselines and logs change while a benchmark runs
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/baselines")
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("-dirty" if changed else "")


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def cpu_name() -> str:
    """Model and number of cores of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def gpu_names() -> str | None:
    """The visible GPUs, e.g. `2 × NVIDIA H100 80GB HBM3`; None without torch or without a GPU."""
    try:
        import torch
    except ModuleNotFoundError:
        return None
    if not torch.cuda.is_available():
        return None
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    kinds = ", ".join(sorted(set(names)))
    return kinds if len(names) == 1 else f"{len(names)} × {kinds}"


def device_name() -> str:
    """The GPUs if there are any, else the CPU."""
    return gpu_names() or cpu_name()


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that affect speed."""
    installed = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def _relative(path: Path) -> str:
    root = Path(__file__).parents[1].resolve()
    path = path.resolve()
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def command_line() -> str:
    """How the running module was called: `python -m benchmarks.NAME` with its arguments."""
    spec = sys.modules["__main__"].__spec__
    module = spec.name if spec else sys.argv[0]
    return " ".join(["python", "-m", module, *sys.argv[1:]])
