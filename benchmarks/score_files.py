"""`coepg score` on files of 1,000,000 rows: rows per second on one core by format and protocol, and the memory it takes.

Logs of grounding boards in both kinds of rows, of about 700 bytes, and files of GUI-R1. Against: the same lines read with
json.loads and nothing else, which no scorer in Python can avoid. CPU time is measured, and beside it how long ten million
additions would have taken meanwhile, since a machine may be throttled: some are made after every few thousand rows.
`COEPG_ROWS` makes the files shorter.
"""

from __future__ import annotations

import json
import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks import baseline
from coepg_dagster.evaluation.score import PredictionFile, score_predictions

NAME = "score_files"
ROWS = int(os.environ.get("COEPG_ROWS", "1000000"))
APPLICATIONS, GROUPS = 26, ("CAD", "Creative", "Dev", "OS", "Office", "Scientific")
THOUGHT = f"<thought>{'The element is near the upper border. ' * 8}</thought>"


def local(n: int) -> dict[str, Any]:
    x, y = n % 997, n * 7 % 991
    return {
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
        "raw_response": f'{THOUGHT}{{"coordinate":[{x},{y}]}}',
        "bbox": [1000, 600, 1560, 840],
        "correctness": "correct" if 1000 <= x * 2.56 <= 1560 and 600 <= y * 1.44 <= 840 else "wrong",
    }


def server(n: int) -> dict[str, Any]:
    x, y = n % 997, n * 7 % 991
    return {
        "img_filename": f"os_web/{n // 3}.png",
        "bbox": [1000, 600, 1560, 840],
        "instruction": "close the window",
        "id": n,
        "application": f"app_{n % APPLICATIONS}",
        "platform": "os_web",
        "img_size": [2560, 1440],
        "ui_type": ("text", "icon")[n % 2],
        "group": ("basic", "advanced")[n // 2 % 2],
        "raw_response": f'{THOUGHT}{{"coordinate":[{x},{y}]}}',
        "pred": [x / 1000 * 2560, y / 1000 * 1440],
        "pred_norm": [x / 1000, y / 1000],
    }


def phone(n: int) -> dict[str, Any]:
    return {
        "instruction": f"step {n}",
        "gt_action": "click",
        "gt_bbox": [500, 900],
        "gt_input_text": "no input text",
        "group": "android",
        "ui_type": "",
        "image_size": [1080, 2400],
        "orig_w": 1080,
        "orig_h": 2400,
        "pred": THOUGHT,
        "pred_coord": [n % 1080, n % 2400],
        "pred_action": "click",
        "pred_input_text": "no input text",
    }


FILES: tuple[tuple[str, str, Callable[[int], dict[str, Any]]], ...] = (
    ("mai_ui", "screenspot_pro/items", local),
    ("mai_ui", "mmbench_gui/items", server),
    ("gui_r1", "android_control/strict14", phone),
)


class Timed:
    """CPU seconds since it was made, and how long ten million additions would have taken meanwhile."""

    SAMPLE = 100_000

    def __init__(self) -> None:
        self._started, self._sampled, self._samples = time.process_time(), 0.0, 0
        self.sample()

    def sample(self, *_: Any) -> None:
        """Makes some additions, whose time does not count."""
        started, x = time.process_time(), 0
        for i in range(self.SAMPLE):
            x += i
        self._sampled += time.process_time() - started
        self._samples += 1

    def read(self) -> tuple[float, float]:
        seconds = time.process_time() - self._started - self._sampled
        return seconds, self._sampled / self._samples / self.SAMPLE * 1e7


def measured(path: Path, format: str, protocol: str) -> dict[str, Any]:
    timed = Timed()
    with path.open("rb") as file:
        for n, line in enumerate(file):
            json.loads(line)
            if n % 5_000 == 0:
                timed.sample()
    json_seconds, json_additions = timed.read()
    timed = Timed()
    result = score_predictions(PredictionFile(path, format), protocol, report=timed.sample)
    seconds, additions = timed.read()
    if result.scored != ROWS or any("otherwise" in note or "raw answer" in note for note in result.notes):
        raise RuntimeError(f"{protocol}: {result.scored} of {ROWS} rows scored; {result.notes}")
    return {
        "protocol": protocol,
        "format": format,
        "seconds": seconds,
        "additions_seconds": additions,
        "json_seconds": json_seconds,
        "json_additions_seconds": json_additions,
    }


def main() -> None:
    pa.set_cpu_count(1)
    runs = []
    for format, protocol, row in FILES:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "log.jsonl"
            with path.open("w") as file:
                file.writelines(json.dumps(row(n)) + "\n" for n in range(ROWS))
            runs.append(measured(path, format, protocol))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    log = baseline.Log(NAME)  # imports torch, which takes more memory than scoring
    for of in runs:
        log(
            f"{of['protocol']}: {ROWS:,} rows in {of['seconds']:.1f} s of CPU time, {of['json_seconds']:.1f} s with json.loads "
            f"alone; ten million additions took {of['additions_seconds']:.2f} and {of['json_additions_seconds']:.2f} s meanwhile"
        )
    log(f"at most {peak:.2f} GiB")
    slowest = max(runs, key=lambda of: of["seconds"])
    value, against = ROWS / slowest["seconds"], ROWS / slowest["json_seconds"]
    baseline.write(
        NAME,
        command=baseline.command_line(),
        value=value,
        unit="rows/s",
        against=against,
        ratio=value / against,
        repetitions=runs,
        device=baseline.cpu_name(),
        against_what="json.loads of the same lines",
        rows=ROWS,
        peak_gib=peak,
        threads=1,
    )


if __name__ == "__main__":
    main()
