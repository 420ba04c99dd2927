from __future__ import annotations

from random import Random

from coepg_dagster.sandbox.pretraining import wordings as w

BUTTON = w.ScreenElement("button", "previous", "", (10, 180, 60, 200))
FIELDS = [
    w.ScreenElement("field", f"{n}", "", (10, 20 * i + 60, 100, 20 * i + 75)) for i, n in enumerate(("1st", "2nd"))
]
SCREEN = [BUTTON, *FIELDS]


def test_each_wording_words_it_differently() -> None:
    plans = {w.precise(name, BUTTON, SCREEN, "CLICK")[0] for name in w.WORDINGS}
    assert plans == {
        "button 'previous'",
        "press on the previous button",
        "click the element reading 'previous', a button near the lower left",
        "use the push button marked previous",
    }


def test_same_random_state_same_plan() -> None:
    for name in w.WORDINGS:
        plans = [[w.describe(name, e, SCREEN, "CLICK", Random(3), 0.5) for e in SCREEN] for _ in range(2)]
        assert plans[0] == plans[1]


def test_precise_plans_tell_the_elements_of_a_screen_apart() -> None:
    for name in w.WORDINGS:
        plans = [plan for element in SCREEN for plan in w.precise(name, element, SCREEN, "CLICK")]
        assert len(plans) == len(set(plans))
    assert not set(w.precise("D", FIELDS[0], SCREEN, "TYPE")) & set(w.vague("D", FIELDS[0], "TYPE"))


def test_verbs_follow_the_action() -> None:
    assert w.precise("B", FIELDS[1], SCREEN, "TYPE") == ("fill in the 2nd field",)
    assert "enter text in the second input box" in w.precise("D", FIELDS[1], SCREEN, "TYPE")


def test_vagueness_is_as_frequent_as_configured() -> None:
    rng = Random(0)
    plans = [w.describe("B", BUTTON, SCREEN, "CLICK", rng, 0.25) for _ in range(2000)]
    share = sum(plan in w.vague("B", BUTTON, "CLICK") for plan in plans) / len(plans)
    assert 0.2 < share < 0.3
    assert all(w.is_right(p, ["B"], BUTTON, SCREEN, "CLICK") for p in plans if p not in w.vague("B", BUTTON, "CLICK"))


def test_vagueness_hangs_on_family_and_planner() -> None:
    vagueness = w.Vagueness(families=0.5, often=0.6, seldom=0.1)
    drawn = {vagueness.on(f"family-{n}", "p") for n in range(50)}
    assert drawn == {0.6, 0.1}
    assert vagueness.on("family-1", "p") == vagueness.on("family-1", "p")


def test_only_elements_with_a_unique_name_are_askable() -> None:
    twin = w.ScreenElement("button", "previous", "", (100, 100, 120, 110))
    assert w.askable([BUTTON, twin, *FIELDS]) == [2, 3]


def test_long_names_are_cut_at_a_blank() -> None:
    assert w.short_name("one two three four five six") == "one two three four five"
    assert len(w.short_name("x" * 40)) == w.LONGEST_NAME
