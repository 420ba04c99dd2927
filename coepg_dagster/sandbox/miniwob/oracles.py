"""Oracles for MiniWoB++ pages: one small rule per task family chooses the next action from the goal and the DOM.

A rule takes a PageView and returns a Move, or None where it does not know (the episode is then dropped). It depends only
on the PageView, so the same episode always has the same steps. `targets` lists every element for which the same label is
correct; the first of them is acted on. Where several different labels are correct (two forms to fill in any order), the
rule follows reading order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from coepg_dagster.sandbox.miniwob.browser import ActionType, Browser
from coepg_dagster.sandbox.miniwob.elements import Element, history_entry

Query = Callable[..., Any]


@dataclass(frozen=True)
class Move:
    """One action of an oracle: type, elements (all are correct, the first is acted on), and value."""

    action_type: ActionType
    targets: tuple[Element, ...]
    value: str = ""

    @property
    def history(self) -> str:
        """The action as `history_entry` writes it."""
        return history_entry(self.targets[0], self.action_type, self.value)


@dataclass(frozen=True)
class PageView:
    """What an oracle sees: the goal, the visible elements, the moves made so far, and a way to read the DOM."""

    goal: str
    elements: tuple[Element, ...]
    done: tuple[Move, ...]
    run: Query

    def all(self, kind: str, name: str | None = None) -> list[Element]:
        """Visible elements of a kind (and of a name, if given), in document order."""
        return [e for e in self.elements if e.kind == kind and (name is None or e.name == name)]

    def with_class(self, css_class: str) -> list[Element]:
        """Visible elements with a CSS class."""
        return [e for e in self.elements if css_class in e.classes]

    def at_nodes(self, nodes: Sequence[int]) -> list[Element]:
        """Visible elements among DOM nodes (indices in querySelectorAll('*')), in the order of `nodes`."""
        by_node = {e.node: e for e in self.elements}
        return [by_node[n] for n in nodes if n in by_node]


Oracle = Callable[[PageView], Move | None]


class OracleError(ValueError):
    """The page does not look as the oracle's rule expects."""


def look(browser: Browser, goal: str, done: Sequence[Move]) -> PageView:
    """The PageView of a browser's current page."""
    return PageView(goal, browser.elements(), tuple(done), browser.run)


def _click(targets: Sequence[Element]) -> Move | None:
    return Move("CLICK", tuple(targets)) if targets else None


def _type(targets: Sequence[Element], value: str) -> Move | None:
    return Move("TYPE", tuple(targets), value) if targets and value else None


def _quoted(goal: str) -> list[str]:
    return re.findall(r'"(.*?)"', goal)


def _extract(pattern: str, goal: str) -> str:
    """The first group of `pattern` in the goal. Raises OracleError where it does not match."""
    match = re.search(pattern, goal)
    if match is None:
        raise OracleError(f"the goal {goal!r} does not look as expected ({pattern})")
    return match[1]


def _fill(view: PageView, values: Sequence[tuple[str | None, str]], button: str | None = None) -> Move | None:
    """Fills fields (by label; None: the only one) in reading order, then clicks the button (None: the only one)."""
    wanted: list[tuple[Element, str]] = []
    for name, value in values:
        fields = view.all("field", name)
        if len(fields) != 1:
            return None
        wanted.append((fields[0], value))
    for field, value in sorted(wanted, key=lambda pair: (pair[0].box[1], pair[0].box[0])):
        if field.value != value:
            return _type([field], value)
    buttons = view.all("button", button)
    return _click(buttons) if len(buttons) == 1 else None


def click_button(view: PageView) -> Move | None:
    return _click(view.all("button", _quoted(view.goal)[0]))


def click_link(view: PageView) -> Move | None:
    return _click(view.all("link", _quoted(view.goal)[0]))


def click_test_2(view: PageView) -> Move | None:
    return _click(view.all("button", _extract(r"button (\w+)", view.goal)))


def click_button_sequence(view: PageView) -> Move | None:
    names = re.findall(r"button (\w+)", view.goal)
    return _click(view.all("button", names[len(view.done)])) if len(view.done) < len(names) else None


def click_dialog(view: PageView) -> Move | None:
    return _click(view.all("button", "x"))


def enter_text(view: PageView) -> Move | None:
    return _fill(view, [(None, _quoted(view.goal)[0])])


def enter_text_2(view: PageView) -> Move | None:
    word = _quoted(view.goal)[0]
    return _fill(view, [(None, word.upper() if "upper case" in view.goal else word.lower())])


def enter_password(view: PageView) -> Move | None:
    password = _quoted(view.goal)[0]
    return _fill(view, [("Password", password), ("Verify password", password)])


def login_user(view: PageView) -> Move | None:
    user, password = _quoted(view.goal)
    return _fill(view, [("Username", user), ("Password", password)])


