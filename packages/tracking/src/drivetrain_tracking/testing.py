"""The contract that every tracker must pass.

A tracker's test subclasses `TrackerContract`, implements `make` and `logged`, and calls `check_all` with an empty
directory.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from drivetrain_tracking.errors import TrackerStateError
from drivetrain_tracking.protocol import Tracker

VALUES: Mapping[str, object] = {
    "loss": 0.5,
    "tokens": 3,
    "phase": "warm-up",
    "done": False,
    "lr": {"encoder": 0.1, "decoder": 0.25},
}


class TrackerContract(ABC):
    """A set of checks that every tracker must pass; a failed check raises an AssertionError that explains it."""

    @abstractmethod
    def make(self, directory: Path) -> Tracker:
        """Return a new tracker that may write to `directory`."""

    @abstractmethod
    def logged(self, directory: Path) -> Sequence[tuple[int | None, Mapping[str, object]]]:
        """Return the step and values of every `log`, in order, as read back from the platform's files."""

    def check_all(self, directory: Path) -> list[str]:
        """Run every check, each in a directory of its own.

        Returns:
            The names of the checks that ran.

        Raises:
            AssertionError: A check failed; the message says what the tracker must do.
        """
        checks: tuple[Callable[[Path], None], ...] = (
            self.check_construction_writes_nothing,
            self.check_values_come_back,
            self.check_values_are_there_before_the_end,
            self.check_a_resumed_run_goes_on,
            self.check_numbers_that_are_none,
            self.check_order_of_calls,
        )
        for check in checks:
            place = directory / check.__name__
            place.mkdir()
            check(place)
        return [check.__name__ for check in checks]

    def check_construction_writes_nothing(self, directory: Path) -> None:
        """Check that construction, which happens on every rank, writes nothing before `start`."""
        tracker = self.make(directory)
        assert tracker.name, "a tracker has a name"
        assert isinstance(tracker.on_all_ranks, bool), "on_all_ranks says whether every rank logs"
        tracker.finish()
        assert not list(directory.iterdir()), "a tracker that is never started writes nothing"

    def check_values_come_back(self, directory: Path) -> None:
        """Check that numbers, strings, booleans and nested dicts are written with their steps, in order."""
        tracker = self.make(directory)
        tracker.start("contract", {"seed": 1, "model": {"width": 8}})
        tracker.log(VALUES, step=0)
        tracker.log({"loss": 0.25}, step=10)
        tracker.finish()
        self._expect(directory, [(0, VALUES), (10, {"loss": 0.25})])

    def check_values_are_there_before_the_end(self, directory: Path) -> None:
        """Check that logged values can be read back before `finish`, so that a killed run loses none."""
        tracker = self.make(directory)
        tracker.start("contract", {})
        tracker.log({"loss": 1.0}, step=1)
        self._expect(directory, [(1, {"loss": 1.0})])
        tracker.finish()

    def check_a_resumed_run_goes_on(self, directory: Path) -> None:
        """Check that a second tracker of the same run appends to the output of the first."""
        for step in (1, 2):
            tracker = self.make(directory)
            tracker.start("contract", {})
            tracker.log({"loss": 1.0 / step}, step=step)
            tracker.finish()
        self._expect(directory, [(1, {"loss": 1.0}), (2, {"loss": 0.5})])

    def check_numbers_that_are_none(self, directory: Path) -> None:
        """Check that NaN and infinities are logged, not refused: users need to see a diverging loss."""
        tracker = self.make(directory)
        tracker.start("contract", {})
        tracker.log({"loss": float("nan"), "grad_norm": float("inf")}, step=1)
        tracker.log({"loss": 1.0}, step=2)
        tracker.finish()
        assert [step for step, _ in self.logged(directory)] == [1, 2], (
            "a NaN keeps its step and spoils no other"
        )

    def check_order_of_calls(self, directory: Path) -> None:
        """Check that logging before `start` and starting twice are errors, and finishing twice is not."""
        tracker = self.make(directory)
        assert _raises_state_error(lambda: tracker.log({"loss": 1.0})), "log() before start() is an error"
        tracker.start("contract", {})
        assert _raises_state_error(lambda: tracker.start("contract", {})), "start() twice is an error"
        tracker.finish()
        tracker.finish()
        assert _raises_state_error(lambda: tracker.log({"loss": 1.0})), "log() after finish() is an error"

    def _expect(self, directory: Path, expected: Sequence[tuple[int | None, Mapping[str, object]]]) -> None:
        logged = [(step, dict(values)) for step, values in self.logged(directory)]
        wanted = [(step, dict(values)) for step, values in expected]
        assert logged == wanted, f"logged {wanted}, read back {logged}"


def _raises_state_error(call: Callable[[], None]) -> bool:
    try:
        call()
    except TrackerStateError:
        return True
    return False
