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
    def make(
        build: Callable[[], DataLoader[Any]], count: int, state: dict[str, Any] | None = None, **options: Any
    ) -> list[ShardedLoader[Any]]:
        shards = [shard_loader(build(), Shard(index, count), **options) for index in range(count)]
        for shard in shards:
            if state is not None:
                shard.load_state_dict(state)
        return shards

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


@pytest.fixture
def read_in_runs(make_shards: Any, read_together: Any) -> Callable[..., list[int]]:
    """Read an epoch of `length` samples in runs, each of which resumes from the state of the run before.

    A run of `chain` is (shards, batch size on each, steps before the interruption); a last one reads what is left.
    """

    def read(
        build: Callable[[int], DataLoader[Any]],
        chain: list[tuple[int, int, int]],
        length: int,
        epoch: int = 0,
        options: Callable[[int], dict[str, Any]] = lambda count: {},
    ) -> list[int]:
        state: dict[str, Any] | None = None
        found: list[int] = []
        for count, batch_size, num_steps in [*chain, (2, 3, None)]:
            shards = make_shards(lambda size=batch_size: build(size), count, state, **options(count))
            for shard in shards:
                if state is None:
                    shard.set_epoch(epoch)
                assert shard.epoch == epoch
            part = read_together(shards, num_steps)
            found += part.samples
            state = part.states[-1] if part.states else shards[0].state_dict()
            assert state["position"] == len(found)
            if len(found) == length:
                break
        return found

    return read
