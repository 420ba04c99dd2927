"""Messages of a job's process are read while they are written, whatever part of a line is there."""

import subprocess
import sys
from collections.abc import Iterator

import dagster as dg
from coepg_dagster.resources.messages import Messages, whole_lines
from hypothesis import given
from hypothesis import strategies as st

WRITES_IN_PARTS = """
import time
from dagster_pipes import PipesFileMessageWriterChannel, open_dagster_pipes

def in_parts(self, message, json=__import__("json")):
    line = json.dumps(message) + "\\n"
    for part in (line[: len(line) // 3], line[len(line) // 3 : -1], line[-1:]):
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(part)
        time.sleep(0.12)

PipesFileMessageWriterChannel.write_message = in_parts
with open_dagster_pipes() as pipes:
    for number in range(3):
        pipes.log.info(f"step {number} ϕ")
with open(pipes._message_channel._path, "a") as file:
    file.write('{"killed": "in the mid')
"""


@given(st.lists(st.binary(max_size=6)), st.lists(st.integers(0, 9)))
def test_lines_come_whole_however_they_are_written(parts: list[bytes], sizes: list[int]) -> None:
    class Growing:
        """A file to which something is appended whenever its end was read."""

        def __init__(self) -> None:
            self.there, self.rest = b"", b"".join(parts)
            self.steps = iter(sizes)

        def readline(self) -> bytes:
            line, end, self.there = self.there.partition(b"\n")
            return line + end

        def grow(self) -> bool:
            step = next(self.steps, len(self.rest))
            self.there, self.rest = self.there + self.rest[:step], self.rest[step:]
            return bool(self.rest)

    file = Growing()
    *whole, _ = b"".join(parts).split(b"\n")
    assert list(whole_lines(file, file.grow)) == [line + b"\n" for line in whole]  # type: ignore[arg-type]


def test_progress_goes_on_after_a_line_that_was_there_in_part() -> None:
    @dg.asset
    def job(context: dg.AssetExecutionContext) -> Iterator[object]:
        injector = dg.PipesTempFileContextInjector()
        with dg.open_pipes_session(context, context_injector=injector, message_reader=Messages()) as session:
            environment = {"PATH": "", **session.get_bootstrap_env_vars()}
            subprocess.run([sys.executable, "-c", WRITES_IN_PARTS], env=environment, check=True)
        yield from session.get_results()

    with dg.instance_for_test() as instance:
        assert dg.materialize([job], instance=instance).success
        run = instance.get_runs()[0]
        logged = [entry.user_message for entry in instance.all_logs(run.run_id)]
    assert [message for message in logged if message.startswith("step")] == [f"step {n} ϕ" for n in range(3)]
    assert not any("exception" in message for message in logged)
