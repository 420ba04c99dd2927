"""Plug-ins that docs/methods.md plans and nobody has built yet; once one of that kind and name exists, it no longer counts."""

from __future__ import annotations

from typing import Final

from coepg_dagster.plugins import Kind

PLANNED: Final[tuple[tuple[Kind, str, str], ...]] = (
    ("reward", "se_gui", "SE-GUI (arXiv 2505.12370), dense point"),
    ("reward", "gui_g2", "GUI-G² (arXiv 2507.15846), point"),
    ("reward", "gui_g2_coverage", "GUI-G² (arXiv 2507.15846), coverage"),
    ("reward", "lpo", "LPO (arXiv 2506.09373)"),
    ("reward", "step_gui", "Step-GUI (arXiv 2512.15431), point"),
    ("reward", "step_gui_box", "Step-GUI (arXiv 2512.15431), box"),
    ("reward", "magicgui", "MagicGUI (arXiv 2508.03700)"),
    ("reward", "gui_g1", "GUI-G1 (arXiv 2505.15810), box size"),
    ("reward", "infigui_r1_box", "InfiGUI-R1 (arXiv 2504.14239)"),
    ("reward", "infigui_g1", "InfiGUI-G1"),
    ("reward", "format", "GUI-R1 (arXiv 2504.10458)"),
    ("reward", "guirlvg_format", "GuirlVG (arXiv 2508.04389)"),
    ("reward", "length", "A²FM"),
    ("reward", "no_thinking", "UIShift (arXiv 2505.12493) and GTA1 (arXiv 2507.05791)"),
    ("reward", "hyperclick", "HyperClick (arXiv 2510.27266)"),
    ("reward", "sub_goal", "InfiGUI-R1 (arXiv 2504.14239)"),
    ("reward", "gui_rcpo", "GUI-RCPO (arXiv 2508.05615)"),
    ("reward", "step_reward_model", "UI-Genie (arXiv 2505.21496)"),
    ("combiner", "ui_s1", "UI-S1 (arXiv 2509.11543)"),
    ("combiner", "gui_libra", "GUI-Libra (arXiv 2602.22190)"),
    ("combiner", "gui_r1", "GUI-R1 (arXiv 2504.10458)"),
    ("advantage", "rloo", "InfiGUI-R1 (arXiv 2504.14239)"),
    ("advantage", "maxrl", "MaxRL"),
    ("advantage", "sngs", "GUI-Libra (arXiv 2602.22190)"),
    ("advantage", "gui_g1_difficulty", "GUI-G1 (arXiv 2505.15810)"),
    ("advantage", "arpo_replay", "ARPO (arXiv 2505.16282)"),
    ("advantage", "ui_s1_levels", "UI-S1 (arXiv 2509.11543)"),
    ("policy_loss", "guirlvg_kl", "GuirlVG (arXiv 2508.04389)"),
    ("data", "transition_pairs", "UIShift (arXiv 2505.12493)"),
    ("data", "reverse_synthesis", "OS-Genesis"),
    ("data", "reflection_samples", "GUI-Reflection"),
    ("data", "corrupted_steps", "UI-Genie (arXiv 2505.21496)"),
    ("data", "calibrated_steps", "Step-GUI (arXiv 2512.15431)"),
    ("data", "state_machine", "AutoWebWorld"),
    ("inference", "retrieved_demonstrations", "LearnAct"),
    ("inference", "screen_text", "TRISHUL"),
    ("inference", "cursor_moves", "GUI-Cursor"),
    ("check", "trigger_probe", "VisualTrap (arXiv 2507.06899)"),
    ("check", "injected_text", "AgentHazard (arXiv 2507.04227)"),
)
"""Kind, name and source."""
