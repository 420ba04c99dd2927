"""No result depends on the order of a set: Python orders sets by PYTHONHASHSEED, which differs from run to run.

The hand-written loop, with plans of many words, is made in a process of its own for each of three seeds, by the real
selection, measures, scores and audits; `tests.test_loop` does the same with trained models and two seeds.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from coepg_dagster.auditing.differences import data as differences_of_data
from coepg_dagster.auditing.trace import trace
from coepg_dagster.evaluation.score import score_steps
from coepg_dagster.experiment.files import load_experiment
from coepg_dagster.experiment.schema import Quality
from coepg_dagster.experiment.versions import code_version
from coepg_dagster.pools.candidates import mark_duplicates
from coepg_dagster.pools.controls import dataset_checks, shuffled
from coepg_dagster.pools.quality import Regenerated, data_quality
from coepg_dagster.pools.selection import select
from coepg_dagster.provenance import LOOP, SHARED, Ref
from tests.auditing.loop import CONFIG, TABLE, Hand
from tests.pools.tables import candidate, candidates, verdict, verdicts

REPOSITORY = Path(__file__).parent.parent
SEEDS = ("0", "1", "2")
TRAIN = TABLE.slice(0, 2)
VERIFIERS = (("judge",), ("judge", "grounder_1"))
"""By iteration."""


def test_results_do_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    running = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, tmp_path / seed],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in SEEDS
    ]
    first, *others = [json.loads(process.communicate(timeout=120)[0], object_pairs_hook=list) for process in running]
    for other in others:
        assert other == first


def written(k: int, chance: random.Random) -> tuple[pa.Table, pa.Table]:
    """Candidates and verdicts of an iteration; plans are of words that occur with different frequencies."""
    words = [f"word{i}" for i in range(80)]
    plans = candidates(
        *(
            candidate(step, planner, i, " ".join(chance.choices(words, range(1, 81), k=12)))
            for step in ("s", "t")
            for planner in ("open", "planner_1")[: k + 1]
            for i in range(6)
        )
    )
    names = plans["candidate_id"].to_pylist()
    votes = [verdict(c, v, chance.random() < 0.7, mean_logprob=-chance.random()) for v in VERIFIERS[k] for c in names]
    return mark_duplicates(plans, 0.9), verdicts(*votes)


def results(root: Path) -> dict[str, Any]:
    """Data versions, data quality, scores and audits of a loop, in the order in which they are made."""
    hand, chance = Hand(root).whole(), random.Random(0)
    output: dict[str, Any] = {}
    previous = None
    for k in range(2):
        plans, votes = written(k, chance)
        hand.data(k, plans, votes)
        rows, decisions = select(TRAIN, plans, votes, CONFIG, k, previous)
        moved = shuffled(plans, TRAIN, 0.9, 8)
        judged = verdicts(*(verdict(c, v, True) for v in VERIFIERS[k] for c in moved["candidate_id"].to_pylist()))
        made = Regenerated(TRAIN, plans, votes, rows, CONFIG, frozenset(VERIFIERS[k]))
        figures = data_quality(made, judged, decisions, previous, Quality(), [(28, 3136, 50176)])
        output[f"quality {k}"] = figures
        output[f"checks {k}"] = dataset_checks(rows, TABLE, "train", Quality())
        previous = rows
    tests = TABLE.filter(pc.equal(TABLE["split"], "test_seed"))
    answers = pa.table({"step_id": ["u"], "action_type": ["CLICK"], "value": ["a b c"], "x": [15.0], "y": [15.0]})
    output["scores"] = json.loads(score_steps("mind2web/uground", tests, answers).to_json())
    output["differences"] = differences_of_data(hand.archive, *(hand.newest[Ref("dataset", k)] for k in range(2)))
    output["trace"] = trace(hand.archive, "hand/s1", 1, "0")
    output["versions"] = {str(ref): record.data_version for ref, record in hand.newest.items()}
    experiment = load_experiment(REPOSITORY / "experiments" / "sandbox.yaml")
    output["code"] = {asset: code_version(experiment, asset) for asset in (*SHARED, *LOOP)}
    return output


if __name__ == "__main__":
    print(json.dumps(results(Path(sys.argv[1]))))
