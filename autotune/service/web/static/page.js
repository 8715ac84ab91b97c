// The page: what /v1 says, drawn. Everything that anybody wrote is put in as text, never as markup.
import { Chart } from "/static/chart.js";

const TERMINAL = ["SUCCEEDED", "NOTHING_FITS", "FAILED", "ERROR", "CANCELLED"];
const KINDS = ["state", "priority", "inspected", "budget_known", "quality_known", "search_started", "warned", "prediction_started",
  "prediction_ended", "cuts_started", "cuts_ended", "trial_started", "trial_ended", "finalist_ended", "anchor_started", "anchor_ended", "ablation_started",
  "ablation_ended", "stopped", "seconds_known"];
const ROWS = 100, MOST = 500;
const main = document.getElementById("main");
const connection = document.getElementById("connection");
const leave = document.getElementById("leave");
let close = () => {};
let me = {};

function make(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

class Refused extends Error {
  constructor(status, detail) { super(detail); this.status = status; }
}

async function ask(path, options = {}) {
  const answer = await fetch(path, { headers: { "Content-Type": "application/json" }, credentials: "same-origin", ...options });
  if (!answer.ok) {
    const problem = await answer.json().catch(() => ({ detail: answer.statusText }));
    throw new Refused(answer.status, problem.detail);
  }
  return answer;
}

const json = async (path, options) => (await ask(path, options)).json();
const say = (words) => { if (connection.textContent !== words) connection.textContent = words; };

export function bytes(number) {
  const mib = number / 2 ** 20;
  return mib < 4096 ? `${mib < 10 ? mib.toFixed(1) : Math.round(mib)} MiB` : `${(mib / 1024).toFixed(2)} GiB`;
}

function ago(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  return seconds < 86400 ? `${(seconds / 3600).toFixed(1)} h` : `${Math.round(seconds / 86400)} days`;
}

const state = (name) => make("span", { class: `state ${name}` }, name.replace("_", " ").toLowerCase());

function message(search) {
  return search.retry_at ? `${search.message} Tried again at ${new Date(search.retry_at * 1000).toLocaleTimeString()}.` : search.message;
}

function bar(summary, ended) {
  if (!summary.num_trials) return make("span", { class: "quiet small" }, ended ? "no trials" : "no trials yet");
  const words = `${summary.num_ended} of ${summary.num_trials} trials`;
  return make("span", {}, make("progress", { max: summary.num_trials, value: Math.min(summary.num_ended, summary.num_trials), "aria-label": words }),
    make("span", { class: "quiet small" }, words));
}

// What each choice of the plan bought, by the runs of the plan ("") and of the plan without it, round by round.
function bought(runs) {
  const own = runs[""] ?? {};
  const items = Object.keys(runs).filter((name) => name).map((name) => {
    const logs = Object.keys(runs[name]).filter((round) => runs[name][round] > 0 && own[round] > 0).map((round) => Math.log(own[round] / runs[name][round]));
    const factor = Math.exp(logs.reduce((sum, each) => sum + each, 0) / logs.length);
    return make("li", {}, make("strong", {}, name.replaceAll("_", " ")), logs.length
      ? ` ${factor.toFixed(2)} times the speed without it (${logs.length} ${logs.length === 1 ? "round" : "rounds"})` : ` without it: ${Object.values(runs[name])[0]}`);
  });
  return items.length ? [make("h4", {}, "What each choice bought"), make("ul", {}, ...items)] : [];
}

// All searches -------------------------------------------------------------------------------------------------------

async function showAll() {
  const list = make("ul", { class: "list" });
  const more = make("button", { type: "button", hidden: "" }, "Show more");
  main.replaceChildren(make("h2", {}, "Searches"), list, more);
  let timer = 0, last = "", open = true, most = ROWS;
  close = () => { open = false; clearTimeout(timer); };
  async function refresh() {
    if (!document.hidden) {
      const found = await json(`/v1/searches?limit=${most}`);
      const text = JSON.stringify(found);
      if (!open) return;
      say(`${found.filter((each) => !TERMINAL.includes(each.state)).length} under way`);
      more.hidden = found.length < most || most >= MOST;
      if (text !== last) { last = text; drawList(list, found); }
    }
    timer = setTimeout(() => refresh().catch(failed), 2000);
  }
  more.addEventListener("click", () => { most += ROWS; clearTimeout(timer); refresh().catch(failed); });
  await refresh();
}

function drawList(list, found) {
  const focused = document.activeElement?.getAttribute("href");
  list.replaceChildren(...found.map((search) => make("li", { class: "card" },
    make("a", { href: `#/${search.id}` }, search.name), state(search.state), bar(search.summary, TERMINAL.includes(search.state)),
    make("span", { class: "small" }, message(search) || (search.summary.best?.words ?? "")))));
  if (!found.length) list.append(make("li", {}, "Nothing was submitted yet: ", make("code", {}, "autotune submit model.py --budget 8GiB")));
  if (focused) list.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus();
}

// One search ---------------------------------------------------------------------------------------------------------

async function showOne(id) {
  const path = `/v1/searches/${id}`;
  const head = make("section"), report = make("section", { hidden: "" });
  const chart = new Chart(bytes);
  const body = make("tbody"), more = make("button", { type: "button", hidden: "" }, "Show more");
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...["Trial", "Settings", "Samples/s", "Peak", "Said"].map((each) => make("th", { scope: "col" }, each)))), body);
  const log = make("pre", { tabindex: "0" });
  const logs = make("details", { ontoggle: () => logs.open && readLog() }, make("summary", {}, "Log"), log);
  main.replaceChildren(head, make("section", {}, make("h3", {}, "Speed against memory"), chart.element), report,
    make("section", {}, make("h3", {}, "Trials"), make("div", { class: "scroll", tabindex: "0" }, table), more), make("section", {}, logs));
  const trials = new Map();
  let search = null, shown = ROWS, drawn = false, source = null, open = true;
  close = () => { open = false; source?.close(); };

  async function readLog() { log.textContent = await (await ask(`${path}/log`)).text() || "Nothing yet."; }

  function later() {  // many events, one drawing
    if (drawn) return;
    drawn = true;
    requestAnimationFrame(() => { drawn = false; if (open) draw(); });
  }

  function draw() {
    const rows = [...trials.values()].sort((a, b) => b.number - a.number);
    chart.draw(rows, search.summary.limit_bytes, search.summary.best?.number);
    body.replaceChildren(...rows.slice(0, shown).map((each) => make("tr", { class: each.number === search.summary.best?.number ? "best" : each.fits ? "" : "wrong" },
      make("td", { class: "number" }, String(each.number)), make("td", {}, each.number === 0 ? `${each.settings} (the job as it stands)` : each.settings),
      make("td", { class: "number" }, each.samples_per_s ? each.samples_per_s.toPrecision(4) : "–"),
      make("td", { class: "number" }, each.peak_bytes ? bytes(each.peak_bytes) : "–"), make("td", {}, each.words))));
    more.hidden = rows.length <= shown;
  }
  more.addEventListener("click", () => { shown += 5 * ROWS; draw(); });

  async function readSearch() {
    search = await json(path);
    if (!open) return;
    drawHead();
    if (search.has_plan && report.hidden) {
      const text = await (await ask(`${path}/report`)).text().catch(() => "");
      report.hidden = false;
      report.replaceChildren(make("h3", {}, "Plan"), make("p", {}, make("a", { class: "button", href: `${path}/plan`, download: `plan-${id}.yaml` }, "Download plan.yaml")),
        ...bought(search.summary.without ?? {}), make("pre", { tabindex: "0", class: "scroll" }, text));
    }
    later();
  }

  function act(words, method, where, document) {
    return make("button", { type: "button", onclick: async () => {
      try { await ask(`${path}${where}`, { method, body: JSON.stringify(typeof document === "function" ? document() : document) }); await readSearch(); } catch (error) { say(error.message); }
    } }, words);
  }

  function goOn() {
    const time = make("input", { size: 6, placeholder: search.spec.max_time ?? "no limit" });
    const trials = make("input", { type: "number", min: 1, max: 10000, placeholder: search.spec.trials });
    return [act("Go on", "POST", "/resume", () => ({ max_time: time.value.trim() || null, trials: trials.value ? Number(trials.value) : null })),
      make("label", { class: "small" }, "in at most ", time), make("label", { class: "small" }, "with trials ", trials)];
  }

  function drawHead() {
    const ended = TERMINAL.includes(search.state), waits = search.state === "QUEUED";
    const mine = me.role === "admin" || (me.role === "submit" && me.name === search.owner);
    const focused = head.contains(document.activeElement) ? document.activeElement.textContent : null;
    const until = search.ended_at ?? Date.now() / 1000;
    head.replaceChildren(...[make("div", { class: "row" }, make("h2", {}, search.name), state(search.state)),
      make("p", { class: "quiet small" }, `${search.id}, by ${search.owner}, ${ago(until - search.created_at)}, priority ${search.priority}` + (search.attempt > 1 ? `, attempt ${search.attempt}` : "")),
      bar(search.summary, ended),
      search.summary.best ? make("p", {}, ended ? "Best: " : "Best so far: ", make("strong", {}, `${search.summary.best.settings}: ${search.summary.best.words}`)) : null,
      search.message ? make("p", { class: ended && search.state !== "SUCCEEDED" ? "wrong-words" : "quiet" }, message(search)) : null,
      make("div", { class: "row" },
        mine && waits ? act("Sooner", "PATCH", "", { priority: Math.min(100, search.priority + 10) }) : null,
        mine && waits ? act("Later", "PATCH", "", { priority: Math.max(0, search.priority - 10) }) : null,
        mine && !ended ? act("Finish with the best so far", "POST", "/cancel", { mode: "finish" }) : null,
        mine && !ended ? act("Cancel now", "POST", "/cancel", { mode: "now" }) : null,
        ...(mine && ["CANCELLED", "FAILED", "ERROR"].includes(search.state) ? goOn() : []))].filter((child) => child !== null));
    if (focused) [...head.querySelectorAll("button")].find((each) => each.textContent === focused)?.focus();
    document.title = `${search.name}: ${search.state.toLowerCase()}`;
  }

  search = await json(path);
  const since = search.num_events;  // what comes while trials are read is told again
  for (let after = -1; open; ) {
    const rows = await json(`${path}/trials?limit=5000&after=${after}`);
    for (const row of rows) trials.set(row.number, row);
    if (rows.length < 5000) break;
    after = rows.at(-1).number;
  }
  if (!open) return;
  await readSearch();

  source = new EventSource(`${path}/events?after=${since}`);
  source.onopen = () => say("live");
  source.onerror = () => say("the connection was lost; trying again");
  let due = 0;
  const renew = () => { due ||= setTimeout(() => { due = 0; if (open) readSearch().catch(failed); }, 400); };
  for (const kind of KINDS) source.addEventListener(kind, (event) => {
    const data = JSON.parse(event.data);
    if (kind === "trial_ended") { trials.set(data.number, data); later(); }
    if (kind !== "trial_started") renew();
  });
  source.addEventListener("end", () => { source.close(); say("ended"); renew(); });
  source.addEventListener("refused", (event) => { source.close(); const { status, detail } = JSON.parse(event.data); failed(new Refused(status, detail)); });
  if (TERMINAL.includes(search.state)) { source.close(); say("ended"); }
}

