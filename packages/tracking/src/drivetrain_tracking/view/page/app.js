// The page: follows the runs, and shows those that are chosen.

import { askCurves, askRuns } from "/api.js";
import { showMetrics, showRuns } from "/choices.js";
import { Panel } from "/panel.js";
import { showDetails, showDifferences } from "/tables.js";
import { formatBytes } from "/text.js";

const POLL_MILLISECONDS = 1000;
const MOST_RUNS_AT_FIRST = 10;
const MOST_PANELS_AT_FIRST = 12;
const SYSTEM = /^(throughput|memory|system|power|gpu)\//;
const get = (id) => document.getElementById(id);

const view = { axis: "step", smoothing: 0, isLogarithmic: false, low: 0, high: 1 };
const tables = { differences: { first: 0, second: 1, isShort: true }, details: { shown: 0 } };
let runs = [];
let range = null; // what was zoomed to
let shownView = "curves";
let versions = "";
let tick = 0;
const chosenRuns = new Set();
const chosenMetrics = new Set();
const knownRuns = new Set();
const knownMetrics = new Set();
const panels = new Map();

// The metrics of the chosen runs with their numbers of values: losses first, then as they came.
function metricsOfRuns() {
  const counts = new Map();
  for (const run of runs.filter((one) => chosenRuns.has(one.id))) {
    for (const [name, count] of Object.entries(run.metrics)) counts.set(name, (counts.get(name) ?? 0) + count);
  }
  const rank = ([name]) => (/(^|[/_ ])loss$/.test(name) ? 0 : 1);
  return [...counts].sort((a, b) => rank(a) - rank(b));
}

// Choose what is new: the first runs, and the first metrics of each side.
function chooseNew(metrics) {
  for (const name of metrics.map(([one]) => one)) {
    if (knownMetrics.has(name)) continue;
    knownMetrics.add(name);
    const beside = [...chosenMetrics].filter((one) => SYSTEM.test(one) === SYSTEM.test(name));
    if (beside.length < MOST_PANELS_AT_FIRST / (SYSTEM.test(name) ? 2 : 1)) chosenMetrics.add(name);
  }
}

function chooseNewRuns() {
  for (const run of runs) {
    if (!knownRuns.has(run.id) && chosenRuns.size < MOST_RUNS_AT_FIRST) chosenRuns.add(run.id);
    knownRuns.add(run.id);
  }
}

// Make, order and remove panels, so that there is one for each chosen metric.
function arrangePanels(metrics) {
  const wanted = metrics.map(([name]) => name).filter((name) => chosenMetrics.has(name));
  for (const [name, panel] of panels) {
    if (wanted.includes(name)) continue;
    panel.root.remove();
    panels.delete(name);
  }
  const next = new Map([["panels", get("panels").firstElementChild], ["system", get("system").firstElementChild]]);
  for (const name of wanted) {
    if (!panels.has(name)) panels.set(name, new Panel(name, view, actions));
    const { root } = panels.get(name);
    const place = SYSTEM.test(name) ? "system" : "panels";
    // An element that stands right already is not moved, for it would lose the focus.
    if (root === next.get(place)) next.set(place, root.nextElementSibling);
    else get(place).insertBefore(root, next.get(place));
  }
  const sides = ["panels", "system"].map((id) => get(id).childElementCount > 0);
  get("view-curves").classList.toggle("single", !(sides[0] && sides[1]));
  get("nothing").hidden = sides[0] || sides[1];
}

// Ask for the curves of all panels, and draw them over one x axis.
async function refreshCurves() {
  tick += 1;
  const asked = tick;
  const ids = runs.filter((run) => chosenRuns.has(run.id)).map((run) => run.id);
  const labels = new Map(runs.map((run) => [run.id, run.label]));
  const there = [...panels.values()];
  const answers = await Promise.all(there.map((panel) => askCurves(panel.metric, ids, view.axis, range, panel.columns)));
  if (asked !== tick) return; // a newer question is on its way
  const filled = answers.filter((answer) => answer.curves.length > 0);
  [view.low, view.high] = range ?? (filled.length > 0
    ? [Math.min(...filled.map((answer) => answer.low)), Math.max(...filled.map((answer) => answer.high))]
    : [0, 1]);
  there.forEach((panel, index) => panel.show(answers[index], labels));
}

