"""The division of a loader's data among shards, from which samplers and sources are built."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from drivetrain_data.sampling.block_shuffle import IndexFunction
from drivetrain_data.sampling.rank_agreement import RankAgreement
from drivetrain_data.settings import ShardingStrategy, UnevenPolicy
from drivetrain_data.shard import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSharding:
    """A division of a loader's data, from the view of one shard."""

    shard: Shard
    even: UnevenPolicy  # what becomes of an epoch's tail
    split: bool  # whether the loader's batch size is the sum over shards
    strategy: ShardingStrategy | IndexFunction  # assigns samples to shards
    num_blocks: int  # blocks of data that shards keep to; 1 if they take turns over all of it
    seed: int
    for_all: bool  # whether one rank reads for all shards
    group: dist.ProcessGroup | None = None  # of the ranks that share the data; None if unknown
    compares_streams: bool = False  # whether ranks compare the first samples that only a loop can read
    draws_apart: bool = False  # whether a map-style dataset that is read without workers draws as in a worker

    @property
    def agreement(self) -> RankAgreement | None:
        """The comparisons of the ranks that share the data; None for one rank, or if their group is unknown."""
        if self.group is None or dist.get_world_size(self.group) == 1:
            return None
        return RankAgreement(self.group, self.for_all)

    @property
    def strategy_name(self) -> str:
        """The strategy as a user would write it."""
        if isinstance(self.strategy, str):
            return repr(self.strategy)
        return getattr(self.strategy, "__name__", type(self.strategy).__name__)

    @property
    def is_first_reader(self) -> bool:
        """True on the reading rank that warns for all."""
        return self.for_all or self.shard.index == 0

    def readers(self, counts: Sequence[int]) -> Sequence[int]:
        """Return the shards whose batches this rank reads in a step: its own, or all that have a batch."""
        if not self.for_all:
            return (self.shard.index,)
        return range(len(counts) if self.even == "pad" else sum(count > 0 for count in counts))

    def size_on_each(self, batch_size: int) -> int:
        """Return the batch size on each shard. To split batches, the number of shards must divide `batch_size`."""
        if not self.split:
            return batch_size
        if batch_size % self.shard.count:
            raise ValueError(
                f"split_batches=True: batch_size={batch_size} must be a multiple of the {self.shard.count} shards"
            )
        return batch_size // self.shard.count

    def check_interleaved(self, reason: str) -> None:
        """Raise ValueError, with the reason, for any strategy but "interleaved"."""
        if self.strategy != "interleaved":
            raise ValueError(
                f"strategy={self.strategy_name}: {reason}; leave it out for this loader, or say 'interleaved'"
            )

    def check_unsplit(self, reason: str) -> None:
        """Raise ValueError, with the reason, if batches are to be split."""
        if self.split:
            raise ValueError(f"split_batches=True: {reason}; leave it out")
