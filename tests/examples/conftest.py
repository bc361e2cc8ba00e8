"""Examples run as ranks, as under any launcher, or in this process; what only ours brings is tested through it."""

import runpy
import sys
from collections.abc import Callable

import pytest

from example_launching import EXAMPLES
from processes import Completed, run_script


@pytest.fixture
def run_example(pythons: tuple[str, ...]) -> Callable[..., Completed]:
    """`run_example(name, *args, num_processes=2)` runs an example to its end; what its first rank left."""

    def run(example: str, *args: str, num_processes: int) -> Completed:
        ranks = run_script(
            EXAMPLES / example,
            *args,
            num_processes=num_processes,
            timeout_seconds=150,
            environment={},
            pythons=pythons,
        )
        assert [rank.returncode for rank in ranks] == [0] * num_processes, ranks
        return ranks[0]

    return run


@pytest.fixture
def call_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`call_example(name, *args)` runs an example here, where its libraries are imported once; what it printed."""

    def call(example: str, *args: object) -> str:
        monkeypatch.setattr(sys, "argv", [example, *map(str, args)])
        runpy.run_path(str(EXAMPLES / example), run_name="__main__")
        return capsys.readouterr().out

    return call
