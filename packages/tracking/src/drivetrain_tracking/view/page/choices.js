// The lists at the side: which runs and which metrics are shown.

import { colorOf } from "/drawing.js";
import { element, formatBytes, nameElement, visible } from "/text.js";

const ENDS = {
  failed: "failed: it ended by an error, or without saying that it is finished",
  killed: "killed: it was stopped before its end",
};
const MOST_LISTED = 500; // metrics; the filter finds the others

// Return what is to be told of a run: [text, is it a warning].
export function notesOf(run) {
  const notes = [];
  const plural = (count, noun) => `${count.toLocaleString()} ${noun}${count === 1 ? "" : "s"}`;
  if (run.run && run.run !== run.label) notes.push([visible(run.run, 80), false]);
  if (run.read_bytes < run.size_bytes * 0.999 && run.size_bytes - run.read_bytes > 1e6) {
    notes.push([`reading: ${formatBytes(run.read_bytes)} of ${formatBytes(run.size_bytes)}`, false]);
  }
  if (run.attempt > 1) notes.push([`attempt ${run.attempt}: steps were logged again`, false]);
  if (run.ended in ENDS) notes.push([ENDS[run.ended], true]);
  if (run.problem) notes.push([run.problem, true]);
  if (run.num_damaged > 0) notes.push([`${plural(run.num_damaged, "damaged line")} passed over`, true]);
  if (run.num_foreign > 0) notes.push([`${plural(run.num_foreign, "line")} of another kind passed over`, true]);
  if (run.num_lost > 0) notes.push([`${plural(run.num_lost, "record")} lost by the run, its disk was full`, true]);
  if (run.num_left_out > 0) notes.push([`${plural(run.num_left_out, "value")} left out: steps fell back too often`, true]);
  return notes;
}

function choice(name, isChosen, change, ...beside) {
  const box = element("input", { type: "checkbox", checked: isChosen });
  box.addEventListener("change", () => change(box.checked));
  return element("label", {}, box, ...beside.slice(0, -1), nameElement(name), beside.at(-1) ?? "");
}

// Replace a list's content, and keep the focus where it was: the list is made anew while a run goes on.
function replaceItems(list, items) {
  const boxes = () => [...list.querySelectorAll("input")];
  const focused = boxes().indexOf(document.activeElement);
  list.replaceChildren(...items);
  if (focused >= 0) boxes()[focused]?.focus();
}

export function showRuns(list, runs, chosen, change) {
  replaceItems(list, runs.map((run) => {
    const swatch = element("span", { class: "swatch" });
    swatch.style.background = colorOf(run.id);
    const state = run.ended ? "" : element("span", { class: "count" }, "●");
    if (state) state.title = "goes on, or was stopped without an end";
    const label = choice(run.label, chosen.has(run.id), (isChosen) => change(run.id, isChosen), swatch, state);
    const notes = notesOf(run).map(([text, isWarning]) => element("p", { class: isWarning ? "note warn" : "note" }, text));
    return element("li", {}, label, ...notes);
  }));
}

export function showMetrics(list, metrics, chosen, filter, change) {
  const wanted = filter.toLowerCase();
  const found = metrics.filter(([name]) => name.toLowerCase().includes(wanted));
  const items = found.slice(0, MOST_LISTED).map(([name, count]) => element(
    "li", {}, choice(name, chosen.has(name), (isChosen) => change(name, isChosen), element("span", { class: "count" }, count.toLocaleString())),
  ));
  if (found.length > MOST_LISTED) items.push(element("li", { class: "note" }, `${found.length - MOST_LISTED} more: filter them`));
  replaceItems(list, items);
}
