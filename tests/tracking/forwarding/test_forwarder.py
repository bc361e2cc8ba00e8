import gc
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from drivetrain_tracking import JSONLTracker, ValueNotLoggableError
from drivetrain_tracking.errors import DeliveryFileError, DeliveryInUseError
from drivetrain_tracking.forwarding.deliver_until_end import deliver_until_end
from drivetrain_tracking.forwarding.delivery import Delivery, delivery_path
from drivetrain_tracking.forwarding.forwarder import Forwarder
from drivetrain_tracking.run.run_state import RunState
from drivetrain_tracking.values.records import LoggedRecord, MediaKind, StoredMedium


@dataclass
class Kept:
    """A platform in memory, whose content outlives its trackers as a server's would."""

    fail_after: int | None = None  # so many records are taken, then a call fails
    refused: int = -1  # the step of a record that is never taken
    takes_no_plan: bool = False
    is_media_at_fault: bool = False  # a record of such a step is taken without its media
    poisonous: frozenset[int] = frozenset()  # steps at which the library fails on the content
    events: list[object] = field(default_factory=list)
    records: list[LoggedRecord] = field(default_factory=list)

    @property
    def steps(self) -> list[int | None]:
        return [record.step for record in self.records]


class KeptTracker:
    name, on_all_ranks = "kept", False
    media_kinds: frozenset[MediaKind] = frozenset({"text"})

    def __init__(self, kept: Kept) -> None:
        self.kept = kept

    def start(self, run_name: str, config: Mapping[str, object], *, tag: str = "") -> None:
        self.kept.events.append(("start", run_name, dict(config), tag))

    def log(self, values: Mapping[str, object], *, step: int | None = None) -> None:
        raise AssertionError("a platform gets records")

    def write(self, records: Sequence[LoggedRecord]) -> None:
        for record in records:
            if self.kept.fail_after == 0:
                raise OSError("out of quota")
            if record.step == self.kept.refused:
                raise ValueNotLoggableError("not this one")
            if record.step in self.kept.poisonous and (record.media or not self.kept.is_media_at_fault):
                raise RuntimeError("cannot parse this")
            if self.kept.fail_after is not None:
                self.kept.fail_after -= 1
            self.kept.records.append(record)

    def count_held(self, records: Sequence[LoggedRecord]) -> int:
        times = {record.time for record in self.kept.records}
        held = [record.time in times for record in records]
        return held.index(False) if False in held else len(held)

    def record_plan(self, plan: Mapping[str, object]) -> None:
        if self.kept.takes_no_plan:
            raise RuntimeError("too long")
        self.kept.events.append(("plan", dict(plan)))

    def record_info(self, info: Mapping[str, object]) -> None:
        self.kept.events.append(("info", dict(info)))

    def finish(self) -> None:
        self.kept.events.append("finish")


NOTE = StoredMedium(kind="text", data="hello")


def deliver_whatever_fails(log: JSONLTracker, kept: Kept) -> int:
    """Deliver as often as a call fails, and return how often that was."""
    forwarder = Forwarder(log.path, KeptTracker(kept))
    for failures in range(40):
        try:
            forwarder.deliver()
        except RuntimeError:
            continue
        return failures
    raise AssertionError("it never ends")


def log_steps(log: JSONLTracker, *steps: int) -> None:
    for step in steps:
        log.log({"loss": 1.0}, step=step)


@pytest.fixture
def log(tmp_path: Path) -> JSONLTracker:
    log = JSONLTracker(tmp_path)
    log.start("bytes", {"lr": 0.1, "limit": float("inf")})
    return log