// Signing in ---------------------------------------------------------------------------------------------------------

const signIn = (token) => ask("/session", { method: "POST", body: JSON.stringify({ token }) });

function showSignIn(words) {
  close();
  const token = make("input", { id: "token", type: "password", autocomplete: "current-password", required: "" });
  const said = make("p", { role: "alert", class: "wrong-words" }, words ?? "");
  main.replaceChildren(make("section", {}, make("h2", {}, "Sign in"), make("form", { onsubmit: async (event) => {
    event.preventDefault();
    try {
      await signIn(token.value);
      await route();
    } catch (error) { said.textContent = error.message; token.select(); }
  } }, make("p", {}, make("label", { for: "token" }, "Token "), token, " ", make("button", {}, "Sign in")),
  make("p", { class: "quiet small" }, "autotune serve token create --role submit --name ann"), said)));
  token.focus();
}

leave.addEventListener("click", async () => { await ask("/session", { method: "DELETE" }); leave.hidden = true; showSignIn(); });

function failed(error) {
  if (error instanceof Refused && error.status === 401) { showSignIn(error.message); return; }
  say(error instanceof Refused ? error.message : "the service does not answer; trying again");
  if (!(error instanceof Refused)) setTimeout(() => route(), 3000);
}

async function route() {
  close();
  document.title = "autotune";
  say("");
  const token = /^#token=([\w-]+)$/.exec(location.hash)?.[1];
  if (token) history.replaceState(null, "", "#/");  // the link that the server prints: it is kept in no history
  const id = /^#\/([0-9a-f]{16})$/.exec(location.hash)?.[1];
  try {
    if (token) try { await signIn(token); } catch (error) { return showSignIn(error.message); }
    me = await json("/session");
    leave.hidden = !me.by_cookie;
    await (id ? showOne(id) : showAll());
    main.focus({ preventScroll: true });
  } catch (error) { failed(error); }
}

addEventListener("hashchange", (event) => { if (location.hash !== "#main") route(); });
route();
