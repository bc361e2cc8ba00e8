"""What an Accelerator holds is let go with its last name, and not at the next collection of garbage."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from drivetrain import Accelerator
from drivetrain_backends import AccumulationError

QUIET = {"run": {"show_plan": False}}


def trained(accelerator: Accelerator) -> dict[str, Any]:
    """Everything of a short training by name."""
    model = nn.Linear(4, 1)
    own, plain = (
        SGD(model.parameters(), lr=0.1),
        DataLoader(torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), batch_size=2),
    )
    prepared = accelerator.prepare(model, own, StepLR(own, 1), plain)
    for x in prepared[-1]:
        with accelerator.accumulate(prepared[0]):
            accelerator.backward(prepared[0](x).square().mean())
            prepared[1].step()
            prepared[2].step()
            prepared[1].zero_grad()
    names = ("model", "optimizer", "scheduler", "loader")
    return {
        **dict(zip(names, prepared, strict=True)),
        "module": model,
        "own optimizer": own,
        "own loader": plain,
    }


def alive(references: dict[str, weakref.ref[Any]]) -> list[str]:
    return [name for name, reference in references.items() if reference() is not None]


def lifetimes(backend: str) -> list[list[str]]:
    """What lives on after free_memory() and `del`, after the Accelerator too, and after it alone has gone."""
    found: list[list[str]] = []
    gc.collect()
    gc.disable()
    try:
        for ends in (True, False):
            accelerator = Accelerator(
                cpu=True, backend=backend, gradient_accumulation_steps=2, sections=QUIET
            )
            objects = trained(accelerator)
            references = {name: weakref.ref(one) for name, one in objects.items()}
            references["accelerator"] = weakref.ref(accelerator)
            if ends:
                accelerator.free_memory()
                objects.clear()
                found.append(alive(references))
                accelerator.end_training()
            del accelerator
            found.append(alive({name: references[name] for name in ("accelerator",)}))
            if backend != "deepspeed":  # whose engine and hooks are circles
                objects.clear()
                found.append(alive(references))
    finally:
        gc.enable()
        gc.collect()
    return found


def test_nothing_waits_for_the_garbage_collector() -> None:
    assert lifetimes("single") == [["accelerator"], [], [], [], []]


@pytest.mark.ranks(2)
def test_nothing_waits_for_the_garbage_collector_under_ddp() -> None:
    assert lifetimes("ddp") == [["accelerator"], [], [], [], []]


@pytest.mark.ranks(2)
def test_a_sharded_model_alone_waits_for_the_garbage_collector() -> None:
    model = ["model", "module"]  # torch's fully_shard ties it to itself
    assert lifetimes("fsdp") == [[*model, "accelerator"], [], model, [], model]


def test_what_is_held_goes_on_without_its_accelerator() -> None:
    objects = trained(Accelerator(cpu=True, sections=QUIET))
    model, optimizer, scheduler = (objects[name] for name in ("model", "optimizer", "scheduler"))
    optimizer.param_groups[0]["lr"] = 1.0
    before = model.weight.detach().clone()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert torch.equal(model.weight, before - model.weight.grad)
    assert optimizer.param_groups[0]["lr"] < 1.0


def test_a_step_after_the_models_were_released_is_refused() -> None:
    accelerator = Accelerator(cpu=True, sections=QUIET)
    model = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    accelerator.free_memory()
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(AccumulationError, match=r"step\(\) of SGD after free_memory\(\), end_training\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    assert model.weight.grad is None


@pytest.mark.slow
def test_a_save_whose_copies_are_pending_keeps_no_accelerator(tmp_path) -> None:
    gc.collect()
    gc.disable()
    try:
        accelerator = Accelerator(
            cpu=True,
            project_dir=tmp_path,
            sections={**QUIET, "checkpoint": {"staging": "overlap", "background": True}},
        )
        objects = trained(accelerator)
        accelerator.save_state()
        accelerator.wait_for_save()
        references = {
            name: weakref.ref(one) for name, one in [*objects.items(), ("accelerator", accelerator)]
        }
        objects.clear()
        del accelerator
        assert alive(references) == []
    finally:
        gc.enable()
        gc.collect()
