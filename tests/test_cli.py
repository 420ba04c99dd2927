"""Mistyped arguments: every command ends with a message, and never with a traceback.

The exit status is 1, or 2 where the command line itself cannot be read, which Click says with the usage of the command.
"""

from __future__ import annotations

import ast
import builtins
import io
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import typer
from coepg_dagster.assets.ledger import one_daemon
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from typer.testing import CliRunner

from coepg_dagster import yaml_files
from coepg_dagster.cli import app
from coepg_dagster.cli.common import print_table
from coepg_dagster.project import Project
from tests.deployment import free_port
from tests.project import REPOSITORY, make_project, tell

FILE, FOLDER, NOTHING, LONG = "a-file", "a-folder", "nothing", "x" * 5000


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project in which nothing was made yet; its folder is the working folder."""
    root = make_project(tmp_path_factory.mktemp("cli") / "project", REPOSITORY / "experiments" / "sandbox.yaml")
    (root / FILE).write_text("no predictions\n")
    (root / FOLDER).mkdir()
    before = Path.cwd()
    os.chdir(root)
    yield root
    os.chdir(before)


REFERENCES = {
    "nothing": "no experiment 'nothing'; known: sandbox",
    "": "no experiment ''",
    "../sandbox": "no experiment '..'",
    LONG: "no experiment 'xxx",
    "sandbox/": "use sandbox or one of sandbox/s13, sandbox/s42",
    "sandbox/s9": "use sandbox or one of",
    "sandbox/s²": "use sandbox or one of",
    "sandbox@1": "no experiment 'sandbox@1'",
}
ITERATIONS = {
    "sandbox": "names no iteration: write EXPERIMENT@k",
    "sandbox@": "names no iteration",
    "sandbox@x": "names no iteration",
    "sandbox@-1": "names no iteration",
    "sandbox@²": "names no iteration",
    "sandbox@1.5": "names no iteration",
    "@1": "names no iteration",
    "nothing@1": "no experiment 'nothing'",
    "sandbox/s9@1": "no such seed",
    "sandbox@4": "sandbox has the iterations 0..3",
    "sandbox@" + "9" * 99: "sandbox has the iterations 0..3",
}
NOT_MADE = {"sandbox@1": "run `coepg evolve sandbox/s13 --through 1` first"}
OF_EXPERIMENTS = [
    ["import"],
    ["results"],
    ["plan"],
    ["lineage"],
    ["audit"],
    ["evolve", "--through", "1"],
    ["report", "--out", "out"],
]
OF_ITERATIONS = [
    ["play"],
    ["rewards", "agreement"],
    ["rewards", "calibration"],
    ["rewards", "recompute", "--variant", "literal"],
]
SCORE = ["score", FILE, "--format", "coepg", "--protocol", "miniwob/point"]

MISTYPED: list[tuple[list[str], str]] = [
    *(([*command, name], message) for command in OF_EXPERIMENTS for name, message in REFERENCES.items()),
    *(([*command, name], message) for command in OF_ITERATIONS for name, message in ITERATIONS.items()),
    *((["rewards", "calibration", name], message) for name, message in NOT_MADE.items()),
    *((["diff", name, "sandbox@1"], message) for name, message in ITERATIONS.items()),
    *((["diff", "sandbox@0", name], message) for name, message in ITERATIONS.items()),
    *((["compare", name, "sandbox@1"], message) for name, message in (ITERATIONS | NOT_MADE).items() if "@" in name),
    (["nothing"], "No such command"),
    (["rewards", "nothing"], "No such command"),
    (["results"], "Missing argument"),
    (["results", "sandbox", "--jsno"], "No such option"),
    (["evolve", "sandbox"], "Missing option"),
    (["evolve", "sandbox", "--through", "x"], "Invalid value for"),
    (["evolve", "sandbox", "--through", "-1"], "Invalid value for"),
    (["evolve", "sandbox", "--through", "4"], "has iterations 0..3: lower --through"),
    (["evolve", "sandbox", "--through", "1", "--from", "2"], "--from 2 is after --through 1"),
    (["evolve", "sandbox", "--through", "1", "--device", "gpu"], "'gpu' is not one of"),
    (["evolve", "sandbox", "--through", "1", "--device", "tpu"], "'tpu' is not one of"),
    (["evolve", "sandbox", "--through", "1", "--processes", "0"], "Invalid value for"),
    (["evolve", "sandbox", "--through", "1", "--processes", "100000"], "Invalid value for"),
    (["plan", "sandbox", "--gpu", "Voodoo"], "known: "),
    (["plan", "sandbox", "--gpus", "0"], "Invalid value for"),
    (["plan", "sandbox", "--gpus", "2"], "add --gpu"),
    (["plan", "sandbox", "--on", "nowhere"], "there is no machine 'nowhere'; known: h100x1"),
    (["plan", "sandbox", "--on", "laptop", "--gpu", "H100-80GB"], "leave out --gpu"),
    (["evolve", "sandbox", "--through", "1", "--on", "nowhere"], "there is no machine 'nowhere'"),
    (["evolve", "sandbox", "--through", "1", "--on", "h100x8"], "`training_processes: 1` of sft"),
    (["ui", "--on", "nowhere"], "there is no machine 'nowhere'"),
    (["plan", "sandbox", "--strategy", "zero9"], "'zero9' is not one of"),
    *((["trace", row], "names no row") for row in ("", "x", "sandbox@1", "sandbox@1#", "#", "@#")),
    *((["trace", f"{name}#1"], message) for name, message in ITERATIONS.items()),
    (["trace", "nothing@1#0"], "no experiment 'nothing'"),
    (["trace", "sandbox@4#0"], "iterations 0..3"),
    (["trace", "sandbox@1#0"], "run `coepg evolve sandbox/s13 --through 1` first"),
    (["trace", "sandbox@1#" + "9" * 5000], "run `coepg evolve"),
    (["trace", "r0123456789abcdef"], "no D_k in the store holds row"),
    (["mark", "sandbox@1#0", "veto"], "Missing option"),
    (["mark", "sandbox@1#0", "delete", "--reason", "x"], "'delete' is not one of"),
    (["mark", "sandbox@1#0", "veto", "--reason", " "], "the mark is refused: reason"),
    (["mark", "sandbox@1#0", "veto", "--reason", "a\x1b[31m"], "the mark is refused: reason"),
    (["mark", "sandbox@1#0", "veto", "--reason", "x", "--by", ""], "the mark is refused: by"),
    (["marks", "nothing"], "no experiment 'nothing'"),
    (["mark", "sandbox@1", "veto", "--reason", "x"], "names no row"),
    (["mark", "sandbox@1#0", "veto", "--reason", "x"], "run `coepg evolve sandbox/s13 --through 1` first"),
    (["mark", "r0123456789abcdef", "flag", "--reason", "x"], "no D_k in the store holds row"),
    (["gc", "--keep", "0"], "Invalid value for"),
    (["report", "sandbox"], "Missing option"),
    (["report", "sandbox", "--out", FILE], f"{FILE}"),
    (["report", "sandbox", "--out", f"{FILE}/pages"], "Not a directory"),
    (["report", "sandbox", "--out", LONG], "File name too long"),
    (["ui", "--port", "70000"], "Invalid value for"),
    (["ui", "--host", "10.0.0.1"], "no login: whoever reaches this address can start and delete runs"),
    (["ui", "--host", ""], "no login"),
    (["ui", "--host", "0"], "no login"),
    (["ui", "--host", "0.0.0.0", "--without-login"], "--public-url http://NAME:3000"),  # noqa: S104
    (["ui", "--host", "::1"], "is not an IPv4 address"),
    (["ui", "--host", "127.no.such"], "is not an IPv4 address"),
    *(
        (["ui", "--public-url", url], "give https://NAME or")
        for url in ("there", "https://a/b", "ftp://a", "http://[", "http://u@a")
    ),
    (["reproduce", "nothing"], "no experiment 'nothing'"),
    (["reproduce", "sandbox/s13"], "--seeds chooses among its seeds"),
    *(
        (["reproduce", "sandbox", "--seeds", s], "whole numbers with commas")
        for s in ("13,abc", "", ",", "13,", "-1", "²")
    ),
    (["reproduce", "sandbox", "--seeds", "13,99"], "has the seeds [13, 42, 1234], not [99]"),
    (["reproduce", "sandbox", "--jobs", "0"], "Invalid value for"),
    (["reproduce", "sandbox", "--on", "h100x8"], "add --jobs 1"),
    (["reproduce", "sandbox", "--device", "gpu"], "'gpu' is not one of"),
    (["reproduce", "sandbox", "--out", FILE], "File exists"),
    (["reproduce", "sandbox", "--collect"], "run `coepg evolve sandbox --through 0`, then collect it"),
    (["collect", "nothing"], "'nothing' is not"),
    (["collect", "miniwob", "--processes", "0"], "Invalid value for"),
    (["pretrain", "nothing"], "'nothing' is not"),
    (["pretrain", "sandbox", "--recipe", NOTHING], "does not exist"),
    (["pretrain", "sandbox", "--recipe", FOLDER], "is a directory"),
    (["pretrain", "sandbox", "--device", "gpu"], "'gpu' is not one of"),
    (["pretrain", "sandbox", "--loaders", "-1"], "Invalid value for"),
    (["pretrain", "sandbox", "--snapshot", NOTHING], "does not exist"),
    (["play", "sandbox@0", "--device", "gpu"], "'gpu' is not one of"),
    (["play", "sandbox@0", "--episodes", "0"], "Invalid value for"),
    (["score", FILE], "Missing option"),
    (SCORE, FILE),
    ([*SCORE[:1], NOTHING, *SCORE[2:]], NOTHING),
    ([*SCORE[:1], FOLDER, *SCORE[2:]], FOLDER),
    ([*SCORE[:-1], "miniwob/pointt"], "is not known; choose from"),
    ([*SCORE[:3], "csv", *SCORE[4:]], "csv"),
    (["compare", FILE, NOTHING], FILE),
    (["compare", LONG, FILE], "File name too long"),
    (["compare", FILE, FILE, "--protocol", "x"], "is not known"),
    (["check-data", NOTHING], "does not exist"),
    (["rewards", "recompute", "sandbox@1"], "Missing option"),
]


REFUSED: dict[str, list[str]] = {
    "evolve": ["nothing", "--through", "1"],
    "import": ["nothing"],
    "results": ["nothing"],
    "plan": ["nothing"],
    "lineage": ["nothing"],
    "trace": ["sandbox@x#0"],
    "mark": ["sandbox@x#0", "veto", "--reason", "x"],
    "marks": ["nothing"],
    "audit": ["sandbox"],
    "diff": ["sandbox@x", "sandbox@1"],
    "gc": [],
    "recover": [],
    "report": ["nothing", "--out", "out"],
    "ui": ["--host", "10.0.0.1"],
    "reproduce": ["nothing"],
    "collect": ["miniwob", "--out", f"{FILE}/shards"],
    "pretrain": ["sandbox", "--recipe", FILE],
    "play": ["sandbox@x"],
    "score": [FILE, "--format", "coepg", "--protocol", "nothing"],
    "compare": ["sandbox@x", "sandbox@1"],
    "check-data": [FOLDER, "--experiment", "nothing"],
    "label-changes": ["screenspot", FOLDER, "screenspot_v2", FOLDER, "--source", "x"],
    "rewards recompute": ["sandbox@x", "--variant", "literal"],
    "rewards agreement": ["sandbox@x"],
    "rewards calibration": ["sandbox@x"],
}
"""What each command refuses in a project in which nothing was made."""
ASKS_NOTHING = {"plugins", "protocols"}


def commands(group: Any, *above: str) -> Iterator[str]:
    """The full names of all commands."""
    for name, command in group.commands.items():
        yield from commands(command, *above, name) if hasattr(command, "commands") else [" ".join((*above, name))]


@pytest.mark.parametrize("command", sorted({*commands(typer.main.get_command(app))} - ASKS_NOTHING))
def test_what_a_command_refuses_is_one_line(command: str, project: Path) -> None:
    place = project / FOLDER if command in ("gc", "recover") else project  # which refuse only where there is no project
    code, out, err = tell(place, *command.split(), *REFUSED[command])
    assert code == 1 and not out and len(err.splitlines()) == 1, f"{code}: {out}{err}"


@pytest.mark.parametrize(
    ("arguments", "message"), MISTYPED, ids=[" ".join(part[:20] for part in arguments) for arguments, _ in MISTYPED]
)
def test_a_mistyped_argument_ends_with_a_message(arguments: list[str], message: str, project: Path) -> None:
    code, out, err = tell(project, *arguments)
    assert code == (2 if err.startswith("Usage: ") else 1) and not out, f"{code}: {out}{err}"
    assert message in err and "Traceback" not in err
    assert list(project.glob("store/*")) == []


def test_a_second_ui_of_a_project(project: Path) -> None:
    """Its daemon would start runs that the daemon of the first starts too."""
    with dg.DagsterInstance.from_config(str(Project(project).prepare_dagster_home())) as instance, one_daemon(instance):
        code, _, err = tell(project, "ui", "--port", str(free_port()))
    assert code == 1 and "another `coepg ui` runs" in err and "or end it first" in err


def test_a_port_that_is_taken(project: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, _, err = tell(project, "ui", "--port", port)
        assert code == 1 and f"port {port} of 127.0.0.1 cannot be used" in err and "choose another --port" in err


@pytest.mark.parametrize(
    ("home", "message"),
    [
        (".dagster", "Dagster wants an absolute path: set it to "),
        ("/nowhere/at/all", "there is no such folder"),
        (FILE, "Dagster wants an absolute path"),
        ("{project}/" + FILE, "there is no such folder"),
        ("{project}/" + FOLDER, "cannot be opened"),
    ],
)
def test_a_dagster_home_that_cannot_be_used(home: str, message: str, project: Path) -> None:
    (project / FOLDER / "dagster.yaml").write_text("storage: [half a dra")
    place = {"COEPG_ROOT": str(project), "DAGSTER_HOME": home.format(project=project)}
    refused = CliRunner(env=place).invoke(app, ["results", "sandbox"])
    assert refused.exit_code == 1 and message in refused.stderr, refused.stderr


def test_an_empty_dagster_home_is_none(project: Path) -> None:
    ended = CliRunner(env={"COEPG_ROOT": str(project), "DAGSTER_HOME": ""}).invoke(
        app, ["results", "sandbox", "--json"]
    )
    assert ended.exit_code == 0 and (project / ".dagster").is_dir()


def test_results_of_a_loop_that_was_not_made_name_the_command_and_the_seeds_that_were(project: Path) -> None:
    made = project / "store" / "sandbox" / "s42"
    code, out, _ = tell(project, "results", "sandbox/s13")
    assert code == 0 and out.strip().endswith(
        "no iteration of sandbox/s13 was made yet: coepg evolve sandbox/s13 --through 0"
    )
    made.mkdir(parents=True)
    try:
        code, out, _ = tell(project, "results", "sandbox")
        assert code == 0 and out.strip().endswith("coepg evolve sandbox/s13 --through 0; there is sandbox/s42")
    finally:
        shutil.rmtree(project / "store")


def test_a_store_that_cannot_be_written_to(project: Path) -> None:
    (project / "store").mkdir()
    (project / "store" / "pages").write_text("in the way")
    try:
        code, _, err = tell(project, "lineage", "sandbox")
        assert code == 1 and "`coepg report sandbox --out DIR` writes the map elsewhere" in err
        assert tell(project, "gc", "--dry-run")[0] == 0
    finally:
        shutil.rmtree(project / "store")


def test_no_project(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "nothing", tmp_path / ("x" * 300)):
        code, _, err = tell(root, "results", "sandbox")
        assert (code == 1 and "run this from the project's root" in err) or "too long" in err


def test_a_gpu_that_is_not_there(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for command in (["evolve", "sandbox", "--through", "1"], ["reproduce", "sandbox"], ["play", "sandbox@0"]):
        code, _, err = tell(project, *command, "--device", "cuda")
        assert code == 1 and "torch sees no GPU here" in err


def test_a_file_that_cannot_be_used_is_named_and_costs_no_other(project: Path) -> None:
    place = project / "experiments"
    others = [place / name for name in ("sandbox copy.yaml", "._sandbox.yaml", "draft.yaml")]
    others[0].write_text((place / "sandbox.yaml").read_text())
    others[1].write_bytes(b"\x00\x05\x16\x07")
    others[2].write_text("parent: sandbox\ndescription: x\niterations: yes\nseeds: [-1]\n")
    try:
        code, out, err = tell(project, "plan", "sandbox")
        assert code == 0 and out.startswith("sandbox/s13 on this_machine") and "would run first: benchmark_steps" in out
        assert "left out" not in err  # it reads the file that it was told
        code, out, err = tell(project, "plan", "draft")
        assert code == 1 and not out and "key `seeds`" in err and "left out" not in err
        for command in (["trace", "r" + "0" * 16], ["gc", "--dry-run"], ["ui", "--host", "10.0.0.1"]):
            err = tell(project, *command)[2]
            assert [line for line in err.splitlines() if line.startswith("left out")] == err.splitlines()[:2], command
            assert "draft.yaml: key `iterations`: Input should be a valid integer (got 'yes') (and 1 more)" in err
    finally:
        for file in others:
            file.unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("benchmark: {path: data/nothere}", "data/nothere: there is no such file or folder; correct `benchmark.path`"),
        ("benchmark: {path: data}", "is no MiniWoB++ snapshot"),
        ("benchmark: {reader: mind2web, test: [test_task]}", "is no file of Multimodal-Mind2Web"),
        ("benchmark: {reader: jsonl, test: [test]}", "holds no files of a jsonl dataset"),
        (
            "benchmark: {max_train_steps: 7}\ngrpo: {prompts: dataset}",
            "`grpo.prompts_per_step`: it is 64, and split 'train', with `max_train_steps`",
        ),
        (
            "grpo: {prompts: dataset, prompts_per_step: 2401, micro_batch_size: 8}",
            "has 2400 training steps: lower it",
        ),
    ],
)
def test_plan_refuses_what_a_later_step_would(change: str, message: str, project: Path) -> None:
    file = project / "experiments" / "changed.yaml"
    file.write_text(f"parent: sandbox\ndescription: x\n{change}\n")
    try:
        code, _, err = tell(project, "plan", "changed")
    finally:
        file.unlink()
    assert code == 1 and message in err, err


def test_the_resolved_file_is_printed_alone(project: Path) -> None:
    code, out, _ = tell(project, "plan", "sandbox", "--resolved")
    assert code == 0 and yaml_files.parse(out)["name"] == "sandbox"


INTERNAL = {
    "BadPicture",
    "Died",
    "NotJson",
    "OracleError",
    "RejectedRow",
    "SpaceMismatch",
    "SplitError",
    "_Unreachable",
}
"""Errors that the code handles itself, or that only a fault of the code raises."""


def test_every_error_that_a_user_reads_has_one_base() -> None:
    """Then the command line, the worker and a Dagster step show its message without a traceback."""
    bases: dict[str, set[str]] = {}
    for place in ("coepg_dagster", "assets", "resources"):
        for file in (REPOSITORY / place).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef):
                    bases[node.name] = {ast.unparse(base).rpartition(".")[2] for base in node.bases}

    def derives(name: str, roots: set[str]) -> bool:
        return name in roots or any(derives(base, roots) for base in bases.get(name, ()) if base != name)

    builtin = {
        name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, Exception)
    }
    errors = {name for name in bases if derives(name, builtin)}
    assert {"Refusal", "Ended", "NotUsable"} <= errors
    assert {name for name in errors if not derives(name, INTERNAL | {"Refusal"})} == set()


@given(
    cells=st.lists(
        st.lists(
            st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=1, max_size=17),
            min_size=6,
            max_size=6,
        ),
        min_size=1,
        max_size=3,
    ),
    width=st.integers(45, 130),
)
def test_a_table_is_whole_at_any_width(cells: list[list[str]], width: int) -> None:
    """No cell is cut or broken, no word of a header either, and every table names its rows."""
    header = [f"{cell[:6]}_h Step SR" for cell in cells[0]]
    with redirect_stdout(io.StringIO()) as out:
        print_table("title", header, cells, "caption", width)
    lines = out.getvalue().splitlines()
    assert max(map(cell_len, lines)) <= width
    shown = [part.strip() for line in lines for part in re.split("[│┃]", line)]
    for row in cells:
        assert set(row) <= set(shown)
    assert all(any(word in part.split() for part in shown) for head in header for word in head.split())
    assert "…" not in out.getvalue()
    tables = sum(line.startswith("┏") for line in lines)
    assert shown.count(cells[0][0]) >= tables


def test_two_files_are_compared_in_a_table_and_as_json(project: Path) -> None:
    for name, x in (("hit", 5.0), ("miss", 90.0)):
        label = {"action_type": "click", "value": "", "point": [5, 5], "boxes": [[0, 0, 10, 10]]}
        rows = [
            {
                **{"step_id": f"{i}", "episode_id": f"{i // 2}", "step_index": i % 2, "width": 100, "height": 100},
                "label": label,
                "prediction": {"action_type": "click", "value": "", "point": [x if i % 3 else 5.0, 5.0]},
            }
            for i in range(12)
        ]
        (project / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    both = ["compare", "miss.jsonl", "hit.jsonl", "--protocol", "android_control/strict14"]
    code, out, _ = tell(project, *both)
    assert code == 0 and "all steps: 12 steps" in out and "yes" in out and "100.00" in out
    code, out, _ = tell(project, *both, "--json")
    of = json.loads(out)["splits"]["all steps"]["differences"]["step_acc"]
    assert code == 0 and of["b"] == 100 and of["a"] + of["macro"] == pytest.approx(100) and of["differs"] is True
