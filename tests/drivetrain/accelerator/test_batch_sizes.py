"""A batch size that fits on all ranks, where one of them alone runs out of memory in the middle of a step."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.optim import SGD

from drivetrain import Accelerator
from drivetrain_state import ConnectError, ParallelDims
from plain_loop.accelerated import accelerator_of

SCRIPT = """
import json, sys, weakref
import torch
from torch import nn
from torch.optim import SGD
from drivetrain import Accelerator
backend, folder, settings = sys.argv[1:]
sections = {"run": {"show_plan": False}, **json.loads(settings)}
accelerator = Accelerator(cpu=True, backend=backend, project_dir=folder, sections=sections)
tried, left, seen = [], [], []
def train(batch_size):
    left.append(sum(one() is not None for one in seen))
    tried.append([batch_size, accelerator.gradient_accumulation_steps])
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    seen.append(weakref.ref(plain))
    model, optimizer = accelerator.prepare(plain, SGD(plain.parameters(), lr=0.1))
    for i in range(8):
        with accelerator.accumulate(model):
            loss = model(torch.ones(batch_size, 8)).square().mean()
            if i == 6 and accelerator.process_index == 1 and batch_size > 8:
                torch.empty(2**60, dtype=torch.uint8)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_if_due()
    state = accelerator.get_state_dict(model)
    return {name: value.flatten().tolist() for name, value in (state or {}).items()}
found = accelerator.find_executable_batch_size(train, starting_batch_size=32)()
print(json.dumps([tried, left, found, accelerator.executable_batch_size.batch_size]), flush=True)
accelerator.end_training()
"""


def trained_weights(num_steps: int) -> dict[str, list[float]]:
    """Train the script's model in a plain loop."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        model(torch.ones(32, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.flatten().tolist() for name, value in model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.usefixtures("deepspeed_operators")
@pytest.mark.parametrize("backend", ["ddp", "fsdp", *(f"deepspeed-{stage}" for stage in range(4))])
def test_one_rank_out_of_memory_ends_the_try_on_all(
    run_ranks_script: Any, tmp_path: Path, backend: str
) -> None:
    name, _, stage = backend.partition("-")
    sections: dict[str, Any] = {"checkpoint": {"save_every_steps": 1, "keep_last": 1}}
    sections |= {"deepspeed": {"stage": int(stage)}} if stage else {}
    ranks = run_ranks_script(SCRIPT, name, str(tmp_path), json.dumps(sections), timeout_seconds=150)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    tried, left, weights, batch_sizes = zip(
        *(json.loads(rank.stdout.splitlines()[-1]) for rank in ranks), strict=True
    )
    assert tried == ([[32, 1], [16, 2], [8, 4]],) * 2
    assert left == ([0, 0, 0],) * 2
    assert batch_sizes == (8, 8)
    expected = trained_weights(2)
    assert weights[0].keys() == expected.keys()
    for name, value in expected.items():
        assert weights[0][name] == pytest.approx(value, abs=1e-6), name
    plan = json.loads((tmp_path / "checkpoints" / "step-2" / "manifest.json").read_text())["plan"]
    assert plan["facts"]["executable batch size"] == "8"


@pytest.mark.slow
def test_a_run_that_is_started_again_begins_with_the_batch_size_of_its_newest_checkpoint(tmp_path) -> None:
    tried: list[tuple[int, int]] = []
    steps: list[int] = []

    def train(batch_size: int, run: Accelerator, fails: bool) -> None:
        tried.append((batch_size, run.gradient_accumulation_steps))
        model = nn.Linear(2, 2)
        model, optimizer = run.prepare(model, SGD(model.parameters(), lr=0.1))
        if (tmp_path / "checkpoints").exists():
            steps.append(run.load_state())
        if batch_size > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        for _ in range(run.gradient_accumulation_steps):
            with run.accumulate(model):
                run.backward(model(torch.ones(batch_size, 2)).sum())
                optimizer.step()
        run.save_state()
        if fails:
            raise RuntimeError("a crash after the save")

    for crash in (True, False):
        with ExitStack() as stack:
            accelerator = stack.enter_context(
                Accelerator(cpu=True, project_dir=tmp_path, sections={"run": {"show_plan": False}})
            )
            if crash:
                stack.enter_context(pytest.raises(RuntimeError, match="a crash"))
            accelerator.find_executable_batch_size(train, starting_batch_size=10)(accelerator, fails=crash)
    assert tried == [(10, 1), (5, 2), (2, 5), (2, 5)]
    assert steps == [1]
    assert accelerator.plan.facts["executable batch size"] == "2"


def test_a_method_is_tried_with_its_object_and_keeps_the_global_batch() -> None:
    accelerator = Accelerator(cpu=True, sections={"run": {"show_plan": False}})

    class Trainer:
        tried: ClassVar[list[tuple[int, int]]] = []

        @accelerator.find_executable_batch_size
        def train(self, batch_size: int, *, largest: int) -> int:
            self.tried.append((batch_size, accelerator.gradient_accumulation_steps))
            if batch_size > largest:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return batch_size

    assert Trainer().train(largest=40) == 32
    assert Trainer.tried == [(128, 1), (64, 2), (32, 4)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{"parallelism": ParallelDims(data=2)}, {}], ids=["parallelism", "group"])
def test_a_group_that_cannot_be_formed_again_is_refused_before_the_first_try(options: dict[str, Any]) -> None:
    """In a run with a mesh, or with the ranks' own process group."""
    tried: list[int] = []
    said = r"cannot be formed again.*let Accelerator\(\) connect the ranks"
    with accelerator_of(**options) as accelerator, pytest.raises(ConnectError, match=said):
        accelerator.find_executable_batch_size(tried.append)()
    assert tried == []
