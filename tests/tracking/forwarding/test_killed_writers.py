import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drivetrain_tracking import JSONLTracker
from drivetrain_tracking.forwarding.delivery import Delivery, delivery_path
from drivetrain_tracking.spool.spool_reader import SpoolReader
from optional_modules import import_later

loader = import_later("tensorboard.backend.event_processing.event_file_loader")


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


def wait_for_progress(log: JSONLTracker, process: "subprocess.Popen[bytes]", *, seconds: float = 30) -> None:
    """Wait until a writer delivers: from then on a kill meets it at its work."""
    place, deadline = delivery_path(log.path, "tensorboard"), time.monotonic() + seconds
    before = Delivery.load(place)
    while Delivery.load(place) == before:
        assert process.poll() is None, "the writer has ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("rounds", "seed"),
    # 200 rounds in four parts: the slow stage begins no part after its time is over.
    [
        (2, 0),
        *(pytest.param(50, seed, marks=[pytest.mark.slow, pytest.mark.timeout(400)]) for seed in range(4)),
    ],
)
def test_every_value_is_there_once_and_in_order_however_often_the_writer_is_killed(
    tmp_path: Path, rounds: int, seed: int
) -> None:
    choice = random.Random(seed)
    log = JSONLTracker(tmp_path)
    log.start("killed", {"lr": 0.1})
    step = num_within = 0
    for _ in range(rounds):
        process = writer(log, parent=os.getpid())
        for _ in range(choice.randrange(2000, 4000)):
            log.log({"loss": 1 / (step + 1)}, step=step)
            step += 1
        wait_for_progress(log, process)
        time.sleep(choice.uniform(0, 0.05))
        process.kill()
        process.wait()
        state = Delivery.load(delivery_path(log.path, "tensorboard"))
        num_within += state.sending_end > state.offset
    log.finish()
    assert num_within >= rounds // 2, "most kills fell where no batch was on its way"
    assert writer(log, parent=0).wait() == 0
    assert delivered(tmp_path) == list(range(step))
    assert len([None for _, line in SpoolReader(log.path).read() if "loss" in line]) == step
