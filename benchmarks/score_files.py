"""`coepg score` on a log of 1,000,000 rows: rows per second on one core, and the most memory that it takes.

A log in the fields of ScreenSpot-Pro's evaluator, rows of about 750 bytes. Against: reading the same lines with json.loads
and nothing else, which no scorer in Python can avoid. `COEPG_ROWS` makes it shorter.
"""

from __future__ import annotations

import json
import os
import resource
import tempfile
import time
from pathlib import Path

import pyarrow as pa

from benchmarks import baseline
from coepg_dagster.evaluation.score import score_file

NAME = "score_files"
ROWS = int(os.environ.get("COEPG_ROWS", "1000000"))
APPLICATIONS, GROUPS = 26, ("CAD", "Creative", "Dev", "OS", "Office", "Scientific")
PROTOCOL = "screenspot_pro/items"


def write(path: Path) -> None:
    with path.open("w") as file:
        for n in range(ROWS):
            x, y = n % 997, n * 7 % 991
            answer = f"<thought>{'The element is near the upper border. ' * 8}</thought>"
            row = {
                "id": f"item_{n}",
                "group": GROUPS[n % len(GROUPS)],
                "application": f"app_{n % APPLICATIONS}",
                "platform": "windows",
                "lang": "en",
                "instruction_style": "instruction",
                "prompt_to_evaluate": "close the window",
                "gt_type": "positive",
                "ui_type": ("text", "icon")[n % 2],
                "task_filename": "app_windows",
                "pred": [x * 2.56, y * 1.44],
                "raw_response": f'{answer}{{"coordinate":[{x},{y}]}}',
                "bbox": [1000, 600, 1560, 840],
                "correctness": "correct" if 1000 <= x * 2.56 <= 1560 and 600 <= y * 1.44 <= 840 else "wrong",
            }
            file.write(json.dumps(row) + "\n")


def main() -> None:
    pa.set_cpu_count(1)
    log = baseline.Log(NAME)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        write(path)
        started = time.process_time()
        with path.open("rb") as file:
            for line in file:
                json.loads(line)
        between = time.process_time()
        result = score_file(path, "mai_ui", PROTOCOL)
        ended = time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if result.scored != ROWS or any("otherwise" in note for note in result.notes):
        raise RuntimeError(f"{result.scored} of {ROWS} rows scored; {result.notes}")
    value, against = ROWS / (ended - between), ROWS / (between - started)
    log(f"{value:,.0f} rows/s of CPU time, {against:,.0f} with json.loads alone; at most {peak:.2f} GiB")
    baseline.write(
        NAME,
        command=baseline.command_line(),
        value=value,
        unit="rows/s",
        against=against,
        ratio=value / against,
        repetitions=[value],
        device=baseline.cpu_name(),
        against_what="json.loads of the same lines",
        rows=ROWS,
        peak_gib=peak,
        threads=1,
    )


if __name__ == "__main__":
    main()
