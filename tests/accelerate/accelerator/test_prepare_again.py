"""What libraries do between two loops: free memory, prepare again, set even_batches; beside the real Accelerate."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from accelerate_sides import OURS, on_sides

pytest.importorskip("accelerate")


def loader() -> DataLoader[Any]:
    data = TensorDataset(torch.arange(7.0).reshape(7, 1))
    return DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, drop_last=False))


def outcome(accelerator: Any) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(0.5))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    accelerator.prepare_model(model, evaluation_mode=True)  # a Trainer that evaluates before it trains
    found: list[float] = []
    for even in (False, True):  # sentence-transformers sets it between its loaders
        accelerator.free_memory()
        accelerator.even_batches = even
        batches = accelerator.prepare(loader())
        prepared, optimizer = accelerator.prepare(model, optimizer)
        for (batch,) in batches:
            with accelerator.accumulate(prepared):
                loss = prepared(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            # transformers repeats a mean once for each sample of a full batch.
            found += [loss.item(), len(accelerator.gather_for_metrics(loss.detach().repeat(4)))]
    return found


def test_a_loop_after_free_memory_goes_on_with_the_optimizer_and_the_masks_of_the_real_one() -> None:
    found = on_sides(outcome)
    assert found[0] == pytest.approx(found[1])
    assert found[0][1::2] == [4, 3, 4, 3]


def referred(accelerator: Any) -> list[float]:
    torch.manual_seed(0)
    reference = torch.nn.Linear(4, 3)
    accelerator.prepare_model(reference, evaluation_mode=True)
    accelerator.free_memory()  # a Trainer's train() begins with it
    model = torch.nn.Linear(4, 3)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return reference(torch.randn(2, 4)).flatten().tolist()


def test_a_reference_model_computes_in_the_runs_precision_after_free_memory_as_with_the_real_one() -> None:
    found = on_sides(referred, mixed_precision="bf16")
    assert found[0] == found[1]
    assert torch.tensor(found[0]).bfloat16().tolist() == found[0]


def kept_after(accelerator: Any) -> list[Any]:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared = accelerator.prepare(model)
    alone = accelerator.prepare(prepared) is prepared, accelerator.prepare_model(prepared) is prepared
    again, stepped = accelerator.prepare(prepared, optimizer)
    return [alone, again is prepared, stepped.optimizer is optimizer, len(accelerator._models)]


def test_a_prepared_model_comes_back_as_it_is_and_pairs_with_a_later_optimizer() -> None:
    assert on_sides(kept_after) == [[(True, True), True, True, 1]] * 2


def rates(accelerator: Any, folder: Path) -> list[float]:
    counted = Counted()
    accelerator.register_for_checkpointing(counted)
    model = torch.nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule: Any = None
    found: list[float] = []
    for _ in range(3):
        accelerator.free_memory()
        schedule = torch.optim.lr_scheduler.StepLR(getattr(optimizer, "optimizer", optimizer), 1)
        prepared, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        accelerator.backward(prepared(torch.ones(1, 1)).sum())
        optimizer.step()
        schedule.step()
        found.append(schedule.get_last_lr()[0])
    counted.number = 3
    accelerator.save_state(str(folder))
    schedule.step()
    counted.number = 0
    accelerator.load_state(str(folder))
    return [*found, schedule.get_last_lr()[0], counted.number]


class Counted:
    number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def test_free_memory_forgets_schedules_and_keeps_what_the_program_registered(tmp_path: Path) -> None:
    found = on_sides(lambda accelerator: rates(accelerator, tmp_path / type(accelerator).__module__))
    assert found[0] == pytest.approx(found[1])
    assert found[0][-1] == 3


def test_a_prepared_schedule_belongs_to_the_checkpoints_again_after_free_memory(tmp_path: Path) -> None:
    with OURS.accelerator() as accelerator:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        accelerator.free_memory()
        model, optimizer, again = accelerator.prepare(model, optimizer, schedule)
        assert again is schedule
        accelerator.save_state(str(tmp_path))
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        schedule.step()
        accelerator.load_state(str(tmp_path))
        assert schedule.get_last_lr() == [1.0]


def wrapper_kept_over_free_memory(accelerator: Any) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    found: list[float] = []
    for _ in range(3):  # a Trainer that trains several times
        for _ in range(2):
            with accelerator.accumulate(wrapped):
                inputs = torch.full((1, 1), accelerator.process_index + 1.0)
                accelerator.backward(wrapped(inputs).square().mean())
                found.append(float(accelerator.clip_grad_norm_(wrapped.parameters(), 10.0)))
                optimizer.step()
                optimizer.zero_grad()
        accelerator.free_memory()
        optimizer = accelerator.prepare(optimizer)
    whole = (each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters())
    return [*found, *(each.item() for each in whole)]


@pytest.mark.parametrize(
    "options",
    [{"mixed_precision": "bf16"}, pytest.param({"dynamo_backend": "eager"}, marks=pytest.mark.slow)],
)
def test_a_model_kept_over_free_memory_trains_with_its_optimizer(options: dict[str, Any]) -> None:
    found = on_sides(wrapper_kept_over_free_memory, **options)
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def on_replicas_and_divided() -> list[list[float]]:
    plugin = OURS("accelerate.FullyShardedDataParallelPlugin")(fsdp_version=2)
    both = ({}, {"fsdp_plugin": plugin})
    return [on_sides(wrapper_kept_over_free_memory, [OURS], **options)[0] for options in both]


def test_a_divided_model_kept_over_free_memory_trains_as_replicas_do(run_ranks: Any) -> None:
    for replicated, divided in run_ranks(on_replicas_and_divided):
        assert divided == pytest.approx(replicated, rel=1e-5)


def on_each_rank() -> list[Any]:
    found = on_sides(wrapper_kept_over_free_memory, gradient_accumulation_steps=2)
    with OURS.accelerator() as accelerator:
        model = torch.nn.Linear(1, 1)
        wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.free_memory()
        optimizer = accelerator.prepare(optimizer)
        assert accelerator.prepare(model) is wrapped
    return found


@pytest.mark.slow
def test_a_wrapper_kept_over_free_memory_averages_gradients_again(run_ranks: Any) -> None:
    for theirs, ours in run_ranks(on_each_rank):
        assert ours == pytest.approx(theirs, rel=1e-5)
