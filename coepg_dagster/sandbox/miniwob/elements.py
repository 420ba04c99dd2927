"""The visible, named elements of a MiniWoB++ page, from its DOM.

This module walks the DOM, names kinds and elements, and decides what is visible; `oracles` chooses actions. An element is
visible when at least 4 × 4 px of it lie inside the task area, below the instruction bar, and the browser's own hit test
finds it (or something inside it) at the centre of that part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Box = tuple[float, float, float, float]
"""(x1, y1, x2, y2) in screenshot pixels."""


@dataclass(frozen=True)
class Element:
    """One visible element.

    Attributes:
        kind: a plain word: button, link, tab, field, checkbox, radio, list, area, section, icon, item, folder, file,
            shape, box, day, text.
        name: visible text or label; of a field its label. Unlabelled fields, checkboxes and radios are named "1st",
            "2nd", … by their place in the document when there are several; a lone one has no name. Icons are named by
            their function and the owner of their post or mail.
        box: the largest visible piece, px.
        color: "#rrggbb" of a coloured box or shape, else "".
        pieces: every visible piece (a link that wraps over two lines has two); `box` is one of them.
        node: index in `document.querySelectorAll("*")`, for oracles.
        classes: CSS classes, for oracles.
        value: current text of a field or area, selected option of a list, "on" for a checked box, else "".
        options: the options of a list.
    """

    kind: str
    name: str
    box: Box
    color: str = ""
    pieces: tuple[Box, ...] = ()
    node: int = -1
    classes: tuple[str, ...] = ()
    value: str = ""
    options: tuple[str, ...] = ()

    @property
    def centre(self) -> tuple[float, float]:
        """The centre of `box`, px."""
        return (self.box[0] + self.box[2]) / 2, (self.box[1] + self.box[3]) / 2


def element_at(elements: Sequence[Element], point: tuple[float, float]) -> Element | None:
    """The smallest element with a piece that contains a point (px, borders included), or None."""
    x, y = point
    hits = [
        ((p[2] - p[0]) * (p[3] - p[1]), index)
        for index, element in enumerate(elements)
        for p in element.pieces
        if p[0] <= x <= p[2] and p[1] <= y <= p[3]
    ]
    return elements[min(hits)[1]] if hits else None


def history_entry(element: Element | None, action_type: str, value: str) -> str:
    """An action as Mind2Web writes it: `[button] Next -> CLICK`, `[field] Username -> TYPE: cheree`; None: `[page]`."""
    target = "[page]" if element is None else f"[{element.kind}] {element.name}".rstrip()
    return f"{target} -> {action_type}: {value}" if value else f"{target} -> {action_type}"


def from_dom(rows: Sequence[Mapping[str, Any]]) -> tuple[Element, ...]:
    """The result of ELEMENTS_JS as elements, in document order."""
    elements: list[Element] = []
    for row in rows:
        pieces: tuple[Box, ...] = tuple((float(p[0]), float(p[1]), float(p[2]), float(p[3])) for p in row["pieces"])
        elements.append(
            Element(
                kind=row["kind"],
                name=row["name"],
                box=max(pieces, key=lambda p: (p[2] - p[0]) * (p[3] - p[1])),
                color=row["color"],
                pieces=pieces,
                node=row["node"],
                classes=tuple(row["classes"]),
                value=row["value"],
                options=tuple(row["options"]),
            )
        )
    return tuple(elements)


ELEMENTS_JS: Final = r"""
const WIDTH = 160, HEIGHT = 210, MIN = 4, LONGEST = 32;
const query = document.getElementById('query');
const top0 = query ? query.getBoundingClientRect().bottom : 0;
const nodes = Array.from(document.querySelectorAll('*'));
const skip = document.querySelectorAll('#query, #reward-display, #sync-task-cover, #click-canvas');
const tidy = s => (s || '').replace(/\s+/g, ' ').trim();
const text = e => tidy(e.innerText === undefined ? e.textContent : e.innerText);
const classes = e => Array.from(e.classList || []);
const has = (e, c) => e.classList && e.classList.contains(c);

function pieces(el) {
  let [cx1, cy1, cx2, cy2] = [0, top0, WIDTH, HEIGHT];
  for (let p = el.parentElement; p && p !== document.body; p = p.parentElement) {
    const s = getComputedStyle(p);
    if (p instanceof SVGElement && p.tagName !== 'svg') continue;
    if (s.overflowX === 'visible' && s.overflowY === 'visible') continue;
    if (s.display === 'inline') continue;
    const r = p.getBoundingClientRect();
    cx1 = Math.max(cx1, r.left); cy1 = Math.max(cy1, r.top);
    cx2 = Math.min(cx2, r.right); cy2 = Math.min(cy2, r.bottom);
  }
  const out = [];
  for (const r of el.getClientRects()) {
    const b = [Math.max(cx1, r.left), Math.max(cy1, r.top), Math.min(cx2, r.right), Math.min(cy2, r.bottom)];
    if (b[2] - b[0] < MIN || b[3] - b[1] < MIN) continue;
    const hit = document.elementFromPoint((b[0] + b[2]) / 2, (b[1] + b[3]) / 2);
    if (hit && (hit === el || el.contains(hit))) out.push(b);
  }
  return out;
}