def general_page(view: PageView) -> Move | None:
    """The page itself says what its goal asks for next."""
    wanted = view.run("() => coepgNext()")
    if wanted is None:
        return None
    action, node, value = wanted
    targets = view.at_nodes([node])
    return Move(action, tuple(targets), value) if targets else None


def login_user_popup(view: PageView) -> Move | None:
    cancel = view.all("button", "Cancel")
    return _click(cancel) if cancel else login_user(view)


def click_tab(view: PageView) -> Move | None:
    return _click(view.all("tab", "Tab #" + _extract(r"#(\d)", view.goal)))


LINK_IN_PANEL_JS: Final = """
(word, panelSelector) => {
const nodes = Array.from(document.querySelectorAll('*')), pairs = [];
for (const a of document.querySelectorAll('.alink')) {
  if (a.textContent !== word) continue;
  const panel = a.closest(panelSelector);
  const tab = document.querySelector('.ui-tabs-nav a[href="#' + panel.id + '"]');
  const head = tab || panel.previousElementSibling;
  pairs.push([nodes.indexOf(a), nodes.indexOf(head)]);
}
return pairs;
}
"""


def _link_in_panel(view: PageView, panel: str) -> Move | None:
    word = _quoted(view.goal)[0]
    links = view.all("link", word)
    if links:
        return _click(links)
    heads = [head for _, head in view.run(LINK_IN_PANEL_JS, word, panel)]
    return _click(view.at_nodes(list(dict.fromkeys(heads))))


def click_tab_2(view: PageView) -> Move | None:
    return _link_in_panel(view, ".ui-tabs-panel")


def click_collapsible_2(view: PageView) -> Move | None:
    return _link_in_panel(view, ".ui-accordion-content")


def click_collapsible(view: PageView) -> Move | None:
    return _click(view.all("button", "Submit") if view.done else view.all("section"))


def _choose(view: PageView, kind: str, names: Sequence[str]) -> Move | None:
    """Marks every named checkbox or radio, then clicks Submit. All that are still unmarked are correct targets."""
    marked = {e.name for e in view.all(kind) if e.value}
    if not set(names) <= {e.name for e in view.all(kind)}:
        return None
    missing = [e for e in view.all(kind) if e.name in names and e.name not in marked]
    return _click(missing) if missing else _click(view.all("button", "Submit"))


def _names(goal: str) -> list[str]:
    listed = _extract(r"Select (.*) and click Submit", goal)
    return [] if listed == "nothing" else listed.split(", ")


def click_option(view: PageView) -> Move | None:
    return _choose(view, "radio", _names(view.goal))


def click_checkboxes(view: PageView) -> Move | None:
    return _choose(view, "checkbox", _names(view.goal))


def focus_text(view: PageView) -> Move | None:
    return _click(view.all("field", _extract(r"the (\d\w\w) input", view.goal)))


def choose_list(view: PageView) -> Move | None:
    value = _extract(r"Select (.*) from the list", view.goal)
    if view.done:
        return _click(view.all("button", "Submit"))
    return Move("SELECT", tuple(view.all("list")), value) if view.all("list") else None


def click_color(view: PageView) -> Move | None:
    match = re.search(r"Click on the (\w+) colored box", view.goal)
    return _click(view.all("box", match[1])) if match else None  # the goal is a painted box, not text


def click_shades(view: PageView) -> Move | None:
    color = _extract(r"shades of (\w+)", view.goal)
    missing = [e for e in view.all("box", color) if "selected" not in e.classes]
    return _click(missing) if missing else _click(view.all("button", "Submit"))


def click_shape(view: PageView) -> Move | None:
    wanted = _extract(r"Click on a (.*)", view.goal).split()

    def matches(shape: Element) -> bool:
        size, color, *rest = shape.name.split(" ")
        kind, text = (rest[0], rest[1]) if len(rest) == 2 else ("shape", rest[0])
        return all(
            word in ("item", kind, text) if word not in _SIZES and word not in _SHAPE_COLORS else word in (size, color)
            for word in wanted
        )

    return _click([e for e in view.all("shape") if matches(e)])


_SIZES: Final = ("small", "large")
_SHAPE_COLORS: Final = ("red", "green", "blue", "aqua", "black", "magenta", "yellow")


def identify_shape(view: PageView) -> Move | None:
    shapes = view.all("shape")
    if len(shapes) != 1:
        return None
    what = shapes[0].name.split(" ")[2]
    name = {"letter": "Letter", "digit": "Number"}.get(what, what.capitalize())
    return _click(view.all("button", name))


def click_menu(view: PageView) -> Move | None:
    if ">" in view.goal:
        return None  # opens by hovering only: a click on the way counts as the choice
    for name in reversed(_extract(r"Select (.*)", view.goal).split(">")):
        items = view.all("item", name)
        if items:
            return _click(items)
    return None