def test_a_run_is_delivered_as_it_was_logged(log: JSONLTracker) -> None:
    tracker = KeptTracker(Kept())
    forwarder = Forwarder(log.path, tracker, options={"tag": "first"})
    log.record_plan({"backend": "ddp"})
    log.record_info({"python": "3.11"})
    log.log({"loss": float("nan"), "note": "warm-up", "lr": {"head": 0.5}}, step=3)
    assert not forwarder.deliver()
    log.log({"done": True})
    log.finish()
    assert forwarder.deliver()
    forwarder.close()
    assert tracker.kept.events == [
        ("start", "bytes", {"lr": 0.1, "limit": float("inf")}, "first"),
        ("plan", {"backend": "ddp"}),
        ("info", {"python": "3.11"}),
        "finish",
    ]
    first, second = tracker.kept.records
    assert str(first.values) == "{'loss': nan, 'note': 'warm-up', 'lr': {'head': 0.5}}"
    assert (first.step, first.attempt, second.step, dict(second.values)) == (3, 1, None, {"done": True})
    assert first.time < second.time


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("taken", range(8))
def test_after_a_failure_in_a_batch_every_record_is_there_once(
    log: JSONLTracker, taken: int, is_killed: bool
) -> None:
    log_steps(log, *range(8))
    kept = Kept(fail_after=taken)
    forwarder = Forwarder(log.path, KeptTracker(kept))
    with pytest.raises(OSError, match="out of quota"):
        forwarder.deliver()
    if is_killed:
        forwarder.close()  # releases the lock, as the end of its process does
        forwarder = Forwarder(log.path, KeptTracker(kept))
    kept.fail_after = None
    log_steps(log, 8)
    forwarder.deliver()
    assert kept.steps == list(range(9))
    assert forwarder.delivery.num_delivered == 10  # nine records and the start
    started = ("start", "bytes", {"lr": 0.1, "limit": float("inf")}, "")
    # Each process opens the platform's run again.
    assert [event for event in kept.events if event != "finish"] == [started] * (2 if is_killed else 1)


@pytest.mark.parametrize("poisonous", [{0}, {3}, {2, 5}])
def test_a_record_on_which_the_library_fails_is_passed_once_the_next_is_taken(
    log: JSONLTracker, poisonous: set[int], caplog: pytest.LogCaptureFixture
) -> None:
    log_steps(log, *range(8))
    kept = Kept(poisonous=frozenset(poisonous))
    failures = deliver_whatever_fails(log, kept)
    assert kept.steps == [step for step in range(8) if step not in poisonous]
    assert failures <= 4 * len(poisonous)  # in a batch, and three times by itself; the fourth finds out
    for step in poisonous:
        assert f"does not take 'loss' of step {step}, which stay in the log: RuntimeError" in caplog.text


def test_a_plan_that_is_not_taken_blocks_nothing(log: JSONLTracker, caplog: pytest.LogCaptureFixture) -> None:
    log.record_plan({"backend": "ddp"})
    log.record_info({"python": "3.11"})
    log_steps(log, 0, 1, 2)
    kept = Kept(takes_no_plan=True)
    deliver_whatever_fails(log, kept)
    assert ("info", {"python": "3.11"}) in kept.events
    assert kept.steps == [0, 1, 2]
    assert "does not take 'plan'" in caplog.text


def test_values_are_taken_where_media_are_at_fault(log: JSONLTracker) -> None:
    log_steps(log, 0)
    log.write([LoggedRecord(time=log.now(), step=1, values={"loss": 0.5}, media={"note": NOTE})])
    kept = Kept(poisonous=frozenset({1}), is_media_at_fault=True)
    deliver_whatever_fails(log, kept)  # also at the end of the log, where no record follows
    assert [(record.step, dict(record.media)) for record in kept.records] == [(0, {}), (1, {})]


def test_while_a_platform_is_down_nothing_is_passed_over(log: JSONLTracker) -> None:
    log_steps(log, *range(8))
    kept = Kept(fail_after=3)
    forwarder = Forwarder(log.path, KeptTracker(kept))
    for _ in range(20):
        with pytest.raises(OSError, match="out of quota"):
            forwarder.deliver()
    kept.fail_after = None
    forwarder.deliver()
    assert kept.steps == list(range(8))
    assert forwarder.delivery.num_refused == 0


def test_a_file_that_is_gone_leaves_its_record_without_it(
    log: JSONLTracker, caplog: pytest.LogCaptureFixture
) -> None:
    gone = StoredMedium(kind="image", path=log.path.parent / "media" / "gone.png")
    log.write([LoggedRecord(time=log.now(), step=1, values={"loss": 1.0}, media={"sample": gone})])
    tracker = KeptTracker(Kept())
    tracker.media_kinds = frozenset({"image"})
    Forwarder(log.path, tracker).deliver()
    assert [(record.step, dict(record.media)) for record in tracker.kept.records] == [(1, {})]
    assert "gone.png is gone: 'sample' of step 1 is left out" in caplog.text


