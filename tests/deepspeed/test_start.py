"""The first use on a machine, at which DeepSpeed compiles an operator."""

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import pytest
from torch.utils.file_baton import FileBaton

from drivetrain_backends import AccumulationWindow
from drivetrain_deepspeed import DeepSpeedBackend
from drivetrain_deepspeed.library import telling_of_builds
from drivetrain_precision import choose_policy
from drivetrain_state import ProgressMark, StateSettings, connect

SCRIPT = """
import sys
import torch
from drivetrain_backends import AccumulationWindow
from drivetrain_deepspeed import DeepSpeedBackend
from drivetrain_precision import choose_policy
from drivetrain_state import StateSettings, connect

with connect(StateSettings(device="cpu"), needs_group=True) as context:
    before = context.progress.count
    DeepSpeedBackend(context, choose_policy("no", context.device), window=AccumulationWindow()).close()
    print("marks", context.progress.count - before, context.progress.label)
"""


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_compiling_the_operator_is_told_of_and_is_progress(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script)]
    run = subprocess.run(
        command,
        env=os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path / "empty")},
        capture_output=True,
        text=True,
        timeout=480,
        check=True,
    )
    assert "DeepSpeed compiles an operator for this machine, about a minute" in run.stderr
    assert f"kept in {tmp_path / 'empty'} (TORCH_EXTENSIONS_DIR)" in run.stderr
    marks, label = run.stdout.splitlines()[-1].removeprefix("marks ").split(" ", 1)
    assert int(marks) >= 1
    assert label == ProgressMark.COMPILE


@pytest.mark.ranks(2)
def test_the_buffers_in_shared_memory_keep_no_name_on_the_host() -> None:
    with connect(StateSettings(device="cpu", watchdog=False)) as context:
        DeepSpeedBackend(context, choose_policy("no", context.device), window=AccumulationWindow()).close()
        maps = Path("/proc/self/maps").read_text().splitlines()
    buffers = [line for line in maps if "/deepspeed_allreduce_buffer_" in line]
    assert len(buffers) == 2
    assert all(line.endswith("(deleted)") for line in buffers)


@pytest.mark.parametrize("is_held", [True, False])
def test_a_wait_for_another_build_names_the_lock_and_who_holds_it(
    tmp_path: Path, caplog, is_held: bool
) -> None:
    lock = tmp_path / "lock"
    with lock.open("w") as held, caplog.at_level(logging.WARNING):
        if not is_held:
            held.close()  # as that of a build that was killed

        def release_once_told() -> None:
            while not caplog.messages:
                time.sleep(0.01)
            lock.unlink()

        releasing = Thread(target=release_once_told, daemon=True)
        with (
            connect(StateSettings(device="cpu", watchdog=False)) as context,
            telling_of_builds(context, every_seconds=0.05),
        ):
            before = context.progress.count
            releasing.start()
            FileBaton(str(lock), wait_seconds=0.01).wait()
            releasing.join()
        num_marks = context.progress.count - before
    (said,) = caplog.messages[:1]
    if is_held:
        assert said.startswith(
            f"DeepSpeed waits for another build of its operator, by process {os.getpid()} ("
        )
        assert said.endswith(f"lock file {lock}")
    else:
        assert said == (
            f"DeepSpeed waits for the lock file {lock}, which no process on this machine holds: it is of a build on "
            "another machine that shares the folder, or of one that was killed. If no such build runs, stop this "
            "run, delete the file and start again; TORCH_EXTENSIONS_DIR sets another folder"
        )
        assert num_marks == 0, "a watchdog ends it"
