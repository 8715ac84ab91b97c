// The page: what /v1 says, drawn. Everything that anybody wrote is put in as text, never as markup.
import { Chart } from "/static/chart.js";

const TERMINAL = ["SUCCEEDED", "NOTHING_FITS", "FAILED", "ERROR", "CANCELLED"];
const KINDS = ["state", "priority", "inspected", "budget_known", "quality_known", "search_started", "warned", "driver_started", "prediction_started",
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
  const answer = await fetch(path, { headers: { "Content-Type": "application/json" }, credentials: "same-origin", ...options })
    .catch(() => { throw new Refused(0, "the service does not answer; trying again"); });
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
  return mib < 4096 ? `${mib < 10 ? mib.toFixed(1) : Math.round(mib)} MiB` : `${(mib / 1024).toFixed(2).replace(/\.?0+$/, "")} GiB`;
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

const first = (words) => words.split("\n", 1)[0];
const times = (ratio) => `${ratio.toFixed(2)}x`;
const within = (search) => search.summary.limit_bytes ? bytes(search.summary.limit_bytes) : search.spec.budget;

// How far the search is: the phase that it is in, with its own progress; once it has ended, its trials.
function bar(search) {
  const { summary } = search, phase = summary.phases?.[summary.phase];
  const trials = summary.num_trials ? `${summary.num_ended} of ${summary.num_trials} trials` : "no trials";
  if (TERMINAL.includes(search.state)) return make("span", { class: "quiet small" }, trials);
  if (!phase || !["RUNNING", "CANCELLING"].includes(search.state)) return make("span", { class: "quiet small" }, summary.num_ended ? trials : "not begun");
  const words = summary.phase === "trials" ? trials : `${summary.phase}${phase.words ? `: ${phase.words}` : ""}`;
  return make("span", {}, progress(phase, words), make("span", { class: "quiet small" }, words));
}

const progress = (phase, words) => make("progress", { "aria-label": words, ...(phase.of ? { max: phase.of, value: Math.min(phase.done, phase.of) } : {}) });

// All phases so far, in their order; once they are over, in a line.
function phases(search) {
  if (TERMINAL.includes(search.state)) {
    const over = Object.entries(search.summary.phases ?? {}).map(([name, phase]) => `${name}: ${phase.words}`);
    return over.length ? make("p", { class: "quiet small phases-over" }, over.join(" · ")) : null;
  }
  const { summary } = search, now = ["RUNNING", "CANCELLING"].includes(search.state) ? summary.phase : null;
  const items = Object.entries(summary.phases ?? {}).map(([name, phase]) => make("li", name === now ? { "aria-current": "step" } : {},
    make("span", {}, name), name === now ? progress(phase, name) : make("span", { "aria-hidden": "true" }, "✓"),
    make("span", { class: "quiet small" }, [phase.words, name === now && phase.since ? `for ${ago(Date.now() / 1000 - phase.since)}` : ""].filter((each) => each).join(", "))));
  return items.length ? make("ol", { class: "phases", "aria-label": "Phases" }, ...items) : null;
}

// What the plan comes to: its gain over the job as it stands, and its peak against the budget.
export function result(found) {
  const facts = [];
  const interval = found.low && found.high ? `95 %: ${times(found.low)} to ${times(found.high)}` : "";
  if (found.gain) facts.push(fact(times(found.gain), "the speed of the job as it stands", interval, found.is_proven ? null : "not proven", found.is_proven ? null : found.why));
  else facts.push(fact("gain unknown", found.why ?? "", ""));
  if (found.peak_bytes) {
    const share = found.limit_bytes ? found.peak_bytes / found.limit_bytes : null;
    facts.push(fact(bytes(found.peak_bytes), found.limit_bytes ? `at its peak, of ${bytes(found.limit_bytes)} (${Math.round(100 * share)} %)` : "at its peak, without a budget",
      found.reference ? `the job as it stands: ${bytes(found.reference.peak_bytes)}${found.reference.fits ? "" : ", over the budget"}` : "",
      share ? make("meter", { min: 0, max: 1, value: share, "aria-label": "peak as a share of the budget" }) : null));
  }
  if (found.samples_per_s) facts.push(fact(found.samples_per_s.toPrecision(4), "samples per second", found.reference ? `the job as it stands: ${found.reference.samples_per_s.toPrecision(4)}` : ""));
  return make("div", {}, make("div", { class: "facts" }, ...facts), make("p", {}, make("strong", {}, found.settings)));
}

function fact(figure, words, more, mark = null, why = null) {
  const marked = typeof mark === "string" ? make("strong", { class: "unproven" }, mark) : mark;
  return make("div", { class: "fact" }, make("span", { class: "figure" }, figure), make("span", {}, words), marked, make("span", { class: "quiet small" }, more), why ? make("span", { class: "quiet small" }, why) : null);
}

// A box above the page: its words, and what was chosen of the buttons; Escape chooses none.
function box(title, words, ...buttons) {
  return new Promise((chosen) => {
    const dialog = make("dialog", { "aria-labelledby": "asked", onclose: () => { const answer = dialog.returnValue; dialog.remove(); chosen(answer); } },
      make("h3", { id: "asked" }, title), words, make("form", { method: "dialog", class: "row" }, ...buttons.map((each) => make("button", { value: each }, each))));
    document.body.append(dialog);
    dialog.showModal();
  });
}

async function copy(text, element) {
  try { await navigator.clipboard.writeText(text); } catch {  // plain HTTP has no clipboard: it is selected, for Ctrl-C
    getSelection().selectAllChildren(element);
    document.execCommand("copy");
  }
  say("copied");
}

// What may be longer than its place: the keyboard scrolls it, and it has a name.
const scrolled = (tag, name, options, ...children) => make(tag, { tabindex: "0", role: "region", "aria-label": name, ...options }, ...children);

function copied(title, text) {
  const element = scrolled("pre", title, {}, text);
  return make("div", { class: "copied" }, make("div", { class: "row" }, make("h4", {}, title), make("button", { type: "button", "aria-label": `Copy: ${title}`, onclick: () => copy(text, element) }, "Copy")), element);
}

const quoted = (word) => /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;

// What a reader does next with the plan.
function commands(search) {
  const fetching = `autotune fetch ${search.id} -o plan.yaml --server ${location.origin}`;
  if (search.spec.command) return `${fetching}\nautotune run plan.yaml -- ${search.spec.command.map(quoted).join(" ")}`;
  return `${fetching}\nautotune verify plan.yaml ${quoted(search.spec.task)}\n\n# in the job:\nplan = autotune.load_plan("plan.yaml")\ntraining = autotune.apply(plan, autotune.load_task(${JSON.stringify(search.spec.task)}))\nfor batch in training.loader:\n    result = training.step(batch)`;
}

// What was asked for: every option that has a value.
function options(search, mine) {
  const rows = Object.entries(search.spec).filter(([name, value]) => name !== "archive" && value !== null && value !== false)
    .map(([name, value]) => [name.replaceAll("_", " "), Array.isArray(value) ? value.map(quoted).join(" ") : value === true ? "yes" : String(value)]);
  if (search.spec.archive) rows.push(["archive", `SHA-256 ${search.spec.archive}`]);
  return make("div", {}, make("dl", {}, ...rows.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])),
    mine && search.spec.archive ? make("p", {}, make("a", { class: "button", href: `/v1/searches/${search.id}/archive`, download: `job-${search.id}.tar` }, "Download the archive")) : null);
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

