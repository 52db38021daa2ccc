// Asks the frontend once a second and shows what it says.

import { bytes, count, duration, make, percent } from "./elements.js";
import { joinRequests, showRequests } from "./requests.js";
import { joinWorkers, showWorkers } from "./workers.js";

const EVERY = 1000;
const LONGEST_PAUSE = 10000;
const PATIENCE = 5000;
const KEY = "foveal-api-key";

const byId = (id) => document.getElementById(id);
let pause = EVERY;
let heard = null;
let timer = 0;

class Asked extends Error {
  constructor(status) {
    super(`status ${status}`);
    this.status = status;
  }
}

async function ask(path) {
  const key = sessionStorage.getItem(KEY);
  const response = await fetch(path, {
    headers: key ? { Authorization: `Bearer ${key}` } : {},
    cache: "no-store",
    signal: AbortSignal.timeout(PATIENCE),
  });
  if (!response.ok) throw new Asked(response.status);
  return response;
}

async function fetchPicture(request, index) {
  try {
    const place = `${request.frontend}/${request.number}/${index}`;
    return await (await ask(`v1/dashboard/pictures/${place}`)).blob();
  } catch {
    return null; // too old by now
  }
}

function median(numbers) {
  const sorted = [...numbers].sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor(sorted.length / 2)] : null;
}

function total(term, value, note) {
  return make("div", {},
    make("dt", { text: term }), make("dd", { text: value }), make("dd", { class: "note", text: note }));
}

function showTotals(frontends, workers, requests) {
  const ready = workers.filter((worker) => worker.ready && !worker.draining).length;
  const inFlight = frontends.reduce((sum, each) => sum + each.requests, 0);
  const told = requests.filter((request) => request.cached_tokens !== null);
  const prompt = told.reduce((sum, request) => sum + request.prompt_tokens, 0);
  const cached = told.reduce((sum, request) => sum + request.cached_tokens, 0);
  const first = requests.map((r) => r.first_token_seconds).filter((s) => s !== null);
  const arenas = frontends.map((each) => each.arena).filter(Boolean);
  const used = arenas.reduce((sum, arena) => sum + arena.bytes_used, 0);
  const size = arenas.reduce((sum, arena) => sum + arena.bytes_total, 0);
  byId("totals").replaceChildren(
    total("Workers ready", `${ready} of ${workers.length}`, frontends.length > 1
      ? `${frontends.length} frontends` : "1 frontend"),
    total("In flight", count(inFlight), inFlight === 1 ? "request" : "requests"),
    total("Taken from cache", percent(cached, prompt), `of ${count(prompt)} prompt tokens`),
    total("First token", duration(median(first)), `median of the last ${count(first.length)}`),
    total("Arena", size ? bytes(used) : "none", size ? `of ${bytes(size)}` : "pictures go inline"),
  );
}

function show(frontends) {
  const workers = joinWorkers(frontends);
  const requests = joinRequests(frontends);
  const names = workers.map((worker) => worker.id);
  const facts = workers.find((worker) => worker.facts.model)?.facts ?? {};
  byId("about").textContent = [
    facts.model?.split("/").pop(),
    facts.engine === "mock" ? "mock engines: answers are made up" : null,
    `router: ${frontends[0].router_mode}`,
  ].filter(Boolean).join(" · ");
  showTotals(frontends, workers, requests);
  showWorkers(byId("workers"), workers);
  showRequests(byId("requests"), requests, names, fetchPicture);
  byId("no-workers").hidden = workers.length > 0;
  byId("no-requests").hidden = requests.length > 0;
  byId("columns").hidden = requests.length === 0;
}

function report(state, words, problem = "") {
  byId("connection").dataset.state = state;
  byId("connection").textContent = words;
  byId("problem").hidden = !problem;
  byId("problem").textContent = problem;
  document.querySelector("main").classList.toggle("old", state !== "live");
}

function explain(error) {
  if (error.status === 401 || error.status === 403) {
    sessionStorage.removeItem(KEY);
    byId("key-form").hidden = false;
    document.querySelector("main").hidden = true;
    report("locked", "locked");
    return false;
  }
  const since = heard ? ` What is shown is of ${heard.toLocaleTimeString()}.` : "";
  if (error.status === 503) {
    report("crowded", "waiting", `Too many dashboards are open. Trying again.${since}`);
  } else if (error.status) {
    report("lost", "error", `The frontend answers with status ${error.status}.${since}`);
  } else {
    report("lost", "disconnected", `The frontend does not answer. Trying again.${since}`);
  }
  return true;
}

async function turn() {
  clearTimeout(timer);
  if (document.hidden) return; // asked again when it is looked at
  let again = true;
  try {
    const frontends = await (await ask("v1/dashboard/state")).json();
    show(frontends);
    heard = new Date();
    pause = EVERY;
    byId("key-form").hidden = true;
    document.querySelector("main").hidden = false;
    report("live", "live");
  } catch (error) {
    again = explain(error);
    pause = Math.min(LONGEST_PAUSE, pause * 1.5);
  }
  clearTimeout(timer);
  if (again) timer = setTimeout(turn, pause);
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value);
  byId("key").value = "";
  turn();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) turn();
});
window.addEventListener("online", turn);
turn();
