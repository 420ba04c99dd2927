// The gallery of an audit page. Everything that is shown is put there as text, never as markup.
// Data come through <script> elements, since a page opened from a file may not fetch: `index.js` has a few small numbers for
// each row, by which it is filtered; `rows-N.js` has what a card shows and is loaded when it is; `texts.js` is loaded at the
// first search. `marks.js` has what auditors marked; only a served page can add to it.
"use strict";

const PER_PAGE = 24;
const COLORS = ["#1f77b4", "#ff7f0e", "#9467bd", "#d62728", "#17becf", "#8c564b", "#e377c2", "#7f7f7f"];
const BOX = "#00a651";
const VOTES = ["not asked", "miss", "hit", "no answer"];
const data = window.coepgAudit;
const chunks = new Map(); // number → promise of its content
const waiting = new Map(); // name of a script → what to do with what it holds
const CHOICES = ["decision", "planner", "action", "marked", "sort"];
const view = { decision: "", planner: "", action: "", marked: "", sort: "", search: "", page: 1, votes: data.names.verifier.map(() => "") };
const MARKED = { veto: "vetoed", flag: "flagged" };
const SORTS = { disagreement: "verifiers disagree most", unsure: "least confident", sure: "most confident", repeats: "plan repeats most" };
let texts = null;
let matches = [];
let drawn = 0;
let chosen = -1; // number of the card that keys act on, on this page
let marks = new Map(); // step and plan → marks

