import json
from pathlib import Path

import pytest

from drivetrain_tracking.view.run_index import RunIndex
from logged_runs import BEGAN, read_whole, start_line, value_lines, write_log


def steps_of(index: RunIndex, name: str) -> list[tuple[int, list[int]]]:
    return [(branch.attempt, list(branch.points.steps)) for branch in index.curves[name].branches]


def test_values_of_all_kinds_are_curves_by_flat_names(tmp_path: Path) -> None:
    record = {"step": 1, "time": BEGAN, "loss": 2.5, "lr": {"head": 0.1}, "n": 3, "done": True}
    record["per_rank"] = [1.0, 2]
    index = read_whole(write_log(tmp_path, [start_line(), {**record, "note": "warm", "big": 10**400}]))
    assert {name: curve.last for name, curve in index.curves.items()} == {
        "loss": 2.5, "lr/head": 0.1, "n": 3, "done": 1, "per_rank/0": 1, "per_rank/1": 2, "big": float("inf"),
    }  # fmt: skip
    assert index.facts.texts == {"note": "warm"}


def test_the_strings_that_stand_for_what_is_not_finite_are_marks(tmp_path: Path) -> None:
    values = ["NaN", "Infinity", "-Infinity", 1.0]
    records = [{"step": n, "time": BEGAN, "loss": value} for n, value in enumerate(values)]
    index = read_whole(write_log(tmp_path, records))
    marks = {kind: list(found[0].points.steps) for kind, found in index.curves["loss"].marks.items()}
    assert marks == {"nan": [0], "inf": [1], "-inf": [2]}
    assert steps_of(index, "loss") == [(1, [3])]


@pytest.mark.parametrize("how", ["attempt", "older log"])
def test_a_resumed_run_logs_steps_again_as_another_attempt(tmp_path: Path, how: str) -> None:
    again = value_lines(range(3, 7))
    if how == "attempt":
        again = [{**record, "attempt": 2} for record in again]
    index = read_whole(write_log(tmp_path, [start_line(), *value_lines(range(5)), start_line(), *again]))
    assert steps_of(index, "loss") == [(1, [0, 1, 2, 3, 4]), (2, [3, 4, 5, 6])]
    assert index.facts.attempt == 2


def test_a_resumed_run_that_goes_on_behind_its_last_step_is_one_attempt(tmp_path: Path) -> None:
    records = [start_line(), *value_lines(range(3)), start_line(), *value_lines(range(3, 6))]
    assert steps_of(read_whole(write_log(tmp_path, records)), "loss") == [(1, [0, 1, 2, 3, 4, 5])]


def test_lines_without_steps_are_counted_or_stand_at_the_step_before(tmp_path: Path) -> None:
    counted = [{"time": BEGAN, "loss": 1.0}] * 3
    index = read_whole(write_log(tmp_path / "none", counted))
    assert steps_of(index, "loss") == [(1, [0, 1, 2])]
    mixed = [{"step": 5, "time": BEGAN, "loss": 1.0}, {"time": BEGAN, "speed": 2.0}]
    assert steps_of(read_whole(write_log(tmp_path / "some", mixed)), "speed") == [(1, [5])]


def test_events_tell_of_the_run(tmp_path: Path) -> None:
    records = [
        start_line("first", {"lr": 0.1}),
        {"event": "plan", "time": BEGAN, "plan": {"backend": "fsdp"}},
        {"event": "info", "time": BEGAN, "info": {"git": "abc"}},
        *value_lines(range(2)),
        {"event": "lost", "count": 7},
        {"event": "finish", "time": BEGAN + 9},
    ]
    facts = read_whole(write_log(tmp_path, records, damaged=b"{half a li\n")).facts
    assert (facts.run_name, facts.config, facts.plan, facts.info) == (
        "first", {"lr": 0.1}, {"backend": "fsdp"}, {"git": "abc"},
    )  # fmt: skip
    assert (facts.num_lost, facts.num_damaged, facts.ended, facts.last_step) == (7, 1, "finished", 1)
    assert (facts.start_time, facts.last_time) == (BEGAN, BEGAN + 9)


@pytest.mark.parametrize(
    ("more", "ended"),
    [({}, "finished"), ({"state": "failed"}, "failed"), ({"state": "killed"}, "killed"),
     ({"state": "__proto__"}, "finished"), ({"state": ["failed"]}, "finished")],
)  # fmt: skip
def test_the_last_line_tells_how_the_run_ended_until_it_begins_again(
    tmp_path: Path, more: dict[str, object], ended: str
) -> None:
    records = [start_line(), *value_lines(range(2)), {"event": "finish", "time": BEGAN + 9, **more}]
    assert read_whole(write_log(tmp_path, records)).facts.ended == ended
    assert read_whole(write_log(tmp_path, [start_line()])).facts.ended is None


@pytest.mark.parametrize(
    "record",
    [{"loss": 1.0}, {"time": "noon", "loss": 1.0}, {"time": 1e300}, {"time": 1.0, "step": "two"},
     {"time": 1.0, "step": 2**70}, {"time": 1.0, "step": 1.5}, {"time": float("nan"), "step": 1}],
)  # fmt: skip
def test_lines_of_another_kind_are_counted(tmp_path: Path, record: dict[str, object]) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(record) + "\n" + json.dumps(value_lines([1])[0]) + "\n")
    index = read_whole(path)
    assert (index.facts.num_foreign, steps_of(index, "loss")) == (1, [(1, [1])])


def test_a_run_that_goes_on_is_followed(tmp_path: Path) -> None:
    index = read_whole(write_log(tmp_path, value_lines(range(3))))
    version = index.version
    assert not index.advance()
    assert index.version == version, "nothing has changed"
    write_log(tmp_path, value_lines(range(3, 5)))
    index.advance()
    assert index.version > version
    assert steps_of(index, "loss") == [(1, [0, 1, 2, 3, 4])]


def test_a_log_that_vanishes_is_told_and_what_was_read_stays(tmp_path: Path) -> None:
    path = write_log(tmp_path, value_lines(range(3)))
    index = read_whole(path)
    path.unlink()
    index.advance()
    assert index.problem.startswith("the log is gone")
    assert steps_of(index, "loss") == [(1, [0, 1, 2])]
    version = index.version
    index.advance()
    assert index.version == version, "told once"


def test_a_log_that_is_replaced_begins_anew(tmp_path: Path) -> None:
    path = write_log(tmp_path, value_lines(range(9)))
    index = read_whole(path)
    path.unlink()
    index.advance()
    write_log(tmp_path, [start_line("second"), *value_lines(range(2))])
    while index.advance():
        pass
    assert (index.problem, index.facts.run_name) == ("", "second")
    assert steps_of(index, "loss") == [(1, [0, 1])]


def test_media_are_kept_in_order_and_those_of_another_shape_passed_over(tmp_path: Path) -> None:
    media = {
        "sample": {"kind": "image", "file": "media/1.png"},
        "odd": 3,
        "unknown": {"kind": "scent"},
        "list": {"kind": []},
    }
    index = read_whole(write_log(tmp_path, value_lines([4], media=media)))
    assert [(one.name, one.step, one.file) for one in index.facts.media] == [("sample", 4, "media/1.png")]