const FILTERS = { "all states": [], "under way": ["QUEUED", "LEASED", "RUNNING", "CANCELLING"], "with a plan": ["SUCCEEDED"], "without a plan": ["NOTHING_FITS", "FAILED", "ERROR", "CANCELLED"] };
const filter = { states: "all states", owner: "", name: "" };  // kept while the page is open

async function showAll() {
  const list = make("ul", { class: "list" });
  const more = make("button", { type: "button", hidden: "" }, "Show more");
  let timer = 0, last = "", open = true, most = ROWS;
  const now = () => { clearTimeout(timer); refresh().catch(failed); };
  const choice = (name, words, all) => make("label", { class: "small" }, `${words} `, make("select", { onchange: (event) => { filter[name] = event.target.value; now(); } },
    ...all.map(([value, said]) => make("option", { value, selected: filter[name] === value }, said))));
  const filters = make("form", { class: "row filters", role: "search", onsubmit: (event) => event.preventDefault() },
    choice("states", "State", Object.keys(FILTERS).map((each) => [each, each])), choice("owner", "Of", [["", "everybody"], [me.name, `${me.name} (you)`]]),
    make("label", { class: "small" }, "Name ", make("input", { type: "search", value: filter.name, oninput: (event) => { filter.name = event.target.value.trim(); now(); } })));
  main.replaceChildren(make("h2", {}, "Searches"), filters, list, more);
  close = () => { open = false; clearTimeout(timer); };
  async function refresh() {
    if (!document.hidden) {
      const like = new URLSearchParams([["limit", most], ...FILTERS[filter.states].map((each) => ["state", each])]);
      for (const name of ["owner", "name"]) if (filter[name]) like.append(name, filter[name]);
      const asked = like.toString(), found = await json(`/v1/searches?${asked}`);
      const queue = found.some((each) => each.state === "QUEUED") ? await json("/v1/queue") : {};
      const turns = found.some((each) => each.state === "RUNNING") ? await json("/v1/turns") : {};
      const text = JSON.stringify([asked, found, queue, turns, Math.floor(Date.now() / 30000)]);  // ages, too
      if (!open) return;
      say(`${found.filter((each) => !TERMINAL.includes(each.state)).length} under way`);
      more.hidden = found.length < most || most >= MOST;
      if (text !== last) { last = text; drawList(list, found, queue, turns); }
    }
    clearTimeout(timer);
    timer = setTimeout(() => refresh().catch(failed), 2000);
  }
  more.addEventListener("click", () => { most += ROWS; now(); });
  await refresh();
}

