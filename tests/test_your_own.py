"""A stranger's walk through docs/your-own.md: its files and commands, as they stand on the page."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from coepg_dagster.experiment.files import load_experiment
from coepg_dagster.prompts import grounder_messages, planner_messages
from tests.project import REPOSITORY, Forked, make_project, tell
from tests.test_loop_formats import SIZE, screens

PAGE = (REPOSITORY / "docs" / "your-own.md").read_text()


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def blocks(title: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", section(title), re.S)


def commands(title: str) -> list[list[str]]:
    """The `coepg` commands of a section's shell blocks, without their comments and redirections."""
    lines = [line for block in blocks(title, "sh") for line in block.splitlines() if line.startswith("coepg ")]
    return [shlex.split(line.partition(" > ")[0], comments=True)[1:] for line in lines]


def write_data(folder: Path) -> None:
    """Steps like the line of the page, on MiniWoB++ screens, which the sandbox's models can read; any point is on target."""
    (line,) = blocks("Own data", "json")
    counts = {"train": 12, "validation": 3, "test": 3}
    names = [(split, f"{split}-{i}") for split, count in counts.items() for i in range(count)]
    (folder / "images").mkdir(parents=True)
    lines = []
    for (split, name), (goal, png) in zip(names, screens(len(names)), strict=True):
        (folder / "images" / f"{name}.png").write_bytes(png)
        place = {"split": split, "step_id": name, "episode_id": name, "image": f"images/{name}.png"}
        lines.append(json.dumps(json.loads(line) | place | {"goal": goal, "boxes": [[0, 0, *SIZE]]}))
    (folder / "steps.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = make_project(tmp_path / "project", REPOSITORY / "experiments" / "sandbox.yaml")
    (root / "experiments" / "mine.yaml").write_text(blocks("Own data", "yaml")[0])
    write_data(root / "data-of-mine")
    return root


@pytest.mark.slow
def test_own_data_are_checked_planned_imported_and_used_and_the_store_moves(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    check, plan, imported, plan_again, evolve = commands("Own data")
    code, out, err = tell(project, *check)
    assert code == 0 and "12 steps in split train" in out, err
    code, out, err = tell(project, *plan)
    assert code == 0 and "would run first: benchmark_steps" in out and re.search(r"^takes: .*iteration", out, re.M), err

    process = Forked(project, *imported)
    out, err = process.communicate(timeout=1500)
    assert process.returncode == 0, err
    assert re.match(r"reads up to 19 files with \S+ GB in data-of-mine; .* GB are free", err), err
    assert "mine benchmark_steps" not in err and "benchmark_steps: done in" in err
    assert out.splitlines()[:3] == [
        f"{n} steps in split {split}" for split, n in (("test", 3), ("train", 12), ("validation", 3))
    ]
    code, out, _ = tell(project, *plan_again)
    assert code == 0 and "would run first: open_models" in out and "benchmark_steps" not in out

    process = Forked(project, *evolve)
    out, err = process.communicate(timeout=3000)
    assert process.returncode == 0, err
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    for step in ("candidate_plans", "verdicts", "dataset", "evaluation"):
        assert re.search(rf"^{time} mine/s13 k=0 {step}: done in \d", err, re.M), err

    here = project.parent / "moved"
    copied = re.search(r"^rsync -a (.*) /backup/mine/$", blocks("Move, back up and upgrade a store", "sh")[0], re.M)
    assert copied is not None
    here.mkdir()
    for name in copied[1].split():
        source = project / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, here / name)  # type: ignore[operator]
    project.rename(project.parent / "gone")
    monkeypatch.chdir(here)
    audit, recover, collect = commands("Move, back up and upgrade a store")
    code, out, err = tell(here, *audit)
    assert code == 0 and "none tampered with" in out, f"{out}{err}"
    assert tell(here, *recover)[:2] == (0, "the event log lacks nothing\n")
    code, out, err = tell(here, *collect)
    assert code == 0 and "mine" in (here / "store/pages/mine/results/results.md").read_text(), f"{out}{err}"
    code, out, _ = tell(here, "results", "mine", "--json")
    assert code == 0 and json.loads(out)["iterations"][0]["stale"] == {}


def test_a_checkpoint_is_loaded_and_asked_as_the_page_says() -> None:
    (load,) = blocks("Where checkpoints are", "python")
    names: dict[str, Any] = {"FOLDER": str(REPOSITORY / "models" / "base-planner")}
    exec(load, names)  # noqa: S102 - our own page
    assert names["model"].config.model_type == "qwen2_5_vl"
    (ask,) = blocks("Serve them with vLLM", "python")
    exec(ask, names)  # noqa: S102
    assert names["chat"] == planner_messages("Buy a red scarf", ["CLICK [Scarves]"], "web")
    assert names["then"] == grounder_messages("the red scarf", "web")
    text = names["processor"].apply_chat_template(names["chat"], add_generation_prompt=True)
    assert text.index("<|image_pad|>") < text.index("Buy a red scarf")


def test_the_families_that_the_page_names_are_those_that_are_known() -> None:
    named = set(re.findall(r"`(qwen\w+)`", section("Own model")))
    source = (REPOSITORY / "coepg_dagster" / "inference" / "architecture.py").read_text()
    known = re.search(r"is not known here; known: ([\w, ]+)", source)
    assert known is not None and named == set(known[1].split(", "))


def test_the_experiment_asks_grpo_about_its_own_few_steps(project: Path) -> None:
    """Without the sandbox's `unseen`, which leaves none where all steps are in D_k; with 3B models too, less one setting."""
    file = project / "experiments" / "mine.yaml"
    assert load_experiment(file).grpo.prompts == "dataset"
    shutil.copy(REPOSITORY / "experiments" / "web_3b.yaml", project / "experiments")
    file.write_text(file.read_text().replace("sandbox", "web_3b").replace(", micro_batch_size: 64", ""))
    assert load_experiment(file).models.base_planner.startswith("Qwen/")


def test_7b_on_one_machine_and_the_reward_of_another_variant(project: Path) -> None:
    shutil.copy(REPOSITORY / "experiments" / "web_7b.yaml", project / "experiments")
    (plan,) = commands("7B on one machine")
    code, out, err = tell(project, *plan)
    assert code in (0, 1, 3) and "Traceback" not in err and "web_7b/s13 on h100x8" in out
    (recompute,) = commands("Own reward")
    assert "run `coepg evolve mine/s13 --through 1` first" in tell(project, *recompute)[2]


def test_the_slurm_script_is_one(tmp_path: Path) -> None:
    (script,) = (block for block in blocks("Slurm", "sh") if block.startswith("#!"))
    (tmp_path / "job.sh").write_text(script)
    subprocess.run(["bash", "-n", tmp_path / "job.sh"], check=True)
    assert "--signal=B:TERM@" in script and script.splitlines()[-1].startswith("exec .venv/bin/coepg evolve ")


def test_kubernetes_shares_runs_and_store() -> None:
    instance = yaml.safe_load((REPOSITORY / "docs" / "kubernetes" / "dagster.yaml").read_text())
    variable = instance["storage"]["postgres"]["postgres_url"]["env"]
    launcher = instance["run_launcher"]["config"]
    assert variable in section("Kubernetes") and launcher["env_secrets"][0] in section("Kubernetes")
    store = next(mount["mountPath"] for mount in launcher["volume_mounts"] if mount["name"] == "store")
    assert instance["compute_logs"]["config"]["base_dir"].startswith(store)


def test_every_message_of_the_page_is_one_of_the_code() -> None:
    """Fixed words of each message in the first column occur in a source file."""
    sources = "\n".join(
        re.sub(r'"\s*\n\s*f?"', "", file.read_text())
        for place in ("coepg_dagster", "assets", "resources")
        for file in (REPOSITORY / place).rglob("*.py")
    )
    messages = re.findall(r"^\| `([^|]*)` \|", section("Troubleshooting by message"), re.M)
    assert len(messages) >= 8
    for message in messages:
        words = [part for part in re.split(r"…|'x'|FILE|\bk\b|SIGKILL|\b12\b|wandb", message) if len(part.strip()) > 6]
        assert words and all(part.strip(" :;,") in sources for part in words), message


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]*)", PAGE):
        assert not target or (REPOSITORY / "docs" / target).exists(), target
