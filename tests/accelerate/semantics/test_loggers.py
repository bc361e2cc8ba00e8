"""Rows of the table "Where it differs" about loggers."""

from pathlib import Path

import pytest

from accelerate_sides import SIDES

pytest.importorskip("accelerate")


def test_stacklevel(caplog: pytest.LogCaptureFixture) -> None:
    """`stacklevel=1` of a logger"""
    files: list[str] = []
    for side in SIDES:
        with side.accelerator():
            logger = side("accelerate.logging.get_logger")("of stacklevel", "INFO")
            logger.info("here", stacklevel=1)
            logger.info("there", main_process_only=False)
        files.append(Path(caplog.records[-2].pathname).name)
        assert caplog.messages[-1] == "[RANK 0] there"
    assert files == ["logging.py", Path(__file__).name, Path(__file__).name]
