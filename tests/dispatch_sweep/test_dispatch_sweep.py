"""Every class computes, learns and generates bit by bit as in memory, or a list says why not.

pytest -m slow tests/dispatch_sweep --sweep all   # every class, some two minutes; without, a sample by the commit

inexact.txt lists what is not exact, with its reason, so that what is exact today cannot differ tomorrow without a
word. A run of the sweep writes what it found to build/sweep/dispatch.md. Where a file's tensors begin at other
addresses than those of memory, the kernels of some processors add up in another order: "exact at the same addresses"
says that the model in memory gives the same bits when its tensors begin where those of the file do. The list does not
name these: another processor has others.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checks.commits import drawn_by_commit
from dispatch_sweep.cases import dispatched_cases
from dispatch_sweep.table import EXACT, Table, read_inexact
from dispatch_sweep.ways import ADDRESSES, WAYS, Subject, outcome_of
from hardware.simulated.device import CAN_BE_MADE

NUM_DRAWN = 40  # for a commit
FAST = "llama"  # the case of every run
LISTED = Path(__file__).with_name("inexact.txt")
CHECKS = Path(__file__).with_name("accelerator_checks.py")
FOUND = Path(__file__).parents[2] / "build" / "sweep" / "dispatch.md"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Draw the cases."""
    if "name" in metafunc.fixturenames:
        names = list(dispatched_cases())
        everything = metafunc.config.getoption("--sweep") == "all"
        metafunc.parametrize("name", names if everything else drawn_by_commit(names, NUM_DRAWN))


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    """What this run finds."""
    found = Table(tuple(WAYS))
    yield found
    FOUND.parent.mkdir(parents=True, exist_ok=True)
    FOUND.write_text(found.as_markdown(read_inexact(LISTED)))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """What is as small as this waits for other threads longer than it computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_there_are_two_hundred_classes_and_more() -> None:
    assert len(dispatched_cases()) >= 200


def test_the_list_names_cases_and_ways_that_there_are_and_a_reason_for_each() -> None:
    listed = read_inexact(LISTED)
    assert {case for case, _ in listed} <= dispatched_cases().keys()
    assert {way for _, way in listed} <= WAYS.keys()
    assert all(line.reason for line in listed.values())


@pytest.mark.filterwarnings("ignore")  # transformers and diffusers warn of their own classes
def test_one_class_is_exact_in_every_way(tmp_path: Path) -> None:
    assert set(tried(FAST, tmp_path).values()) == {EXACT}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_class_is_exact_or_listed(name: str, tmp_path: Path, table: Table) -> None:
    outcomes = tried(name, tmp_path)
    table.add(name, outcomes)
    listed = read_inexact(LISTED)
    failures = [
        f"{way}: {outcome}; inexact.txt says: {said}"
        for way, outcome in outcomes.items()
        if outcome != ADDRESSES
        and not outcome.startswith(said := listed[name, way].outcome if (name, way) in listed else EXACT)
    ]
    assert not failures, "\n".join([name, *failures])


@pytest.mark.slow
@pytest.mark.timeout(500)  # the device is compiled first
@pytest.mark.skipif(not CAN_BE_MADE, reason="wants a C++ compiler and ninja")
def test_classes_are_exact_on_an_accelerator(request: pytest.FixtureRequest) -> None:
    """In a process of its own, since torch knows a new device for good."""
    options = ["--sweep", request.config.getoption("--sweep")]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(CHECKS), *options], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr


def tried(name: str, folder: Path) -> dict[str, str]:
    """Return what becomes of a case in each way."""
    case = dispatched_cases()[name]
    model = case.build()
    subject = Subject(name=name, case=case, plain=model, folder=folder)
    try:
        subject.plain.save_pretrained(subject.saved)
        return {way: outcome_of(subject, way) for way in WAYS}
    finally:
        shutil.rmtree(folder)