function hex(css) {
  const m = /rgba?\((\d+), (\d+), (\d+)(?:, ([\d.]+))?/.exec(css || '');
  if (!m || m[4] === '0') return '';
  return '#' + m.slice(1, 4).map(x => (+x).toString(16).padStart(2, '0')).join('');
}

function label(el) {
  const clean = s => tidy(s).replace(/\s*:$/, '');
  if (el.labels && el.labels.length) return clean(text(el.labels[0]));
  if (el.placeholder) return clean(el.placeholder);
  const before = el.previousSibling;
  if (before && before.nodeType === 3 && tidy(before.data)) return clean(before.data);
  const e = el.previousElementSibling, p = el.parentElement;
  if (e && e.tagName === 'LABEL') return clean(text(e));
  if (e && e.tagName === 'SPAN' && text(e).endsWith(':')) return clean(text(e));
  if (e && e.tagName === 'DIV' && p.id !== 'area' && p.id !== 'form' && !e.children.length) return clean(text(e));
  if (p && !e && ['TD', 'DIV'].includes(p.tagName)) {
    const q = p.previousElementSibling;
    if (q && (q.tagName === 'TH' || has(q, 'label'))) return clean(text(q));
  }
  const n = el.nextElementSibling;
  if (n && has(n, 'ui-label')) return clean(text(n));
  return '';
}

function owner(el) {
  const post = el.closest('.media'), mail = el.closest('.email-thread');
  if (post) return ' ' + tidy(post.querySelector('.username').textContent);
  if (mail) return ' ' + tidy(mail.querySelector('.email-sender').textContent);
  return '';
}

const ICONS = {'reply': 'reply', 'retweet': 'retweet', 'like': 'like', 'more': 'more', 'share': 'share',
  'trash': 'trash', 'star': 'star', 'email-reply': 'reply', 'email-forward': 'forward'};
const ICON_IDS = {'open-search': 'search', 'search-cancel': 'back', 'close-email': 'back', 'close-reply': 'back',
  'close-forward': 'back', 'send-reply': 'send', 'send-forward': 'send'};

function shape(el) {
  const c = el.getAttribute('fill') || '';
  let what = {'rect': 'rectangle', 'circle': 'circle', 'polygon': 'triangle'}[el.tagName], size;
  if (el.tagName === 'text') {
    const t = tidy(el.textContent);
    what = (/\d/.test(t) ? 'digit ' : 'letter ') + t;
    size = parseFloat(el.getAttribute('font-size'));
  } else {
    size = el.tagName === 'circle' ? 2 * el.getAttribute('r') : el.tagName === 'rect' ? +el.getAttribute('width') : 0;
    if (el.tagName === 'polygon') {
      const xs = el.getAttribute('points').trim().split(/\s+/).map(p => +p.split(',')[0]);
      size = Math.max(...xs) - Math.min(...xs);
    }
  }
  return [size > 15 ? 'large' : 'small', c, what].join(' ');
}

function describe(el) {
  const tag = el.tagName, type = (el.type || '').toLowerCase();
  if (tag === 'BUTTON' || (tag === 'INPUT' && ['button', 'submit'].includes(type))) {
    if (has(el, 'ui-dialog-titlebar-close')) return ['button', 'x'];
    if (has(el, 'selectric-button')) return null;
    return ['button', text(el) || el.value || ''];
  }
  if (tag === 'DIV' && (has(el, 'final') || has(el, 'ui-submit'))) return ['button', text(el)];
  if (tag === 'A') {
    if (el.closest('.ui-tabs-nav')) return ['tab', text(el)];
    if (el.closest('.ui-datepicker-calendar')) return ['day', text(el)];
    if (el.closest('.ui-datepicker-header')) return ['icon', text(el).toLowerCase()];
    return text(el) ? ['link', text(el)] : null;
  }
  if (tag === 'SPAN' && has(el, 'alink')) return ['link', text(el)];
  if (tag === 'INPUT' && (type === 'checkbox' || type === 'radio')) {
    const l = (el.labels && el.labels[0]) || el.closest('label');
    return [type, l ? text(l) : ''];
  }
  if (tag === 'INPUT' && !has(el, 'selectric-input')) return ['field', label(el)];
  if (tag === 'TEXTAREA') return ['area', label(el)];
  if (tag === 'SELECT' && el.closest('.selectric-hide-select')) return null;
  if (tag === 'SELECT') return ['list', label(el) || el.selectedOptions[0]?.text || ''];
  if (tag === 'DIV' && has(el, 'selectric')) return ['list', text(el.querySelector('.label') || el)];
  if (tag === 'LI' && el.closest('.selectric-items')) return text(el) ? ['item', text(el)] : null;
  if (tag === 'DIV' && has(el, 'ui-menu-item-wrapper')) return ['item', text(el)];
  if (tag === 'LI' && el.closest('.controls')) return ['item', text(el)];
  if (tag === 'H3' && has(el, 'ui-accordion-header')) return ['section', text(el)];
  if (tag === 'SPAN' && has(el, 'folder')) return ['folder', text(el)];
  if (tag === 'SPAN' && has(el, 'file')) return ['file', text(el)];
  if (tag === 'DIV' && has(el, 'color') && el.id !== 'query-color') return ['box', el.getAttribute('data-color') || ''];
  if (tag === 'SPAN' && el.parentElement.id === 'area' && el.dataset.color) return ['box', el.dataset.color];
  if (tag === 'DIV' && has(el, 'email-thread')) return ['item', tidy(el.querySelector('.email-sender').textContent)];
  if (ICON_IDS[el.id]) return ['icon', ICON_IDS[el.id]];
  for (const c of classes(el)) if (ICONS[c] && ['SPAN', 'DIV'].includes(tag)) return ['icon', ICONS[c] + owner(el)];
  if (['text', 'rect', 'circle', 'polygon'].includes(tag) && el.closest('#area_svg')) return ['shape', shape(el)];
  return null;
}

const SILENT = ['LABEL', 'OPTION', 'STYLE', 'SCRIPT', 'TEXTAREA', 'INPUT'];
const closed = new Set(), out = [];
function inside(el) {
  for (let p = el.parentElement; p; p = p.parentElement) if (closed.has(p)) return true;
  return false;
}
nodes.forEach((el, node) => {
  if (!document.body.contains(el) || el === document.body || Array.from(skip).some(s => s.contains(el))) return;
  if (inside(el)) return;
  let d = describe(el);
  if (d && !has(el, 'email-thread')) closed.add(el);  // what is inside belongs to it
  if (!d) {
    if (el.children.length || el instanceof SVGElement || SILENT.includes(el.tagName)) return;
    const t = text(el);
    if (!t || t.length > LONGEST) return;
    d = ['text', t];
  }
  const style = getComputedStyle(el);
  if (style.visibility === 'hidden' || style.display === 'none') return;
  let p;
  if (d[0] === 'text') {
    const range = document.createRange(); range.selectNodeContents(el);
    const seen = pieces(el);
    if (!seen.length || range.getClientRects().length !== 1) return;
    const r = range.getClientRects()[0];
    p = [[Math.max(r.left, 0), Math.max(r.top, top0), Math.min(r.right, WIDTH), Math.min(r.bottom, HEIGHT)]];
    const b = p[0];
    const hit = document.elementFromPoint((b[0] + b[2]) / 2, (b[1] + b[3]) / 2);
    if (b[2] - b[0] < MIN || b[3] - b[1] < MIN || hit !== el) return;
  } else p = pieces(el);
  if (p.length === 1 && ['folder', 'file'].includes(d[0])) {  // the row goes on to the right of its name
    const range = document.createRange(); range.selectNodeContents(el);
    p[0][2] = Math.min(p[0][2], range.getBoundingClientRect().right + 2);
  }
  if (!p.length) return;
  let value = '';
  if (['checkbox', 'radio'].includes(d[0])) value = el.checked ? 'on' : '';
  else if (['field', 'area'].includes(d[0])) value = el.value;
  let options = [];
  if (el.tagName === 'SELECT') {
    options = Array.from(el.options).map(o => o.text);
    value = el.selectedOptions[0]?.text || '';
  }
  const color = d[0] === 'box' ? hex(style.backgroundColor) : d[0] === 'shape' ? hex(style.fill) : '';
  out.push({kind: d[0], name: d[1], pieces: p, color, node, classes: classes(el), value, options});
});
for (const kind of ['field', 'checkbox', 'radio', 'area']) {
  const same = out.filter(o => o.kind === kind), bare = same.filter(o => !o.name);
  if (same.length < 2) continue;
  const nth = i => i + (['th', 'st', 'nd', 'rd'][i > 10 && i < 14 ? 0 : i % 10] || 'th');
  bare.forEach(o => { o.name = nth(same.indexOf(o) + 1); });
}
return out;
"""
"""Run in the page: every visible element as a plain object (see `from_dom`)."""
