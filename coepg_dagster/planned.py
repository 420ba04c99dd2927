"""Plug-ins that docs/methods.md plans and nobody has built yet."""

from __future__ import annotations

from typing import Final

from coepg_dagster.plugins import Kind

PLANNED: Final[tuple[tuple[Kind, str, str], ...]] = (
    ("reward", "step_reward_model", "UI-Genie (arXiv 2505.21496)"),
    ("data", "reverse_synthesis", "OS-Genesis"),
    ("data", "reflection_samples", "GUI-Reflection"),
    ("data", "corrupted_steps", "UI-Genie (arXiv 2505.21496)"),
    ("data", "calibrated_steps", "Step-GUI (arXiv 2512.15431)"),
    ("data", "state_machine", "AutoWebWorld"),
    ("inference", "retrieved_demonstrations", "LearnAct"),
    ("inference", "screen_text", "TRISHUL"),
    ("inference", "cursor_moves", "GUI-Cursor"),
)
"""Kind, name and source."""