def click_menu_2(view: PageView) -> Move | None:
    labels = _quoted(view.goal)
    if len(labels) < 2:
        return None  # the goal is a painted icon, not text
    items = view.all("item", labels[1])
    if items:
        return _click(items)
    playback = view.all("item", "Playback")
    return _click(playback or view.all("button", "Menu"))


TREE_JS: Final = """
(name) => {
const nodes = Array.from(document.querySelectorAll('*')), paths = [];
for (const s of document.querySelectorAll('#tree span')) {
  if (s.textContent !== name) continue;
  const path = [nodes.indexOf(s)];
  for (let li = s.parentElement.parentElement.closest('li'); li; li = li.parentElement.closest('li'))
    path.unshift(nodes.indexOf(li.querySelector(':scope > span')));
  paths.push(path);
}
return paths;
}
"""


def navigate_tree(view: PageView) -> Move | None:
    name = _quoted(view.goal)[0]
    seen = [e for e in view.elements if e.kind in ("folder", "file") and e.name == name]
    if seen:
        return _click(seen)
    deepest = [view.at_nodes(path)[-1:] for path in view.run(TREE_JS, name)]
    return _click(list(dict.fromkeys(element for level in deepest for element in level)))


def social_media(view: PageView) -> Move | None:
    user, action = _extract(r"user (@\S+),", view.goal), _quoted(view.goal)[0]
    if action in ("Reply", "Retweet", "Like"):
        return _click(view.all("icon", f"{action.lower()} {user}"))
    entry = f"{action} {user}" if action in ("Mute", "Block") else action
    return _click(view.all("item", entry) if view.done else view.all("icon", f"more {user}"))


def email_inbox(view: PageView) -> Move | None:
    goal = view.goal
    if "forward" in goal.lower():
        sender, other = re.findall(r"by (\S+?) and|to (\S+)\.", goal)
        return _email_letter(view, sender[0], "forward", "field", other[1])
    sender_name = _extract(r"by (\S+) and", goal)
    if "reply" in goal.lower():
        return _email_letter(view, sender_name, "reply", "area", _quoted(goal)[0])
    if "star icon" in goal or "important" in goal:
        return _click(view.all("icon", f"star {sender_name}"))
    if "delete" in goal.lower() or "trash" in goal.lower():
        return _click(view.all("icon", f"trash {sender_name}"))
    return None


def _email_letter(view: PageView, sender: str, verb: str, kind: str, text: str) -> Move | None:
    writing = view.all("icon", "send")
    if writing:
        inputs = [e for e in view.all(kind) if kind == "area" or "forward-sender" in e.classes]
        if inputs and inputs[0].value != text:
            return _type(inputs[:1], text)
        return _click(writing)
    mails = view.all("item", sender)
    return _click(view.all("icon", verb)) or (_click(mails) if len(mails) == 1 else None)  # two of one sender: unclear


