// Ask the server. All addresses are its own.

async function ask(address, parameters = []) {
  const response = await fetch(`${address}?${new URLSearchParams(parameters)}`);
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

export const askRuns = async () => (await ask("/api/runs")).runs;

export function askCurves(metric, runs, axis, range, columns) {
  const ends = range === null ? [] : [["low", range[0]], ["high", range[1]]];
  return ask("/api/curves", [["metric", metric], ["axis", axis], ["columns", columns], ...ends, ...runs.map((run) => ["run", run])]);
}

export const askDetails = (run) => ask("/api/details", [["run", run]]);

export const askDifferences = (first, second) => ask("/api/differences", [["first", first], ["second", second]]);

export const mediumAddress = (run, medium) => `/media?${new URLSearchParams([["run", run], ["medium", medium]])}`;
