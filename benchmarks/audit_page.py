"""The audit page of 100,000 rows of D_k: how long it takes to write, how much memory, and how fast Chromium opens it.

25,000 steps, each with a different screenshot and six candidates, of which four are in D_k, by three verifiers: 150,000
cards. The limits are two minutes, 2 GB and two seconds; opening ends when the first card's screenshot is drawn. The page is
written in a separate process, whose peak memory is measured, the tables included.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

from benchmarks import baseline
from coepg_dagster.artifacts import CANDIDATES, DATASET, DECISIONS, STEPS, VERDICTS, all_steps, write_steps, write_table
from coepg_dagster.experiment.schema import Regeneration
from coepg_dagster.pools.selection import select
from coepg_dagster.reports.audit import AuditOf, write_audit
from coepg_dagster.steps import CANDIDATE_SCHEMA, STEP_SCHEMA, VERDICT_SCHEMA

NAME = "audit_page"
ROWS, KEPT, CANDIDATES_PER_STEP = 100_000, 4, 6
WIDTH, HEIGHT = 320, 420
VERIFIERS = ("verifier_a", "verifier_b", "grounder_1")
LIMITS = {"seconds": 120, "bytes": 2_000_000_000, "open_seconds": 2}
CHROMIUM = Path("/usr/bin/chromium")
CONFIG = Regeneration(max_plans_per_step=KEPT)


def screenshot(i: int) -> bytes:
    image = Image.new("RGB", (WIDTH, HEIGHT), (250, 250, 255))
    draw = ImageDraw.Draw(image)
    draw.text((20, 20), f"Step number {i} of many, with a form below", fill="black")
    draw.rectangle((40 + i % 100, 100 + i % 200, 160 + i % 100, 140 + i % 200), fill=(i % 256, 120, 200))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def make(folder: Path, rows: int) -> None:
    """The tables, in files like those of the store."""
    steps, plans, votes = [], [], []
    rng = np.random.default_rng(0)
    for i in range(rows // KEPT):
        step = f"made/{i % 40}/{i}/0"
        box = [40.0 + i % 100, 100.0 + i % 200, 160.0 + i % 100, 140.0 + i % 200]
        steps.append(
            {
                "step_id": step,
                "split": "train",
                "episode_id": f"made/{i}",
                "step_index": 0,
                "family": f"family-{i % 40}",
                "seed": i,
                "goal": f"Fill in the form number {i}, then press the button that says Submit",
                "history": [f"clicked the field {j}" for j in range(i % 4)],
                "screenshot": screenshot(i),
                "width": WIDTH,
                "height": HEIGHT,
                "boxes": [box],
                "action_type": ("CLICK", "TYPE", "SELECT")[i % 3],
                "value": ("", "red", "blue")[i % 3],
            }
        )
        for j in range(CANDIDATES_PER_STEP):
            candidate = f"{step}#planner_{j // 2}#{j % 2}"
            plans.append(
                {
                    "candidate_id": candidate,
                    "step_id": step,
                    "planner": f"planner_{j // 2}",
                    "sample": j % 2,
                    "text": "as generated",
                    "plan": f"press the {j}th button of form {i}, near the lower left",
                    "action_type": steps[-1]["action_type"],
                    "value": steps[-1]["value"],
                    "gate": "passed" if j < 5 else "wrong_type",
                    "duplicate_of": None,
                    "prompt_hash": "0" * 16,
                    "sampling_seed": 0,
                }
            )
            for verifier in VERIFIERS if j < 5 else ():
                hit = verifier == "verifier_a" or bool(rng.random() < 0.6)
                votes.append(
                    {
                        "candidate_id": candidate,
                        "step_id": step,
                        "verifier": verifier,
                        "hit": hit,
                        "x": box[0] + 30 if hit else 5.0,
                        "y": box[1] + 20 if hit else 5.0,
                        "mean_logprob": -float(rng.random()),
                        "tokens": 4,
                        "text": "(70,120)",
                        "failure": None,
                    }
                )
    table = pa.Table.from_pylist(steps, STEP_SCHEMA)
    candidates, verdicts = pa.Table.from_pylist(plans, CANDIDATE_SCHEMA), pa.Table.from_pylist(votes, VERDICT_SCHEMA)
    dataset, decisions = select(table, candidates, verdicts, CONFIG, 1, None)
    assert dataset.num_rows == rows // KEPT * KEPT
    write_steps(table, folder / STEPS, ["train"])
    for file, content in ((CANDIDATES, candidates), (VERDICTS, verdicts), (DATASET, dataset), (DECISIONS, decisions)):
        write_table(content, folder / file)


def write(tables: Path, out: Path) -> dict[str, float]:
    """Writes the page; returns seconds, and peak memory of this process in bytes."""
    started = time.monotonic()
    read = [pq.read_table(tables / file) for file in (CANDIDATES, VERDICTS, DECISIONS, DATASET)]
    write_audit(out, AuditOf("made/s1", 1, CONFIG), all_steps(tables / STEPS), *read)
    # not ru_maxrss, which is inherited from the parent process
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    peak = int(status["VmHWM"].split()[0]) * 1024
    return {"seconds": time.monotonic() - started, "bytes": float(peak)}


def opens(page: Path) -> dict[str, float]:
    """Seconds until the first screenshot is drawn, of the first filter by a column, and of the first search."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page(viewport={"width": 1400, "height": 900}, offline=True)
        tab.goto("about:blank")
        begin = time.monotonic()
        tab.goto(f"file://{page}")
        tab.wait_for_function("() => document.querySelector('.screen img')?.naturalWidth > 0")
        opened = time.monotonic() - begin
        loaded = tab.evaluate(
            "() => [...document.querySelectorAll('.screen img')].filter((i) => i.naturalWidth).length"
        )
        begin = time.monotonic()
        tab.get_by_label("decision").select_option("wrong_type")
        tab.locator("#found", has_text=f"{ROWS // KEPT:,} of").wait_for()
        filtered = time.monotonic() - begin
        begin = time.monotonic()
        tab.get_by_label("search").fill("family-7 777")
        tab.wait_for_function("() => /^[0-9]{1,3} of/.test(document.getElementById('found').textContent)")
        searched = time.monotonic() - begin
        browser.close()
    return {
        "open_seconds": opened,
        "filter_seconds": filtered,
        "search_seconds": searched,
        "screenshots_loaded": loaded,
    }


