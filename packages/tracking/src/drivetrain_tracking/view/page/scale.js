// Map values to pixels, and choose the numbers that stand at an axis.

// Return a scale of an axis. A logarithmic one takes positive ends.
export function makeScale(low, high, start, end, isLogarithmic = false) {
  const bend = isLogarithmic ? Math.log10 : (value) => value;
  const from = bend(low);
  const span = bend(high) - from || 1;
  return {
    low,
    high,
    isLogarithmic,
    toPixel: (value) => start + ((bend(value) - from) / span) * (end - start),
    toValue: (pixel) => {
      const bent = from + ((pixel - start) / (end - start)) * span;
      return isLogarithmic ? 10 ** bent : bent;
    },
  };
}

// Return round numbers between two ends, about as many as asked for.
export function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(count, 1);
  if (!(rough > 0) || !Number.isFinite(rough)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const ticks = [];
  // The index keeps 0.1 + 0.1 + 0.1 from becoming 0.30000000000000004.
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index += 1) {
    ticks.push(Number((index * step).toPrecision(12)));
  }
  return ticks;
}

// Return powers of ten between two positive ends; linear ticks where there is less than one.
export function logarithmicTicks(low, high, count) {
  const first = Math.ceil(Math.log10(low) - 1e-9);
  const last = Math.floor(Math.log10(high) + 1e-9);
  if (last - first < 1) return linearTicks(low, high, count).filter((tick) => tick > 0);
  const stride = Math.max(1, Math.ceil((last - first + 1) / count));
  const ticks = [];
  for (let exponent = first; exponent <= last; exponent += stride) ticks.push(10 ** exponent);
  return ticks;
}

// Return round durations in seconds: of seconds, minutes, hours, days.
export function durationTicks(low, high, count) {
  const rough = (high - low) / Math.max(count, 1);
  const step = [60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400].find((size) => size >= rough);
  if (rough < 30 || step === undefined) return linearTicks(low, high, count);
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step) ticks.push(tick);
  return ticks;
}

// Return the ends of the y axis for the values that are in the window, with some room around them.
export function valueRange(pieces, low, high, isLogarithmic) {
  let least = Infinity;
  let most = -Infinity;
  for (const { x, y } of pieces) {
    for (let index = 0; index < x.length; index += 1) {
      if (x[index] < low || x[index] > high || (isLogarithmic && y[index] <= 0)) continue;
      least = Math.min(least, y[index]);
      most = Math.max(most, y[index]);
    }
  }
  if (least > most) return isLogarithmic ? [0.1, 1] : [0, 1];
  if (isLogarithmic) return least === most ? [least / 2, most * 2] : [least / 1.1, most * 1.1];
  const room = least === most ? Math.abs(least) * 0.1 || 1 : (most / 2 - least / 2) * 0.1;
  return [Math.max(least - room, -Number.MAX_VALUE), Math.min(most + room, Number.MAX_VALUE)];
}
