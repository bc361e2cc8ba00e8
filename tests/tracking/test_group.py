import gc
import os
import resource
import signal
import sys
import threading
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest

from drivetrain_tracking import (
    Artifact,
    Image,
    JSONLTracker,
    Text,
    TrackerFailedError,
    TrackerGroup,
    TrackerStateError,
    TrackingSettings,
    UnknownTrackerError,
    ValueNotLoggableError,
)
from drivetrain_tracking.spool.spool_reader import SpoolReader


class Memory:
    """A tracker that keeps what it is told."""

    def __init__(self, name: str, *, on_all_ranks: bool = False, fails_in: str = "") -> None:
        self.name, self.on_all_ranks, self._fails_in = name, on_all_ranks, fails_in
        self.calls: list[object] = []

    def _called(self, call: str, *told: object) -> None:
        self.calls.append((call, *told))
        if call == self._fails_in:
            raise OSError("the disk is full")

    def start(self, run_name, config) -> None:
        self._called("start", run_name, config)

    def log(self, values, *, step=None) -> None:
        self._called("log", values, step)

    def finish(self) -> None:
        self._called("finish")


def test_every_tracker_hears_everything_as_plain_values(tmp_path: Path) -> None:
    one, other = Memory("one"), Memory("other")
    group = TrackerGroup([one, other])
    group.start("run", {"data": Path("x")})
    group.log({"loss": 1.0, "pair": (1, 2)}, step=3)
    group.finish()
    assert one.calls == other.calls
    assert one.calls == [
        ("start", "run", {"data": "x"}),
        ("log", {"loss": 1.0, "pair": [1, 2]}, 3),
        ("finish",),
    ]


def test_other_ranks_log_to_those_that_want_every_rank() -> None:
    main_only, everywhere = Memory("main"), Memory("everywhere", on_all_ranks=True)
    group = TrackerGroup([main_only, everywhere], is_main=False)
    group.start("run")
    group.log({"loss": 1})
    group.finish()
    assert main_only.calls == []
    assert [call[0] for call in everywhere.calls] == ["start", "log", "finish"]


def test_without_trackers_everything_is_allowed() -> None:
    group = TrackerGroup([])
    group.log({"loss": 1})
    group.start("run")
    group.log({"loss": 1})
    group.finish()
    assert group.names == ()


@pytest.mark.parametrize("call", ["start", "log", "finish"])
def test_failing_trackers_are_named_and_keep_no_other_from_its_turn(call: str) -> None:
    broken, good = (Memory(name, fails_in=call) for name in ("broken", "also")), Memory("good")
    group = TrackerGroup([*broken, good])

    def run() -> None:
        group.start("run")
        group.log({"loss": 1}, step=7)
        group.finish()

    told = rf"tracker 'broken' failed in {call}.*OSError: the disk is full.*; tracker 'also' failed in {call}"
    with pytest.raises(TrackerFailedError, match=told) as e:
        run()
    assert isinstance(e.value.__cause__, OSError)
    assert good.calls[-1][0] == call
    group.finish()
    assert good.calls[-1] == ("finish",)


def test_with_warn_a_failing_tracker_does_not_end_the_run(caplog) -> None:
    good = Memory("good")
    group = TrackerGroup([Memory("broken", fails_in="log"), good], settings=TrackingSettings(on_error="warn"))
    group.start("run")
    group.log({"loss": 1}, step=7)
    assert "tracker 'broken' failed in log of step 7: OSError" in caplog.text
    assert good.calls[-1] == ("log", {"loss": 1}, 7)


