// The page of the usage of API keys: asks with the key or the operator's token that is pasted, and shows the answer.
//
// - The secret is in the input field alone: in no storage, no address and no cookie. Leaving the page clears it, also in the
//   copy of the page that a browser keeps for the "back" button.
// - Text that has the form of neither is not sent: it may be a secret of another service.
// - Names of keys are text: no markup is built from data.
// - "Now" is the coordinator's clock, by the reply: that of the visitor's machine may be wrong.

const API_KEY = /^es-[\x21-\x7e]+$/;
const TOKEN = /^[0-9a-f]{64}$/;
const MICRO_DECIMALS = 6;
const DAY_MS = 86_400_000;
const DAYS = 30; // those that the server lists without being asked for another number
const SIDE = 100; // width and height of a chart in its own units
const BAR_SHARE = 0.7; // the share of its place that a bar fills
const UNKNOWN = "This is neither an API key of this round nor the operator's token. API keys begin with es-.";

const byId = (id) => document.getElementById(id);
const whole = (count) => count.toLocaleString("en").replaceAll(",", "\u202f");
const day = (moment) => new Date(moment).toISOString().slice(0, 10);

function el(tag, children, attributes = {}) {
  const made = document.createElement(tag);
  made.append(...[children].flat());
  for (const [name, value] of Object.entries(attributes)) if (value) made.setAttribute(name, value);
  return made;
}

// An amount without the unit's name, as `Unit.figure` shows it: with more decimals where it would be shown as zero.
export function figure(micros, decimals) {
  const size = Math.abs(micros);
  const isLost = size > 0 && 2 * size < 10 ** (MICRO_DECIMALS - decimals);
  const shown = isLost ? Math.min(MICRO_DECIMALS, MICRO_DECIMALS - String(size).length + 2) : decimals;
  const rounded = Math.floor((size + 10 ** (MICRO_DECIMALS - shown) / 2) / 10 ** (MICRO_DECIMALS - shown));
  const sign = micros < 0 && rounded > 0 ? "-" : "";
  const part = shown ? `.${String(rounded % 10 ** shown).padStart(shown, "0")}` : "";
  return `${sign}${whole(Math.floor(rounded / 10 ** shown))}${part}`;
}

// An amount in a sentence, as `Unit.amount` shows it: without zeros at its end, except those of the first two decimals.
export function amount(micros, unit) {
  const [whole, part = ""] = figure(micros, unit.decimals).split(".");
  const isSmall = part.length > unit.decimals;
  const short = isSmall ? part : part.replace(/0+$/, "").padEnd(Math.min(unit.decimals, 2), "0");
  return `${whole}${short && "."}${short} ${unit.name}`;
}

function ago(duration_ms) {
  for (const [unit_ms, name] of [[86_400_000, "d"], [3_600_000, "h"], [60_000, "min"]])
    if (duration_ms >= unit_ms) return `${Math.floor(duration_ms / unit_ms)}\u202f${name} ago`;
  return `${Math.floor(Math.max(0, duration_ms) / 1000)}\u202fs ago`;
}

function lastUse(key, now_ms) {
  if (key.used_ms === null) return key.answered_queries ? "not known" : "never"; // older than its record
  return ago(now_ms - key.used_ms);
}

function state(key, now_ms) {
  if (key.revoked_ms) return `revoked ${day(key.revoked_ms)}`;
  if (!key.expires_ms) return "";
  return key.expires_ms <= now_ms ? `expired ${day(key.expires_ms)}` : `valid until ${day(key.expires_ms)}`;
}

