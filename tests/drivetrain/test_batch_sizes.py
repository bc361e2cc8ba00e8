"""A batch size that fits on all ranks, where one of them alone runs out of memory in the middle of a step."""

import json

import pytest
import torch
from torch import nn
from torch.optim import SGD

from drivetrain import Accelerator

SCRIPT = """
import gc, json, sys, weakref
import torch
from torch import nn
from torch.optim import SGD
from drivetrain import Accelerator
quiet = {"run": {"show_plan": False}}
accelerator = Accelerator(cpu=True, backend=sys.argv[1], project_dir=sys.argv[2], sections=quiet)
tried, left, seen = [], [], []
def train(batch_size):
    left.append(sum(one() is not None for one in seen))
    tried.append([batch_size, accelerator.gradient_accumulation_steps])
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    seen.append(weakref.ref(plain))
    model, optimizer = accelerator.prepare(plain, SGD(plain.parameters(), lr=0.1))
    for i in range(4):
        with accelerator.accumulate(model):
            loss = model(torch.ones(batch_size, 8)).square().mean()
            if i == 2 and accelerator.process_index == 1 and batch_size > 8:
                torch.empty(2**60, dtype=torch.uint8)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return float(torch.stack([p.detach().full_tensor().sum() if hasattr(p, "full_tensor") else p.detach().sum()
        for p in model.parameters()]).sum())
found = accelerator.find_executable_batch_size(train, starting_batch_size=32)()
print(json.dumps([tried, left, found, accelerator.executable_batch_size.batch_size]), flush=True)
accelerator.end_training()
"""


def tries(run_ranks_script, backend: str, folder: str) -> None:
    ranks = run_ranks_script(SCRIPT, backend, folder)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    found = [json.loads(rank.stdout.splitlines()[-1]) for rank in ranks]
    assert [one[0] for one in found] == [[[32, 1], [16, 2], [8, 4]]] * 2
    assert [one[1] for one in found] == [[0, 0, 0]] * 2
    assert found[0][2:] == found[1][2:]
    assert found[0][3] == 8


def test_one_rank_out_of_memory_ends_the_try_on_all_under_ddp(run_ranks_script, tmp_path) -> None:
    tries(run_ranks_script, "ddp", str(tmp_path))


@pytest.mark.slow
def test_one_rank_out_of_memory_ends_the_try_on_all_under_fsdp(run_ranks_script, tmp_path) -> None:
    tries(run_ranks_script, "fsdp", str(tmp_path))


def test_a_run_that_is_started_again_begins_with_the_answer(tmp_path) -> None:
    tried: list[tuple[int, int]] = []
    for _ in range(2):
        with Accelerator(
            cpu=True, project_dir=tmp_path, sections={"run": {"show_plan": False}}
        ) as accelerator:

            def train(batch_size: int, run: Accelerator) -> None:
                tried.append((batch_size, run.gradient_accumulation_steps))
                model = nn.Linear(2, 2)
                run.prepare(model, SGD(model.parameters(), lr=0.1))
                if batch_size > 3:
                    raise torch.OutOfMemoryError("CUDA out of memory")

            accelerator.find_executable_batch_size(train, starting_batch_size=10)(accelerator)
    assert tried == [(10, 1), (5, 2), (2, 5), (2, 5)]
