"""The contract that every tracker must pass.

A tracker's test subclasses `TrackerContract`, implements `make` and `logged`, and calls `check_all` with an empty
directory.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from drivetrain_tracking.errors import TrackerStateError
from drivetrain_tracking.protocol import PlatformTracker, Tracker
from drivetrain_tracking.values.records import LoggedRecord

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

    def as_stored(self, values: Mapping[str, object]) -> Mapping[str, object]:
        """Return values in the form that the platform stores: flat names, floats of 32 bits, no strings, ..."""
        return values

    def check_all(self, directory: Path) -> list[str]:
        """Run every check in a separate directory.

        Returns:
            The names of the checks that ran.

        Raises:
            AssertionError: A check failed; the message says what the tracker must do.
        """
        for check in self.checks:
            place = directory / check.__name__
            place.mkdir()
            check(place)
        return [check.__name__ for check in self.checks]

    @property
    def checks(self) -> tuple[Callable[[Path], None], ...]:
        """The checks, each of which gets an empty directory."""
        return (
            self.check_construction_writes_nothing,
            self.check_values_come_back,
            self.check_values_are_there_before_the_end,
            self.check_a_resumed_run_goes_on,
            self.check_numbers_that_are_none,
            self.check_order_of_calls,
        )

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
        tracker = self._start(directory)
        tracker.log({"loss": 1.0}, step=1)
        self._expect(directory, [(1, {"loss": 1.0})])
        tracker.finish()

    def check_a_resumed_run_goes_on(self, directory: Path) -> None:
        """Check that a second tracker of the same run appends to the output of the first."""
        for step in (1, 2):
            tracker = self._start(directory)
            tracker.log({"loss": 1.0 / step}, step=step)
            tracker.finish()
        self._expect(directory, [(1, {"loss": 1.0}), (2, {"loss": 0.5})])

    def check_numbers_that_are_none(self, directory: Path) -> None:
        """Check that NaN and infinities are logged, not refused: users need to see a diverging loss."""
        tracker = self._start(directory)
        tracker.log({"loss": float("nan"), "grad_norm": float("inf")}, step=1)
        tracker.log({"loss": 1.0}, step=2)
        tracker.finish()
        steps = [step for step, _ in self.logged(directory)]
        assert steps == [1, 2], "a NaN keeps its step and spoils no other"

    def check_order_of_calls(self, directory: Path) -> None:
        """Check that logging before `start` and starting twice are errors, and finishing twice is not."""
        tracker = self.make(directory)
        assert _raises_state_error(lambda: tracker.log({"loss": 1.0})), "log() before start() is an error"
        tracker.start("contract", {})
        assert _raises_state_error(lambda: tracker.start("contract", {})), "start() twice is an error"
        tracker.finish()
        tracker.finish()
        assert _raises_state_error(lambda: tracker.log({"loss": 1.0})), "log() after finish() is an error"

    def _start(self, directory: Path) -> Tracker:
        tracker = self.make(directory)
        tracker.start("contract", {})
        return tracker

    def _expect(self, directory: Path, expected: Sequence[tuple[int | None, Mapping[str, object]]]) -> None:
        logged = [(step, dict(values)) for step, values in self.logged(directory)]
        wanted = [(step, dict(self.as_stored(values))) for step, values in expected]
        assert logged == wanted, f"logged {wanted}, read back {logged}"


class PlatformContract(TrackerContract):
    """The checks of a tracker, and the checks of a `PlatformTracker`, which a writer process feeds.

    Attributes:
        counts_held: Whether `count_held` counts the records on the platform; otherwise it returns 0.
    """

    counts_held: bool = True

    @abstractmethod
    def make(self, directory: Path) -> PlatformTracker:
        """Return a new tracker that may write to `directory`."""

    @property
    def checks(self) -> tuple[Callable[[Path], None], ...]:
        """The checks of a tracker, and the checks of its records."""
        return (
            *super().checks,
            self.check_it_tells_which_records_it_holds,
            self.check_steps_logged_again_are_kept_apart,
        )

    def check_it_tells_which_records_it_holds(self, directory: Path) -> None:
        """Check that a new tracker of a run, as after a kill, counts the sent records that have arrived."""
        records = [LoggedRecord(time=1_700_000_000.25 + n, step=n, values={"loss": n / 4}) for n in range(6)]
        first = self.make(directory)
        first.start("contract", {})
        assert first.count_held(records) == 0, "nothing was written yet"
        first.write(records[:2])
        first.write(records[2:4])
        assert first.count_held(records[3:]) == self.counts_held, "it holds the first of these, and no other"
        first.finish()
        second = self.make(directory)
        second.start("contract", {})
        held, wanted = second.count_held(records), 4 if self.counts_held else 0
        assert held == wanted, f"the run holds 4 of 6 records; a new tracker says {held}, not {wanted}"
        second.write(records[4:])
        assert second.count_held(records) == (6 if self.counts_held else 0), "all are there"
        second.finish()
        self._expect(directory, [(n, {"loss": n / 4}) for n in range(6)])

    def check_steps_logged_again_are_kept_apart(self, directory: Path) -> None:
        """Check that repeated steps of a resumed run are not lost, and do not replace the earlier ones."""
        tracker = self.make(directory)
        tracker.start("contract", {})
        times = iter(range(1_700_000_000, 1_700_000_100))
        for attempt, steps in ((1, (1, 2, 3)), (2, (2, 3, 4))):
            losses = {step: step + attempt / 4 for step in steps}
            tracker.write(
                [
                    LoggedRecord(time=next(times), step=step, attempt=attempt, values={"loss": loss})
                    for step, loss in losses.items()
                ]
            )
        tracker.finish()
        logged = sorted((step, values.get("loss")) for step, values in self.logged(directory))
        wanted = [(1, 1.25), (2, 2.25), (2, 2.5), (3, 3.25), (3, 3.5), (4, 4.5)]
        assert logged == wanted, f"both attempts are kept: {wanted}, not {logged}"


def _raises_state_error(call: Callable[[], None]) -> bool:
    try:
        call()
    except TrackerStateError:
        return True
    return False