def test_a_long_log_is_read_in_parts(log: JSONLTracker) -> None:
    log_steps(log, *range(1000))
    kept = Kept()
    forwarder = Forwarder(log.path, KeptTracker(kept))
    waiting: list[int] = []
    forwarder.deliver(on_progress=lambda _: waiting.append(forwarder.num_waiting))
    assert kept.steps == list(range(1000))
    assert max(waiting) <= 256


@pytest.mark.parametrize("refused", [0, 3, 7])
def test_a_record_that_is_never_taken_is_counted_and_passed(
    log: JSONLTracker, refused: int, caplog: pytest.LogCaptureFixture
) -> None:
    log_steps(log, *range(8))
    kept = Kept(refused=refused)
    forwarder = Forwarder(log.path, KeptTracker(kept))
    with caplog.at_level(logging.WARNING):
        forwarder.deliver()
    assert kept.steps == [step for step in range(8) if step != refused]
    assert (forwarder.delivery.num_refused, forwarder.delivery.num_delivered) == (1, 8)
    told = (
        f"does not take 'loss' of step {refused}, which stay in the log: ValueNotLoggableError: not this one"
    )
    assert told in caplog.text


def test_media_that_a_platform_lacks_stay_beside_the_log(log: JSONLTracker) -> None:
    image = StoredMedium(kind="image", path=log.path.parent / "media" / "1.png", caption="a cat")
    log.write([LoggedRecord(time=log.now(), step=1, media={"note": NOTE, "sample": image})])
    tracker = KeptTracker(Kept())
    Forwarder(log.path, tracker).deliver()
    assert tracker.kept.records[0].media == {"note": NOTE}


def test_damaged_lines_are_passed_over_and_the_good_part_is_sent(log: JSONLTracker) -> None:
    log_steps(log, 0, 1, 2)
    log.finish()
    lines = log.path.read_bytes().splitlines(keepends=True)
    lines[0] = lines[0].replace(b"bytes", b"bites")  # the line of the start, too
    lines[2] = lines[2].replace(b"1.0", b"9.0")
    log.path.write_bytes(b"".join(lines))
    kept = Kept()
    forwarder = Forwarder(log.path, KeptTracker(kept))
    assert forwarder.deliver()
    assert (kept.steps, forwarder.num_damaged) == ([0, 2], 2)
    assert kept.events[0] == ("start", log.path.parent.name, {}, "")


def test_one_process_delivers_to_a_platform(log: JSONLTracker) -> None:
    first = Forwarder(log.path, KeptTracker(Kept()))
    with pytest.raises(DeliveryInUseError, match="another process sends this log to 'kept'"):
        Forwarder(log.path, KeptTracker(Kept()))
    first.close()
    Forwarder(log.path, KeptTracker(Kept())).close()


def test_a_damaged_file_of_what_was_delivered_is_told(log: JSONLTracker) -> None:
    place = delivery_path(log.path, "kept")
    Delivery(offset=3).save(place)
    assert Delivery.load(place).offset == 3
    place.write_text('{"offset": ')
    with pytest.raises(DeliveryFileError, match="remove it to send the whole log again"):
        Forwarder(log.path, KeptTracker(Kept()))


class Plain:
    name, on_all_ranks = "plain", False

    def __init__(self) -> None:
        self.logged: list[tuple[int | None, dict[str, object]]] = []

    def start(self, run_name: str, config: Mapping[str, object]) -> None: ...

    def log(self, values: Mapping[str, object], *, step: int | None = None) -> None:
        self.logged.append((step, dict(values)))

    def finish(self) -> None: ...


def test_a_tracker_of_a_users_own_gets_its_three_calls(log: JSONLTracker) -> None:
    log_steps(log, 1, 2)
    tracker = Plain()
    Forwarder(log.path, tracker).deliver()
    assert tracker.logged == [(1, {"loss": 1.0}), (2, {"loss": 1.0})]


