// Draws /dashboard/state once a second, and the timeline of the request that was picked.
// Text from the server only ever becomes text nodes.
"use strict";

const PERIOD_MS = 1000;
const RATE_WINDOW_MS = 5000;
const MOST_DRAWN = 8; // if a role has more instances, there is no picture

const byId = (id) => document.getElementById(id);
const past = []; // the states of the last seconds, {at, state}, from which rates are computed
let shownRequest = null;
let shownIsOver = false; // the request has ended: its timeline does not change any more, and is not asked for again
const etags = {};

function element(name, attributes = {}, ...children) {
  const made = name.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4))
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value);
  }
  made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

const cell = (content, kind = "") => element("td", kind ? { class: kind } : {}, content ?? "");
const number = (value) => cell(value === undefined ? "" : Math.round(value).toLocaleString("en"), "number");

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${value.toFixed(value < 10 && unit ? 1 : 0)} ${units[unit]}`;
}

const seconds = (value) => (value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(2)} s`);
const clock = (atS) => new Date(atS * 1000).toLocaleTimeString("en-GB");

function share(used, all) {
  if (!all) return cell("");
  const meter = element("meter", { min: 0, max: 1, high: 0.9, value: used / all });
  return cell(element("span", {}, meter, ` ${Math.round((100 * used) / all)}%`), "number");
}

// Return the mean increase of a counter a second, over the window; 0 if the counter has begun anew.
function rate(read) {
  const first = past[0], last = past[past.length - 1];
  const elapsedS = (last.at - first.at) / 1000;
  const before = read(first.state), now = read(last.state);
  if (!elapsedS || before === undefined || now === undefined) return 0;
  return Math.max(0, now - before) / elapsedS;
}

function fill(table, rows, whatIfNone) {
  const width = byId(table).tHead.rows[0].cells.length;
  const none = element("tr", {}, element("td", { colspan: width, class: "empty" }, whatIfNone));
  byId(table).tBodies[0].replaceChildren(...(rows.length ? rows : [none]));
}

// Return in words what an instance that drains or switches its role still has to do.
function progress(instance) {
  const left = [`${instance.num_requests} requests left`, `${instance.num_moved} moved`];
  if (instance.num_blocks_left) left.push(`${instance.num_blocks_left} blocks to copy`);
  return `${instance.state}: ${left.join(", ")}`;
}

// Return in words which modules of an instance are at its helper, or move there; empty without a helper.
function elsewhere(instance) {
  if (!instance.helper) return "";
  return instance.moved ? `${instance.moved} at ${instance.helper}` : `modules move to ${instance.helper}`;
}

const named = (state, name) => state.instances.find((instance) => instance.name === name);

function drawInstances(state) {
  fill("instances", state.instances.map((instance) => {
    const wanted = instance.num_hits + instance.num_misses;
    const problems = [
      instance.is_healthy === false && "a disk does not work",
      instance.num_orphaned_pages > 0 && `${instance.num_orphaned_pages} orphaned pages`,
      instance.state !== "serving" && progress(instance),
      instance.num_pages === undefined && "no heartbeat yet",
    ].filter(Boolean);
    return element("tr", {},
      cell(instance.name), cell(instance.next_role ? `${instance.role} → ${instance.next_role}` : instance.role, instance.role),
      cell([instance.engine, elsewhere(instance)].filter(Boolean).join("; ")),
      number(instance.num_running), number(instance.num_waiting), number(instance.num_assigned_tokens),
      number(rate((past) => named(past, instance.name)?.num_decoded_tokens)),
      share(instance.num_device_pages - instance.num_free_device_pages, instance.num_device_pages),
      share(instance.num_used_pages + instance.num_sealed_pages, instance.num_pages),
      cell(wanted ? `${Math.round((100 * instance.num_hits) / wanted)}%` : "", "number"),
      cell(problems.join(", "), "bad"));
  }), "no instance has registered");
}

