"""Runs the fuzzers with atheris, one after the other: `make fuzz SECONDS=60`, or `python -m tests.fuzz --seconds 60 planner`.

What a fuzzer has learnt lies below build/fuzz/NAME/ and is used again; a finding lies beside it, and ends the run with status 1.
`python -m tests.fuzz --again FILE NAME` runs a finding alone.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.fuzz.mutation import changed

REPOSITORY = Path(__file__).parents[2]
BUILD = REPOSITORY / "build" / "fuzz"
LIMITS = ("-timeout=30", "-rss_limit_mb=3000", "-max_len=65536", "-print_final_stats=1", "-verbosity=0")
"""An input that takes longer than 30 seconds, or more memory, is a finding too."""


def fuzz(name: str, seconds: int) -> None:
    """Fuzzes one target in this process; libFuzzer ends it."""
    import atheris

    with atheris.instrument_imports(include=["coepg_dagster"]):
        from tests.fuzz.targets import TARGETS
    target, corpus = TARGETS[name], BUILD / name
    corpus.mkdir(parents=True, exist_ok=True)
    for i, seed in enumerate(target.seeds()):
        (corpus / f"seed-{i}").write_bytes(seed)
    skip = 0 if name == "mark" else 2 if name == "predictions" else 1  # bytes before the JSON

    def mutator(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.3:
            return bytes(atheris.Mutate(data, most))
        head, text = data[:skip], data[skip:].decode(errors="replace")
        if rng.random() < 0.1:
            head = rng.randbytes(skip)
        return (head + changed(text, rng).encode(errors="replace"))[:most]

    options: dict[str, Any] = {"custom_mutator": mutator} if target.json else {}
    arguments = [*LIMITS, f"-max_total_time={seconds}", f"-artifact_prefix={BUILD}/{name}-", str(corpus)]
    atheris.Setup([sys.argv[0], *arguments], target.run, **options)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="targets; none: all")
    parser.add_argument("--seconds", type=int, default=60, help="for each")
    parser.add_argument("--again", type=Path, help="run this input alone")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        fuzz(given.names[0], given.seconds)
    from tests.fuzz.targets import TARGETS

    if given.again:
        TARGETS[given.names[0]].run(given.again.read_bytes())
        return 0
    failed = []
    for name in given.names or TARGETS:
        command = [sys.executable, "-m", "tests.fuzz", "--here", "--seconds", str(given.seconds), name]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=REPOSITORY)
        BUILD.mkdir(parents=True, exist_ok=True)
        (BUILD / f"{name}.log").write_text(done.stdout + done.stderr)
        runs = re.search(r"number_of_executed_units: ([0-9]+)", done.stderr)
        count = f"{int(runs[1]):,}" if runs else "unknown number of"
        print(f"{name}: {count} executions in {given.seconds} s, {'a FINDING' if done.returncode else 'no finding'}")
        if done.returncode:
            failed.append(name)
            print("\n".join([*done.stdout.splitlines()[-25:], *done.stderr.splitlines()[-6:]]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