function drawn(tag, attributes, children = []) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// A bar for each day, as `coordinator.pages.charts` draws them; `value` takes a day's row, which is missing without answers.
function bars(title, days, rows, value, show) {
  const heights = days.map((name) => rows.has(name) ? value(rows.get(name)) : 0);
  const top = Math.max(...heights) || 1, place = SIDE / days.length;
  const shapes = heights.map((height, number) => drawn("rect", {
    x: ((number + (1 - BAR_SHARE) / 2) * place).toFixed(2), y: (SIDE - SIDE * height / top).toFixed(2),
    width: (BAR_SHARE * place).toFixed(2), height: (SIDE * height / top).toFixed(2), class: "bar s0",
  }, [drawn("title", {}, [`${days[number]}: ${show(height)}`])]));
  const grid = [0, SIDE].map((y) => drawn("line", { x1: 0, x2: SIDE, y1: y, y2: y, class: "grid" }));
  const said = `${title}, ${days.length} days: at most ${show(top)} on a day. The table below has the figures.`;
  const picture = drawn("svg", { viewBox: `0 0 ${SIDE} ${SIDE}`, preserveAspectRatio: "none", role: "img", "aria-label": said },
    [...grid, ...shapes]);
  const up = el("div", [el("span", show(top)), el("span", "0")], { class: "up", "aria-hidden": "true" });
  const along = el("div", [el("span", days[0]), el("span", days.at(-1))], { class: "along" });
  const name = el("figcaption", [el("span", title, { class: "name" }), el("span", show(heights.at(-1)), { class: "newest" })]);
  return el("figure", [name, el("div", [up, picture, along], { class: "plot" })], { class: "chart" });
}

function wideTable(caption, heads, rows) {
  const body = rows.map((cells) => el("tr", cells.map(([text, style], place) =>
    el(place ? "td" : "th", text, { class: style, scope: place ? "" : "row" }))));
  const head = el("thead", el("tr", heads.map(([title, style]) => el("th", title, { scope: "col", class: style }))));
  const table = el("table", [el("caption", caption, { class: "quiet" }), head, el("tbody", body)]);
  return el("div", table, { class: "wide", tabindex: "0", role: "region", "aria-label": caption });
}

// Days are of UTC; the last one has not ended.
function showDays(listed, unit, now_ms) {
  const title = el("h3", `The last ${DAYS} days`);
  if (!listed.length) return byId("days").replaceChildren(title, el("p", "No query was answered.", { class: "soft" }));
  const names = Array.from({ length: DAYS }, (_, number) => day(now_ms - (DAYS - 1 - number) * DAY_MS));
  const rows = new Map(listed.map((row) => [row.day, row]));
  const amount = (micros) => figure(micros, unit.decimals);
  const charts = el("div", [
    bars("sampled tokens by day", names, rows, (row) => row.tokens, whole),
    bars(`spent by day, ${unit.name}`, names, rows, (row) => row.spent_micros, amount),
  ], { class: "charts" });
  const heads = [["day", "text"], ["answered", ""], ["tokens in", "tablet"], ["tokens out", ""], ["spent", ""]];
  const cells = listed.toReversed().map((row) => [
    [row.day, "text"], [whole(row.answered_queries), ""], [whole(row.prompt_tokens), "tablet"], [whole(row.tokens), ""],
    [amount(row.spent_micros), ""],
  ]);
  byId("days").replaceChildren(title, charts, wideTable(`Usage by day; amounts in ${unit.name}`, heads, cells));
}

function showFigures(whose, figures) {
  byId("whose").replaceChildren(el("bdi", whose));
  byId("figures").replaceChildren(...Object.entries(figures).map(([name, value]) => el("div", [el("dt", name), el("dd", value)])));
}

function showOne(key, now_ms) {
  const money = (micros) => amount(micros, key.unit);
  showFigures(key.name, {
    spent: money(key.spent_micros), left: money(key.left_micros), budget: money(key.budget_micros),
    "held for open queries": money(key.reserved_micros), "answered queries": whole(key.answered_queries),
    "open queries": whole(key.open_queries), "sampled tokens": whole(key.tokens), "last use": lastUse(key, now_ms),
    ...(key.expires_ms && { "valid until": day(key.expires_ms) }),
  });
  byId("keys").replaceChildren();
}

