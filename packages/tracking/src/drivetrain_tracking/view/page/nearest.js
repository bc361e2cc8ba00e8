// Find the values nearest to a position, for the tip at the pointer.

// Return the index of the number in a sorted list that is nearest to a position; -1 for an empty list.
export function nearestIndex(sorted, position) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < position) low = middle + 1;
    else high = middle;
  }
  if (low === 0) return sorted.length > 0 ? 0 : -1;
  return low < sorted.length && sorted[low] - position < position - sorted[low - 1] ? low : low - 1;
}

// Return the nearest point of each curve: its run, position, value and whether a later attempt replaced it.
export function nearestPoints(curves, position) {
  const found = [];
  for (const curve of curves) {
    let best = null;
    for (const piece of curve.pieces) {
      const index = nearestIndex(piece.x, position);
      if (index < 0) continue;
      const point = { run: curve.run, x: piece.x[index], y: piece.y[index], isReplaced: piece.is_replaced, attempt: piece.attempt };
      const isNearer = best === null || Math.abs(point.x - position) < Math.abs(best.x - position);
      if (isNearer || (best.isReplaced && !point.isReplaced && Math.abs(point.x - position) === Math.abs(best.x - position))) best = point;
    }
    if (best !== null) found.push(best);
  }
  return found;
}
