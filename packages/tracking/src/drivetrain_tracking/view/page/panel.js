// A panel: the curves of one metric, with zoom and values at the pointer, by mouse and by keyboard.

import { MARGIN, colorOf, drawAxes, drawCurve, drawMarks, line, prepare } from "/drawing.js";
import { nearestPoints } from "/nearest.js";
import { makeScale, valueRange } from "/scale.js";
import { element, formatPosition, formatterOf, nameElement, visible } from "/text.js";

const LEAST_DRAG = 5; // pixels; less is a click

export class Panel {
  // `view` holds what all panels share: axis, smoothing, isLogarithmic, low and high; `actions` are zoom, reset, point.
  constructor(metric, view, actions) {
    this.metric = metric;
    this.format = formatterOf(metric);
    this.view = view;
    this.actions = actions;
    this.answer = null;
    this.labels = new Map();
    this.cursor = null;
    this.drag = null;
    this.canvas = element("canvas", { tabindex: "0", role: "img" });
    this.note = element("p", { class: "note" });
    this.tip = element("div", { class: "tip", hidden: true });
    this.spoken = element("output", { class: "spoken", "aria-live": "polite" });
    const heading = element("div", { class: "heading" }, element("h3", { class: "name" }, nameElement(metric)), this.note);
    this.root = element("section", { class: "panel", "aria-label": visible(metric) }, heading, this.canvas, this.tip, this.spoken);
    this.listen();
  }

  get columns() {
    return Math.max(1, Math.min(4096, Math.round(this.canvas.clientWidth - MARGIN.left - MARGIN.right)));
  }

  show(answer, labels) {
    this.answer = answer;
    this.labels = labels;
    this.draw();
  }

  draw() {
    const { context, width, height } = prepare(this.canvas);
    const curves = this.answer?.curves ?? [];
    const { low, high, axis, smoothing, isLogarithmic } = this.view;
    const pieces = curves.flatMap((curve) => curve.pieces);
    const [least, most] = valueRange(pieces, low, high, isLogarithmic);
    const ends = low < high ? [low, high] : [low - 0.5, high + 0.5];
    this.xScale = makeScale(...ends, MARGIN.left, width - MARGIN.right);
    this.yScale = makeScale(least, most, height - MARGIN.bottom, MARGIN.top, isLogarithmic);
    drawAxes(context, width, height, this.xScale, this.yScale, axis, this.format);
    context.save();
    context.beginPath();
    context.rect(MARGIN.left, MARGIN.top - 4, width - MARGIN.left - MARGIN.right, height - MARGIN.top - MARGIN.bottom + 8);
    context.clip();
    for (const curve of curves) drawCurve(context, curve, this.xScale, this.yScale, smoothing);
    for (const curve of curves) drawMarks(context, curve, this.xScale, height);
    this.drawPointer(context, height);
    context.restore();
    this.describe(curves, pieces, least, most);
  }

  drawPointer(context, height) {
    const style = getComputedStyle(document.documentElement);
    if (this.drag !== null) {
      context.fillStyle = `${style.getPropertyValue("--accent").trim()}33`;
      context.fillRect(this.drag.from, MARGIN.top, this.drag.to - this.drag.from, height - MARGIN.top - MARGIN.bottom);
    }
    if (this.cursor === null) return;
    const at = this.xScale.toPixel(this.cursor);
    context.strokeStyle = style.getPropertyValue("--quiet");
    context.setLineDash([2, 3]);
    line(context, at, MARGIN.top, at, height - MARGIN.bottom);
    context.setLineDash([]);
    for (const point of nearestPoints(this.answer?.curves ?? [], this.cursor)) {
      if (this.yScale.isLogarithmic && point.y <= 0) continue;
      context.fillStyle = colorOf(point.run);
      context.beginPath();
      context.arc(this.xScale.toPixel(point.x), this.yScale.toPixel(point.y), 3.5, 0, 2 * Math.PI);
      context.fill();
    }
  }