// As characters.visible: what turns the direction of writing would make a plan look like another one.
const STEERING = /[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]/g;
const visible = (text) => text.replace(STEERING, (c) => `⟨U+${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "rect", "g", "path", "circle", "title"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null) element.setAttribute(name, value);
  }
  const shown = children.filter((child) => child !== null && child !== "");
  element.append(...shown.map((child) => (typeof child === "string" ? visible(child) : child)));
  return element;
}

function load(name) {
  return new Promise((resolve, reject) => {
    const script = make("script", { src: `${data.folder}/${name}.js` });
    waiting.set(name, resolve);
    script.onload = () => script.remove();
    script.onerror = () => reject(new Error(`${data.folder}/${name}.js cannot be read: keep the page and its folder together`));
    document.body.append(script);
  });
}
window.coepgLoaded = (name, content) => waiting.get(name)(content);

function chunk(number) {
  if (!chunks.has(number)) chunks.set(number, load(`rows-${number}`));
  return chunks.get(number);
}

const vote = (row, verifier) => Math.floor(data.votes[row] / 4 ** verifier) % 4;

// From 0, where all verifiers agree, to 0.5.
function disagreement(row) {
  const count = [0, 0, 0, 0];
  data.names.verifier.forEach((_, verifier) => count[vote(row, verifier)]++);
  const [, miss, hit] = count;
  return hit + miss ? Math.min(hit, miss) / (hit + miss) : 0;
}

const least = (row) => (data.confidence[row] < 0 ? Infinity : data.confidence[row]);
const ORDER = {
  disagreement: (a, b) => disagreement(b) - disagreement(a),
  unsure: (a, b) => (least(a) === least(b) ? 0 : least(a) - least(b)),
  sure: (a, b) => data.confidence[b] - data.confidence[a],
  repeats: (a, b) => data.repeats[b] - data.repeats[a],
};

function keep(list) {
  marks = new Map();
  for (const mark of list) {
    const key = JSON.stringify(mark.key);
    marks.set(key, [...(marks.get(key) ?? []), mark]);
  }
}

const marksOf = (step, same) => [null, same].slice(0, same ? 2 : 1).flatMap((plan) => marks.get(JSON.stringify([step, plan])) ?? []);

async function filter() {
  const words = view.search.toLowerCase().split(/\s+/).filter(Boolean);
  if ((words.length || view.marked) && !texts) {
    texts = await load("texts");
  }
  const wanted = Object.fromEntries(["decision", "planner", "action"].map((name) => [name, data.names[name].indexOf(view[name])]));
  const steps = words.length ? texts.steps.map((text) => words.map((word) => text.includes(word))) : null;
  matches = [];
  for (let row = 0; row < data.decision.length; row++) {
    if (view.decision && data.decision[row] !== wanted.decision) continue;
    if (view.planner && data.planner[row] !== wanted.planner) continue;
    if (view.action && data.action[row] !== wanted.action) continue;
    if (view.votes.some((state, verifier) => state && VOTES[vote(row, verifier)] !== state)) continue;
    if (steps && !words.every((word, i) => steps[data.step[row]][i] || texts.plans[row].includes(word))) continue;
    if (view.marked && !marksOf(texts.ids[data.step[row]], texts.same[row]).some((mark) => mark.counts && mark.mark === view.marked)) continue;
    matches.push(row);
  }
  if (view.sort in ORDER) matches.sort(ORDER[view.sort]);
}

const pages = () => Math.max(1, Math.ceil(matches.length / PER_PAGE));

async function show() {
  const turn = ++drawn;
  await filter();
  if (turn !== drawn) return;
  view.page = Math.min(Math.max(1, view.page), pages());
  remember();
  const rows = matches.slice((view.page - 1) * PER_PAGE, view.page * PER_PAGE);
  const parts = await Promise.all(rows.map((row) => chunk(Math.floor(row / data.perChunk))));
  if (turn !== drawn) return; // the user went on meanwhile
  const cards = rows.map((row, i) => card(row, parts[i].rows[row % data.perChunk], parts[i].steps));
  document.getElementById("gallery").replaceChildren(...cards);
  choose(Math.min(chosen, cards.length - 1), false);
  document.getElementById("found").textContent =
    `${matches.length.toLocaleString("en")} of ${data.decision.length.toLocaleString("en")} candidates`;
  document.getElementById("pager").replaceChildren(...pager());
  document.getElementById("below").replaceChildren(...pager());
}

function fail(error) {
  document.getElementById("found").textContent = error.message;
}

function refresh(page, card = -1) {
  view.page = page;
  chosen = card;
  return show().catch(fail);
}

// Makes a card of this page the one that keys act on.
function choose(card, scroll = true) {
  chosen = card;
  const cards = [...document.querySelectorAll("#gallery article")];
  cards.forEach((element, i) => element.classList.toggle("chosen", i === card));
  if (scroll && cards[card]) cards[card].scrollIntoView({ block: "center" });
}

async function step(by) {
  const cards = document.querySelectorAll("#gallery article").length;
  if (chosen + by >= cards && view.page < pages()) await refresh(view.page + 1, 0);
  else if (chosen + by < 0 && view.page > 1) await refresh(view.page - 1, PER_PAGE - 1);
  choose(Math.min(Math.max(chosen < 0 ? 0 : chosen + (by > 0 && chosen + by >= cards ? 0 : by), 0), cards - 1));
}

function pager() {
  const button = (text, page) => {
    const element = make("button", { type: "button", onclick: () => refresh(page) }, text);
    element.disabled = page < 1 || page > pages();
    return element;
  };
  return [button("‹ back", view.page - 1), `page ${view.page.toLocaleString("en")} of ${pages().toLocaleString("en")}`, button("next ›", view.page + 1)];
}

// In screen pixels whatever the scale: a ring for a hit, a cross for a miss. Each verifier has its own size, so that equal
// points are seen as nested rings.
function symbol(x, y, size, verifier, hit, rim) {
  const r = 4 + 3 * verifier;
  const shape = hit ? make("circle", { r }) : make("path", { d: `M${-r} ${-r}L${r} ${r}M${-r} ${r}L${r} ${-r}` });
  const name = data.names.verifier[verifier];
  return make(
    "g",
    {
      transform: `translate(${x} ${y}) scale(${size})`,
      fill: "none",
      stroke: rim ? "#fff" : COLORS[verifier % COLORS.length],
      "stroke-width": rim ? 4.5 : 2,
      class: rim ? null : "point",
      "data-verifier": rim ? null : name,
    },
    make("title", {}, `${name}: ${hit ? "hit" : "miss"} at (${x}, ${y})`),
    shape,
  );
}

function screen(step, votes, widest, tallest, onclick) {
  const scale = Math.min(widest / step.width, tallest / step.height, 3);
  const svg = make("svg", { viewBox: `0 0 ${step.width} ${step.height}`, preserveAspectRatio: "none" });
  for (const [x1, y1, x2, y2] of step.boxes) {
    const box = { x: x1, y: y1, width: x2 - x1, height: y2 - y1, fill: "none", "vector-effect": "non-scaling-stroke" };
    svg.append(make("rect", { ...box, stroke: "#fff", "stroke-width": 4 }));
    svg.append(make("rect", { ...box, stroke: BOX, "stroke-width": 2, class: "box" }));
  }
  for (const rim of [true, false]) {
    for (const [verifier, state, x, y] of votes) {
      if (x !== null) svg.append(symbol(x, y, 1 / scale, verifier, state === 2, rim));
    }
  }
  const image = make("img", { src: step.screenshot, loading: "lazy", decoding: "async", alt: `screenshot of ${step.id}` });
  const size = `width:${Math.round(step.width * scale)}px;height:${Math.round(step.height * scale)}px`;
  return make("div", { class: "screen", style: size, title: "click to enlarge", onclick }, image, svg);
}

function zoom(step, votes) {
  const dialog = document.getElementById("zoom");
  dialog.replaceChildren(screen(step, votes, innerWidth * 0.9, innerHeight * 0.86, () => dialog.close()));
  dialog.showModal();
}

const quoted = (value) => (value ? `  “${value}”` : "");

function said(mark) {
  const state = mark.mark !== "veto" ? "" : !mark.counts ? "; withdrawn since this version was made" : mark.applied ? "" : "; the next version leaves it out";
  return make("p", { class: mark.mark === "veto" ? "no" : "warn" },
    make("b", {}, MARKED[mark.mark]), ` ${mark.plan === null ? "(whole step) " : ""}by ${mark.by}, ${mark.at.slice(0, 16).replace("T", " ")}: ${mark.reason}${state}`);
}

// Asks who says so and why, and sends it; the server answers with all marks of this D_k.
function ask(kind, row, step) {
  const dialog = document.getElementById("marking");
  const by = make("input", { required: "", maxlength: 100, "aria-label": "your name" });
  by.value = localStorage.getItem("coepg.by") ?? "";
  const reason = make("input", { required: "", maxlength: 1000, "aria-label": "reason" });
  const whole = make("input", { type: "checkbox", "aria-label": "the whole step" });
  whole.checked = row.same === null;
  whole.disabled = row.same === null;
  const error = make("p", { class: "no", role: "alert" });
  const send = async (event) => {
    event.preventDefault();
    error.textContent = "";
    localStorage.setItem("coepg.by", by.value);
    const body = { k: data.iteration, what: row.id ?? row.candidate, mark: kind, whole_step: whole.checked, by: by.value, reason: reason.value };
    try {
      const answer = await fetch("marks", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
      if (!answer.ok) throw new Error(await answer.text());
      keep(await answer.json());
      dialog.close();
      await refresh(view.page, chosen);
    } catch (failure) {
      error.textContent = failure.message;
    }
  };
  dialog.replaceChildren(
    make("form", { onsubmit: send },
      make("h3", {}, `${kind}: ${row.plan ?? "a step whose answer is no plan"}`),
      make("p", { class: "dim" }, step.goal),
      make("label", {}, "your name", by), make("label", {}, "reason", reason),
      make("label", { class: "line" }, whole, "the whole step, with every plan of it"),
      error,
      make("p", {}, make("button", {}, kind), " ", make("button", { type: "button", onclick: () => dialog.close() }, "cancel"))));
  dialog.showModal();
  (by.value ? reason : by).focus();
}

function marking(row, step) {
  if (!window.coepgMarks?.live) return null;
  const marked = marksOf(step.id, row.same).some((mark) => mark.counts);
  const kinds = ["veto", "flag", ...(marked ? ["withdraw"] : [])];
  return make("p", { class: "marking" }, ...kinds.map((kind) => make("button", { type: "button", "data-mark": kind, onclick: () => ask(kind, row, step) }, kind)));
}

function card(number, row, steps) {
  const step = steps[row.step];
  const decision = data.names.decision[data.decision[number]];
  const votes = row.votes.map(([verifier, state, x, y, confidence, note]) =>
    make(
      "tr",
      {},
      make("td", {}, make("span", { class: "dot", style: `background:${COLORS[verifier % COLORS.length]}` }), data.names.verifier[verifier]),
      make("td", { class: state === 2 ? "yes" : "no" }, VOTES[state]),
      make("td", {}, x === null ? note : `(${x}, ${y})`),
      make("td", {}, confidence === null ? "–" : confidence.toFixed(3)),
    ),
  );
  const heads = ["verifier", "vote", "point", "confidence"].map((text) => make("th", {}, text));
  const own = row.action === null ? null : `${row.action}${quoted(row.value)}`;
  const label = `${step.action}${quoted(step.value)}`;
  return make(
    "article",
    { class: `card ${decision}`, "data-candidate": row.candidate, onclick: (event) => choose([...event.currentTarget.parentNode.children].indexOf(event.currentTarget), false) },
    screen(step, row.votes, 200, 300, () => zoom(step, row.votes)),
    make(
      "div",
      { class: "facts" },
      make("span", { class: "badge" }, decision.replaceAll("_", " ")),
      ` ${row.why}`,
      make("p", { class: row.plan === null ? "plan none" : "plan" }, row.plan === null ? make("code", {}, row.text) : row.plan),
      make("p", {}, make("b", {}, "action "), label, own === null || own === label ? "" : make("span", { class: "no" }, `  the plan said ${own}`)),
      make("p", {}, make("b", {}, "task "), step.goal, make("span", { class: "dim" }, `  ${step.family}`)),
      step.instruction ? make("p", {}, make("b", {}, "instruction "), step.instruction) : null,
      step.history.length
        ? make("details", {}, make("summary", {}, `${step.history.length} ${step.history.length === 1 ? "action" : "actions"} before`), make("ol", {}, ...step.history.map((text) => make("li", {}, text))))
        : null,
      row.votes.length ? make("table", {}, make("tr", {}, ...heads), ...votes) : null,
      ...marksOf(step.id, row.same).map(said),
      marking(row, step),
      data.repeats[number] > 1 ? make("p", { class: "dim" }, `${data.repeats[number].toLocaleString("en")} candidates say this plan`) : null,
      make("p", { class: "from" }, `${row.row ? `row ${row.row} (${row.id})` : row.candidate} · planner ${data.names.planner[data.planner[number]]} · made in iteration ${row.madeIn} · `,
        row.row === null ? null : `candidate ${row.candidate} · `,
        make("a", { href: "#" + new URLSearchParams({ search: step.id }) }, "all plans of this step"),
        row.trace ? make("span", {}, " · ", make("a", { href: row.trace }, "trace")) : null),
    ),
  );
}

// The filters are part of the address, so that a view can be linked to.
function remember() {
  const state = new URLSearchParams();
  for (const name of [...CHOICES, "search"]) if (view[name]) state.set(name, view[name]);
  view.votes.forEach((value, i) => value && state.set(`vote.${data.names.verifier[i]}`, value));
  if (view.page > 1) state.set("page", view.page);
  const hash = state.size ? `#${state}` : "";
  if (hash !== location.hash) history.replaceState(null, "", bare() + hash);
}