def main() -> None:
    log = baseline.Log(NAME)
    root = Path(tempfile.mkdtemp())
    try:
        make(root, ROWS)
        runs: list[dict[str, Any]] = []
        for _ in range(3):
            shutil.rmtree(root / "out", ignore_errors=True)
            command = [sys.executable, "-m", "benchmarks.audit_page", str(root), str(root / "out")]
            run = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            if CHROMIUM.exists():
                run |= opens(root / "out" / "audit-1.html")
            runs.append(run)
            log(json.dumps(run))
        files = [file for file in (root / "out").rglob("*") if file.is_file()]
        log(f"{len(files)} files, {sum(file.stat().st_size for file in files):,} bytes")
    finally:
        shutil.rmtree(root)
    seconds = baseline.median([run["seconds"] for run in runs])
    worst = {name: max(run[name] for run in runs) for name in LIMITS if name in runs[0]}
    baseline.write(
        NAME,
        command="python -m benchmarks.audit_page",
        value=seconds,
        unit="seconds to write the page of 100,000 rows",
        against=float(LIMITS["seconds"]),
        ratio=LIMITS["seconds"] / seconds,
        repetitions=runs,
        limits=LIMITS,
        worst=worst,
        within=all(worst[name] <= LIMITS[name] for name in worst),
        device=baseline.cpu_name(),
    )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(write(Path(sys.argv[1]), Path(sys.argv[2]))))
    else:
        main()
