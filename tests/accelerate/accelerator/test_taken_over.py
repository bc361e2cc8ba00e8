"""Models that a second Accelerator of the process prepares again; beside the real Accelerate."""

import gc
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate_sides import OURS, SIDES, THEIRS, Side

pytest.importorskip("accelerate")


def cell_three_times(side: Side, first: Any, *, keeps_first: bool, keeps_prepared: bool) -> list[Any]:
    """Return losses and weights of a notebook's cell that is run three times, and the kinds of its objects."""
    torch.manual_seed(0)
    built = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(built.parameters(), lr=0.1, momentum=0.9)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    loader = DataLoader(TensorDataset(torch.arange(8.0).reshape(8, 1) / 8), batch_size=2)
    given: Any = (built, optimizer, schedule, loader)
    found: list[Any] = []
    accelerators = [first]
    for run in range(3):
        if run:
            accelerators = [*(accelerators if keeps_first else ()), side("accelerate.Accelerator")()]
        accelerator = accelerators[-1]
        model, stepped, its_schedule, batches = prepared = accelerator.prepare(*given)
        for (batch,) in batches:
            with accelerator.accumulate(model):
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                stepped.step()
                its_schedule.step()
                stepped.zero_grad()
            found.append(accelerator.reduce(loss.detach(), "mean").item())
        given = prepared if keeps_prepared else given
        found += [type(stepped).__name__, its_schedule.get_last_lr()]
    return [*found, *(each.item() for each in built.parameters())]


@pytest.mark.parametrize("keeps_prepared", [True, False])
@pytest.mark.parametrize("keeps_first", [True, False])
@pytest.mark.default_cases("False-True")
def test_a_cell_that_runs_again_trains_on(keeps_first: bool, keeps_prepared: bool) -> None:
    found: list[list[Any]] = []
    for side in (THEIRS, OURS):
        with side.accelerator() as accelerator:
            found.append(
                cell_three_times(side, accelerator, keeps_first=keeps_first, keeps_prepared=keeps_prepared)
            )
    assert found[0] == found[1]


def test_an_accelerator_prepares_what_another_has_unwrapped_whether_or_not_that_is_gone() -> None:
    with OURS.accelerator(mixed_precision="bf16") as accelerator:
        model = torch.nn.Linear(1, 1)
        wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        second = OURS("accelerate.Accelerator")()
        again = second.prepare(second.unwrap_model(wrapped))
        assert again(torch.ones(1, 1)).dtype == torch.float32  # computed in bf16, and cast once
        with pytest.raises(
            RuntimeError, match="or the prepare\\(\\) of another Accelerator that took its model"
        ):
            optimizer.step()
        assert second.prepare(optimizer) is optimizer
        second.backward(again(torch.ones(1, 1)).sum())
        before = model.bias.item()
        optimizer.step()
        assert model.bias.item() == pytest.approx(before - 1.0)
        del second, again
        gc.collect()
        third = OURS("accelerate.Accelerator")()
        assert third.prepare_model(model) is model
        accelerator.free_memory()  # which holds nothing of it any more
        assert third.prepare(model) is model
        assert type(model) is not torch.nn.Linear


def test_a_model_that_another_accelerator_divided_is_refused_with_what_to_do() -> None:
    plugin = OURS("accelerate.FullyShardedDataParallelPlugin")(fsdp_version=2)
    with OURS.accelerator(fsdp_plugin=plugin) as accelerator:
        model = accelerator.prepare(torch.nn.Linear(2, 1))
        second = OURS("accelerate.Accelerator")()
        with pytest.raises(
            ValueError, match=r"Linear was prepared by another Accelerator.*build the model and"
        ):
            second.prepare(model)
        assert accelerator.prepare(model) is model
        second.end_training()
        accelerator.end_training()


def on_each_rank() -> list[list[Any]]:
    found: list[list[Any]] = []
    for keeps_prepared in (True, False):
        for keeps_first in (True, False):
            for side in SIDES[:2]:
                with side.accelerator() as accelerator:
                    options = {"keeps_first": keeps_first, "keeps_prepared": keeps_prepared}
                    found.append(cell_three_times(side, accelerator, **options))
    return found


@pytest.mark.slow
def test_ranks_train_on_with_averaged_gradients(run_ranks: Any) -> None:
    by_rank = run_ranks(on_each_rank)
    assert by_rank[0] == by_rank[1]
    for theirs, ours in zip(by_rank[0][::2], by_rank[0][1::2], strict=True):
        for one, other in zip(theirs, ours, strict=True):
            assert one == (pytest.approx(other) if isinstance(other, float) else other)