const bare = () => location.href.split("#")[0];

function recall() {
  const state = new URLSearchParams(location.hash.slice(1));
  for (const name of [...CHOICES, "search"]) view[name] = state.get(name) ?? "";
  view.votes = data.names.verifier.map((name) => state.get(`vote.${name}`) ?? "");
  view.page = Number(state.get("page") ?? 1) || 1;
  document.getElementById("filters").replaceChildren(...filters());
}

function filters() {
  const counts = (column, names) => {
    const count = names.map(() => 0);
    for (const code of column) count[code]++;
    return names.map((name, i) => [name, `${name.replaceAll("_", " ")} (${count[i].toLocaleString("en")})`]);
  };
  const choice = (label, options, value, set, none = "any") => {
    const select = make("select", { onchange: (event) => { set(event.target.value); refresh(1); } },
      make("option", { value: "" }, none), ...options.map(([name, text]) => make("option", { value: name }, text)));
    select.value = value;
    select.setAttribute("aria-label", typeof label === "string" ? label : label.textContent);
    return make("label", {}, label, select);
  };
  const made = ["decision", "planner", "action"].map((name) =>
    choice(name, counts(data[name], data.names[name]), view[name], (value) => (view[name] = value)));
  data.names.verifier.forEach((name, i) => {
    const label = make("span", {}, make("span", { class: "dot", style: `background:${COLORS[i % COLORS.length]}` }), name);
    made.push(choice(label, VOTES.map((text) => [text, text]), view.votes[i], (value) => (view.votes[i] = value)));
  });
  made.push(choice("marked", Object.entries(MARKED), view.marked, (value) => (view.marked = value)));
  made.push(choice("sort", Object.entries(SORTS), view.sort, (value) => (view.sort = value), "by step"));
  let timer = 0;
  const search = make("input", {
    type: "search", placeholder: "words, or an id", "aria-label": "search",
    oninput: (event) => {
      view.search = event.target.value.trim();
      clearTimeout(timer);
      timer = setTimeout(() => refresh(1), 150);
    },
  });
  search.value = view.search;
  made.push(make("label", {}, "search", search));
  made.push(make("button", { type: "button", onclick: () => { history.replaceState(null, "", bare()); recall(); refresh(1); } }, "clear"));
  return made;
}

