"""Every model and optimizer is trained exactly as by a plain loop, or refused in our words; none else.

pytest -m slow tests/sweep --sweep all      # every case, some ten minutes; without, a sample by the commit

refusals.txt lists what is refused, so that what trains today cannot be refused tomorrow without a word. A run of the
sweep writes what it found to build/sweep/refusals.txt.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from checks.commits import drawn_by_commit
from sweep.comparison import WAYS, Outcome, compare
from sweep.model_cases import model_cases
from sweep.optimizer_cases import optimizer_cases

NUM_MODELS, NUM_OPTIMIZERS = 6, 3  # drawn for a commit
# Rounding is a millionth of a step of SGD; adaptive optimizers make more of it where gradients are small.
TOLERANCES = {"model": 1e-3, "optimizer": 5e-3}
LISTED = Path(__file__).with_name("refusals.txt")
FOUND = Path(__file__).parents[2] / "build" / "sweep" / "refusals.txt"


def drawn(everything: bool) -> list[tuple[str, str]]:
    """Return the cases to try: all, or a few drawn by the hash of the commit."""
    cases = {"model": list(model_cases()), "optimizer": list(optimizer_cases())}
    numbers = {"model": NUM_MODELS, "optimizer": NUM_OPTIMIZERS}
    if everything:
        return [(kind, name) for kind, names in cases.items() for name in names]
    return [(kind, name) for kind in cases for name in drawn_by_commit(cases[kind], numbers[kind])]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Draw the cases."""
    if "case" in metafunc.fixturenames:
        cases = drawn(metafunc.config.getoption("--sweep") == "all")
        metafunc.parametrize("case", cases, ids=[f"{kind} {name}" for kind, name in cases])


def test_there_are_eighty_models_and_optimizers_and_more() -> None:
    assert len(model_cases()) + len(optimizer_cases()) >= 80


def outcome_of(kind: str, name: str, way: str) -> Outcome:
    """Compare a case; ranks load the module of what they call, and that is this one."""
    return compare(kind, name, way)


@pytest.fixture(scope="module")
def refused() -> Iterator[set[str]]:
    """What is refused in this run, as lines of the list."""
    found: set[str] = set()
    yield found
    FOUND.parent.mkdir(parents=True, exist_ok=True)
    FOUND.write_text("".join(f"{line}\n" for line in sorted(found)))


@pytest.mark.slow
@pytest.mark.usefixtures("deepspeed_operators")
def test_a_case_is_exact_or_refused(case: tuple[str, str], run_ranks, refused: set[str]) -> None:
    kind, name = case
    failures: list[str] = []
    listed = set(LISTED.read_text().splitlines())
    for way in WAYS:
        num_processes = 1 if way == "single" else 2
        outcomes = run_ranks(outcome_of, kind, name, way, num_processes=num_processes, timeout_seconds=120)
        failures += [f"{way}: {wrong}" for outcome in outcomes if (wrong := judged(outcome, kind, way))]
        line = f"{kind} {name}: {way}"
        is_refused = any(outcome.refusal is not None for outcome in outcomes)
        refused.update([line] if is_refused else [])
        if is_refused is not (line in listed):
            said = outcomes[0].refusal if is_refused else "it trains, and is listed as refused"
            failures.append(f"{way}, not as refusals.txt lists it: {said}")
    assert not failures, "\n".join([f"{kind} {name}", *failures])


def judged(outcome: Outcome, kind: str, way: str) -> str | None:
    """Return what is wrong with an outcome, if anything is. One process has no reason to refuse anything."""
    if outcome.refusal is not None:
        refused_well = outcome.is_meant and way != "single"
        return None if refused_well else f"raw error: {outcome.refusal}"
    if outcome.difference <= TOLERANCES[kind]:
        return None
    return f"{outcome.worst} is {outcome.difference:.1e} of its way off the plain loop"
