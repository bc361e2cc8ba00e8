import os
import random
import signal
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


def log_losses(log: JSONLTracker, steps: range) -> None:
    for step in steps:
        log.log({"loss": 1 / (step + 1)}, step=step)


def stopped_writer_state(log: JSONLTracker, process: "subprocess.Popen[bytes]") -> Delivery:
    """Stop a writer and return how far it is, which cannot change until it goes on."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    assert process.poll() is None, "the writer has ended by itself"
    return Delivery.load(delivery_path(log.path, "tensorboard"))


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
    step = 0
    for round_index in range(rounds):
        process = writer(log, parent=os.getpid())
        before = state = stopped_writer_state(log, process)
        deadline = time.monotonic() + 30
        while state == before or state.offset == state.sending_end:  # until a batch of its own is on its way
            assert time.monotonic() < deadline, "no batch was on its way"
            process.send_signal(signal.SIGCONT)
            log_losses(log, range(step, step := step + 50))
            time.sleep(choice.uniform(0, 0.05))
            state = stopped_writer_state(log, process)
        # Half of the kills meet that batch, the others the writer wherever it is a little later.
        if round_index % 2:
            process.send_signal(signal.SIGCONT)
            log_losses(log, range(step, step := step + 50))
            time.sleep(choice.uniform(0, 0.05))
        process.kill()
        process.wait()
    log.finish()
    assert writer(log, parent=0).wait() == 0
    assert delivered(tmp_path) == list(range(step))
    assert len([None for _, line in SpoolReader(log.path).read() if "loss" in line]) == step
