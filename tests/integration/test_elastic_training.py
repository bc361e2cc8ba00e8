"""An elastic run whose hosts die, freeze and come back trains what a run that nothing happened to trains."""

import json
import signal
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from shutil import copyfile

import pytest

from drivetrain_checkpoint import RESUME_EXIT_CODE
from integration.elastic_training import EPOCHS, MICRO_BATCH, MICRO_BATCHES, SAMPLES
from launch_fixtures import clean_environment
from launcher.hosts import Host, Launcher, hosts_fixture  # noqa: F401

MEANT_FOR = 3
SAVE_EVERY = 3  # as elastic_training.py has it
PER_EPOCH = SAMPLES // (MICRO_BATCH * MICRO_BATCHES * MEANT_FOR)


@pytest.mark.slow
@pytest.mark.undisturbed
@pytest.mark.timeout(900)
def test_losses_and_samples_are_those_of_a_run_that_nothing_happened_to(
    hosts: Callable[[int], list[Host]], tmp_path: Path, python: str
) -> None:
    copyfile(Path(__file__).with_name("elastic_training.py"), tmp_path / "train.py")
    made = hosts(3)
    launchers = [start(host) for host in made]
    launchers[0].wait_for("begins at step 0 with 3 processes")
    wait_for_steps(tmp_path, 5)
    made[1].kill()
    launchers[0].wait_for("with 2 processes")
    wait_for_steps(tmp_path, 5)
    launchers[1] = start(made[1])
    launchers[0].wait_for("with 3 processes", count=2)
    wait_for_steps(tmp_path, 5)
    made[2].freeze()
    launchers[0].wait_for("with 2 processes", count=2)
    wait_for_steps(tmp_path, 5)
    made[2].thaw()
    launchers[0].wait_for("with 3 processes", count=3)
    assert [launcher.end() for launcher in launchers] == [0, 0, 0], [one.output for one in launchers]
    assert not any(host.pids() for host in made)

    alone = made[0].start(
        *("launch", "--cpu", "train.py", "alone", "alone-log", str(MEANT_FOR), "0"),
        environment=clean_environment(),
    )
    assert alone.end() == 0, alone.output
    elastic, undisturbed = read(tmp_path, "log"), read(tmp_path, "alone-log")
    assert list(elastic) == list(undisturbed) == list(range(EPOCHS * PER_EPOCH))
    worlds = [elastic[step][0]["world"] for step in elastic]
    assert [world for world, _ in groupby(worlds)] == [3, 2, 3, 2, 3]
    (_, end), (killed, at_kill), (joined, before_join), (frozen, at_freeze), (back, _) = rounds(tmp_path)
    assert 0 < killed <= end + 1 < killed + 1 + SAVE_EVERY  # lost at most what was not saved yet
    assert joined == at_kill + 1  # nothing is lost when ranks are told to save
    assert 0 < frozen <= before_join + 1 < frozen + 1 + SAVE_EVERY
    assert back == at_freeze + 1
    for step, records in elastic.items():
        assert samples_of(records) == samples_of(undisturbed[step]), step
        assert mean_loss(records) == pytest.approx(mean_loss(undisturbed[step]), rel=1e-4), step
    for epoch in range(EPOCHS):
        steps = range(epoch * PER_EPOCH, (epoch + 1) * PER_EPOCH)
        assert sorted(sample for step in steps for sample in samples_of(elastic[step])) == list(
            range(SAMPLES)
        )


@pytest.mark.slow
@pytest.mark.undisturbed
@pytest.mark.timeout(600)
def test_all_ranks_save_and_every_launcher_says_so_when_the_host_of_the_store_is_stopped(
    hosts: Callable[[int], list[Host]], tmp_path: Path
) -> None:
    copyfile(Path(__file__).with_name("elastic_training.py"), tmp_path / "train.py")
    made = hosts(2)
    launchers = [start(host) for host in made]
    launchers[0].wait_for("begins at step 0 with 2 processes")
    wait_for_steps(tmp_path, 4)
    launchers[0].process.send_signal(signal.SIGTERM)
    assert [launcher.end() for launcher in launchers] == [RESUME_EXIT_CODE] * 2, [
        one.output for one in launchers
    ]
    for launcher in launchers:
        assert (
            "all ranks have saved; run the same command again to continue (exit code 75)" in launcher.output
        )
    assert f"step-{max(read(tmp_path, 'log')) + 1}" in {
        folder.name for folder in (tmp_path / "project" / "checkpoints").iterdir()
    }


def rounds(folder: Path) -> list[tuple[int, int]]:
    """Return the first and the last step that rank 0 made in each round, in order."""
    files = sorted(folder.glob("log.0.*"), key=lambda file: float(file.name.removeprefix("log.0.")))
    steps = [
        [json.loads(line)["step"] for line in file.read_text().splitlines() if line.endswith("}")]
        for file in files
    ]
    return [(each[0], each[-1]) for each in steps]


def start(host: Host) -> Launcher:
    return host.start(
        *("launch", "--cpu", "--nnodes", "1:3", "--rdzv-backend", "c10d", "--rdzv-id", "run"),
        *("--master-addr", "10.213.7.1", "--nproc-per-node", "1"),
        *("train.py", "project", "log", str(MEANT_FOR), "0.5"),
        environment=clean_environment(),
    )


def wait_for_steps(folder: Path, number: int) -> None:
    """Wait until the ranks have made some more steps."""
    deadline, until = time.monotonic() + 240, max(read(folder, "log"), default=-1) + number
    while max(read(folder, "log"), default=-1) < until:
        assert time.monotonic() < deadline, [log.read_text() for log in folder.glob("*.log")]
        time.sleep(0.2)


def read(folder: Path, name: str) -> dict[int, list[dict]]:
    """Return what the last run of each step logged, by step: a step behind the checkpoint is run again."""
    found: dict[int, list[dict]] = {}
    for file in folder.glob(f"{name}.*.*"):
        for line in file.read_text().splitlines():
            if line.endswith("}"):
                record = json.loads(line)
                found.setdefault(record["step"], []).append(record)
    kept: dict[int, list[dict]] = {}
    for step, records in sorted(found.items()):
        newest = max(records, key=lambda record: record["began"])["round"]
        kept[step] = [record for record in records if record["round"] == newest]
    return kept


def samples_of(records: list[dict]) -> list[int]:
    return sorted(sample for record in records for sample in record["samples"])


def mean_loss(records: list[dict]) -> float:
    return sum(record["loss"] for record in records) / len(records)