// A column's narrowest screen is a class of style.css. The first one is each row's heading.
const COLUMNS = [
  ["name", "text", (key, unit, now_ms) => {
    const said = state(key, now_ms);
    return [el("bdi", key.name), said ? el("small", ` ${said}`) : ""];
  }],
  ["spent", "", (key, unit) => figure(key.spent_micros, unit.decimals)],
  ["left", "", (key, unit) => figure(key.left_micros, unit.decimals)],
  ["budget", "tablet", (key, unit) => figure(key.budget_micros, unit.decimals)],
  ["answered", "tablet", (key) => whole(key.answered_queries)],
  ["open", "desktop", (key) => whole(key.open_queries)],
  ["tokens", "tablet", (key) => whole(key.tokens)],
  ["last use", "tablet", (key, unit, now_ms) => lastUse(key, now_ms)],
];

function showAll({ keys, unit }, now_ms) {
  const sum = (name) => keys.reduce((total, key) => total + key[name], 0);
  showFigures("All API keys", {
    keys: whole(keys.length), spent: amount(sum("spent_micros"), unit),
    "answered queries": whole(sum("answered_queries")), "open queries": whole(sum("open_queries")),
    "sampled tokens": whole(sum("tokens")),
  });
  if (!keys.length) return byId("keys").replaceChildren(el("p", "There are no keys yet: swarm-coordinator api-keys create", { class: "soft" }));
  const rows = keys.map((key) => COLUMNS.map(([, style, show]) => [show(key, unit, now_ms), style]));
  byId("keys").replaceChildren(wideTable(`API keys; amounts in ${unit.name}`, COLUMNS, rows));
}

// Show what the secret gives access to; return the time of the reply.
async function ask(secret, signal) {
  const isKey = API_KEY.test(secret);
  if (!isKey && !TOKEN.test(secret)) throw new Error(UNKNOWN);
  const headers = { Accept: "application/json", Authorization: `Bearer ${secret}` };
  const options = { headers, signal, cache: "no-store", credentials: "omit" };
  const reply = await fetch(isKey ? "/v1/usage" : "/v1/operator/keys", options)
    .catch(() => { throw new Error("The coordinator does not answer. Try again."); });
  if (!isKey && reply.status === 401) throw new Error(UNKNOWN);
  const answer = await reply.json().catch(() => ({}));
  if (!reply.ok) throw new Error((answer.error ?? answer).message ?? `The coordinator answers with status ${reply.status}.`);
  signal.throwIfAborted();
  const now_ms = Date.parse(reply.headers.get("Date")) || Date.now();
  if (isKey) showOne(answer, now_ms);
  else showAll(answer, now_ms);
  showDays(answer.days, answer.unit, now_ms);
  return now_ms;
}

function clear() {
  byId("usage").hidden = true;
  byId("said").textContent = "";
  byId("mistake").textContent = "";
  byId("mistake").className = "";
  for (const name of ["keys", "days", "figures"]) byId(name).replaceChildren();
}

let asking = null; // aborts the request under way

byId("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (asking) return;
  const { signal } = asking = new AbortController();
  byId("show").setAttribute("aria-disabled", "true"); // `disabled` would take the focus from it
  try {
    const now_ms = await ask(byId("secret").value.trim(), signal);
    byId("mistake").textContent = "";
    byId("usage").hidden = false;
    byId("said").textContent = `As of ${new Date(now_ms).toISOString().slice(11, 19)} UTC.`;
  } catch (error) {
    clear();
    if (signal.aborted) return; // the page was left
    byId("mistake").textContent = error.message;
    byId("mistake").className = "bad";
  } finally {
    asking = null;
    byId("show").removeAttribute("aria-disabled");
  }
});

addEventListener("pagehide", () => {
  asking?.abort();
  byId("secret").value = "";
  clear();
});
byId("plain").hidden = isSecureContext;