// Whose trials run while a search waits for a device.
function turn(others) {
  if (!others) return "";
  return `waits for a device, which is used by ${others.map((each) => `${each.name} of ${each.owner}`).join(", ") || "another search"}`;
}

function about(search, queue, turns) {
  const words = [`by ${search.owner}`, `${ago(Date.now() / 1000 - search.created_at)} ago`, within(search) ? `within ${within(search)}` : "no budget"];
  return [...words, queue[search.id] ? `no. ${queue[search.id]} in the queue` : null, turn(turns[search.id])].filter((each) => each).join(", ");
}

function drawList(list, found, queue, turns) {
  const focused = document.activeElement?.getAttribute("href");
  list.replaceChildren(...found.map((search) => make("li", { class: "card" },
    make("span", {}, make("a", { href: `#/${search.id}` }, search.name), make("span", { class: "quiet small" }, about(search, queue, turns))), state(search.state), bar(search), said(search))));
  if (!found.length) list.append(make("li", {}, ...(filter.name || filter.owner || filter.states !== "all states" ? ["No search is like that."]
    : ["Nothing was submitted yet: ", make("code", {}, "autotune submit model.py --budget 8GiB")])));
  if (focused) list.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus();
}

// One line: what the plan comes to, why there is none, or the best trial so far.
function said(search) {
  const { summary } = search;
  const lost = ["FAILED", "ERROR", "NOTHING_FITS"].includes(search.state);
  if (summary.result) return make("span", { class: "small" }, summary.result.words);
  if (search.message || search.retry_at) return make("span", { class: `small line ${lost ? "wrong-line" : ""}` }, message({ ...search, message: first(search.message) }));
  return make("span", { class: "small" }, summary.best ? `best trial ${summary.best.words}` : "");
}

// One search ---------------------------------------------------------------------------------------------------------

