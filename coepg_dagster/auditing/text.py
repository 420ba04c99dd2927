"""Traces and differences as plain text for the terminal."""

from __future__ import annotations

from typing import Any, Final

from coepg_dagster.characters import visible


def trace_text(trace: dict[str, Any]) -> str:
    """A trace (see auditing.trace) as lines."""
    row, step, plan, planner, rule = (trace[name] for name in ("row", "step", "plan", "planner", "rule"))
    shot = step["screenshot"]
    sampling = ", ".join(f"{name} {value}" for name, value in planner["sampling"].items())
    lines = [
        f"row       {row['id'] or 'none: ' + row['decision']}  ({row['experiment']}, made in iteration {row['made_in']})",
        *(
            f"          row {one['number']} of D_{one['iteration']} {one['data_version']}"
            f"{', carried over' if one['carried_over'] else ''}{'' if one['current'] else ', not current'}"
            for one in row["datasets"]
        ),
        f"step      {step['step_id']}  ({step['split']}, episode {step['episode_id']}, step {step['step_index']})",
        f"          goal: {step['goal']}",
        *([f"          instruction: {step['instruction']}"] if step.get("instruction") else []),
        f"          done: {' ; '.join(step['history']) or 'nothing'}",
        f"          label: {step['action_type']} {step['value']!r}, boxes {_boxes(step['boxes'])}",
        f"          screenshot: {step['width']} x {step['height']} px, {shot['hash']}, row {shot['row']} of {shot['file']}",
        f"plan      {plan['plan']!r}, {plan['action_type']} {plan['value']!r}, gate: {plan['gate']}",
        f"          as generated: {plan['text']}",
        f"planner   {planner['name']}: {_model(planner)}",
        f"          prompt {planner['prompt']['hash']} ({planner['prompt']['style']}), seed {planner['seed']}, "
        f"sample {plan['sample']}, {sampling}",
        *(f"verdict   {_verdict(vote)}" for vote in trace["verdicts"]),
        f"rule      {_rule(rule) if step['boxes'] else 'the action has no target, so no verifier ran'} → {row['decision']}; "
        f"kept for this step: {', '.join(rule['kept_for_this_step']) or 'none'}",
        *(f"{one['mark']:9} {marked(one)}" for one in trace["marks"]),
        *(f"dropped   {_dropped(other)}" for other in trace["dropped"]),
        *(
            f"trained   {one['asset']}[{one['iteration']}] {one['data_version']}"
            f"{'' if one['loop'] == row['experiment'] else ' of ' + one['loop']}: {one['how']}"
            f"{'' if one['current'] else ', not current'}"
            for one in trace["trained"]
        ),
        *(
            [f"parent    vetoes {read['version']} (the first {read['lines']} lines of marks.jsonl)"]
            if (read := rule["vetoes"])
            else []
        ),
        *(f"parent    {_parent(one)}" for one in trace["parents"]),
    ]
    for name, model in trace["parents"][-1].get("models", {}).items() if trace["parents"] else ():
        lines.append(f"          {name}: {model['checkpoint']} {model['version']}")
    return _joined(lines)


def _rule(rule: dict[str, Any]) -> str:
    return (
        f"{rule['rule']}{'' if rule['k'] is None else ' k=' + str(rule['k'])}: {rule['hits']} of {rule['answered']} hit"
    )


def marked(mark: dict[str, Any]) -> str:
    """A mark (see auditing.marks.shown_marks) in words: who set it on what, when and why, and whether it counts."""
    of = "the whole step" if mark["plan"] is None else "the plan"
    words = f"{of}, by {mark['by']}, {mark['at']}, on {mark['of']}: {mark['reason']}"
    if mark["applied"]:
        return words if mark["counts"] else f"{words} (withdrawn since this version was made)"
    since = f"{words} (this version was made without it; it counts from D_{mark['iteration']} on)"
    return since if mark["mark"] == "veto" else words


def _boxes(boxes: list[list[float]]) -> str:
    return " ".join("(" + ", ".join(f"{edge:g}" for edge in box) + ")" for box in boxes) or "none"


