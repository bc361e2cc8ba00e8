"""Saves that the settings ask for: after steps and minutes, and on a signal that ends the program."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from drivetrain import Accelerator
from drivetrain_checkpoint import RESUME_EXIT_CODE
from drivetrain_launcher.run import failures
from processes import environment_alone

TRAIN = """
import os, sys, time
import torch
from drivetrain import Accelerator

accelerator = Accelerator(cpu=True, project_dir=sys.argv[1], seed=0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = accelerator.prepare(model, optimizer)
with accelerator:
    for step in range(1, 100_000):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            print("trains", flush=True)
        accelerator.save_if_due()
        time.sleep(0.002)
"""


def steps_of(project: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (project / "checkpoints").glob("step-*"))


def accelerator_that_saves(project: Path, **settings: object) -> tuple[Accelerator, list[int]]:
    """Eight steps of training, with a window of two micro-batches; the steps at which something was saved."""
    accelerator = Accelerator(
        cpu=True, project_dir=project, gradient_accumulation_steps=2, sections={"checkpoint": settings}
    )
    model, optimizer = accelerator.prepare(
        model := torch.nn.Linear(2, 1), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    saved: list[int] = []
    for micro_batch in range(16):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.save_if_due() is not None:
            saved.append(micro_batch)
    return accelerator, saved


def test_every_third_step_is_saved_after_its_window(tmp_path: Path) -> None:
    accelerator, saved = accelerator_that_saves(tmp_path, save_every_steps=3)
    assert saved == [5, 11]
    assert steps_of(tmp_path) == [3, 6]
    accelerator.end_training()


def test_the_clock_counts_from_the_last_save(tmp_path: Path) -> None:
    accelerator, saved = accelerator_that_saves(tmp_path, save_every_minutes=1e-9)
    assert saved == [1, 3, 5, 7, 9, 11, 13, 15]
    accelerator.end_training()
    accelerator, saved = accelerator_that_saves(tmp_path / "slow", save_every_minutes=60.0)
    assert saved == []
    accelerator.end_training()


def test_signals_are_handled_from_the_first_call_to_the_end(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    accelerator, _ = accelerator_that_saves(tmp_path)
    assert signal.getsignal(signal.SIGUSR1) != before
    accelerator.end_training()
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.parametrize(("num_ranks", "number"), [(1, signal.SIGTERM), (2, signal.SIGUSR1)])
@pytest.mark.default_cases("1-15")
def test_a_signal_to_one_rank_saves_on_all_and_ends_the_run(
    run_ranks_script, tmp_path: Path, num_ranks: int, number: int
) -> None:
    project = tmp_path / "project"
    # Twice, as where a launcher hands on what a scheduler sent to all.
    to_last = f"""
            for _ in range(2 * accelerator.is_last_process):
                os.kill(os.getpid(), {int(number)})"""
    source = TRAIN.replace(
        """
            print("trains", flush=True)""",
        to_last,
    )
    ended = run_ranks_script(source, str(project), num_processes=num_ranks)
    assert [rank.returncode for rank in ended] == [RESUME_EXIT_CODE] * num_ranks, ended
    (step,) = steps_of(project)
    said = (
        f"{signal.Signals(number).name}: saved at step {step}; the program ends; start it again to continue"
    )
    assert [said in rank.stderr for rank in ended] == [True] + [False] * (num_ranks - 1)
    assert step >= 3
    with Accelerator(cpu=True, project_dir=project) as accelerator:
        model = torch.nn.Linear(2, 1)
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        assert accelerator.load_state() == step


LATE_SIGNALS = """
import atexit, signal

class Late:
    def __del__(self):  # as the interpreter ends
        os.kill(os.getpid(), signal.SIGTERM)

late = Late()
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
accelerator.context.before_close(lambda: os.kill(os.getpid(), signal.SIGTERM))
accelerator.context.before_close(lambda: print("closing", flush=True))
accelerator.request_stop("the limit is near")
"""


def test_a_signal_while_the_program_ends_does_not_change_its_exit_code(
    run_ranks_script, tmp_path: Path
) -> None:
    source = TRAIN.replace("with accelerator:", LATE_SIGNALS + "with accelerator:")
    (ended,) = run_ranks_script(source, str(tmp_path), num_processes=1)
    assert ended.returncode == RESUME_EXIT_CODE, ended
    assert ended.stdout.split() == ["closing"]
    assert len(steps_of(tmp_path)) == 1


GOES_ON = """
import os, signal, subprocess, sys
import torch
from drivetrain import Accelerator

accelerator = Accelerator(cpu=True, project_dir=sys.argv[1])
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
try:
    with accelerator:
        accelerator.request_stop("the limit is near")
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        accelerator.save_if_due()
except SystemExit:
    pass
child = "import signal; print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)"
subprocess.run([sys.executable, "-c", child], check=True)
os.kill(os.getpid(), signal.SIGTERM)
print("goes on", flush=True)
"""


def test_a_program_that_goes_on_after_its_stop_is_ended_by_a_signal(run_ranks_script, tmp_path: Path) -> None:
    (ended,) = run_ranks_script(GOES_ON, str(tmp_path), num_processes=1)
    assert (ended.returncode, ended.stdout.split()) == (RESUME_EXIT_CODE, ["True"]), ended


@contextmanager
def two_launched_ranks(
    python: str, folder: Path, *flags: str
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Launch the training on two ranks; give the launcher and the ranks' process ids once both have trained."""
    script = folder / "train.py"
    # In one piece: both ranks write to one pipe.
    script.write_text(TRAIN.replace('print("trains", flush=True)', 'os.write(1, b"%d\\n" % os.getpid())'))
    launch = [python, "-m", "drivetrain_launcher", "launch", "--no-prefix", "--num-processes", "2", *flags]
    with subprocess.Popen(
        [*launch, str(script), str(folder / "project")],
        env=environment_alone(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        try:
            assert launcher.stdout is not None
            yield launcher, [int(launcher.stdout.readline()) for _ in range(2)]
        finally:
            launcher.kill()


@pytest.mark.parametrize(
    ("to_launcher", "number"), [(True, signal.SIGTERM), (False, signal.SIGTERM), (True, signal.SIGUSR1)]
)
@pytest.mark.slow
def test_the_launcher_ends_with_the_same_code_and_starts_nothing_again(
    tmp_path: Path, python: str, to_launcher: bool, number: signal.Signals
) -> None:
    with two_launched_ranks(python, tmp_path, "--max-restarts", "2") as (launcher, pids):
        os.kill(launcher.pid if to_launcher else pids[1], number)
        out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == RESUME_EXIT_CODE, err
    assert "all ranks have saved; run the same command again to continue (exit code 75)" in err
    assert out == ""
    assert len(steps_of(tmp_path / "project")) == 1


@pytest.mark.slow
def test_ranks_whose_launcher_is_killed_save_and_end(tmp_path: Path, python: str) -> None:
    with two_launched_ranks(python, tmp_path) as (launcher, _):
        launcher.kill()
        _, err = launcher.communicate(timeout=60)  # both pipes end with the last rank
    assert "SIGTERM: saved at step" in err
    assert len(steps_of(tmp_path / "project")) == 1


def test_launcher_and_checkpoint_mean_the_same_code() -> None:
    assert failures.RESUME_EXIT_CODE == RESUME_EXIT_CODE
