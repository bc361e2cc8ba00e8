import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drivetrain_tracking import JSONLTracker
from drivetrain_tracking.spool.spool_reader import SpoolReader

loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")


def writer(log: JSONLTracker, *, parent: int) -> "subprocess.Popen[bytes]":
    command = ["-m", "drivetrain_tracking.forwarding", str(log.path), "tensorboard", "--parent", str(parent)]
    return subprocess.Popen([sys.executable, *command, "--seconds-after-end", "60"])


def delivered(folder: Path) -> list[int]:
    """The steps in TensorBoard's files, in the order in which they were written."""
    found: list[tuple[float, int]] = []
    for file in (folder / "tensorboard").rglob("events.*"):
        found += [
            (event.wall_time, event.step)
            for event in loader.EventFileLoader(str(file)).Load()
            if _is_loss(event)
        ]
    return [step for _, step in sorted(found)]


def _is_loss(event: object) -> bool:
    return any(value.tag == "loss" for value in event.summary.value)


@pytest.mark.parametrize("rounds", [3, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_every_value_is_there_once_and_in_order_however_often_the_writer_is_killed(
    tmp_path: Path, rounds: int
) -> None:
    choice = random.Random(0)
    log = JSONLTracker(tmp_path)
    log.start("killed", {"lr": 0.1})
    step = 0
    for _ in range(rounds):
        process = writer(log, parent=0)  # no such parent: it delivers what is there, and ends
        until = time.monotonic() + choice.uniform(0.05, 0.6)
        while time.monotonic() < until:
            for _ in range(choice.randrange(20)):
                log.log({"loss": 1 / (step + 1)}, step=step)
                step += 1
            time.sleep(0.01)
        process.kill()
        process.wait()
    log.finish()
    assert writer(log, parent=0).wait() == 0
    assert step > 10
    assert delivered(tmp_path) == list(range(step))
    assert len([None for _, line in SpoolReader(log.path).read() if "loss" in line]) == step
