// The views beside the curves: what differs between two runs, and what is known of one.

import { askDetails, askDifferences, mediumAddress } from "/api.js";
import { element, nameElement, visible } from "/text.js";

const LONGEST_VALUE = 5000;

function table(title, header, rows) {
  const head = element("thead", {}, element("tr", {}, ...header.map((text) => element("th", { scope: "col" }, visible(text, 120)))));
  return element("table", {}, element("caption", {}, title), head, element("tbody", {}, ...rows));
}

function chooser(label, runs, chosen, change) {
  const options = runs.map((run) => element("option", { value: String(run.id), selected: run.id === chosen }, visible(run.label, 120)));
  const select = element("select", {}, ...options);
  select.addEventListener("change", () => change(Number(select.value)));
  return element("label", {}, `${label} `, select);
}

const cell = (value) => (value === null
  ? element("td", { class: "absent" }, "not there")
  : element("td", {}, visible(value, LONGEST_VALUE)));

// The table of what two runs were started with; `state` holds first, second and isShort.
export async function showDifferences(place, runs, state) {
  if (runs.length < 2) {
    place.replaceChildren(element("p", { class: "empty" }, "Two runs are needed: name more folders, or one that holds several."));
    return;
  }
  const answer = await askDifferences(state.first, state.second);
  const again = (change) => { Object.assign(state, change); showDifferences(place, runs, state); };
  const short = element("input", { type: "checkbox", checked: state.isShort });
  short.addEventListener("change", () => again({ isShort: short.checked }));
  const controls = element(
    "div", { class: "chooser" },
    chooser("First run", runs, state.first, (first) => again({ first })),
    chooser("Second run", runs, state.second, (second) => again({ second })),
    element("label", {}, short, " Only differences"),
  );
  const labels = [state.first, state.second].map((id) => runs.find((run) => run.id === id)?.label ?? "");
  const tables = [["Configuration", answer.config], ["Plan", answer.plan]].map(([title, compared]) => {
    const shown = compared.filter((row) => row.is_different || !state.isShort);
    const rows = shown.map((row) => element(
      "tr", { class: row.is_different ? "differs" : "same" },
      element("th", { scope: "row" }, visible(row.name)), cell(row.first), cell(row.second),
    ));
    const count = compared.filter((row) => row.is_different).length;
    if (rows.length === 0) return element("p", { class: "empty" }, `${title}: ${compared.length > 0 ? "no differences" : "none was logged"}.`);
    return table(`${title}: ${count} of ${compared.length} differ`, ["Name", ...labels], rows);
  });
  place.replaceChildren(controls, ...tables);
}

function mediumElement(run, medium) {
  const address = mediumAddress(run, medium.id);
  const name = visible(medium.caption || medium.name);
  if (!medium.has_file) {
    return element("pre", {}, visible(typeof medium.data === "string" ? medium.data : JSON.stringify(medium.data, null, 1), LONGEST_VALUE));
  }
  if (medium.kind === "image" || medium.kind === "figure") return element("img", { src: address, alt: name, loading: "lazy" });
  if (medium.kind === "audio") return element("audio", { src: address, controls: true, preload: "none", "aria-label": name });
  if (medium.kind === "video") return element("video", { src: address, controls: true, preload: "none", "aria-label": name });
  return element("a", { href: address, download: "" }, name);
}

// What is known of one run: configuration, plan, surroundings, texts and media; `state` holds shown.
export async function showDetails(place, runs, state) {
  if (runs.length === 0) return;
  const answer = await askDetails(state.shown);
  const change = (shown) => { state.shown = shown; showDetails(place, runs, state); };
  const media = answer.media.reverse().map((medium) => element(
    "figure", {}, nameElement(medium.name), mediumElement(state.shown, medium),
    element("figcaption", {}, [medium.step === null ? "" : `step ${medium.step}`, visible(medium.caption)].filter(Boolean).join(": ")),
  ));
  const titles = [["Configuration", answer.config], ["Plan", answer.plan], ["Surroundings", answer.info], ["Texts", answer.texts]];
  const tables = titles.filter(([, values]) => Object.keys(values).length > 0).map(([title, values]) => table(
    title, ["Name", "Value"],
    Object.entries(values).map(([name, value]) => element("tr", {}, element("th", { scope: "row" }, visible(name)), cell(String(value)))),
  ));
  place.replaceChildren(
    element("div", { class: "chooser" }, chooser("Run", runs, state.shown, change)),
    ...(media.length > 0 ? [element("h2", {}, "Media, newest first"), element("div", { class: "media" }, ...media)] : []),
    ...tables,
  );
}