const actions = {
  point(position) { for (const panel of panels.values()) panel.point(position); },
  zoom(low, high) { range = [low, high]; get("reset").disabled = false; guard(refreshCurves()); },
  reset() { range = null; get("reset").disabled = true; guard(refreshCurves()); },
};

function showLists() {
  const metrics = metricsOfRuns();
  chooseNew(metrics);
  showRuns(get("runs"), runs, chosenRuns, (id, isChosen) => { toggle(chosenRuns, id, isChosen); update(); });
  showMetrics(get("metrics"), metrics, chosenMetrics, get("filter").value, (name, isChosen) => { toggle(chosenMetrics, name, isChosen); update(); });
  return metrics;
}

function toggle(set, item, isIn) {
  if (isIn) set.add(item);
  else set.delete(item);
}

function showProgress() {
  const sum = (name) => runs.reduce((total, run) => total + run[name], 0);
  const [read, size] = [sum("read_bytes"), sum("size_bytes")];
  const isLoading = size - read > 1e6;
  get("progress").hidden = !isLoading;
  get("progress").value = size > 0 ? read / size : 1;
  const count = `${runs.length} ${runs.length === 1 ? "run" : "runs"}`;
  get("status").textContent = isLoading ? `${count}, reading ${formatBytes(read)} of ${formatBytes(size)}` : count;
  return isLoading;
}

async function update() {
  const metrics = showLists();
  arrangePanels(metrics);
  if (shownView === "curves") await guard(refreshCurves());
}

// An error is shown where the state is shown; the page goes on asking.
async function guard(work) {
  try {
    await work;
  } catch (error) {
    get("status").textContent = error instanceof TypeError ? "the server does not answer: is the command still running?" : String(error.message);
    versions = "";
  }
}

async function poll() {
  await guard((async () => {
    runs = await askRuns();
    chooseNewRuns();
    const isLoading = showProgress();
    const now = runs.map((run) => run.version).join();
    if (now !== versions) {
      versions = now;
      await update();
    }
    document.body.dataset.state = isLoading ? "loading" : "ready";
  })());
  setTimeout(poll, POLL_MILLISECONDS);
}

function showView(name) {
  shownView = name;
  for (const button of document.querySelectorAll("nav button")) button.setAttribute("aria-pressed", String(button.dataset.view === name));
  for (const one of ["curves", "differences", "details"]) get(`view-${one}`).hidden = one !== name;
  get("controls").hidden = get("metric-choice").hidden = name !== "curves";
  if (name === "differences") guard(showDifferences(get("view-differences"), runs, tables.differences));
  else if (name === "details") guard(showDetails(get("view-details"), runs, tables.details));
  else guard(refreshCurves());
}

function redraw() {
  for (const panel of panels.values()) panel.draw();
}

get("axis").addEventListener("change", (event) => { view.axis = event.target.value; actions.reset(); });
get("smoothing").addEventListener("input", (event) => {
  view.smoothing = Number(event.target.value);
  get("smoothing-value").value = event.target.value;
  redraw();
});
get("logarithmic").addEventListener("change", (event) => { view.isLogarithmic = event.target.checked; redraw(); });
get("reset").addEventListener("click", () => actions.reset());
get("filter").addEventListener("input", showLists);
for (const button of document.querySelectorAll("nav button")) button.addEventListener("click", () => showView(button.dataset.view));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { showLists(); redraw(); });
let resized = 0;
window.addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(() => guard(refreshCurves()), 150);
});
poll();