// A spreadsheet takes text that begins with one of these for a formula, also after blanks, and in its full-width form.
const cell = (value) => {
  const text = value === null || value === undefined ? "" : String(value);
  const formula = typeof value === "string" && /^[\s\0]*[=+\-@＝＋－＠\t\r\n]/.test(text);
  return `"${(formula ? "'" : "") + text.replaceAll('"', '""')}"`;
};

// The current selection, in its order, as the text of a CSV file (RFC 4180; the byte order mark tells Excel that it is UTF-8).
async function csv() {
  const verifiers = data.names.verifier;
  const lines = [["row", "row_id", "candidate_id", "decision", "why", "step_id", "family", "goal", "plan", "answer", "planner", "action", "value",
    "label_action", "label_value", "made_in", "repeats", "marks", ...verifiers.flatMap((name) => [`${name}: vote`, `${name}: x`, `${name}: y`, `${name}: confidence`])]];
  for (const number of matches) {
    const part = await chunk(Math.floor(number / data.perChunk));
    const row = part.rows[number % data.perChunk];
    const of = part.steps[row.step];
    const votes = new Map(row.votes.map((cast) => [cast[0], cast]));
    const marked = marksOf(of.id, row.same).filter((mark) => mark.counts).map((mark) => `${MARKED[mark.mark]} by ${mark.by}: ${mark.reason}`);
    lines.push([row.row, row.id, row.candidate, data.names.decision[data.decision[number]], row.why, of.id, of.family, of.goal, row.plan, row.text,
      data.names.planner[data.planner[number]], row.action, row.value, of.action, of.value, row.madeIn, data.repeats[number], marked.join("; "),
      ...verifiers.flatMap((_, i) => { const [, state, x, y, confidence] = votes.get(i) ?? [i, 0, null, null, null]; return [VOTES[state], x, y, confidence]; })]);
  }
  return "\ufeff" + lines.map((line) => line.map(cell).join(",") + "\r\n").join("");
}

async function save() {
  const address = URL.createObjectURL(new Blob([await csv()], { type: "text/csv" }));
  make("a", { href: address, download: `${data.folder}.csv` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.target.closest("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const act = (kind) => document.querySelector(`#gallery .chosen [data-mark=${kind}]`)?.click();
  const keys = {
    j: () => step(1), k: () => step(-1), v: () => act("veto"), f: () => act("flag"),
    n: () => view.page < pages() && refresh(view.page + 1), p: () => view.page > 1 && refresh(view.page - 1),
    "/": () => document.querySelector("#filters input[type=search]").focus(),
  };
  if (Object.hasOwn(keys, event.key)) {
    event.preventDefault();
    keys[event.key]();
  }
});

document.getElementById("csv").addEventListener("click", () => save().catch(fail));
document.getElementById("filters").addEventListener("submit", (event) => event.preventDefault());
window.addEventListener("hashchange", () => { recall(); show().catch(fail); });
keep(window.coepgMarks?.marks ?? []);
recall();
show().catch(fail);
