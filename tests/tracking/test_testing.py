from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from drivetrain_tracking import JSONLTracker
from drivetrain_tracking.testing import TrackerContract


class Forgetful(JSONLTracker):
    """Loses every second value."""

    def log(self, values, *, step=None) -> None:
        super().log(dict(list(values.items())[::2]), step=step)


class ForgetfulContract(TrackerContract):
    def make(self, directory: Path) -> JSONLTracker:
        return Forgetful(directory)

    def logged(self, directory: Path) -> Sequence[tuple[int | None, Mapping[str, object]]]:
        return []


def test_a_tracker_that_loses_values_fails_the_contract(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"logged .*read back"):
        ForgetfulContract().check_all(tmp_path)


class Eager(JSONLTracker):
    """Writes before it is started."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.path.touch()


class EagerContract(ForgetfulContract):
    def make(self, directory: Path) -> JSONLTracker:
        return Eager(directory)


def test_a_tracker_that_writes_when_constructed_fails_the_contract(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="never started writes nothing"):
        EagerContract().check_all(tmp_path)
