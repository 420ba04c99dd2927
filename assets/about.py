"""What Dagster's web UI shows of each asset: description with its equation, kinds, owners, columns, links."""

from dataclasses import dataclass
from typing import Any

import dagster as dg
import pyarrow as pa
from coepg_dagster.assets.ledger import Loop

from coepg_dagster.provenance import CONTINUED, SHARED, Asset, Ref, continued
from coepg_dagster.reports.site import EVOLUTION, INDEX, LINEAGE, page_of
from coepg_dagster.steps import CANDIDATE_SCHEMA, DATASET_SCHEMA, STEP_SCHEMA, VERDICT_SCHEMA

PAGES = "/pages"
"""Where `coepg ui` serves the pages, on the address of Dagster's web UI: a link without host and port lives on any of them."""

ABOUT: dict[Asset, str] = {
    "benchmark_steps": """Every labelled step of the benchmark: screenshot, task, history, label action, target box, split.

`train` makes D_k, `validation` is for model and setting choices, the test splits are read by `evaluation` only.""",
    "open_models": """The base pair M_0 and the open members of the planner pool Π and the verifier pool Φ, each with the hash
of its weights.""",
    "planner_sft": """**π_k**, the planner after supervised fine-tuning of the base planner on D_{k-1}. Partition 0 is the base
planner as it is.

Eq. 1: `(p, a^type, a^value) = π(o, Q, h)`. The planner says what to do: a plan in words, an action type, a value.""",
    "grounder": """**ϕ_k**, the grounder after supervised fine-tuning of the base grounder on D_{k-1}. Partition 0 is the base
grounder as it is.

Eq. 2: `a^coor = ϕ(o^vision, p)`. The grounder says where; it sees the screenshot and the plan only.""",
    "grounder_rl": """**ϕ_k**, the grounder after GRPO too, on the plans of D_{k-1}; the paper trains it by supervised
fine-tuning only. The reward is the score of the place in its own answer: by default 1 in the target box, else 0 (Eq. 3).
Everything that reads ϕ_k reads this one. Partition 0 is ϕ_0.""",
    "planner": """**π'_k**, the planner after GRPO from π_k with the confidence-weighted reward ensemble (C-DREM) of ϕ_k and
the open verifiers. Partition 0 is π_0.

- Eq. 3: `Acc_j = 1` if grounder j's point lies in the target box, else 0
- Eq. 4: `r^plan = Σ_j w_j Acc_j`
- Eq. 5: `w_j = exp(σ_j c_j) / Σ_n exp(σ_n c_n)`, with prior σ and confidence c
- Eq. 6: `c_j = exp((1/L) Σ_l log P_j(y_l))`, over the L coordinate tokens (`confidence: probability`)
- Eq. 9: `r = 0` unless type and value are right, else `r^plan`
- Eq. 10: `A_i = (r_i - mean r) / std r` within the group""",
    "end_to_end": """**One model** that answers type, value and point from screenshot, goal and history, without a plan (the
paper's Table 3): supervised fine-tuning on the labels of the steps in D_{k-1}, then GRPO where it is on. Partition 0 is the
base as it is.""",
    "candidate_plans": """Plans for every training step by every member of the planner pool Π: the open planners, π'_k, and
π'_{k-1} from k = 2 on. Each is kept with the result of the gate (Eq. 7, 8) on its action type and value.""",
    "verdicts": """Where every member of the verifier pool Φ (the open verifiers, ϕ_k, and ϕ_{k-1} from k = 2 on) points for every
candidate, with its confidence.

Eq. 3: `Acc_j = 1` if the point lies in the target box. Eq. 6: the mean log-probability of the coordinate tokens. Every
verdict is kept, so that any selection rule can be applied to the same table.""",
    "dataset": """**D_k**: rows (o, h, p, a) whose plan was verified, a being the *label* action; and for every other candidate
the reason why it was dropped. D_0 comes from open models only. Iteration k + 1 trains on it.""",
    "data_quality": """Purity, diversity and coverage of D_k (the paper's Fig. 6), the reasons of its drops, agreement of its
verifiers, controls, and its drift since D_{k-1}.

- `purity_open`: share of judged candidates that the open verifiers accept, which are the same for every k (frozen purity);
  `purity`: that the current ones accept, which grow in number
- `diversity`: verified plans per covered step; `plans`: per step and per task, raw, distinct and verified
- `coverage`: share of steps with at least one row
- `verifier_agreement`: share of pairs of verifiers that agree; `verifier_kappa`: beyond chance
- `specificity`: how much a plan says about its step (100: no plan fits two steps)
- `plan_shuffle`: how often a verifier finds the target given another step's plan, beside its own rate and chance
- `trigger`: how often a patch draws a verifier's points to itself, if `quality.trigger_steps` is set
- `drift`: share of plans that D_{k-1} did not hold; `drift_words`: divergence of their words, 0 to 1 bit""",
    "evaluation": """The agent **M_k = {π'_k, ϕ_k}** on validation and on every test split, greedy, under the experiment's named
protocol, with 95 % intervals clustered by task. `pairs` has the scores of other pairs of models, if the experiment names a
`judge` or sets `evaluation`: they show which model a gain comes from. `third_party` says whom text like an instruction misleads,
if `evaluation.third_party` is set.""",
    "evolution_report": """Step SR per split, purity, diversity and coverage over the iterations, as a page with figures.""",
}

