from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_data import BatchPlan, TrimError, batch_sizes, check_after_loop, trim, trim_objects
from drivetrain_data.remainder import weigh
from drivetrain_data.sampling.partition import step_plan

# two shards have samples of their own, the other two repeat one
REPLAY = step_plan(2, 4, 3, "uneven", shard=0, is_last=True)
# of three a shard, four count
PADDED = step_plan(4, 4, 3, "pad", shard=0, is_last=True)
BATCHES = BatchPlan(
    real_counts=(3, 2, 0), sizes=(3, 2, 1), even=False, is_last=True, replayed=False, advance=2
)


class Pair(NamedTuple):
    left: torch.Tensor
    right: object


@dataclass
class Output:
    logits: torch.Tensor
    note: str


def test_nested_values_of_any_structure_are_trimmed() -> None:
    rows = torch.arange(4)
    gathered = {
        "dict": {"x": rows},
        "list": [rows, (rows[:, None] * torch.ones(2),)],
        "pair": Pair(rows, "text"),
        "output": Output(rows, "note"),
        "none": None,
    }
    trimmed = trim(REPLAY, gathered)
    assert trimmed["dict"]["x"].tolist() == [0, 1]
    assert trimmed["list"][0].tolist() == [0, 1]
    assert trimmed["list"][1][0].shape == (2, 2)
    assert isinstance(trimmed["pair"], Pair)
    assert trimmed["pair"].left.tolist() == [0, 1]
    assert trimmed["pair"].right == "text"
    assert trimmed["output"] == Output(trimmed["output"].logits, "note")
    assert trimmed["output"].logits.tolist() == [0, 1]
    assert trimmed["none"] is None
    assert gathered["dict"]["x"].tolist() == [0, 1, 2, 3]


@given(
    total=st.integers(1, 60),
    count=st.integers(1, 8),
    batch_size=st.integers(1, 6),
    even=st.sampled_from(["uneven", "pad"]),
    width=st.integers(1, 3),
)
def test_what_is_left_is_each_real_sample_in_order(total, count, batch_size, even, width) -> None:
    total = min(total, count * batch_size)
    plan = step_plan(total, count, batch_size, even, shard=0, is_last=True)
    held: list[int] = []
    objects: list[list[int]] = []
    next_sample = 0
    for size, real in zip(plan.sizes, plan.real_counts, strict=True):
        samples = [*range(next_sample, next_sample + real), *([-1] * (size - real))]
        next_sample += real
        held += samples
        objects.append(samples)
    tensor = torch.tensor(held)
    assert trim(plan, tensor).tolist() == list(range(total))
    assert trim_objects(plan, objects) == list(range(total))
    several = tensor.repeat_interleave(width)
    assert trim(plan, several).tolist() == torch.arange(total).repeat_interleave(width).tolist()


@pytest.mark.parametrize("plan", [REPLAY, PADDED, BATCHES])
def test_a_number_of_each_rank_loses_those_of_ranks_without_samples(plan: BatchPlan) -> None:
    values = torch.arange(float(len(plan.real_counts)))
    assert trim(plan, values).tolist() == [0.0, 1.0]


def test_a_vector_of_each_rank_loses_those_of_ranks_without_samples() -> None:
    assert trim(REPLAY, torch.arange(12)).tolist() == [0, 1, 2, 3, 4, 5]
    assert trim(BATCHES, torch.arange(15)).tolist() == list(range(10))


def test_what_counts_in_full_is_left_alone() -> None:
    plan = step_plan(5, 4, 3, "uneven", shard=0, is_last=True)
    odd = torch.arange(7)
    assert trim(plan, odd) is odd
    assert trim(None, odd) is odd
    assert trim_objects(None, [[1], [2, 3]]) == [1, 2, 3]
    assert trim_objects(None, ["a", "b"]) == ["a", "b"]


def test_objects_of_ranks_without_samples_are_left_out() -> None:
    assert trim_objects(REPLAY, ["a", "b", "c", "d"]) == ["a", "b"]
    assert trim_objects(REPLAY, [["a"], ["b"], ["c"], ["d"]]) == ["a", "b"]
    assert trim_objects(BATCHES, [["a", "b", "c"], ["d", "e"], ["f"]]) == ["a", "b", "c", "d", "e"]


def test_rows_that_belong_to_nobody_are_refused() -> None:
    with pytest.raises(TrimError, match=r"has 7 rows, and the 4 shards held 1\+1\+1\+1 samples"):
        trim(REPLAY, torch.arange(7))
    with pytest.raises(TrimError, match=r"has 18 rows, and the 3 shards held 3\+2\+1 samples"):
        trim(BATCHES, torch.arange(18))  # three a sample, or six a rank
    with pytest.raises(
        TrimError, match=r"rank 1 gave 2 rows or elements for a batch of 3 samples, of which 1 count"
    ):
        trim(PADDED, torch.arange(8))
    with pytest.raises(TrimError, match="rank 1 gave 2 rows or elements"):
        trim_objects(PADDED, [[1, 2, 3], [4, 5], [6, 7, 8], [9, 10, 11]])


