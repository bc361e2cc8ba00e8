// Show text from logs as text: names may hold markup, or characters that turn the direction of what follows.

const MISLEADING = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
const LONGEST = 400; // of a name in the page; the whole one would be 10,000 characters of a tooltip

// Return a name with control characters and direction marks spelt out, and shortened.
export function visible(text, longest = LONGEST) {
  const code = (found) => `⟨U+${found.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;
  const shown = String(text).slice(0, longest).replace(MISLEADING, code);
  return text.length > longest ? `${shown}…` : shown;
}

// Make an element. Strings among the children become text nodes; nothing is ever parsed as markup.
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in made && typeof value !== "string") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// Make an element of a name, which breaks into lines behind a slash.
export function nameElement(text) {
  const parts = visible(text).split(/(?<=\/)/);
  const broken = parts.flatMap((part, i) => (i ? [element("wbr"), part] : [part]));
  return element("span", { class: "name", dir: "ltr", title: visible(text) }, ...broken);
}

// Format a number for people: five significant digits, an exponent where it is shorter.
export function formatNumber(value) {
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(Number(value.toPrecision(5)));
}

export function formatBytes(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  let size = bytes;
  while (size >= 1000 && unit < units.length - 1) { size /= 1000; unit += 1; }
  return `${Number(size.toPrecision(4))} ${units[unit]}`;
}

// Return how the values of a metric are written: sizes with their units.
export function formatterOf(metric) {
  return /(^|[/_])bytes$/.test(metric) ? formatSize : formatNumber;
}

function formatSize(value) {
  return Number.isFinite(value) && value >= 1000 ? formatBytes(value) : formatNumber(value);
}

export function formatSeconds(seconds) {
  const sign = seconds < 0 ? "-" : "";
  const size = Math.abs(seconds);
  if (size < 60) return `${sign}${Number(size.toPrecision(3))} s`;
  const whole = Math.round(size);
  const pad = (part) => String(part).padStart(2, "0");
  const hours = Math.floor(whole / 3600);
  const rest = `${pad(Math.floor(whole / 60) % 60)}:${pad(whole % 60)}`;
  return `${sign}${hours >= 24 ? `${Math.floor(hours / 24)} d ` : ""}${hours % 24}:${rest}`;
}

export function formatPosition(axis, x) {
  if (axis === "time") return new Date(x * 1000).toLocaleString();
  if (axis === "relative") return formatSeconds(x);
  return `step ${Math.abs(x) < 100 ? formatNumber(x) : Math.round(x)}`; // whole steps: 9,999,999 is not 1e7
}