KINDS: dict[Asset, set[str]] = {
    "benchmark_steps": {"parquet"},
    "open_models": {"huggingface"},
    "planner_sft": {"pytorch", "trl"},
    "grounder": {"pytorch", "trl"},
    "grounder_rl": {"pytorch", "trl"},
    "planner": {"pytorch", "trl"},
    "end_to_end": {"pytorch", "trl"},
    "candidate_plans": {"pytorch", "parquet"},
    "verdicts": {"pytorch", "parquet"},
    "dataset": {"parquet"},
    "data_quality": {"json"},
    "evaluation": {"pytorch", "json"},
    "evolution_report": {"html"},
}

ROLES: dict[Asset, str] = {
    "benchmark_steps": "input",
    "open_models": "input",
    "planner_sft": "planner",
    "planner": "planner",
    "grounder": "grounder",
    "grounder_rl": "grounder",
    "end_to_end": "planner",
    "candidate_plans": "data",
    "verdicts": "data",
    "dataset": "data",
    "data_quality": "data",
    "evaluation": "evaluation",
    "evolution_report": "evaluation",
}
"""What an asset is for: a tag, by which the UI filters."""

PARTS: dict[Asset, str] = {
    **dict.fromkeys(SHARED, "inputs"),
    "data_quality": "evaluation",
    "evaluation": "evaluation",
    "evolution_report": "evaluation",
}
"""The part of the graph that an asset is drawn in, from left to right inputs, iteration (all others), evaluation."""

COLUMNS: dict[Asset, pa.Schema] = {
    "benchmark_steps": STEP_SCHEMA,
    "candidate_plans": CANDIDATE_SCHEMA,
    "verdicts": VERDICT_SCHEMA,
    "dataset": DATASET_SCHEMA,
}


