"""Losses of programs that count micro-batches, keep graphs or prepare no optimizer; beside the real one."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate_sides import OURS, SIDES, on_sides, said

pytest.importorskip("accelerate")


def prepared(accelerator: Any, *, with_optimizer: bool = True) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return (
        accelerator.prepare(model, optimizer) if with_optimizer else (accelerator.prepare(model), optimizer)
    )


def weights_of(model: Any) -> list[float]:
    return [each.item() for parameter in model.parameters() for each in parameter.flatten()]


def keeps_a_graph(accelerator: Any) -> list[float]:
    model, optimizer = prepared(accelerator)
    for _ in range(2):
        loss = model(torch.ones(1, 2)).square().mean()
        accelerator.backward(loss, retain_graph=True)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(accelerator.unwrap_model(model))


def counts_itself(accelerator: Any) -> list[float]:
    model, optimizer = prepared(accelerator)
    for place in range(1, 7):
        accelerator.backward(model(torch.ones(1, 2) * place).square().mean() * 0.01)
        if place % 2 == 0 or place == 5:
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(accelerator.unwrap_model(model))


def prepares_no_optimizer(accelerator: Any) -> list[float]:
    model, optimizer = prepared(accelerator, with_optimizer=False)
    for _ in range(3):
        accelerator.backward(model(torch.ones(1, 2)).square().mean())
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return [*weights_of(model), norm.item()]


def prepares_no_optimizer_but_accumulates(accelerator: Any) -> list[float]:
    model, optimizer = prepared(accelerator, with_optimizer=False)
    for place in range(4):
        with accelerator.accumulate(model):
            inputs = torch.ones(1, 2) * (place + accelerator.process_index)
            accelerator.backward(model(inputs).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_value_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    return weights_of(model)


def punishes_gradients(accelerator: Any) -> list[float]:
    model, optimizer = prepared(accelerator)
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 2)).square().mean(), create_graph=True)
        norm = sum(each.grad.square().sum() for each in model.parameters())
        optimizer.zero_grad()
        accelerator.backward(norm * 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


def chooses_inputs(accelerator: Any) -> list[float]:
    model, optimizer = prepared(accelerator)
    inputs = torch.ones(1, 2) * (1 + accelerator.process_index)
    inputs.requires_grad_()
    accelerator.backward(model(inputs).square().mean(), inputs=[inputs])
    assert inputs.grad is not None
    accelerator.backward(model((inputs + inputs.grad).detach()).square().mean() * 0.1)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.backward(model(inputs).mean(), inputs=list(model.parameters()))
    optimizer.step()
    return [*weights_of(model), *inputs.grad.flatten().tolist()]


def prepares_nothing(accelerator: Any) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    accelerator.backward(model(torch.ones(1, 2)).mean())
    assert model.weight.grad is not None
    return model.weight.grad.flatten().tolist()


def counts_steps(accelerator: Any) -> list[float]:
    model, optimizer = prepared(accelerator)
    found = [accelerator.step]
    for batch in accelerator.prepare(DataLoader(torch.ones(6, 2))):  # pyright: ignore[reportArgumentType]
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
            found.append(accelerator.step)
    return found


def raises_a_flag(accelerator: Any) -> list[Any]:
    is_unset = accelerator.flag_tensor is None
    accelerator.set_trigger()
    raised = accelerator.flag_tensor.item()
    return [is_unset, raised, accelerator.check_trigger(), accelerator.flag_tensor.item()]


@pytest.mark.parametrize(
    ("found_by", "num_micro_batches"),
    [
        (keeps_a_graph, 1),
        (counts_itself, 2),
        (prepares_no_optimizer, 1),
        (prepares_no_optimizer_but_accumulates, 2),
        (punishes_gradients, 1),
        (chooses_inputs, 1),
        (prepares_nothing, 1),
        (prepares_nothing, 4),
        (counts_steps, 4),
        (raises_a_flag, 1),
    ],
)
@pytest.mark.filterwarnings(r"ignore:Using backward\(\) with create_graph=True:UserWarning")
def test_one_process_finds_what_the_real_one_finds(found_by: Any, num_micro_batches: int) -> None:
    found = on_sides(found_by, SIDES, gradient_accumulation_steps=num_micro_batches)
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-5)


def on_each_rank() -> tuple[list[list[Any]], str]:
    by_number = {
        1: (keeps_a_graph, prepares_no_optimizer, chooses_inputs),
        2: (counts_itself, prepares_no_optimizer_but_accumulates),
    }
    found = [
        on_sides(found_by, gradient_accumulation_steps=number)
        for number, functions in by_number.items()
        for found_by in functions
    ]
    with OURS.accelerator(fsdp_plugin=OURS("accelerate.FullyShardedDataParallelPlugin")()) as accelerator:
        return found, said(lambda: keeps_a_graph(accelerator))


@pytest.mark.slow
def test_two_processes_find_what_those_of_the_real_one_find(run_ranks: Any) -> None:
    for found, told in run_ranks(on_each_rank):
        for theirs, ours in found:
            assert ours == pytest.approx(theirs, rel=1e-5)
        assert "FSDP frees the gathered parameters" in told