def _model(member: dict[str, Any]) -> str:
    return f"{member['model']}, weights {member['weights']}"


def _verdict(vote: dict[str, Any]) -> str:
    if vote["failure"] is not None:
        return f"{vote['name']}: gave no answer ({vote['failure']}); {_model(vote)}"
    point = "no coordinates" if vote["point"] is None else "({:.1f}, {:.1f})".format(*vote["point"])
    answer = f"{point}, confidence {vote['confidence']:.3f}"
    return f"{vote['name']}: {'hit ' if vote['hit'] else 'miss'} {answer}; {_model(vote)}"


def _dropped(other: dict[str, Any]) -> str:
    of = f" of {other['duplicate_of_row'] or other['duplicate_of']}" if other["duplicate_of"] else ""
    return f"{other['candidate_id']}: {other['reason']}{of}: {other['plan'] or other['text']!r}"


def _parent(one: dict[str, Any]) -> str:
    name = one["asset"] if one["iteration"] is None else f"{one['asset']}[{one['iteration']}]"
    state = "" if one["current"] else ", not current"
    return f"{name} {one['data_version']} (run {one['run_id'][:8]}){state}{', TAMPERED' if one['tampered'] else ''}"


def diff_text(diff: dict[str, Any]) -> str:
    """Differences (see auditing.differences) as lines, with SHOWN rows of each kind."""
    data = diff["data"]
    (version_a, version_b), (rows_a, rows_b) = data["versions"], data["rows"]
    lines = [
        f"{diff['a']} → {diff['b']}",
        f"data      {version_a} ({rows_a} rows) → {version_b} ({rows_b} rows): {data['same']} the same, "
        f"{len(data['gained'])} gained, {len(data['lost'])} lost, {len(data['changed'])} changed",
    ]
    for kind in ("gained", "lost", "changed"):
        lines += [f"{kind:9} {n:6}  {why}" for why, n in data["why"][kind].items()]
        lines += [f"          e.g. {_row(one)}" for one in data[kind][:SHOWN]]
    for asset, model in diff["models"].items():
        if model is None:
            lines.append(f"{asset:12} is not there on both sides")
            continue
        distance = "" if model["distance"] is None else f", ‖Δ‖/‖A‖ = {model['distance']:.4f}"
        same = "same weights" if model["same_weights"] else "other weights"
        lines.append(f"{asset:12} {' → '.join(model['versions'])}: {same}{distance}")
        for what in ("inputs", "settings", "code"):
            lines += [
                f"          {what[:-1] if what != 'code' else what} {key}: {was} → {now}"
                for key, (was, now) in model[what].items()
            ]
    for split, result in (diff["results"] or {}).items():
        if "not_comparable" in result:
            lines.append(f"results   {split}: {result['not_comparable']}")
            continue
        for metric, difference in result["differences"].items():
            lines.append(f"results   {split:12} {metric:8} {_difference(difference)} ({result['steps']} steps)")
    if diff["results"] is None:
        lines.append("results   were not evaluated on both sides")
    return _joined(lines)


def _joined(lines: list[str]) -> str:
    """The lines as text; no goal or plan in one of them adds another."""
    return "\n".join(visible(line, one_line=True) for line in lines)


SHOWN: Final = 3
"""How many rows of a kind are shown."""


def _row(one: dict[str, Any]) -> str:
    ids = one["row"] if "row" in one else " → ".join(one["rows"])
    changes = "".join(f"; {name}: {was} → {now}" for name, (was, now) in one.get("changes", {}).items())
    return f"{ids} {one['step_id']}: {one['plan']!r}{changes}"


def _difference(difference: dict[str, Any]) -> str:
    if difference["macro"] is None:
        return "undefined"
    low, high = difference["ci95"] or (None, None)
    interval = "" if low is None else f" [{low:+.1f}, {high:+.1f}]"
    return f"{difference['macro']:+.1f}{interval}{', differs' if difference['differs'] else ''}"
