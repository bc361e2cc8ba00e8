import logging

import pytest
import torch

from drivetrain_state import Context, StateSettings, Topology, connect, get_logger


def _of(rank: int) -> Context:
    topology = Topology(rank=rank, local_rank=rank, world_size=2, local_world_size=2)
    return Context(topology=topology, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("asked", "lines"),
    [({}, ["loss 0.5"]), ({"main_process_only": False}, ["[rank 0] loss 0.5", "[rank 1] loss 0.5"])],
    ids=["the main process", "every rank"],
)
def test_the_main_process_speaks_for_all_or_every_rank_with_its_number(
    caplog: pytest.LogCaptureFixture, asked: dict[str, bool], lines: list[str]
) -> None:
    for rank in range(2):
        get_logger("run", _of(rank)).warning("loss %.1f", 0.5, **asked)
    assert [record.getMessage() for record in caplog.records] == lines


def test_a_record_names_the_line_that_logged(caplog: pytest.LogCaptureFixture) -> None:
    get_logger("run", _of(0)).warning("here")
    assert caplog.records[0].funcName == "test_a_record_names_the_line_that_logged"
    assert caplog.records[0].name == "run"


def _in_order() -> list[str]:
    context = connect(StateSettings(device="cpu", watchdog=False))
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    plain = logging.getLogger("in order")
    plain.addHandler(handler)
    try:
        get_logger("in order", context).error("hello", in_order=True)
    finally:
        plain.removeHandler(handler)
    return lines


def test_ranks_speak_one_after_the_other(run_ranks) -> None:
    assert run_ranks(_in_order) == [["[rank 0] hello"], ["[rank 1] hello"]]


_WITHOUT_A_CONTEXT = """
import logging
from drivetrain_state import StateSettings, connect, get_logger

logger = get_logger("no context", log_level="info")  # as a module does at import
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("no context").addHandler(handler)
logger.info("before")
try:
    logger.info("early", in_order=True)
except RuntimeError as error:
    refused = str(error)
with connect(StateSettings(device="cpu", watchdog=False)):
    logger.info("one")
    logger.debug("silent")
    logger.info("each", main_process_only=False)
    logger.info("turns", in_order=True)
logger.info("after")
print("ranks are not connected: make the Accelerator" in refused, *lines, sep="|")
"""


def test_a_logger_made_before_the_ranks_met_finds_its_rank_at_each_call(run_ranks_script) -> None:
    told = [rank.stdout.splitlines()[-1] for rank in run_ranks_script(_WITHOUT_A_CONTEXT)]
    assert told == ["True|before|one|[rank 0] each|[rank 0] turns|after", "True|[rank 1] each|[rank 1] turns"]


def test_a_logger_in_one_process_needs_no_context(caplog: pytest.LogCaptureFixture) -> None:
    get_logger("alone").warning("in order", in_order=True)
    assert [record.getMessage() for record in caplog.records] == ["[rank 0] in order"]
    with pytest.raises(TypeError, match=r"the second argument is a context; .* log_level='INFO'\)"):
        get_logger("alone", "INFO")  # type: ignore[arg-type]
