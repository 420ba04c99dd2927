"""Runs the fuzzers with atheris: `make fuzz SECONDS=60`, or `python -m tests.fuzz --seconds 60 planner`.

One target after the other in one process each; with `--workers N` all targets at once, N processes each, which share what they
learn. That lies below build/fuzz/NAME/ and is used again. Findings lie in build/fuzz/found/, the first input of each place in the
code where one was raised. Fuzzing goes on after a finding. build/fuzz/summary.json tells of the run, whose status is 1 where
something was found. `python -m tests.fuzz --again FILE NAME` runs a finding alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.fuzz.mutation import changed

REPOSITORY = Path(__file__).parents[2]
BUILD = REPOSITORY / "build" / "fuzz"
FOUND = BUILD / "found"
LIMITS = ("-timeout=30", "-rss_limit_mb=3000", "-max_len=65536", "-report_slow_units=30", "-print_final_stats=1")
"""An input that takes longer than 30 seconds, or more memory, is a finding too."""


def fuzz(name: str, seconds: int) -> None:
    """Fuzzes one target in this process; libFuzzer ends it."""
    import atheris

    with atheris.instrument_imports(include=["coepg_dagster"]):
        from tests.fuzz.targets import TARGETS
    target, corpus = TARGETS[name], BUILD / name
    skip = 0 if name == "mark" else 2 if name == "predictions" else 1  # bytes before the JSON

    def mutator(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.3:
            return bytes(atheris.Mutate(data, most))
        head, text = data[:skip], data[skip:].decode(errors="replace")
        if rng.random() < 0.1:
            head = rng.randbytes(skip)
        return (head + changed(text, rng).encode(errors="replace"))[:most]

    seen: set[str] = set()

    def run(data: bytes) -> None:
        """Keeps what fails instead of raising, since libFuzzer ends where something is raised."""
        try:
            target.run(data)
        except Exception as error:  # noqa: BLE001 - every one is a finding
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{type(error).__name__} at {frame.filename}:{frame.lineno}"
            if place not in seen:
                seen.add(place)
                file = FOUND / f"{name}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"
                file.write_bytes(data)
                file.with_suffix(".txt").write_text(traceback.format_exc(), errors="backslashreplace")
                print(f"FOUND {file.name}: {place}", flush=True)

    options: dict[str, Any] = {"custom_mutator": mutator} if target.json else {}
    arguments = [*LIMITS, f"-max_total_time={seconds}", f"-artifact_prefix={FOUND}/{name}-", str(corpus)]
    atheris.Setup([sys.argv[0], *arguments], run, **options)
    atheris.Fuzz()


def worker(name: str, number: int, seconds: int) -> dict[str, Any]:
    """Fuzzes a target until the time is over, in another process where an input ended the one before.

    Its CPU seconds, executions, covered edges and findings (file: place).
    """
    end, cpu, runs, edges = time.monotonic() + seconds, 0.0, 0, 0
    findings: dict[str, str] = {}
    while (left := round(end - time.monotonic())) > 0:
        log = BUILD / f"{name}-{number}.log"
        with log.open("wb") as out:
            command = [sys.executable, "-m", "tests.fuzz", "--here", "--seconds", str(left), name]
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=REPOSITORY)
            _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        text = log.read_text(errors="replace")
        executed = re.search(r"number_of_executed_units: ([0-9]+)", text)
        cpu, runs = cpu + used.ru_utime + used.ru_stime, runs + (int(executed[1]) if executed else 0)
        edges = max([edges, *map(int, re.findall(r" cov: ([0-9]+)", text))])
        findings |= dict(re.findall(r"^FOUND ([^:]+): (.*)$", text, re.MULTILINE))
        if process.returncode == 0:
            break
        written = re.search(r"Test unit written to (.*)", text)
        file = Path(written[1]).name if written else f"{name}-{number}-ended.txt"
        findings[file] = f"status {process.returncode}"
        (FOUND / file).with_suffix(".txt").write_text(text)
        if not written:  # it did not begin
            break
    return {"cpu_seconds": cpu, "executions": runs, "edges": edges, "findings": findings}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="targets; none: all")
    parser.add_argument("--seconds", type=int, default=60, help="for each")
    parser.add_argument("--workers", type=int, help="all targets at once, with so many processes each")
    parser.add_argument("--again", type=Path, help="run this input alone")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        fuzz(given.names[0], given.seconds)
    from tests.fuzz.targets import TARGETS

    if given.again:
        TARGETS[given.names[0]].run(given.again.read_bytes())
        return 0
    names, each = given.names or list(TARGETS), given.workers or 1
    FOUND.mkdir(parents=True, exist_ok=True)
    for name in names:
        (BUILD / name).mkdir(parents=True, exist_ok=True)
        for i, seed in enumerate(TARGETS[name].seeds()):
            (BUILD / name / f"seed-{i}").write_bytes(seed)
    summary: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(len(names) * each if given.workers else 1) as pool:
        started = {name: [pool.submit(worker, name, n, given.seconds) for n in range(each)] for name in names}
        for name, futures in started.items():
            done = [future.result() for future in futures]
            found = {file: place for one in done for file, place in one["findings"].items()}
            total = {key: round(sum(one[key] for one in done)) for key in ("cpu_seconds", "executions")}
            summary[name] = {
                "workers": each,
                "seconds": given.seconds,
                **total,
                "edges": max(one["edges"] for one in done),
                "findings": found,
            }
            print(
                f"{name}: {total['executions']:,} executions in {total['cpu_seconds']:,} s of CPU, {len(found)} findings"
            )
            for file, place in found.items():
                print(f"  {file}: {place}", flush=True)
    (BUILD / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return 1 if any(one["findings"] for one in summary.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
