import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from drivetrain_tracking import JSONLTracker
from drivetrain_tracking.forwarding import deliver_until_end as module
from drivetrain_tracking.forwarding.deliver_until_end import deliver_until_end
from drivetrain_tracking.forwarding.forwarder import Forwarder


class Flaky:
    """A platform that is down until an event says that it is up."""

    name, on_all_ranks = "flaky", False

    def __init__(self) -> None:
        self.is_up, self.has_failed = threading.Event(), threading.Event()
        self.steps: list[int | None] = []

    def start(self, run_name: str, config: Mapping[str, object]) -> None: ...

    def log(self, values: Mapping[str, object], *, step: int | None = None) -> None:
        if not self.is_up.is_set():
            self.has_failed.set()
            raise OSError("503: down for maintenance")
        self.steps.append(step)

    def finish(self) -> None: ...


@pytest.fixture
def log(tmp_path: Path) -> JSONLTracker:
    log = JSONLTracker(tmp_path)
    log.start("bytes", {})
    for step in range(3):
        log.log({"loss": 1.0}, step=step)
    return log


@pytest.mark.parametrize("ends_by", ["its last line", "the end of its process"])
def test_a_long_pause_ends_with_the_run(
    log: JSONLTracker, ends_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE_SECONDS", 3600.0)
    tracker, is_over, results = Flaky(), threading.Event(), []
    limits = {"seconds_after_end": 7200.0, "is_over": is_over.is_set}
    forwarder = Forwarder(log.path, tracker)
    thread = threading.Thread(
        target=lambda: results.append(deliver_until_end(forwarder, **limits)), daemon=True
    )
    thread.start()
    assert tracker.has_failed.wait(60)
    tracker.is_up.set()
    if ends_by == "its last line":
        log.finish()
    else:
        is_over.set()
    thread.join(60)
    assert results == [True]
    assert tracker.steps == [0, 1, 2]
    log.finish()


def test_a_platform_that_takes_something_is_given_the_whole_time_again(
    log: JSONLTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE_SECONDS", 0.01)
    log.finish()
    tracker = Flaky()
    tracker.is_up.set()
    taken: list[int | None] = []

    def take_or_fail(_values: Mapping[str, object], *, step: int | None = None) -> None:
        if len(taken) % 2 == 0:  # fails before each record
            taken.append(None)
            raise OSError("503")
        taken.append(step)

    tracker.log = take_or_fail  # type: ignore[method-assign]
    limits = {"seconds_after_end": 0.02, "is_over": lambda: True}
    assert deliver_until_end(Forwarder(log.path, tracker), **limits)
    assert [step for step in taken if step is not None] == [0, 1, 2]