class EndedTracker(KeptTracker):
    """A tracker whose platform shows how a run ended."""

    def end(self, state: str | None) -> None:
        self.kept.events.append(state or "let go")


def started(folder: Path, *steps: int) -> JSONLTracker:
    log = JSONLTracker(folder)
    log.start("run", {})
    log_steps(log, *steps)
    return log


@pytest.fixture
def begun_log(tmp_path: Path) -> Path:
    """A log that ends without its last line: a copy, which no process has open."""
    log = started(tmp_path / "run", 1)
    (tmp_path / "killed").mkdir()
    shutil.copyfile(log.path, tmp_path / "killed" / log.path.name)
    log.end("failed")
    return tmp_path / "killed" / log.path.name


def deliver_after_the_run(log: Path, kept: Kept, tracker: type[KeptTracker] = EndedTracker) -> list[object]:
    """Deliver as replay does, and return what the platform was told since."""
    before = len(kept.events)
    forwarder = Forwarder(log, tracker(kept))
    try:
        assert deliver_until_end(forwarder, seconds_after_end=0.0, is_over=lambda: True)
    finally:
        forwarder.close()
    return [event if isinstance(event, str) else event[0] for event in kept.events[before:]]


@pytest.mark.parametrize("state", ["finished", "failed", "killed"])
def test_a_platform_is_told_the_state_that_the_log_ends_with(tmp_path: Path, state: RunState) -> None:
    log, kept = started(tmp_path, 1), Kept()
    log.end(state)
    assert deliver_after_the_run(log.path, kept) == ["start", state]
    assert deliver_after_the_run(log.path, kept) == [], "it was told"
    older = KeptTracker(kept)
    Delivery().save(delivery_path(log.path, older.name))
    assert deliver_after_the_run(log.path, kept, KeptTracker) == ["start", "finish"], "it has no states"


def test_a_log_that_nobody_writes_and_that_does_not_end_is_that_of_a_killed_run(begun_log: Path) -> None:
    kept = Kept()
    assert deliver_after_the_run(begun_log, kept) == ["start", "killed"]
    assert deliver_after_the_run(begun_log, kept) == [], "it was told, and nothing came since"
    started(begun_log.parent, 2).finish()
    assert deliver_after_the_run(begun_log, kept) == ["start", "finished"]
    assert kept.steps == [1, 2]


def test_a_run_that_goes_on_is_not_taken_for_a_killed_one(tmp_path: Path) -> None:
    log, kept = started(tmp_path, 1), Kept()
    assert deliver_after_the_run(log.path, kept) == ["start", "let go"]
    log_steps(log, 2)
    log.end("failed")
    assert deliver_after_the_run(log.path, kept) == ["start", "failed"]


def test_the_end_is_told_by_a_later_process_where_one_was_killed_before_it(
    tmp_path: Path, begun_log: Path
) -> None:
    kept = Kept()
    forwarder = Forwarder(begun_log, EndedTracker(kept))
    forwarder.deliver()
    del forwarder  # as if it was killed: neither the end nor close() follows
    gc.collect()
    moved = shutil.copytree(begun_log.parent, tmp_path / "moved")  # where no lock is held
    assert deliver_after_the_run(moved / begun_log.name, kept) == ["start", "killed"]


def test_a_run_that_starts_again_before_its_end_was_killed_in_between(begun_log: Path) -> None:
    started(begun_log.parent).finish()
    assert deliver_after_the_run(begun_log, Kept()) == ["start", "killed", "start", "finished"]


def test_an_end_that_the_platform_does_not_take_is_tried_again_later(begun_log: Path) -> None:
    class Down(EndedTracker):
        def end(self, state: str | None) -> None:
            raise OSError("503: down for maintenance")

    kept = Kept()
    forwarder = Forwarder(begun_log, Down(kept))
    assert not deliver_until_end(forwarder, seconds_after_end=0.0, is_over=lambda: True)
    forwarder.close()
    assert deliver_after_the_run(begun_log, kept) == ["start", "killed"]
