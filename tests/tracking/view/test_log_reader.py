import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_tracking import DeliveryFileError, JSONLTracker
from drivetrain_tracking.forwarding.delivery import Delivery
from drivetrain_tracking.spool.line import encode
from drivetrain_tracking.spool.spool_reader import SpoolReader
from drivetrain_tracking.view.log_reader import LogReader, find_logs, parse_lines

RECORDS = st.dictionaries(st.text(min_size=1), st.integers() | st.text(), min_size=1, max_size=3).filter(
    lambda record: "crc" not in record
)


def whole(reader: LogReader) -> tuple[list[dict[str, object]], int]:
    records: list[dict[str, object]] = []
    num_damaged = 0
    while True:
        chunk = reader.read()
        records += chunk.records
        num_damaged += chunk.num_damaged
        if chunk.is_last:
            return records, num_damaged


@given(st.lists(st.tuples(RECORDS, st.booleans()), max_size=6), st.data())
def test_damaged_lines_are_counted_and_others_read(
    made: list[tuple[dict[str, int | str], bool]], data: st.DataObject
) -> None:
    lines: list[bytes] = []
    kept: list[dict[str, int | str]] = []
    for record, is_damaged in made:
        line = bytearray(encode(record)[:-1])
        if is_damaged:  # a changed bit that leaves no line break
            at = data.draw(st.integers(0, len(line) - 1).filter(lambda at: line[at] ^ 16 != 10))  # noqa: B023
            line[at] ^= 16
        else:
            kept.append(record)
        lines.append(bytes(line))
    records, num_damaged = parse_lines(lines)
    # A changed bit may turn the mark of the checksum into another name, which makes it an older log's line.
    taken = [{k: v for k, v in record.items() if k != "crc"} for record in records]
    assert [record for record in taken if record in kept] == kept
    assert len(records) + num_damaged == len(lines)


@pytest.mark.parametrize(
    "line", [b"", b"[1]", b"1", b'{"a": 1', b"\xff", b'{"a": 1}, {"b": 2}', b"[" * 100_000]
)
def test_what_is_no_object_is_damage_alone_and_between_others(line: bytes) -> None:
    assert parse_lines([line]) == ([], 1)
    assert parse_lines([b'{"a": 1}', line, b'{"b": 2}']) == ([{"a": 1}, {"b": 2}], 1)


def test_two_damaged_lines_that_would_be_json_together_are_two_damaged_lines() -> None:
    assert parse_lines([b'{"a": [1', b"2]}", b'{"b": 1}, {"c": 1}']) == ([], 3)


def test_lines_of_older_versions_have_no_checksum_and_are_taken() -> None:
    assert parse_lines([b'{"step": 1, "loss": 0.5}']) == ([{"step": 1, "loss": 0.5}], 0)


def test_a_line_that_is_being_written_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    line = encode({"step": 1})
    path.write_bytes(line + line[:5])
    reader = LogReader(path)
    assert len(whole(reader)[0]) == 1
    assert whole(reader) == ([], 0)
    path.write_bytes(line + line)
    assert len(whole(reader)[0]) == 1


def test_a_line_longer_than_a_chunk_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(encode({"text": "x" * 5_000_000}) + encode({"step": 2}))
    records, num_damaged = whole(LogReader(path))
    assert [set(record) - {"crc"} for record in records] == [{"text"}, {"step"}]
    assert num_damaged == 0


@pytest.mark.parametrize("how", ["other file", "cut", "written over"])
def test_a_log_that_is_replaced_is_noticed(tmp_path: Path, how: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(encode({"step": 1}) * 3)
    reader = LogReader(path)
    whole(reader)
    if how == "other file":
        (tmp_path / "new").write_bytes(encode({"step": 1}) * 9)
        (tmp_path / "new").replace(path)
    else:
        path.write_bytes(encode({"step": 2}) * (1 if how == "cut" else 9))
    assert reader.read().is_replaced
    assert len(whole(reader)[0]) == (9 if how != "cut" else 1)


def test_a_log_that_is_gone_is_an_error_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="log"):
        LogReader(tmp_path / "log.jsonl").read()


def test_the_mark_of_a_checksum_is_that_of_the_spool() -> None:
    changed = encode({"step": 1, "loss": 0.5})[:-1].replace(b"0.5", b"0.6")
    assert json.loads(changed)
    assert parse_lines([changed]) == ([], 1)


def test_a_pipe_in_the_place_of_a_log_is_told_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log.jsonl")
    with pytest.raises(OSError, match="is no regular file, but a pipe"):
        LogReader(tmp_path / "log.jsonl").read()
    with pytest.raises(OSError, match="is no regular file, but a pipe"):
        list(SpoolReader(tmp_path / "log.jsonl").read())
    with pytest.raises(OSError, match="is no regular file, but a pipe"):
        JSONLTracker(tmp_path).start("run", {})
    os.mkfifo(tmp_path / "mlflow.delivered")
    with pytest.raises(OSError, match="is no regular file, but a pipe"):
        Delivery.load(tmp_path / "mlflow.delivered")
    (tmp_path / "wandb.delivered").write_text("[" * 100_000)
    with pytest.raises(DeliveryFileError, match=r"is damaged \(it is nested too deeply"):
        Delivery.load(tmp_path / "wandb.delivered")


def make_log(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "log.jsonl").touch()
    return folder / "log.jsonl"


def test_a_folder_may_be_a_run_or_hold_many(tmp_path: Path) -> None:
    one, two = make_log(tmp_path / "runs" / "b"), make_log(tmp_path / "runs" / "sweep" / "a")
    assert [(place.label, place.path) for place in find_logs([tmp_path / "runs"])] == [
        ("b", one),
        ("sweep/a", two),
    ]
    assert [place.label for place in find_logs([tmp_path / "runs" / "b"])] == ["b"]


def test_a_log_that_two_folders_hold_is_found_once_and_equal_labels_are_told_apart(tmp_path: Path) -> None:
    make_log(tmp_path / "x" / "run"), make_log(tmp_path / "y" / "run")
    assert len(find_logs([tmp_path, tmp_path / "x"])) == 2
    labels = [place.label for place in find_logs([tmp_path / "x", tmp_path / "y"])]
    assert labels == [str(tmp_path / "x" / "run"), str(tmp_path / "y" / "run")]


def test_hidden_folders_links_and_depths_beyond_four_are_left_out(tmp_path: Path) -> None:
    make_log(tmp_path / "runs" / ".cache")
    make_log(tmp_path / "runs" / "1" / "2" / "3" / "4")
    make_log(tmp_path / "runs" / "1" / "2" / "3" / "5" / "6")
    (tmp_path / "runs" / "link").symlink_to(make_log(tmp_path / "other").parent)
    assert [place.label for place in find_logs([tmp_path / "runs"])] == ["1/2/3/4"]


def test_a_folder_that_is_not_there_holds_none(tmp_path: Path) -> None:
    assert find_logs([tmp_path / "gone"]) == ()