async function showOne(id) {
  const path = `/v1/searches/${id}`;
  const head = make("section"), report = make("section", { hidden: "" });
  const chart = new Chart(bytes);
  const body = make("tbody"), more = make("button", { type: "button", hidden: "" }, "Show more");
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...["Trial", "Settings", "Samples/s", "Peak", "Said", "Log"].map((each) => make("th", { scope: "col" }, each)))), body);
  const log = scrolled("pre", "Log of the search", { class: "log" });
  const logs = make("details", { ontoggle: () => logs.open && readLog() }, make("summary", {}, "Log"), log);
  const asked = make("details", {}, make("summary", {}, "Options and archive"));
  main.replaceChildren(head, make("section", {}, make("h3", {}, "Speed against memory"), chart.element), report,
    make("section", {}, make("h3", {}, "Trials"), scrolled("div", "Table of trials", { class: "scroll" }, table), more), make("section", {}, asked), make("section", {}, logs));
  const trials = new Map();
  let search = null, shown = ROWS, drawn = false, source = null, open = true, place = null, waited = "";
  const ticking = setInterval(async () => {
    if (!search || !open || document.hidden || TERMINAL.includes(search.state)) return;
    waited = search.state === "RUNNING" ? turn((await json("/v1/turns").catch(() => ({})))[id]) : "";
    if (!open) return;
    drawHead();
    if (logs.open) readLog();
  }, 5000);
  close = () => { open = false; clearInterval(ticking); source?.close(); };

  async function readLog() {
    const text = await ask(`${path}/log`).then((answer) => answer.text(), (error) => error.message) || "Nothing yet.";
    if (text !== log.textContent) log.textContent = text;
  }

  async function showTrialLog(number) {
    const text = await ask(`${path}/trials/${number}/log`).then((answer) => answer.text(), (error) => error.message);
    const title = `What trial ${number} printed`;
    await box(title, scrolled("pre", title, { class: "log" }, text), "Close");
  }

  function later() {  // many events, one drawing
    if (drawn) return;
    drawn = true;
    requestAnimationFrame(() => { drawn = false; if (open) draw(); });
  }

  function draw() {
    const rows = [...trials.values()].sort((a, b) => b.number - a.number);
    chart.draw(rows, search.summary.limit_bytes, search.summary.best?.number, TERMINAL.includes(search.state));
    if (!rows.length) return body.replaceChildren(make("tr", {}, make("td", { colspan: 6 }, TERMINAL.includes(search.state) ? "No trial has run." : "No trial has ended yet.")));
    body.replaceChildren(...rows.slice(0, shown).map((each) => make("tr", { class: each.number === search.summary.best?.number ? "best" : each.fits ? "" : "wrong" },
      make("td", { class: "number" }, String(each.number)), make("td", {}, each.number === 0 ? `${each.settings} (the job as it stands)` : each.settings),
      make("td", { class: "number" }, each.samples_per_s ? each.samples_per_s.toPrecision(4) : "–"),
      make("td", { class: "number" }, each.peak_bytes ? bytes(each.peak_bytes) : "–"), make("td", {}, each.words),
      make("td", {}, make("button", { type: "button", class: "plain", "aria-label": `Log of trial ${each.number}`, onclick: () => showTrialLog(each.number) }, "log")))));
    more.hidden = rows.length <= shown;
  }
  more.addEventListener("click", () => { shown += 5 * ROWS; draw(); });

  async function readSearch() {
    search = await json(path);
    place = search.state === "QUEUED" ? (await json("/v1/queue"))[id] : null;
    if (!open) return;
    drawHead();
    asked.replaceChildren(asked.firstChild, options(search, mine()));
    if (search.has_plan && report.hidden) {
      const text = await (await ask(`${path}/report`)).text().catch(() => "");
      report.hidden = false;
      const plan = await (await ask(`${path}/plan`)).text();
      report.replaceChildren(make("h3", {}, "The plan"), copied("Apply it", commands(search)), copied("plan.yaml", plan),
        make("p", {}, make("a", { class: "button", href: `${path}/plan`, download: `plan-${id}.yaml` }, "Download plan.yaml")),
        ...bought(search.summary.without ?? {}), make("details", {}, make("summary", {}, "In words"), scrolled("pre", "The plan in words", { class: "scroll", id: "report" }, text)));
    }
    later();
  }

  const mine = () => me.role === "admin" || (me.role === "submit" && me.name === search.owner);

  function act(words, method, where, document, asks = null) {
    return make("button", { type: "button", onclick: async () => {
      if (asks && await box(`${words}?`, make("p", {}, asks), "Back", words) !== words) return;
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
    const ended = TERMINAL.includes(search.state), waits = search.state === "QUEUED", { summary } = search;
    const focused = head.contains(document.activeElement) ? document.activeElement.textContent : null;
    if (focused !== null && document.activeElement.tagName === "INPUT") return;  // somebody types
    const until = search.ended_at ?? Date.now() / 1000;
    const whose = search.owner === me.name ? "yours" : `${search.owner}'s`;
    head.replaceChildren(...[make("div", { class: "row" }, make("h2", {}, search.name), state(search.state)),
      summary.result ? result(summary.result) : null,
      make("p", { class: "quiet small" }, [search.id, `by ${search.owner}`, `${ago(until - search.created_at)}${ended ? " in all" : ""}`, within(search) ? `within ${within(search)}` : "no budget",
        `priority ${search.priority}`, place ? `no. ${place} in the queue` : "", waited, search.attempt > 1 ? `attempt ${search.attempt}` : ""].filter((each) => each).join(", ")),
      phases(search),
      !summary.result && summary.best ? make("p", {}, ended ? "The best trial, measured once: " : "The best trial so far: ", make("strong", {}, `${summary.best.settings}: ${summary.best.words}`)) : null,
      search.message || search.retry_at ? make("p", { class: ended && search.state !== "SUCCEEDED" ? "wrong-words" : "quiet" }, message(search)) : null,
      make("div", { class: "row" },
        mine() && waits ? act("Sooner", "PATCH", "", { priority: Math.min(100, search.priority + 10) }) : null,
        mine() && waits ? act("Later", "PATCH", "", { priority: Math.max(0, search.priority - 10) }) : null,
        mine() && !ended ? act("Finish with the best so far", "POST", "/cancel", { mode: "finish" },
          `This search is ${whose}. No more trials begin; the best so far becomes the plan.`) : null,
        mine() && !ended ? act("Cancel now", "POST", "/cancel", { mode: "now" },
          `This search is ${whose}. It ends at once, without a plan. What was measured is kept: it can go on later.`) : null,
        ...(mine() && ["CANCELLED", "FAILED", "ERROR"].includes(search.state) ? goOn() : []))].filter((child) => child !== null));
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
    if (kind !== "trial_started" || data.round !== null) renew();
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
  if (!(error instanceof Refused)) throw error;  // a bug: the console has it
  if (error.status === 401) { showSignIn(error.message); return; }
  say(error.message);
  if (error.status === 0) setTimeout(() => route(), 3000);
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
