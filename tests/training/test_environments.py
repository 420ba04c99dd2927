"""Environments in processes of their own: order, death, deadlines, refusals; programs of a few lines stand in for browsers."""

from __future__ import annotations

import sys
import time

import psutil
import pytest

from coepg_dagster.experiment.training import Environment
from coepg_dagster.progress import Ended
from coepg_dagster.training.environments import LOST, Environments, is_lost

PROGRAM = """
import json, os, sys, time
for line in sys.stdin:
    n = json.loads(line)["n"]
    mark = os.path.join(sys.argv[1], str(n))
    if n % 5 == 3 and not os.path.exists(mark):  # it dies at this question, the first time
        open(mark, "w").close()
        sys.exit("no display")
    if n == 99:
        time.sleep(60)
    time.sleep(0.01 * (n % 3))
    print(json.dumps({"refused": "another page"} if n == 77 else {"success": n % 2 == 0, "why": str(n)}), flush=True)
"""


def pool(folder: object, processes: int = 3, seconds: float = 20.0) -> Environments:
    command = (sys.executable, "-c", PROGRAM, str(folder))
    return Environments(Environment(processes=processes, seconds=seconds), command)


def test_answers_are_in_order_and_a_death_costs_a_second_try(tmp_path: object) -> None:
    before = psutil.Process().children()
    with pool(tmp_path) as environments:
        answers = environments.ask([{"n": n} for n in range(12)])
        assert [answer["why"] for answer in answers] == [str(n) for n in range(12)]
        assert [answer["success"] for answer in answers] == [n % 2 == 0 for n in range(12)]
        assert environments.restarted == 2 and environments.lost == 0
        assert environments.ask([]) == []
        alive = [child for child in psutil.Process().children() if child not in before]
        assert len(alive) == 3
    assert not [child for child in alive if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def test_what_gives_no_answer_in_time_is_lost_and_the_others_are_not(tmp_path: object) -> None:
    started = time.monotonic()
    with pool(tmp_path, seconds=1.0) as environments:
        environments.ask([{"n": 0}, {"n": 1}, {"n": 2}])  # started, which takes longer on a slow machine
        stuck, right = environments.ask([{"n": 99}, {"n": 4}])
        assert (stuck["success"], stuck["why"], right["success"]) == (False, LOST, True)
        assert environments.lost == 1 and environments.restarted == 2
        [alone] = environments.ask([{"n": 99}])
        assert is_lost(alone) and not is_lost(right), "what none survives, asked alone, is no reason to end"
    assert time.monotonic() - started < 30


def test_where_none_lives_or_a_question_is_wrong_the_step_ends_with_the_reason(tmp_path: object) -> None:
    with pool(tmp_path) as environments, pytest.raises(Ended, match=r"grpo\.environment: another page"):
        environments.ask([{"n": 1}, {"n": 77}])
    dead = Environments(Environment(processes=2), (sys.executable, "-c", "import sys; sys.exit('no Chromium')"))
    with dead, pytest.raises(Ended, match="all environments failed: it ended no Chromium"):
        dead.ask([{"n": 1}, {"n": 2}])
