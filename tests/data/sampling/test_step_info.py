from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from drivetrain_data import Shard, shard_loader
from drivetrain_data.sampling.partition import step_plan
from drivetrain_data.sampling.step_info import look_ahead

TAIL = step_plan(5, 4, 3, "uneven", shard=0, is_last=True)
PADDED = step_plan(5, 4, 3, "pad", shard=0, is_last=True)


def test_a_tail_without_replays_is_whole_but_of_unequal_sizes() -> None:
    assert TAIL.is_whole
    assert not TAIL.equal_sizes
    assert [TAIL.kept(shard) for shard in range(4)] == [slice(0, 2), slice(0, 1), slice(0, 1), slice(0, 1)]


def test_padding_makes_sizes_equal_and_is_not_whole() -> None:
    assert not PADDED.is_whole
    assert PADDED.equal_sizes
    assert [PADDED.kept(shard).stop for shard in range(4)] == [3, 2, 0, 0]


def test_a_plan_of_padded_batches_keeps_its_real_samples_and_weights() -> None:
    padded = TAIL.padded_to(3)
    assert (padded.sizes, padded.real_counts) == ((3,) * 4, TAIL.real_counts)
    assert not padded.is_whole
    assert padded.equal_sizes
    assert [padded.weight(shard) for shard in range(4)] == [TAIL.weight(shard) for shard in range(4)]
    unknown = replace(TAIL, sizes=None, real_counts=None)
    assert unknown.padded_to(3) == unknown


class PaddedTo4:
    padded_size = 4

    def __call__(self, samples: list[int]) -> torch.Tensor:
        return torch.tensor(samples + [-1] * (4 - len(samples)))


@pytest.mark.parametrize("index", [0, 1])
def test_a_loader_knows_of_the_padding_of_its_collate_function(index: int) -> None:
    loader = shard_loader(DataLoader(range(11), batch_size=4, collate_fn=PaddedTo4()), Shard(index, 2))
    rows = [(batch.tolist(), loader.current) for batch in loader]
    assert all(len(batch) == 4 for batch, _ in rows)
    kept = [one for batch, plan in rows if plan is not None for one in batch[plan.kept(index)]]
    assert -1 not in kept
    assert [plan.sizes for _, plan in rows if plan is not None] == [(4, 4)] * len(rows)


def test_unknown_sizes_are_not_equal() -> None:
    unknown = replace(TAIL, sizes=None)
    assert not unknown.equal_sizes
    assert unknown.is_whole
    with pytest.raises(RuntimeError, match="does not know how many samples"):
        replace(unknown, real_counts=None).kept(0)


def test_weights_make_the_mean_over_shards_that_over_samples() -> None:
    assert [TAIL.weight(shard) for shard in range(4)] == [8 / 5, 4 / 5, 4 / 5, 4 / 5]
    short = step_plan(2, 4, 3, "uneven", shard=3, is_last=True)
    assert [short.weight(shard) for shard in range(4)] == [2, 2, 0, 0]
    assert [short.replays(shard) for shard in range(4)] == [False, False, True, True]
    assert short.replayed


def test_padding_weighs_as_much_as_a_sample() -> None:
    assert [PADDED.weight(shard) for shard in range(4)] == [1, 1, 1, 1]
    assert not any(PADDED.replays(shard) for shard in range(4))


def test_sizes_that_are_a_guess_are_not_relied_on() -> None:
    assert not replace(PADDED, guessed=True).equal_sizes


def weighed_gradients(num_samples: int) -> list[float]:
    """The gradient of each step under plain DDP."""
    shard = Shard(dist.get_rank(), dist.get_world_size())
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    (weight,) = model.parameters()
    loader = shard_loader(DataLoader(torch.arange(float(num_samples)), batch_size=2), shard)  # pyright: ignore[reportArgumentType]
    found: list[float] = []
    for batch in loader:
        weight.grad = None
        assert loader.current is not None
        (model(batch[:, None]).mean() * loader.current.weight(shard.index)).backward()
        assert weight.grad is not None
        found.append(weight.grad.item())
    return found


@pytest.mark.parametrize("num_samples", [7, 9])
@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_weighed_losses_give_ddp_the_gradient_of_the_mean_over_samples(
    run_ranks, num_processes: int, num_samples: int
) -> None:
    steps = torch.arange(float(num_samples)).split(2 * num_processes)
    expected = [samples.mean().item() for samples in steps]  # the gradient of the model w * x
    for found in run_ranks(weighed_gradients, num_samples, num_processes=num_processes):
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["batch sampler", "foreign"])
def test_padded_steps_of_unequal_batches_are_weighed_by_their_samples(kind: str) -> None:
    batches = [[0, 1, 2], [3], [4, 5], [6, 7], [8]]
    loader: Any = DataLoader(torch.arange(9), batch_sampler=batches)
    if kind == "foreign":
        loader = Listed([torch.tensor(batch) for batch in batches])
    sharded = shard_loader(loader, Shard(1, 2), even="pad")
    weights = [(sharded.current.weight(0), sharded.current.weight(1)) for _ in sharded if sharded.current]
    assert weights == [(1.5, 0.5), (1.0, 1.0), (2.0, 0.0)]


class Listed:
    def __init__(self, batches: list[torch.Tensor]) -> None:
        self.dataset = self.batches = batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


@pytest.mark.parametrize("shard", [-1, 4, "0", None])
def test_a_shard_that_is_none_has_no_weight(shard: Any) -> None:
    with pytest.raises(ValueError, match=r"with 4 shards they are 0 to 3"):
        TAIL.weight(shard)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_step_is_known_to_be_the_last_once_one_more_was_asked_for(num_steps: int) -> None:
    read: list[int] = []
    steps = (read.append(number) or number for number in range(num_steps))
    for number, is_last in look_ahead(steps):
        assert is_last == (number == num_steps - 1)
        assert len(read) == min(num_steps, number + 2)
    assert len(read) == num_steps
