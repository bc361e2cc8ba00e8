"""The tests that the tracker of every platform passes; each platform's file says how its content is read back."""

import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from drivetrain_tracking.testing import PlatformContract
from drivetrain_tracking.values.records import LoggedRecord, StoredMedium
from killed_trackers import Row, kill_writers, numbered_rows


def started(tracker: Any, **options: Any) -> Any:
    """Start a run with a nested configuration."""
    tracker.start("run", {"lr": 0.1, "model": {"width": 8}}, **options)
    return tracker


class PlatformTests(PlatformContract):
    """The contract, killed writers, media, and a run of the user's.

    Attributes:
        tracker: The class of the tracker.
        libraries: The modules of its library that are imported before writers are forked.
    """

    tracker: ClassVar[Any]
    libraries: ClassVar[tuple[str, ...]]

    def make(self, directory: Path) -> Any:
        return self.tracker(directory)

    def prepare_kills(self, directory: Path) -> Mapping[str, Any]:
        """Return further arguments of `kill_writers`."""
        return {}

    @abstractmethod
    def killed_rows(self, directory: Path) -> Sequence[Row]:
        """Return the rows of the run "killed"."""

    def media_records(self, media: Mapping[str, StoredMedium]) -> list[LoggedRecord]:
        return [LoggedRecord(time=1.5, step=7, media=media)]

    @abstractmethod
    def check_media(self, directory: Path, tracker: Any, media: Mapping[str, StoredMedium]) -> None:
        """Check that the platform holds the media of `media_records`, and the plan where it is a file."""

    @abstractmethod
    def open_live(self, directory: Path) -> Any:
        """Return a run of the user's."""

    @abstractmethod
    def check_live(self, directory: Path, live: Any) -> None:
        """Check that a user's run is open, log and end it, and check that it has all values."""

    def check_kills(self, directory: Path, rounds: int) -> None:
        count = 15 * (rounds + 1)
        more = self.prepare_kills(directory)
        kill_writers(self.tracker, self.libraries, directory, num_rounds=rounds, num_records=count, **more)
        assert self.killed_rows(directory) == numbered_rows(count)

    def test_it_passes_the_contract_of_platforms(self, tmp_path: Path) -> None:
        (tmp_path / "runs").mkdir()
        self.check_all(tmp_path / "runs")

    @pytest.mark.parametrize("rounds", [3, 20])
    @pytest.mark.slow
    def test_killed_writers_lose_and_double_nothing(self, tmp_path: Path, rounds: int) -> None:
        self.check_kills(tmp_path, rounds)

    def test_media_come_back(self, tmp_path: Path, media: Mapping[str, StoredMedium]) -> None:
        kinds = {kind: media[kind] for kind in self.tracker.media_kinds}
        tracker = started(self.make(tmp_path / "log"))
        tracker.write(self.media_records(kinds))
        tracker.record_plan({"backend": "ddp"})
        tracker.finish()
        self.check_media(tmp_path / "log", tracker, media)

    def test_a_run_of_the_users_gets_the_values_and_stays_open(self, tmp_path: Path) -> None:
        live = self.open_live(tmp_path)
        tracker = self.tracker.of(live)
        tracker.start("ignored", {"lr": 0.1})
        tracker.log({"loss": 0.5}, step=1)
        tracker.finish()
        self.check_live(tmp_path, live)


class QuietPlatformTests(PlatformTests):
    """The tests of a platform whose library leaves nothing behind in the process."""

    def test_no_thread_stays_and_nothing_is_printed(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        before = threading.active_count()
        tracker = started(self.make(tmp_path / "log"))
        tracker.log({"loss": 1, "tokens": 2.5})
        tracker.log({"loss": 1.5, "tokens": 2})
        tracker.finish()
        assert threading.active_count() == before
        assert capfd.readouterr() == ("", "")
        assert [one.name for one in tmp_path.iterdir()] == ["log"]
