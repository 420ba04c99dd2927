"""What auditors read in a terminal: traces, audits and differences as plain text."""

from __future__ import annotations

from typing import Any


def trace_text(found: dict[str, Any]) -> str:
    """A trace (see auditing.trace) as lines."""
    row, step, plan, planner, rule = (found[name] for name in ("row", "step", "plan", "planner", "rule"))
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
        f"          done: {' ; '.join(step['history']) or 'nothing'}",
        f"          label: {step['action_type']} {step['value']!r}, boxes {_boxes(step['boxes'])}",
        f"          screenshot: {step['width']} x {step['height']} px, {shot['hash']}, row {shot['row']} of {shot['file']}",
        f"plan      {plan['plan']!r}, {plan['action_type']} {plan['value']!r}, gate: {plan['gate']}",
        f"          as generated: {plan['text']}",
        f"planner   {planner['name']}: {_model(planner)}",
        f"          prompt {planner['prompt']['hash']} ({planner['prompt']['style']}), seed {planner['seed']}, "
        f"sample {plan['sample']}, {sampling}",
        *(f"verdict   {_verdict(vote)}" for vote in found["verdicts"]),
        f"rule      {rule['rule']}{'' if rule['k'] is None else ' k=' + str(rule['k'])}: {rule['hits']} of "
        f"{rule['answered']} hit → {row['decision']}; kept for this step: {', '.join(rule['kept_for_this_step']) or 'none'}",
        *(f"dropped   {_dropped(other)}" for other in found["dropped"]),
        *(
            f"trained   {one['asset']}[{one['iteration']}] {one['data_version']}: {one['how']}"
            f"{'' if one['current'] else ', not current'}"
            for one in found["trained"]
        ),
        *(f"parent    {_parent(one)}" for one in found["parents"]),
    ]
    for name, model in found["parents"][-1].get("models", {}).items() if found["parents"] else ():
        lines.append(f"          {name}: {model['checkpoint']} {model['version']}")
    return "\n".join(lines)


def _boxes(boxes: list[list[float]]) -> str:
    return " ".join("(" + ", ".join(f"{edge:g}" for edge in box) + ")" for box in boxes) or "none"


def _model(member: dict[str, Any]) -> str:
    return f"{member['model']}, weights {member['weights']}"


def _verdict(vote: dict[str, Any]) -> str:
    if vote["failure"] is not None:
        return f"{vote['name']}: gave no answer ({vote['failure']}); {_model(vote)}"
    point = "no coordinates" if vote["point"] is None else "({:.1f}, {:.1f})".format(*vote["point"])
    said = f"{point}, confidence {vote['confidence']:.3f}"
    return f"{vote['name']}: {'hit ' if vote['hit'] else 'miss'} {said}; {_model(vote)}"


def _dropped(other: dict[str, Any]) -> str:
    of = f" of {other['duplicate_of_row'] or other['duplicate_of']}" if other["duplicate_of"] else ""
    return f"{other['candidate_id']}: {other['reason']}{of}: {other['plan'] or other['text']!r}"


def _parent(one: dict[str, Any]) -> str:
    name = one["asset"] if one["iteration"] is None else f"{one['asset']}[{one['iteration']}]"
    state = "" if one["current"] else ", not current"
    return f"{name} {one['data_version']} (run {one['run_id'][:8]}){state}{', TAMPERED' if one['tampered'] else ''}"
