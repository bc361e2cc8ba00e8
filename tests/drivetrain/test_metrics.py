import pytest
import torch

from drivetrain.metrics import weigh
from drivetrain_data import BatchPlan


def plan(*real: int, replayed: bool = False) -> BatchPlan:
    return BatchPlan(
        real_counts=real, sizes=real, even=False, is_last=True, replayed=replayed, advance=sum(real)
    )


def test_means_of_a_tail_weigh_by_the_samples_behind_them() -> None:
    losses = [torch.tensor(2.0), torch.tensor(5.0)]
    weighed = [weigh(loss, None, plan(3, 1), shard)[0].item() for shard, loss in enumerate(losses)]
    assert sum(weighed) / 2 == pytest.approx((3 * 2.0 + 1 * 5.0) / 4)


def test_counted_sums_stay_as_they_are() -> None:
    loss, count = weigh(torch.tensor(6.0), 3, plan(3, 1), 0)
    assert (loss.item(), count) == (6.0, 3)


@pytest.mark.parametrize("count", [None, 4])
def test_a_replayed_batch_weighs_nothing_and_its_nan_stays_out(count: int | None) -> None:
    parameter = torch.ones((), requires_grad=True)
    loss, counted = weigh(parameter * float("nan"), count, plan(1, 0, replayed=True), 1)
    assert loss.item() == 0.0
    assert counted == (None if count is None else 0.0)
    weigh(parameter * 3.0, count, plan(1, 0, replayed=True), 1)[0].backward()
    assert parameter.grad is not None
    assert parameter.grad.item() == 0.0
