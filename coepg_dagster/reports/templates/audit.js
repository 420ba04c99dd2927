// The gallery of an audit page. Everything that is shown is put there as text, never as markup.
// Data come through <script> elements, since a page opened from a file may not fetch: `index.js` has a few small numbers for
// each row, by which it is filtered; `rows-N.js` has what a card shows and is loaded when it is; `texts.js` is loaded at the
// first search.
"use strict";

const PER_PAGE = 24;
const COLORS = ["#1f77b4", "#ff7f0e", "#9467bd", "#d62728", "#17becf", "#8c564b", "#e377c2", "#7f7f7f"];
const BOX = "#00a651";
const VOTES = ["not asked", "miss", "hit", "no answer"];
const data = window.coepgAudit;
const chunks = new Map(); // number → promise of its content
const waiting = new Map(); // name of a script → what to do with what it holds
const view = { decision: "", planner: "", action: "", search: "", page: 1, votes: data.names.verifier.map(() => "") };
let texts = null;
let matches = [];
let drawn = 0;

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "rect", "g", "path", "circle", "title"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== ""));
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

async function filter() {
  const words = view.search.toLowerCase().split(/\s+/).filter(Boolean);
  if (words.length && !texts) {
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
    matches.push(row);
  }
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
  document.getElementById("found").textContent =
    `${matches.length.toLocaleString("en")} of ${data.decision.length.toLocaleString("en")} candidates`;
  document.getElementById("pager").replaceChildren(...pager());
  document.getElementById("below").replaceChildren(...pager());
}

function fail(error) {
  document.getElementById("found").textContent = error.message;
}

function refresh(page) {
  view.page = page;
  show().catch(fail);
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
    { class: `card ${decision}`, "data-candidate": row.candidate },
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
        ? make("details", {}, make("summary", {}, `${step.history.length} actions before`), make("ol", {}, ...step.history.map((text) => make("li", {}, text))))
        : null,
      row.votes.length ? make("table", {}, make("tr", {}, ...heads), ...votes) : null,
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
  for (const name of ["decision", "planner", "action", "search"]) if (view[name]) state.set(name, view[name]);
  view.votes.forEach((value, i) => value && state.set(`vote.${data.names.verifier[i]}`, value));
  if (view.page > 1) state.set("page", view.page);
  const hash = state.size ? `#${state}` : "";
  if (hash !== location.hash) history.replaceState(null, "", bare() + hash);
}

const bare = () => location.href.split("#")[0];

function recall() {
  const state = new URLSearchParams(location.hash.slice(1));
  for (const name of ["decision", "planner", "action", "search"]) view[name] = state.get(name) ?? "";
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
  const choice = (label, options, value, set) => {
    const select = make("select", { onchange: (event) => { set(event.target.value); refresh(1); } },
      make("option", { value: "" }, "any"), ...options.map(([name, text]) => make("option", { value: name }, text)));
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
  let timer = 0;
  const search = make("input", {
    type: "search", placeholder: "words of task, family, plan, or an id", "aria-label": "search",
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

document.getElementById("filters").addEventListener("submit", (event) => event.preventDefault());
window.addEventListener("hashchange", () => { recall(); show().catch(fail); });
recall();
show().catch(fail);
