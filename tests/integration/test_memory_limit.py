"""A run that comes near its memory limit saves on all ranks, ends before the kernel kills it, and is resumed."""

from pathlib import Path

import pytest
import torch

from drivetrain import Accelerator
from drivetrain_checkpoint import RESUME_EXIT_CODE
from limited_group import limited_group

LEAKING = """
import mmap, os, sys, time
from contextlib import nullcontext
from pathlib import Path
import torch
from drivetrain import Accelerator
from drivetrain_memory import MemoryGuard

accelerator = Accelerator(cpu=True, project_dir=sys.argv[1], seed=0)
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
Path(sys.argv[2], "cgroup.procs").write_text(str(os.getpid()))
flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
leaks = accelerator.process_index == 1
guard = MemoryGuard(stop_at=0.8, on_stop=accelerator.request_stop, interval_seconds=0.02)
held = []
with accelerator, guard if leaks else nullcontext():
    while True:
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
        if leaks and not guard.should_stop:
            held.append(mmap.mmap(-1, 2**21, flags=flags))
        time.sleep(0.02)
        accelerator.save_if_due()
"""


@pytest.mark.slow
def test_one_rank_near_the_limit_saves_on_all_and_ends_the_run(run_ranks_script, tmp_path: Path) -> None:
    project = tmp_path / "project"
    with limited_group(400 * 2**20) as group:
        # Forked ranks would copy the pages they share with the others as they end, within the limit.
        ended = run_ranks_script(LEAKING, str(project), str(group), fresh=True)
    assert [rank.returncode for rank in ended] == [RESUME_EXIT_CODE] * 2, ended
    (folder,) = (project / "checkpoints").glob("step-*")
    step = int(folder.name.removeprefix("step-"))
    assert "of this job's memory limit is held. The kernel ends a process" not in ended[0].stderr
    assert f"of this job's memory limit is held: saved at step {step}; the program ends" in ended[0].stderr
    with Accelerator(cpu=True, project_dir=project) as accelerator:
        model = torch.nn.Linear(2, 1)
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        assert accelerator.load_state() == step > 10


def train_until_asked(accelerator: Accelerator, saved: list[int]) -> None:
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for step in range(1, 10):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        if step == 3:
            accelerator.request_stop("the time is over")
        accelerator.save_if_due()
        saved.append(step)


def test_the_program_may_ask_for_the_end(tmp_path: Path) -> None:
    saved: list[int] = []
    with Accelerator(cpu=True, project_dir=tmp_path) as accelerator:
        with pytest.raises(SystemExit, match=str(RESUME_EXIT_CODE)):
            train_until_asked(accelerator, saved)
    assert saved == [1, 2]
    assert (tmp_path / "checkpoints" / "step-3").is_dir()