def test_threads_log_in_one_order(tmp_path: Path) -> None:
    log = JSONLTracker(tmp_path)
    group = TrackerGroup([log])
    group.start("run")

    def train(first: int) -> None:
        for step in range(first, first + 300):
            group.log({"loss": 1.0}, step=step)

    threads = [threading.Thread(target=train, args=(300 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    group.finish()
    reader = SpoolReader(log.path)
    records = [record for _, record in reader.read() if "event" not in record]
    assert sorted(record["step"] for record in records) == list(range(1200))
    times = [record["time"] for record in records]
    assert times == sorted(set(times))
    assert reader.num_damaged == 0


@pytest.mark.slow
def test_the_memory_of_the_process_does_not_grow_with_calls(tmp_path: Path) -> None:
    group = TrackerGroup([JSONLTracker(tmp_path)])
    group.start("run")

    def log(steps: range) -> int:
        for step in steps:
            group.log({"loss": 0.5, "lr": {"head": 0.1}}, step=step)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = log(range(500))
        after = log(range(500, 3500))
    finally:
        tracemalloc.stop()
    group.finish()
    # What a call kept would take 24,000 bytes at least, a reference of 8 for each. Other threads of the process, of
    # pytest and of earlier tests, allocate a few thousand in between.
    assert after - before < 12_000


def test_a_refused_value_does_not_count_as_logged(tmp_path: Path) -> None:
    log = JSONLTracker(tmp_path)
    group = TrackerGroup([log])
    group.start("run")
    group.log({"loss": 1.0}, step=1)
    group.expect_repeated_steps()
    with pytest.raises(ValueNotLoggableError):
        group.log({"loss": object()}, step=1)
    assert (log.steps.last_step, log.steps.attempt) == (1, 1)
    group.finish()


def test_media_on_a_full_disk_are_lost_counted_and_told_once(tmp_path: Path, caplog) -> None:
    log = JSONLTracker(tmp_path)
    group = TrackerGroup([log])
    group.start("run")
    large = tmp_path / "large.bin"
    large.write_bytes(bytes(1 << 20))
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
        for step in (1, 2):
            group.log({"loss": 1.0, "weights": Artifact(large)}, step=step)
        group.log({"weights": Artifact(large)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))
    group.finish()
    records = [record for _, record in SpoolReader(log.path).read() if record.get("event") != "start"]
    told = [record.get("step", record.get("event")) for record in records]
    assert told == ["lost", 1, "lost", 2, "lost", "finish"]
    assert not any("media" in record for record in records)
    assert list((tmp_path / "media").iterdir()) == []
    assert caplog.messages[-1] == f"3 records could not be written to {log.path}"


def test_a_value_that_cannot_be_logged_is_the_callers_error() -> None:
    group = TrackerGroup([Memory("one")], settings=TrackingSettings(on_error="warn"))
    group.start("run")
    with pytest.raises(ValueNotLoggableError, match="values"):
        group.log({"loss": object()})


def test_calls_out_of_order_are_errors() -> None:
    group = TrackerGroup([Memory("one")])
    with pytest.raises(TrackerStateError, match=r"log\(\) while no run is started"):
        group.log({"loss": 1})
    group.start("run")
    with pytest.raises(TrackerStateError, match=r"start\(\) again"):
        group.start("run")
    group.finish()
    group.finish()


def test_trackers_are_found_by_their_names_which_differ(tmp_path: Path) -> None:
    tracker = JSONLTracker(tmp_path)
    group = TrackerGroup([tracker])
    assert group.get("jsonl") is tracker
    with pytest.raises(UnknownTrackerError, match="'wandb' is not in use, only 'jsonl'"):
        group.get("wandb")
    with pytest.raises(ValueError, match="'one' is there 2 times"):
        TrackerGroup([Memory("one"), Memory("one")])


class Platform(Memory):
    """A tracker with arguments of its own, that keeps the plan beside the configuration."""

    def start(self, run_name, config, *, tags=()) -> None:
        self._called("start", run_name, config, tags)

    def log(self, values, *, step=None, commit=True) -> None:
        self._called("log", values, step, commit)

    def record_plan(self, plan) -> None:
        self._called("plan", plan)


def test_a_tracker_gets_its_own_options_and_the_plan_beside_the_configuration() -> None:
    one, other = Platform("one"), Memory("other")
    group = TrackerGroup([one, other])
    group.start("run", {"lr": 0.1}, plan={"stage": 2}, options={"one": {"tags": ["a"]}})
    group.log({"loss": 1.0}, step=3, options={"one": {"commit": False}})
    assert one.calls == [
        ("start", "run", {"lr": 0.1}, ["a"]),
        ("plan", {"stage": 2}),
        ("log", {"loss": 1.0}, 3, False),
    ]
    assert other.calls == [("start", "run", {"lr": 0.1}), ("log", {"loss": 1.0}, 3)]


def test_an_option_that_a_tracker_does_not_take_is_refused_on_all_ranks_before_any_call() -> None:
    for is_main in (True, False):
        one, other = Platform("one"), Memory("other")
        group = TrackerGroup([other, one], is_main=is_main)
        with pytest.raises(
            TypeError, match=r"'one': Platform\.start\(\) takes no entity; of its own .* tags$"
        ):
            group.start("run", options={"one": {"entity": "me"}})
        with pytest.raises(
            TypeError, match=r"'other': Memory\.log\(\) takes no step; of its own it takes none"
        ):
            group.log({"loss": 1.0}, options={"other": {"step": 1}})
        with pytest.raises(TypeError, match="'one': None is no mapping of arguments by name"):
            group.start("run", options={"one": None})
        assert one.calls == other.calls == []


def test_options_of_a_tracker_that_is_not_in_use_are_left_out_with_one_warning(caplog) -> None:
    group = TrackerGroup([Memory("one")])
    group.start("run", options={"wandb": {"tags": ["a"]}})
    group.log({"loss": 1.0}, options={"wandb": {"commit": False}})
    assert [record.getMessage() for record in caplog.records] == [
        "options for the tracker 'wandb' are left out: it is not in use, only 'one'"
    ]


def test_what_is_no_tracker_is_refused_with_what_it_lacks() -> None:
    class Theirs:
        name = "theirs"

        def log(self, values, step) -> None: ...

        def finish(self) -> None: ...

    with pytest.raises(
        TypeError, match="Theirs is no tracker, for it lacks start, on_all_ranks: a tracker has"
    ):
        TrackerGroup([Theirs()])
    with pytest.raises(TypeError, match=r"Memory is a class: pass an instance of it, Memory\(\.\.\.\)"):
        TrackerGroup([Memory])


def test_values_without_names_are_refused(tmp_path: Path) -> None:
    trackers = TrackerGroup([JSONLTracker(tmp_path)])
    trackers.start("run")
    with pytest.raises(ValueNotLoggableError, match=r"log\(0\.3\): give values by name, such as log\("):
        trackers.log(0.3)  # type: ignore[arg-type]
    trackers.finish()


def test_a_medium_that_is_refused_is_named_and_leaves_no_file_of_the_call(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    trackers = TrackerGroup([JSONLTracker(tmp_path)])
    trackers.start("run")
    text, image = Text("hello"), Image(numpy.zeros((3, 8, 9)))
    with pytest.raises(ValueNotLoggableError, match=r"values\['picture'\]: Image: shape \(3, 8, 9\)"):
        trackers.log({"text": text, "picture": image})
    assert list((tmp_path / "media").iterdir()) == []
    trackers.log({"text": text})
    trackers.finish()


@pytest.mark.skipif(sys.platform == "win32", reason="wants fork")
def test_a_child_forked_while_a_thread_logs_does_not_wait_for_it(tmp_path: Path) -> None:
    log = JSONLTracker(tmp_path)
    group = TrackerGroup([log])
    group.start("run")
    for lock in (group._lock, log._lock):
        held, may_end = threading.Event(), threading.Event()

        def hold(lock=lock, held=held, may_end=may_end) -> None:
            with lock:
                held.set()
                may_end.wait(30)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(30)
        pid = os.fork()
        if not pid:
            with suppress(Exception):  # the child's log is closed
                group.log({"loss": 1.0})
            os._exit(0)
        deadline = time.monotonic() + 60
        while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.01)
        if ended == (0, 0):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        may_end.set()
        thread.join()
        assert ended == (pid, 0)
    group.log({"loss": 2.0})
    group.finish()
    assert [record.get("loss") for _, record in SpoolReader(log.path).read() if "loss" in record] == [2.0]


def test_the_main_rank_alone_tells_of_keys_with_one_text(caplog: pytest.LogCaptureFixture) -> None:
    for is_main in (False, True):
        TrackerGroup([Memory("one")], is_main=is_main).start("run", {1: "a", "1": "b"})
    assert len(caplog.messages) == 1
