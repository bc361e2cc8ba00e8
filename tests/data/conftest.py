"""All shards of a loader in one process, stepping together as ranks do."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain_data import BatchPlan, Shard, ShardedLoader, shard_loader, trim


@dataclass
class Read:
    """What the shards of a loader gave together: the real samples in the order of a gather, and each step's plan."""

    samples: list[Any] = field(default_factory=list)
    plans: list[BatchPlan] = field(default_factory=list)
    held: list[list[list[Any]]] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture
def make_shards() -> Callable[..., list[ShardedLoader[Any]]]:
    def make(build: Callable[[], DataLoader[Any]], count: int, **options: Any) -> list[ShardedLoader[Any]]:
        return [shard_loader(build(), Shard(index, count), **options) for index in range(count)]

    return make


@pytest.fixture
def read_together() -> Callable[..., Read]:
    """Step all shards together, at most `num_steps` times; every shard must stop at the same step."""

    def read(shards: list[ShardedLoader[Any]], num_steps: int | None = None) -> Read:
        found = Read()
        iterators = [iter(shard) for shard in shards]
        while num_steps is None or len(found.plans) < num_steps:
            batches = [next(iterator, None) for iterator in iterators]
            if batches[0] is None:
                assert batches == [None] * len(shards)
                break
            plans = [shard.current for shard in shards]
            assert len({(p.real_counts, p.sizes, p.is_last, p.advance) for p in plans}) == 1
            if plans[0].sizes is not None:
                assert tuple(len(batch) for batch in batches) == plans[0].sizes
            found.samples += trim(plans[0], torch.cat([batch.reshape(-1) for batch in batches])).tolist()
            found.plans.append(plans[0])
            found.held.append([batch.reshape(-1).tolist() for batch in batches])
            states = [shard.state_dict() for shard in shards]
            assert states.count(states[0]) == len(states)
            found.states.append(states[0])
        return found

    return read
