"""How tests share the machine, and how the slow ones are drawn."""

import os
import subprocess
import sys
import threading
from pathlib import Path

from checks.commits import commit, drawn_by_commit
from drawing import SLOW_MINUTES
from lanes import in_room

TESTS = Path(__file__).parents[1]
TOOLS = TESTS.parent / "tools"


def test_a_test_that_wants_the_room_waits_and_whoever_comes_later_waits_for_it(tmp_path: Path) -> None:
    inside: list[str] = []
    entered, may_leave = threading.Event(), threading.Event()

    def stay(name: str, *, alone: bool) -> None:
        with in_room(tmp_path, alone=alone):
            inside.append(name)
            if name == "alone":
                entered.set()
                may_leave.wait(30)

    with in_room(tmp_path, alone=False):
        with in_room(tmp_path, alone=False):  # tests of two of the lanes
            first = threading.Thread(target=stay, args=("alone",), kwargs={"alone": True})
            first.start()
            assert not entered.wait(0.1)
    assert entered.wait(30)
    later = threading.Thread(target=stay, args=("later",), kwargs={"alone": False})
    later.start()
    later.join(0.1)
    assert inside == ["alone"]
    may_leave.set()
    first.join()
    later.join()
    assert inside == ["alone", "later"]


def test_a_commit_draws_the_same_again() -> None:
    names = [f"{number}" for number in range(100)]
    drawn = drawn_by_commit(names, 10)
    assert drawn == drawn_by_commit(names, 10)
    assert len(set(drawn)) == 10
    assert drawn_by_commit(names[:3], 10) == names[:3]


def run_slow(folder: Path, *arguments: str) -> str:
    (folder / "conftest.py").write_text('pytest_plugins = ["drawing"]')
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow")
    for name in ("a", "b"):
        tests = "".join(f"@pytest.mark.slow\ndef test_{n}(): pass\n" for n in range(3))
        (folder / f"test_{name}.py").write_text(f"import pytest\n{tests}def test_fast(): pass\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-rs",
        "-p",
        "no:cacheprovider",
        "-m",
        "slow",
        *arguments,
    ]
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        command,
        cwd=folder,
        env={
            **environment,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": os.pathsep.join(map(str, (TESTS, TOOLS))),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    ).stdout


def test_slow_tests_run_in_an_order_that_is_said_until_their_time_is_over(tmp_path: Path) -> None:
    said = run_slow(tmp_path)
    assert f"in the order that commit {commit()} draws, begun within {SLOW_MINUTES:g} minutes" in said
    assert "6 passed, 2 deselected" in said
    order = [line.split()[0] for line in said.splitlines() if line.endswith("%]")]
    assert [line.split()[0] for line in run_slow(tmp_path).splitlines() if line.endswith("%]")] == order
    assert len({name.partition("::")[0] for name in order[:3]}) == 1  # a file's tests stay together
    assert "6 skipped" in (late := run_slow(tmp_path, "--slow-minutes", "0"))
    assert "0 minutes are over; another commit begins with other slow tests" in late
