"""The progress mark: what it records, and that it stays cheap enough for the hot path by construction."""

import threading

import pytest

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
