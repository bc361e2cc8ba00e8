"""Loggers of several processes, and progress bars, beside the installed Accelerate."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from drivetrain_accelerate.rank_logging import MultiProcessAdapter, get_logger, tqdm
from drivetrain_accelerate.states.partial_state import PartialState

pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def levels_as_before() -> Iterator[None]:
    before = logging.root.level
    yield
    logging.root.setLevel(before)
    PartialState._reset_state()


def test_the_level_is_set_of_the_logger_and_of_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.logging import get_logger as real

    for make in (real, get_logger):
        logger = make("of tests", "DEBUG")
        assert (logger.logger.level, logging.root.level, logger.extra) == (10, 10, {})
        monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "error")
        assert make("of tests").logger.level == 40
        monkeypatch.delenv("ACCELERATE_LOG_LEVEL")
        with pytest.raises(ValueError, match="NOLEVEL"):
            make("of tests", log_level="nolevel")


def test_records_name_the_caller_and_come_once_where_asked(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("records")
    for _ in range(2):
        logger.warning_once("once")
    logger.warning("all %d", 3, main_process_only=False)
    logger.error("in order", in_order=True)
    found = [(record.getMessage(), record.funcName) for record in caplog.records]
    name = "test_records_name_the_caller_and_come_once_where_asked"
    assert found == [("once", name), ("[RANK 0] all 3", name), ("[RANK 0] in order", name)]


def lines_of(make: Any, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Log from this function, through a helper of it, and return the functions that the records name."""
    logger = make("lines", "INFO")

    def helper(**options: Any) -> None:
        logger.info("through a helper", **options)

    logger.info("here")
    logger.info("here", stacklevel=2)
    helper()
    helper(stacklevel=3)
    logger.info("here", main_process_only=False, in_order=True, stacklevel=2)
    logger.log(20, "here")
    found = [record.funcName for record in caplog.records]
    caplog.clear()
    return found


def test_a_record_is_of_the_line_that_calls_with_accelerates_numbers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from accelerate.logging import get_logger as real

    PartialState(cpu=True)
    __import__("accelerate").PartialState(cpu=True)
    expected = ["lines_of", "lines_of", "helper", "lines_of", "lines_of", "lines_of"]
    assert lines_of(real, caplog) == lines_of(get_logger, caplog) == expected
    # One frame is no caller of the program's: the real one names its own file.
    logger = get_logger("lines")
    logger.info("here", stacklevel=1)
    logger.warning_once("warned", stacklevel=1)
    assert {record.funcName for record in caplog.records} == {
        "test_a_record_is_of_the_line_that_calls_with_accelerates_numbers"
    }


def test_attributes_of_every_record_are_added(caplog: pytest.LogCaptureFixture) -> None:
    logger = MultiProcessAdapter(logging.getLogger("attributes"), {"run": "a"})
    logger.warning("said", extra={"step": 1})
    record: Any = caplog.records[0]
    assert (record.run, record.step) == ("a", 1)


def test_a_bar_is_shown_on_the_first_process_of_a_node() -> None:
    bar = tqdm(range(2), desc="work")
    assert (bar.disable, list(bar)) == (False, [0, 1])
    assert tqdm(range(2), disable=True).disable
    with pytest.raises(ValueError, match="say main_process_only=True"):
        tqdm(True, range(2))


def _bars() -> tuple[bool, bool]:
    PartialState(cpu=True)
    try:
        return tqdm(range(2)).disable, tqdm(range(2), main_process_only=False).disable
    finally:
        PartialState._reset_state()


def test_other_processes_show_none(run_ranks: Any) -> None:
    assert run_ranks(_bars) == [(False, False), (True, False)]