def test_rows_that_the_caller_knows_are_believed() -> None:
    assert trim(BATCHES, torch.arange(18), rows=torch.tensor([9, 6, 3])).tolist() == list(range(15))


def test_batches_of_unknown_size_are_cut_by_rank_with_rows_alone() -> None:
    unknown = replace(REPLAY, sizes=None)
    with pytest.raises(TrimError, match="held an unknown number of samples"):
        trim(unknown, torch.arange(8))
    assert trim(unknown, torch.arange(8), rows=torch.tensor([3, 1, 2, 2])).tolist() == [0, 1, 2, 3]
    assert trim_objects(unknown, ["a", "b", "c", "d"]) == ["a", "b"]


def test_rows_are_told_for_each_tensor_of_a_structure() -> None:
    unknown = replace(step_plan(2, 2, 1, "uneven", shard=0, is_last=True), sizes=None, real_counts=(1, 0))
    gathered = {"rows": torch.arange(5), "one": torch.tensor([7, 8])}
    rows = {"rows": torch.tensor([3, 2]), "one": torch.tensor([1, 1])}
    assert str(trim(unknown, gathered, rows=rows)) == str({"rows": torch.arange(3), "one": torch.tensor([7])})
    counts = batch_sizes({"rows": torch.zeros(3, 2), "one": torch.tensor(1.0)})
    assert str(counts) == str({"rows": torch.tensor([3]), "one": torch.tensor([1])})


def test_padding_is_cut_from_objects_of_any_structure() -> None:
    plan = step_plan(5, 2, 4, "pad", shard=0, is_last=True)
    by_rank = [
        {"text": [f"{rank}{i}" for i in range(4)], "more": (torch.arange(4), 0.5 + rank)} for rank in (0, 1)
    ]
    first, second = trim_objects(plan, by_rank)
    assert first is by_rank[0]
    assert second["text"] == ["10"]
    assert second["more"][0].tolist() == [0]
    assert second["more"][1] == 1.5
    with pytest.raises(TrimError, match="rank 1 gave a str for a batch of 4 samples, of which 1 count"):
        trim_objects(plan, ["abcd", "efgh"])


def test_after_a_loop_with_a_tail_only_numbers_can_be_gathered() -> None:
    left = step_plan(1, 2, 4, "uneven", shard=0, is_last=True)
    check_after_loop(left, {"loss": torch.tensor(0.5), "count": 3})
    check_after_loop(None, torch.arange(3))
    check_after_loop(step_plan(8, 2, 4, "uneven", shard=0, is_last=True), torch.arange(3))
    for data in (torch.arange(3), {"loss": torch.tensor(0.5), "texts": ["a", "b"]}):
        with pytest.raises(
            TrimError, match=r"only 1\+0 samples of the ranks counted.*Gather inside the loop"
        ):
            check_after_loop(left, data)


def test_one_row_that_a_filter_left_of_a_padded_batch_is_no_number_for_the_batch() -> None:
    # 2 samples held by each, of which 1 and 0 count.
    padded = step_plan(1, 2, 2, "pad", shard=0, is_last=True)
    number = trim(padded, torch.tensor([7.0, 8.0]), rows=torch.tensor([1, 1]))
    assert number.tolist() == [7.0]
    with pytest.raises(TrimError, match="rank 0 gave 1 rows"):
        trim(padded, torch.tensor([7.0]), rows=torch.tensor([1, 0]))


def tail(*real: int, replayed: bool = False) -> BatchPlan:
    return BatchPlan(
        real_counts=real, sizes=real, even=False, is_last=True, replayed=replayed, advance=sum(real)
    )


def test_means_of_a_tail_weigh_by_the_samples_behind_them() -> None:
    losses = [torch.tensor(2.0), torch.tensor(5.0)]
    weighed = [weigh(loss, None, tail(3, 1), shard)[0].item() for shard, loss in enumerate(losses)]
    assert sum(weighed) / 2 == pytest.approx((3 * 2.0 + 1 * 5.0) / 4)


def test_counted_sums_stay_as_they_are() -> None:
    loss, count = weigh(torch.tensor(6.0), 3, tail(3, 1), 0)
    assert (loss.item(), count) == (6.0, 3)


@pytest.mark.parametrize("count", [None, 4])
def test_a_replayed_batch_weighs_nothing_and_its_nan_stays_out(count: int | None) -> None:
    parameter = torch.ones((), requires_grad=True)
    loss, counted = weigh(parameter * float("nan"), count, tail(1, 0, replayed=True), 1)
    assert loss.item() == 0.0
    assert counted == (None if count is None else 0.0)
    weigh(parameter * 3.0, count, tail(1, 0, replayed=True), 1)[0].backward()
    assert parameter.grad is not None
    assert parameter.grad.item() == 0.0