def search_engine(view: PageView) -> Move | None:
    query, place = _quoted(view.goal)[0], int(_extract(r"the (\d+)\w\w search result", view.goal)) - 1
    fields = view.all("field")
    if fields and fields[0].value != query:
        return _type(fields, query)
    titles = view.with_class("search-title")
    if not titles:
        return _click(view.all("button", "Search"))
    page = str(place // 3 + 1)
    current = view.run("() => document.querySelector('.page-item.active')?.textContent || '1'")
    if current != page:
        return _click([e for e in view.all("link", page) if "page-link" in e.classes])
    return _click(titles[place % 3 : place % 3 + 1])


def multi_form(view: PageView) -> Move | None:
    match = re.search(r"Search for (.*) movies directed by (.*) from year (\d+)", view.goal)
    if match is None:
        raise OracleError(f"the goal {view.goal!r} does not look as expected")
    genre, director, year = match.groups()
    words = (("genre", genre), ("director", director), ("year", year), ("date", year))
    values = [(f.name, v) for f in view.all("field") for w, v in words if w in f.name.lower()]
    return _fill(view, values) if len(values) == 3 else None


def form_sequence_2(view: PageView) -> Move | None:
    places = re.findall(r"(\d\w\w) (radio button|textbox)", view.goal)
    radio = view.all("radio", places[0][0])
    if radio and not radio[0].value:
        return _click(radio)
    field, number = view.all("field", places[1][0]), _quoted(view.goal)[0]
    if field and field[0].value != number:
        return _type(field, number)
    return _click(view.all("button", "Submit"))


def form_sequence_3(view: PageView) -> Move | None:
    option, button = _extract(r"Choose (.*) from the dropdown", view.goal), _quoted(view.goal)[0]
    if any(e.name == option for e in view.all("list")):
        return _click(view.all("button", button))
    return _click(view.all("item", option)) or (None if view.done else _click(view.all("list")))  # may be out of sight


def use_autocomplete(view: PageView) -> Move | None:
    quoted = _quoted(view.goal)
    start, end = quoted[0], quoted[1] if len(quoted) > 1 else ""
    field = view.all("field", "Tags")
    if not field:
        return None
    value = field[0].value
    if value.startswith(start) and value.endswith(end) and view.done and view.done[-1].action_type == "CLICK":
        return _click(view.all("button", "Submit"))
    if value == start:
        return _click([e for e in view.all("item") if e.name.startswith(start) and e.name.endswith(end)])
    return _type(field, start)


def _table(view: PageView) -> dict[str, str]:
    rows = view.run(
        "() => Array.from(document.querySelectorAll('#tab tr'), r => Array.from(r.children, c => c.textContent))"
    )
    return {key: value for key, value in rows}


def read_table(view: PageView) -> Move | None:
    key = _extract(r"value of (.*) into", view.goal)
    return _fill(view, [(None, _table(view)[key])])


def read_table_2(view: PageView) -> Move | None:
    table = _table(view)
    return _fill(view, [(f.name, table[f.name]) for f in view.all("field")])


def click_widget(view: PageView) -> Move | None:
    kind = {"text": "field", "textarea": "area"}.get(_quoted(view.goal)[0], _quoted(view.goal)[0])
    return _click(view.all(kind))


def phone_book(view: PageView) -> Move | None:
    person, what = _extract(r"Find (\S+) in", view.goal), _extract(r"click on their (\w+)", view.goal)
    shown = view.run("() => document.querySelector('#contact .name').textContent")
    if shown == person:
        return _click(view.with_class(what))
    return _click(view.all("link", ">"))


def find_word(view: PageView) -> Move | None:
    place = int(_extract(r"Find the (\d+)\w\w word", view.goal)) - 1
    words = str(view.run("() => document.querySelector('#area p').textContent")).split()
    return _fill(view, [(None, re.sub(r"[^a-zA-Z]+", "", words[place]))])


def odd_or_even(view: PageView) -> Move | None:
    numbers = [
        int(n) for n in view.run("() => Array.from(document.querySelectorAll('.display-number'), n => n.textContent)")
    ]
    buttons = [e for e in view.all("button") if e.name in ("Odd", "Even")]
    if len(buttons) != 2 * len(numbers):
        return None
    missing = []
    for number, odd, even in zip(numbers, buttons[::2], buttons[1::2], strict=True):
        right = odd if number % 2 else even
        if "selected" not in right.classes:
            missing.append(right)
    if not missing:
        return _click(view.all("button", "Submit"))
    same = [e for e in missing if e.name == missing[0].name]  # another name would be another label
    return _click(same)


def choose_date(view: PageView) -> Move | None:
    month, day, year = _extract(r"Select (\S+) as", view.goal).split("/")
    field = view.all("field", "Date")
    if field and field[0].value == f"{month}/{day}/{year}":
        return _click(view.all("button", "Submit"))
    return _click(view.all("day", str(int(day)))) or _click(field)


ORACLES: Final[dict[str, Oracle]] = {
    "choose-date-easy": choose_date,
    "choose-list": choose_list,
    "click-button": click_button,
    "click-button-sequence": click_button_sequence,
    "click-checkboxes": click_checkboxes,
    "click-checkboxes-large": click_checkboxes,
    "click-collapsible-2-nodelay": click_collapsible_2,
    "click-collapsible-nodelay": click_collapsible,
    "click-color": click_color,
    "click-dialog": click_dialog,
    "click-dialog-2": click_button,
    "click-link": click_link,
    "click-menu": click_menu,
    "click-menu-2": click_menu_2,
    "click-option": click_option,
    "click-shades": click_shades,
    "click-shape": click_shape,
    "click-tab": click_tab,
    "click-tab-2": click_tab_2,
    "click-tab-2-hard": click_tab_2,
    "click-test-2": click_test_2,
    "click-widget": click_widget,
    "email-inbox-noscroll": email_inbox,
    "enter-password": enter_password,
    "enter-text": enter_text,
    "enter-text-2": enter_text_2,
    "find-word": find_word,
    "focus-text-2": focus_text,
    "form-sequence-2": form_sequence_2,
    "form-sequence-3": form_sequence_3,
    "general-page": general_page,
    "identify-shape": identify_shape,
    "login-user": login_user,
    "login-user-popup": login_user_popup,
    "multi-layouts": multi_form,
    "multi-orderings": multi_form,
    "navigate-tree": navigate_tree,
    "odd-or-even": odd_or_even,
    "phone-book": phone_book,
    "read-table": read_table,
    "read-table-2": read_table_2,
    "search-engine": search_engine,
    "social-media": social_media,
    "use-autocomplete-nodelay": use_autocomplete,
}
"""The rule of every family that can be collected."""
