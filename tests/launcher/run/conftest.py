"""A script on two ranks, as a user launches it."""

import subprocess
from collections.abc import Callable

import pytest

from launch_fixtures import Launch


@pytest.fixture
def launch(drivetrain_with_torch: Launch, script: Callable) -> Launch:
    """Write a script, and run it on two ranks to its end, in a launcher that has imported torch."""

    def run(
        source: str, *flags: str, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        script(source)
        line = ("launch", "--num-processes", "2", *flags, "script.py")
        return drivetrain_with_torch(*line, environment=environment)

    return run
