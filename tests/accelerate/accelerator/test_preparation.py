"""The order in which programs prepare and read their objects, beside the real Accelerate."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate_sides import OURS, THEIRS, Side, on_sides, said

pytest.importorskip("accelerate")


def trained_with_early_optimizer(accelerator: Any) -> list[list[float]]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    optimizer, schedule = accelerator.prepare(optimizer, schedule)  # as wrappers of optimizers do
    model = accelerator.prepare(model)
    torch.manual_seed(accelerator.process_index)
    weights: list[list[float]] = []
    for _ in range(3):
        accelerator.backward(model(torch.randn(4, 3)).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        weights.append(
            [*accelerator.unwrap_model(model).weight.flatten().tolist(), schedule.get_last_lr()[0]]
        )
    return weights


def test_an_optimizer_may_be_prepared_before_its_model() -> None:
    theirs, ours = on_sides(trained_with_early_optimizer)
    assert ours == [pytest.approx(each, rel=1e-5) for each in theirs]


def early_on_each_rank() -> tuple[list[Any], str]:
    with OURS.accelerator() as accelerator:
        alone = torch.nn.Linear(1, 1)
        optimizer = accelerator.prepare(torch.optim.SGD(alone.parameters(), lr=0.1))
        told = said(optimizer.step)
    return on_sides(trained_with_early_optimizer), told


@pytest.mark.slow
def test_ranks_train_one_model_with_it_and_a_model_that_is_never_prepared_is_told(run_ranks: Any) -> None:
    outcomes = run_ranks(early_on_each_rank)
    for (theirs, ours), told in outcomes:
        assert ours == [pytest.approx(each, rel=1e-5) for each in theirs]
        assert "nothing averages their gradients" in told
    assert outcomes[0][0][1] == outcomes[1][0][1]


def steps_with_a_look_inside(accelerator: Any) -> list[bool]:
    loader = DataLoader(torch.arange(20.0).reshape(10, 2), batch_size=2)  # pyright: ignore[reportArgumentType]
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    synced: list[bool] = []
    for place, batch in enumerate(loader):
        if place == 1:
            assert next(iter(loader)).tolist() == [[0.0, 1.0], [2.0, 3.0]]
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
            synced.append(accelerator.sync_gradients)
    return synced


class TrainsAPart(torch.nn.Module):
    """A model whose `parameters` are those that it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(2, 2).requires_grad_(False)
        self.adapter = torch.nn.Linear(2, 1)

    def parameters(self, recurse: bool = True) -> Any:
        return list(self.adapter.parameters(recurse))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.adapter(self.body(batch))


def gradients_and_compilations(side: Side) -> list[Any]:
    """Return what a rank finds of gradients detached in place, clipping beside a second model, and unwrapping."""
    found: list[Any] = []
    handler = side("accelerate.utils.DistributedDataParallelKwargs")
    is_compiled = side("accelerate.utils.is_compiled_module")
    for options in (None, handler(), handler(gradient_as_bucket_view=True), handler(broadcast_buffers=False)):
        with side.accelerator(kwargs_handlers=options and [options]) as accelerator:
            actor = TrainsAPart()
            optimizer = torch.optim.SGD(actor.parameters(), lr=0.1)
            model, _, optimizer = accelerator.prepare(actor, torch.nn.Linear(2, 1), optimizer)
            accelerator.backward(model(torch.ones(2, 2)).mean())
            assert accelerator.clip_grad_norm_(model.parameters(), 0.01) > 0.01
            try:
                found.append(
                    [each.grad.detach_().norm().item() < 0.01 for each in actor.adapter.parameters()]
                )
            except RuntimeError as error:
                found.append(str(error)[:27])
            accelerator.free_memory()
    for mode in ({}, {"mixed_precision": "bf16"}, {"dynamo_backend": "eager"}):
        with side.accelerator(**mode) as accelerator:
            model = accelerator.prepare(torch.nn.Linear(1, 1))
            compiled = model if "dynamo_backend" in mode else torch.compile(model, backend="eager")
            for kept in ({}, {"keep_fp32_wrapper": False}, {"keep_torch_compile": False}):
                whole = accelerator.unwrap_model(compiled, **kept)
                found.append((is_compiled(whole), type(getattr(whole, "_orig_mod", whole)).__name__))
            accelerator.free_memory()
    return found


def seen_by_each_rank() -> list[Any]:
    return [gradients_and_compilations(side) for side in (OURS, THEIRS)]


@pytest.mark.slow
def test_gradients_can_be_detached_and_a_compilation_stays_on_ranks_as_with_the_real_one(
    run_ranks: Any,
) -> None:
    views = "Can't detach views in-place"
    for ours, theirs in run_ranks(seen_by_each_rank):
        assert ours == theirs
        assert [each == views for each in ours[:4]] == [False, False, True, False]
        assert ours[4:] == [(True, "Linear"), (True, "Linear"), (False, "Linear")] * 3


def test_a_look_at_a_loader_does_not_end_the_loop_around_it() -> None:
    theirs, ours = on_sides(steps_with_a_look_inside, gradient_accumulation_steps=2)
    assert ours == theirs == [False, True, False, True, True]


def outputs_in_bf16(accelerator: Any) -> list[tuple[torch.dtype, list[float]]]:
    found: list[tuple[torch.dtype, list[float]]] = []
    for evaluation_mode in (False, True):
        torch.manual_seed(0)
        model = accelerator.prepare_model(torch.nn.Linear(3, 2), evaluation_mode=evaluation_mode)
        output = model(torch.ones(1, 3))
        found.append((output.dtype, output.flatten().tolist()))
    return found


def test_what_a_model_returns_is_fp32_and_was_computed_in_bf16_also_if_it_is_not_trained() -> None:
    theirs, ours = on_sides(outputs_in_bf16, mixed_precision="bf16")
    assert ours == theirs
    assert ours[0][0] is torch.float32


def test_a_run_on_one_process_imports_nothing_of_sharding() -> None:
    program = (
        "import sys, torch; from drivetrain_accelerate.accelerator.accelerator import Accelerator\n"
        "Accelerator(cpu=True).prepare(torch.nn.Linear(1, 1))\n"
        "print([name for name in ('fsdp', 'tensor', 'pipelining') if f'torch.distributed.{name}' in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
