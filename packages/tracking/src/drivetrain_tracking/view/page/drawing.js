// Draw the axes and curves of one panel on a canvas.

import { durationTicks, linearTicks, logarithmicTicks } from "/scale.js";
import { smooth } from "/smoothing.js";
import { formatNumber, formatSeconds } from "/text.js";

export const MARGIN = { left: 60, right: 12, top: 10, bottom: 22 };
const LIGHT = ["#2563eb", "#e8590c", "#2f9e44", "#9c36b5", "#d6336c", "#0c8599", "#b7791f", "#5f3dc4", "#495057", "#66800b"];
const DARK = ["#74a9ff", "#ff9f5a", "#69db7c", "#da77f2", "#ff8fab", "#3bc9db", "#ffd43b", "#a78bfa", "#ced4da", "#a9e34b"];
const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]]; // beyond ten runs, a colour comes again with other dashes

export function colorOf(run) {
  const colors = matchMedia("(prefers-color-scheme: dark)").matches ? DARK : LIGHT;
  return colors[run % colors.length];
}

function dashOf(run) {
  return DASHES[Math.floor(run / LIGHT.length) % DASHES.length];
}

// Make the canvas as sharp as the screen, and return its context in CSS pixels.
export function prepare(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  const ratio = window.devicePixelRatio || 1;
  const [wide, high] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== wide || canvas.height !== high) [canvas.width, canvas.height] = [wide, high];
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

export function drawAxes(context, width, height, xScale, yScale, axis, format) {
  const style = getComputedStyle(document.documentElement);
  const [grid, quiet] = [style.getPropertyValue("--grid"), style.getPropertyValue("--quiet")];
  context.font = '11px system-ui, "DejaVu Sans", sans-serif';
  context.lineWidth = 1;
  context.strokeStyle = grid;
  context.fillStyle = quiet;
  context.textAlign = "right";
  context.textBaseline = "middle";
  const ticks = yScale.isLogarithmic ? logarithmicTicks : linearTicks;
  for (const tick of ticks(yScale.low, yScale.high, Math.max(3, height / 40))) {
    const y = Math.round(yScale.toPixel(tick)) + 0.5;
    if (y < MARGIN.top - 1 || y > height - MARGIN.bottom + 1) continue;
    line(context, MARGIN.left, y, width - MARGIN.right, y);
    context.fillText(format(tick), MARGIN.left - 6, y);
  }
  context.textAlign = "center";
  context.textBaseline = "top";
  const places = axis === "relative" ? durationTicks : linearTicks;
  for (const tick of places(xScale.low, xScale.high, Math.max(2, width / 110))) {
    const x = Math.round(xScale.toPixel(tick)) + 0.5;
    line(context, x, MARGIN.top, x, height - MARGIN.bottom);
    const label = labelOf(axis, tick, xScale);
    const half = context.measureText(label).width / 2;
    context.fillText(label, Math.min(Math.max(x, half + 2), width - half - 2), height - MARGIN.bottom + 6);
  }
}

function labelOf(axis, tick, scale) {
  if (axis === "relative") return formatSeconds(tick);
  if (axis === "step") return tick >= 1e6 ? `${formatNumber(tick / 1e6)}M` : formatNumber(tick);
  const when = new Date(tick * 1000);
  const isLong = scale.high - scale.low > 86400 * 2;
  return isLong ? when.toLocaleDateString() : when.toLocaleTimeString();
}

// Draw one curve: replaced attempts dimmed, the values faint behind their average if they are smoothed.
export function drawCurve(context, curve, xScale, yScale, smoothing) {
  const color = colorOf(curve.run);
  for (const piece of curve.pieces) {
    const isSmoothed = smoothing > 0 && !piece.is_replaced;
    strokePath(context, piece.x, piece.y, xScale, yScale, {
      color, dash: piece.is_replaced ? [3, 3] : dashOf(curve.run), alpha: piece.is_replaced || isSmoothed ? 0.28 : 1, width: isSmoothed ? 1 : 1.6,
    });
    if (isSmoothed) {
      const [x, y] = piece.mean_x === null ? [piece.x, piece.y] : [piece.mean_x, piece.mean_y];
      strokePath(context, x, smooth(y, smoothing), xScale, yScale, { color, dash: dashOf(curve.run), alpha: 1, width: 2 });
    }
  }
}

function strokePath(context, xs, ys, xScale, yScale, { color, dash, alpha, width }) {
  context.save();
  context.globalAlpha = alpha;
  context.strokeStyle = context.fillStyle = color;
  context.lineWidth = width;
  context.lineJoin = "round";
  context.setLineDash(dash);
  context.beginPath();
  let isOpen = false;
  let drawn = 0;
  for (let index = 0; index < xs.length; index += 1) {
    if (yScale.isLogarithmic && ys[index] <= 0) { isOpen = false; continue; }
    const [x, y] = [xScale.toPixel(xs[index]), yScale.toPixel(ys[index])];
    if (isOpen) context.lineTo(x, y);
    else context.moveTo(x, y);
    isOpen = true;
    drawn += 1;
  }
  context.stroke();
  if (drawn > 0 && xs.length <= 40) {
    for (let index = 0; index < xs.length; index += 1) {
      if (yScale.isLogarithmic && ys[index] <= 0) continue;
      context.beginPath();
      context.arc(xScale.toPixel(xs[index]), yScale.toPixel(ys[index]), 2.4, 0, 2 * Math.PI);
      context.fill();
    }
  }
  context.restore();
}

// Draw values that are not finite at the edges: a cross for NaN, triangles for the infinities.
export function drawMarks(context, curve, xScale, height) {
  const [top, bottom] = [MARGIN.top + 5, height - MARGIN.bottom - 5];
  context.save();
  context.strokeStyle = context.fillStyle = colorOf(curve.run);
  context.lineWidth = 1.8;
  for (const x of curve.marks.nan) {
    const at = xScale.toPixel(x);
    line(context, at - 4, bottom - 4, at + 4, bottom + 4);
    line(context, at - 4, bottom + 4, at + 4, bottom - 4);
  }
  for (const [kind, y, tip] of [["inf", top, -5], ["-inf", bottom, 5]]) {
    for (const x of curve.marks[kind]) {
      const at = xScale.toPixel(x);
      context.beginPath();
      context.moveTo(at - 5, y - tip);
      context.lineTo(at + 5, y - tip);
      context.lineTo(at, y + tip);
      context.fill();
    }
  }
  context.restore();
}

export function line(context, fromX, fromY, toX, toY) {
  context.beginPath();
  context.moveTo(fromX, fromY);
  context.lineTo(toX, toY);
  context.stroke();
}