COLUMN_TEXTS = {
    "step_id": "unique over the whole benchmark",
    "split": "train makes D_k, validation is for model and setting choices, test splits are read by `evaluation` only",
    "episode_id": "the task, by which averages are macro and intervals clustered",
    "step_index": "position in the episode, from 0",
    "family": "MiniWoB++ task, website or app",
    "seed": "of the episode, where the benchmark has one",
    "goal": "Q, the task in words",
    "history": "h_t, what was done before, oldest first",
    "screenshot": "o_t, an encoded PNG or JPEG",
    "width": "of the screenshot, px",
    "height": "of the screenshot, px",
    "boxes": "every target box (x1, y1, x2, y2), px of the screenshot; empty: the action has no target",
    "action_type": "a^type",
    "value": "a^value; empty where the action takes none",
    "candidate_id": "names step, planner and sample",
    "planner": "the pool member that wrote the plan",
    "sample": "which of this planner's plans for the step",
    "text": "the model's answer, as generated",
    "plan": "p, what to do, in words; null: the answer is no plan",
    "gate": "passed, or why type and value are not the label's (Eq. 7, 8)",
    "duplicate_of": "the candidate of this step with the same plan",
    "verifier": "the pool member that gave the verdict",
    "hit": "Acc_j (Eq. 3): its point lies in a target box",
    "x": "its point, px of the screenshot; null: no coordinates in the answer",
    "y": "its point, px of the screenshot; null: no coordinates in the answer",
    "mean_logprob": "Eq. 6: mean log-probability of the coordinate tokens",
    "tokens": "L of Eq. 6, the number of coordinate tokens",
    "failure": "why the verifier gave no answer (not counted as a miss); null: it answered",
    "box": "the target that the plan was verified against, px; null: the action has no target",
    "made_in": "the iteration whose pools made the row",
    "hits": "how many verifiers found the target",
    "answered": "how many verifiers gave an answer",
    "prompt_hash": "of the messages that the planner was given",
    "sampling_seed": "of the generator that sampled this chunk of plans",
    "row_id": "stays the same when D_k is made again with this content, and when the row is carried over; for `coepg trace`",
    "screenshot_hash": "SHA-256 (16 digits) of the screenshot that planner and verifiers saw",
    "score": "orders the plans of a step: share of hits, then confidence",
}
"""What the columns mean, for every table in COLUMNS."""


@dataclass(frozen=True)
class About:
    """The arguments of `dg.asset` that the UI shows."""

    group: str
    description: str
    kinds: set[str]
    owners: list[str]
    tags: dict[str, str]
    metadata: dict[str, Any]


def about(loop: Loop, asset: Asset) -> About:
    """The description, group, tags and columns of an asset."""
    text, metadata = ABOUT[asset], dict[str, Any]()
    if loop.experiment.init == "previous" and asset in CONTINUED:
        before = continued(asset, loop.experiment.phi)
        text += f"\n\n`init: previous`: from partition 2 on, training starts from {before}[k - 1], not from the base."
    if asset in COLUMNS:
        metadata["dagster/column_schema"] = table_schema(COLUMNS[asset])
    tags = {"coepg/experiment": loop.experiment.name, "coepg/role": ROLES[asset]}
    if asset not in SHARED:
        tags["coepg/seed"] = str(loop.seed)
    # Dagster's graph shows only the last part of a key: groups for each seed tell them apart
    whose = loop.experiment.name if asset in SHARED else f"{loop.experiment.name}_s{loop.seed}"
    group = f"{whose}_{PARTS.get(asset, 'iteration')}"
    return About(group, f"{text}\n\n{_links(loop, asset)}", KINDS[asset], loop.experiment.owners, tags, metadata)


def _links(loop: Loop, asset: Asset) -> str:
    """Links to the pages of the loop, and the command that makes them where another web server runs."""
    links = f"[lineage map]({PAGES}/{loop.name}/{LINEAGE}), [all pages]({PAGES}/{loop.name}/{INDEX})"
    if asset == "evolution_report":
        links = f"[report]({PAGES}/{loop.name}/{EVOLUTION}), {links}"
    return f"{links} (served by `coepg ui`; elsewhere: `coepg report {loop.name} --out DIR`)"


def page_link(loop: Loop, ref: Ref) -> dict[str, dg.UrlMetadataValue]:
    """Metadata that leads to the page of an artifact; `coepg ui` serves it."""
    return {"page": dg.MetadataValue.url(f"{PAGES}/{loop.name}/{page_of(ref) or LINEAGE}")}


def table_schema(schema: pa.Schema) -> dg.TableSchema:
    """The columns of an Arrow schema, as Dagster shows them."""
    return dg.TableSchema(
        [
            dg.TableColumn(
                field.name,
                str(field.type),
                description=COLUMN_TEXTS[field.name],
                constraints=dg.TableColumnConstraints(nullable=bool(field.nullable)),
            )
            for field in schema
        ]
    )