const STRIP_S = 900, STRIP_LEAST_S = 60; // seconds that the strips show at most, and at least
const STRIP_HEIGHT = 16, STRIP_LEFT = 120, STRIP_WIDTH = 640;

// Draw a row for each instance. A bar has the colour of the role; it is pale while the instance drains or switches.
// There is no bar for the time in which the instance was not registered.
function drawStrips(state) {
  const svg = byId("strips"), until = Date.now() / 1000;
  const began = Math.min(until - STRIP_LEAST_S, ...state.changes.map((change) => change.at_s));
  const from = Math.max(until - STRIP_S, began);
  const names = state.instances.map((instance) => instance.name);
  for (const change of state.changes) if (change.at_s > from && !names.includes(change.instance)) names.push(change.instance);
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${STRIP_LEFT + STRIP_WIDTH} ${names.length * STRIP_HEIGHT || 1}`);
  const x = (atS) => STRIP_LEFT + STRIP_WIDTH * Math.max(0, (atS - from) / (until - from));
  names.forEach((name, row) => {
    const y = row * STRIP_HEIGHT;
    svg.append(element("svg:text", { x: 0, y: y + 12 }, name));
    let changes = state.changes.filter((change) => change.instance === name);
    if (!changes.length) changes = [{ at_s: from, ...named(state, name) }]; // its changes are too old to be known
    changes.forEach((change, index) => {
      const end = index + 1 < changes.length ? changes[index + 1].at_s : until;
      if (!change.role || end <= from) return;
      const kind = change.state === "serving" ? change.role : `${change.role} pale`;
      const what = change.next_role ? `${change.state} to ${change.next_role}` : change.state;
      svg.append(element("svg:rect",
        { class: kind, x: x(change.at_s), y: y + 2, width: Math.max(1, x(end) - x(change.at_s)), height: STRIP_HEIGHT - 4 },
        element("svg:title", {}, `${name}: ${change.role}, ${what}, since ${clock(change.at_s)}`)));
    });
  });
  byId("strips-key").replaceChildren(
    ...["prefill", "decode", "both"].flatMap((role) => [element("span", { class: `key r-${role}` }), role]),
    `; pale while it drains or switches. The last ${Math.round((until - from) / 60)} min.`);
}

function drawMoves(state) {
  const ended = Object.entries(state.num_moves).map(([what, count]) => `${count} ${what.replaceAll("_", " ")}`);
  byId("moved").textContent = ended.join(", ");
  fill("moves", state.moves.map((move) => element("tr", {},
    cell(clock(move.began_s)), cell(move.id, "id"), cell(move.source), cell(move.destination),
    cell(move.reason.replaceAll("_", " ")), cell(move.step.replaceAll("_", " ")), number(move.num_rounds))), "none now");
}

function drawDecisions(state) {
  const share = (value) => `${Math.round(100 * value)}%`;
  fill("decisions", state.decisions.map((decision) => {
    const came = decision.outcome;
    const outcome = came === null ? "not known yet" : came.note
      || `took ${seconds(came.took_s)}; ${share(decision.accepted_before)} accepted before, ${share(came.accepted_after)} after`;
    return element("tr", {},
      cell(clock(decision.at_s)), cell(decision.instance), cell(decision.before, decision.before),
      cell(decision.after, decision.after), cell(decision.why, "text"), cell(seconds(decision.benefit_s), "number"),
      cell(seconds(decision.cost_s), "number"), cell(outcome, "text"));
  }), "none");
}

const key = (path) => `${path.source}\n${path.target}\n${path.transport}`;
const bytesOf = (path) => (state) => state.paths.find((other) => key(other) === key(path))?.bytes ?? 0;

function drawPaths(state) {
  fill("paths", state.paths.map((path) => element("tr", {},
    cell(path.source), cell(path.target), cell(path.transport),
    cell(`${bytes(rate(bytesOf(path)))}/s`, "number"), cell(bytes(path.bytes), "number"))),
    state.num_transfers ? "none reported by the instances that are here now" : "nothing has travelled yet");
}

function drawPicture(state) {
  const svg = byId("picture");
  const columns = { prefill: [], decode: [] };
  for (const instance of state.instances) columns[instance.role === "prefill" ? "prefill" : "decode"].push(instance);
  const rows = Math.max(columns.prefill.length, columns.decode.length);
  svg.replaceChildren();
  if (!rows || rows > MOST_DRAWN) { svg.setAttribute("viewBox", "0 0 1 1"); svg.style.display = "none"; return; }
  svg.style.display = "";
  svg.setAttribute("viewBox", `0 0 760 ${rows * 56 + 4}`);
  const place = {};
  for (const [role, x] of [["prefill", 1], ["decode", 539]]) {
    columns[role].forEach((instance, row) => {
      const y = row * 56 + 2;
      place[instance.name] = { x: role === "prefill" ? 221 : 539, y: y + 23 };
      const load = `${instance.num_running ?? 0} running, ${instance.num_waiting ?? 0} waiting`;
      svg.append(element("svg:g", { class: instance.role },
        element("svg:rect", { x, y, width: 220, height: 46 }),
        element("svg:text", { x: x + 12, y: y + 19 }, instance.name),
        element("svg:text", { x: x + 12, y: y + 36 }, load)));
    });
  }
  for (const path of state.paths) {
    // A stage of a pipeline, prefill-0.1, has a pool of its own.
    const [from, to] = [path.source, path.target].map((name) => place[name] ?? place[name.replace(/\.\d+$/, "")]);
    if (!from || !to || from.x === to.x) continue;
    const now = rate(bytesOf(path));
    const width = now ? Math.min(9, 1.5 + Math.log10(1 + now / 1e5) * 2) : 0.7;
    svg.append(element("svg:line", { x1: from.x, y1: from.y, x2: to.x, y2: to.y, "stroke-width": width }));
    if (now) {
      // The text is nearer to the source, as lines cross in the middle.
      const near = { x: from.x + 0.32 * (to.x - from.x), y: from.y + 0.32 * (to.y - from.y) - 6 };
      svg.append(element("svg:text", { ...near, "text-anchor": "middle" }, `${bytes(now)}/s ${path.transport}`));
    }
  }
}

function drawContexts(state) {
  fill("contexts", state.contexts.map((context) => element("tr", {},
    cell(context.id, "id"), number(context.num_blocks),
    cell(context.num_pinned, context.num_pinned < context.num_blocks ? "number bad" : "number"),
    cell(context.holder), cell(clock(context.expires_s)))), "none");
}

function drawRequests(state) {
  fill("requests", state.requests.map((request) => {
    const pick = () => show(request.id);
    const link = element("button", { class: "link", type: "button" }, request.id);
    const ended = request.is_over ? seconds(request.last_s - request.submitted_s) : "";
    const kind = ["failed", "rejected", "refused"].includes(request.step) ? "bad" : "";
    return element("tr", { onclick: pick, class: request.id === shownRequest ? "shown" : "" },
      cell(clock(request.submitted_s)), cell(link, "id"), cell(request.step, kind),
      cell(request.prefill), cell(request.decode), number(request.num_prompt_tokens),
      number(request.num_cached_tokens), number(request.num_output_tokens), cell(ended, "number"));
  }), "none yet");
}

function drawRejections(state) {
  const counts = Object.entries(state.num_rejected).filter(([, count]) => count);
  byId("rejected").textContent = counts.map(([reason, count]) => `${count} ${reason}`).join(", ");
  fill("rejections", state.rejections.map((rejection) => element("tr", {},
    cell(clock(rejection.at_s)), cell(rejection.request_id, "id"), number(rejection.status),
    cell(rejection.reason, "bad"), cell(rejection.message, "text"))), "none");
}

function drawTimeline(request) {
  const moments = request.moments, began = moments[0].at_s;
  const end = moments[moments.length - 1].at_s;
  const spans = moments.slice(0, -1).map((moment, index) => [moment, moments[index + 1].at_s - moment.at_s]);
  const bar = element("div", { class: "bar" }, ...spans.map(([moment, took]) => element("span", {
    class: `s-${moment.step}`, title: `${moment.step} ${seconds(took)}`,
    "data-share": took / (end - began || 1),
  })));
  for (const span of bar.children) span.style.flexGrow = span.dataset.share;
  const rows = moments.map((moment, index) => element("tr", {},
    cell(`+${seconds(moment.at_s - began)}`, "number"),
    cell(element("span", {}, element("span", { class: `key s-${moment.step}` }), moment.step)),
    cell(moment.instance), cell(index < spans.length ? seconds(spans[index][1]) : "", "number"),
    cell(moment.note, "text")));
  const head = ["at", "step", "instance", "took", ""].map((text) => element("th", {}, text));
  byId("timeline").replaceChildren(
    element("strong", {}, request.id),
    ` ${request.num_prompt_tokens} prompt tokens, ${request.num_cached_tokens} of them cached,`,
    ` ${request.num_output_tokens} tokens out, attempts: ${request.num_attempts}, moves: ${request.num_moves}`, bar,
    element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows)));
  byId("timeline").hidden = false;
}

function draw(state) {
  // Prefill before decode, as a request goes.
  state.instances.sort((a, b) => b.role.localeCompare(a.role) || a.name.localeCompare(b.name, "en", { numeric: true }));
  byId("model").textContent = state.model;
  const { finished, aborted, failed, rejected, refused } = state.num_ended;
  byId("totals").textContent =
    `${finished} finished, ${aborted} aborted, ${failed} failed, ${rejected} rejected, ${refused} refused`;
  drawInstances(state);
  drawStrips(state);
  drawMoves(state);
  drawDecisions(state);
  drawPicture(state);
  drawPaths(state);
  drawContexts(state);
  drawRequests(state);
  drawRejections(state);
}

// Return the parsed answer; null if it has not changed since the last call. Throws an Error.
async function ask(path) {
  const answer = await fetch(path, { headers: etags[path] ? { "if-none-match": etags[path] } : {} });
  if (answer.status === 304) return null;
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error.message);
  etags[path] = answer.headers.get("etag");
  return body;
}

async function showTimeline() {
  if (shownRequest === null || shownIsOver) return;
  const id = shownRequest, path = `dashboard/requests/${encodeURIComponent(id)}`;
  let request = null, problem = null;
  try {
    request = await ask(path);
  } catch (error) {
    problem = error.message;
    delete etags[path]; // the message hides the timeline, so it must be drawn again even if it has not changed
  }
  if (id !== shownRequest) return; // another request was picked meanwhile
  if (problem !== null) {
    byId("timeline").textContent = problem;
    byId("timeline").hidden = false;
  } else if (request !== null) {
    drawTimeline(request);
    shownIsOver = request.is_over;
  }
}

function show(id) {
  shownRequest = id;
  shownIsOver = false;
  delete etags[`dashboard/requests/${encodeURIComponent(id)}`];
  showTimeline();
}

async function poll() {
  const connection = byId("connection");
  try {
    const state = (await ask("dashboard/state")) ?? past[past.length - 1].state;
    const at = performance.now();
    past.push({ at, state });
    while (past.length > 2 && at - past[1].at > RATE_WINDOW_MS) past.shift();
    draw(state);
    await showTimeline();
    connection.textContent = "live";
    connection.className = "";
  } catch {
    connection.textContent = "the conductor does not answer";
    connection.className = "lost";
  }
  setTimeout(poll, document.hidden ? 5 * PERIOD_MS : PERIOD_MS);
}

byId("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = new FormData(event.target).get("id").trim();
  if (id) show(id);
});
poll();
