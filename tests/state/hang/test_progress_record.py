"""The progress mark: what it records, and that it stays cheap enough for the hot path by construction."""

import threading

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from drivetrain_state.hang.progress_record import ProgressMark, ProgressRecord


def test_each_mark_counts_and_the_last_label_stays() -> None:
    record = ProgressRecord()
    assert (record.count, record.label, record.thread_id) == (0, "start", threading.get_ident())
    record.mark("batch")
    record.mark("optimizer step")
    assert (record.count, record.label) == (2, "optimizer step")
    for number in range(9):
        record.mark(f"mark {number}")
    assert list(record.recent) == [f"mark {number}" for number in range(1, 9)]


@pytest.mark.parametrize("form", ["{}", "{!s}", "{!r}"])
def test_a_mark_is_shown_as_its_text(form: str) -> None:
    record = ProgressRecord()
    record.mark(ProgressMark.OPTIMIZER_STEP)
    assert form.format(record.label) == form.format("optimizer step")


def test_the_thread_that_marks_is_the_one_that_is_watched() -> None:
    record = ProgressRecord()
    thread = threading.Thread(target=record.mark, args=("batch",))
    thread.start()
    thread.join()
    assert record.thread_id == thread.ident


def test_a_watch_holds_nothing_else() -> None:
    with pytest.raises(AttributeError, match="has no attribute"):
        ProgressRecord().other = "x"  # pyright: ignore[reportAttributeAccessIssue]


def test_an_observer_gets_every_label_and_notes_change_nothing_else() -> None:
    record, seen = ProgressRecord(), list[str]()
    record.note("nobody listens")
    record.add_observer(seen.append)
    record.mark("gather")
    record.note("forward")
    assert seen == ["gather", "forward"]
    assert (record.count, record.label) == (1, "gather")


def test_an_observer_of_forwards_gets_the_models_and_hears_after_the_others() -> None:
    record, seen, model = ProgressRecord(), list[object](), object()
    record.note_forward(model)
    record.add_forward_observer(seen.append)
    record.add_observer(seen.append)
    record.note_forward(model)
    record.note("forward done")
    record.remove_forward_observer(seen.append)
    record.note_forward(model)
    assert seen == ["forward", model, "forward done", "forward"]
    assert record.count == 0


def test_several_observers_hear_in_their_order_and_one_leaves_alone() -> None:
    record, seen = ProgressRecord(), list[tuple[str, str]]()

    def first(label: str) -> None:
        seen.append(("first", label))

    def second(label: str) -> None:
        seen.append(("second", label))

    record.add_observer(first)
    record.add_observer(second)
    record.mark("gather")
    record.remove_observer(first)
    record.remove_observer(first)  # one that does not follow is left as it is
    record.note("forward")
    assert seen == [("first", "gather"), ("second", "gather"), ("second", "forward")]


def test_an_observer_may_leave_while_it_is_told() -> None:
    record, seen = ProgressRecord(), list[str]()

    def once(label: str) -> None:
        seen.append(label)
        record.remove_observer(once)

    record.add_observer(once)
    record.add_observer(seen.append)
    record.mark("gather")
    record.mark("reduce")
    assert seen == ["gather", "gather", "reduce"]


def test_marks_are_ranges_of_a_profile() -> None:
    record = ProgressRecord()
    record.mark(ProgressMark.GATHER)  # nothing is recorded
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        record.mark(ProgressMark.GATHER_DONE)
        record.note(ProgressMark.BACKWARD)
        record.mark(ProgressMark.AVERAGING)
        torch.ones(2).sum()
        record.mark("gathering blocks.0")
        record.note(ProgressMark.BACKWARD_DONE)  # an exception passed over the end of the averaging
        record.note(ProgressMark.FORWARD)
        record.mark(ProgressMark.BATCH)
        torch.ones(2).prod()
    spans = {event.name: event.time_range for event in profiler.events()}
    ours = {name for name in spans if name.startswith("drivetrain")}
    whats = ("backward", ProgressMark.AVERAGING, "gathering blocks.0", "forward", "batch")
    assert ours == {f"drivetrain: {what}" for what in whats}
    backward, averaging = spans["drivetrain: backward"], spans[f"drivetrain: {ProgressMark.AVERAGING}"]
    assert backward.start <= averaging.start <= spans["aten::sum"].start
    assert spans["aten::sum"].end <= averaging.end <= backward.end
    assert spans["drivetrain: forward"].end <= spans["aten::prod"].start


def test_a_range_ends_although_its_profile_has_ended() -> None:
    record = ProgressRecord()
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU], acc_events=True):
            record.note(ProgressMark.FORWARD)
            torch.ones(1).sum()
        assert record.is_heard
        record.note(ProgressMark.FORWARD_DONE)
        assert not record.is_heard  # nothing is left open