  // Say in words what the picture shows, for those who do not see it.
  describe(curves, pieces, least, most) {
    const { low, high, axis, isLogarithmic } = this.view;
    const counts = ["nan", "inf", "-inf"].map((kind) => [kind, curves.reduce((sum, curve) => sum + curve.marks[kind].length, 0)]);
    const marks = counts.filter(([, count]) => count > 0).map(([kind]) => ({ nan: "× NaN", inf: "▲ infinite", "-inf": "▼ infinite" })[kind]);
    const hidden = isLogarithmic ? pieces.some((piece) => piece.y.some((value) => value <= 0)) : false;
    if (hidden) marks.push("values ≤ 0 not shown");
    if (pieces.some((piece) => piece.is_replaced)) marks.push("┄ logged again");
    this.note.textContent = marks.join(" · ");
    const range = pieces.length > 0 ? `, values from ${this.format(least)} to ${this.format(most)}` : "";
    const said = `${visible(this.metric)}: ${curves.length} ${curves.length === 1 ? "curve" : "curves"}, `
      + `${formatPosition(axis, low)} to ${formatPosition(axis, high)}${range}${marks.length > 0 ? `; ${marks.join(", ")}` : ""}. `
      + "Arrow keys read values, plus and minus zoom, Escape resets.";
    this.canvas.setAttribute("aria-label", said);
  }

  point(position) {
    this.cursor = position;
    if (this.answer !== null) this.draw();
  }

  showTip(pixel) {
    const points = this.cursor === null ? [] : nearestPoints(this.answer?.curves ?? [], this.cursor);
    this.tip.hidden = points.length === 0;
    if (points.length === 0) return;
    const rows = points.map((point) => {
      const swatch = element("span", { class: "swatch" });
      swatch.style.background = colorOf(point.run);
      const label = this.labels.get(point.run) ?? "";
      const replaced = point.isReplaced ? ` (attempt ${point.attempt}, logged again)` : "";
      return element("li", {}, swatch, nameElement(label + replaced), element("span", { class: "value" }, this.format(point.y)));
    });
    const title = formatPosition(this.view.axis, points[0].x);
    this.tip.replaceChildren(element("p", {}, title), element("ul", {}, ...rows));
    this.tip.style.left = `${Math.min(pixel + 16, Math.max(0, this.root.clientWidth - this.tip.offsetWidth - 8))}px`;
    this.tip.style.top = `${this.canvas.offsetTop + 12}px`;
  }

  say() {
    const points = nearestPoints(this.answer?.curves ?? [], this.cursor);
    const said = points.map((point) => `${visible(this.labels.get(point.run) ?? "", 60)} ${this.format(point.y)}`);
    this.spoken.textContent = points.length > 0 ? `${formatPosition(this.view.axis, points[0].x)}: ${said.join(", ")}` : "";
  }

  listen() {
    const pixelOf = (event) => event.clientX - this.canvas.getBoundingClientRect().left;
    this.canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || this.answer === null) return;
      this.canvas.setPointerCapture(event.pointerId);
      this.drag = { from: pixelOf(event), to: pixelOf(event) };
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (this.answer === null) return;
      if (this.drag !== null) this.drag.to = pixelOf(event);
      this.actions.point(Math.min(Math.max(this.xScale.toValue(pixelOf(event)), this.view.low), this.view.high));
      this.showTip(pixelOf(event));
    });
    this.canvas.addEventListener("pointerup", () => {
      const drag = this.drag;
      this.drag = null;
      if (drag === null || Math.abs(drag.to - drag.from) < LEAST_DRAG) return;
      this.zoomTo(...[drag.from, drag.to].sort((a, b) => a - b).map((pixel) => this.xScale.toValue(pixel)));
    });
    this.canvas.addEventListener("pointercancel", () => { this.drag = null; });
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; this.actions.point(null); });
    this.canvas.addEventListener("dblclick", () => this.actions.reset());
    this.canvas.addEventListener("keydown", (event) => this.press(event));
    this.canvas.addEventListener("blur", () => { this.tip.hidden = true; this.actions.point(null); });
  }

  zoomTo(low, high) {
    const from = Math.max(low, this.view.low);
    const to = Math.min(high, this.view.high);
    if (to > from) this.actions.zoom(from, to);
  }

  press(event) {
    if (this.answer === null || event.ctrlKey || event.metaKey || event.altKey) return;
    const { low, high } = this.view;
    const at = this.cursor ?? (low + high) / 2;
    const span = high - low;
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move !== undefined) {
      const next = at + move * span * (event.shiftKey ? 0.1 : 0.01);
      this.actions.point(this.cursor === null ? at : Math.min(Math.max(next, low), high));
      this.showTip(this.xScale.toPixel(this.cursor));
      this.say();
    } else if (event.key === "+" || event.key === "=") {
      this.zoomTo(at - span / 4, at + span / 4);
    } else if (event.key === "-") {
      this.actions.zoom(at - span, at + span);
    } else if (event.key === "Escape" || event.key === "0") {
      this.actions.reset();
    } else {
      return;
    }
    event.preventDefault();
  }
}
