"""Map-style datasets: torch's own DataLoader with a sampler of this package."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from torch import Generator
from torch.utils.data import DataLoader

from drivetrain_data.randomness.permutation import hash_key
from drivetrain_data.randomness.worker_seeds import LoopSeededDataset, LoopSeedSampler
from drivetrain_data.sampling.choose_sampler import step_sampler_of
from drivetrain_data.sampling.samplers import ItemSampler
from drivetrain_data.sampling.sharding import DataSharding
from drivetrain_data.sources.batch_source import BatchSource, Reading
from drivetrain_data.sources.torch_loader import rebuild
from drivetrain_data.state.sampler_parts import length_of


class MapStyleSource(BatchSource):
    """A source that reads a map-style dataset in an order that a sampler of this package cuts into steps.

    Args:
        loader: The user's loader.
        sharding: The division of the data.
    """

    def __init__(self, loader: DataLoader[Any], sharding: DataSharding) -> None:
        sampler = step_sampler_of(loader, sharding)
        super().__init__(loader, sampler.sharding, stride=sampler.stride, batch_size=sampler.batch_size)
        self._sampler = sampler
        self._order = sampler.order
        self._num_samples = length_of(self.dataset)
        self._loop_seeds = LoopSeedSampler(sampler) if loader.persistent_workers else None
        self._generator = Generator()
        dataset = self.dataset if self._loop_seeds is None else LoopSeededDataset(self.dataset)
        steps: Any = self._loop_seeds or sampler
        layout: dict[str, Any] = {"batch_sampler": steps}
        if isinstance(sampler, ItemSampler):
            layout = {"sampler": steps, "batch_size": None}
        self._loader = rebuild(loader, dataset, self._generator, **layout)

    @property
    def seed(self) -> int:
        """The seed of the order of every epoch."""
        return self._order.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._order.seed = seed

    @property
    def order_source(self) -> str:
        """The origin of the order, as a phrase for users."""
        return self._order.source

    def open(self, epoch: int, position: int) -> Iterator[Reading]:
        """Read an epoch from a position on.

        Raises:
            ValueError: The length of the dataset has changed since the loader was sharded.
        """
        if length_of(self.dataset) != self._num_samples:
            raise ValueError(
                f"the dataset had {self._num_samples} samples when its loader was sharded, and has "
                f"{length_of(self.dataset)} now: shard a new DataLoader over it"
            )
        self._sampler.epoch, self._sampler.position = epoch, position
        # The seed does not depend on the program's draws, and includes the position so that workers do not repeat
        # their draws after a resume.
        seed = hash_key(self.seed, epoch, self.sharding.shard.index, position)
        self._generator.manual_seed(seed >> 1)
        if self._loop_seeds is not None:
            self._loop_seeds.begin(seed)
        batches = iter(self._loader)
        plans = self._sampler.plans
        if not self.sharding.for_all:
            for batch in batches:
                yield plans.popleft(), batch, None
            return
        for first in batches:
            plan = plans.popleft()
            assert plan.real_counts is not None
            num_others = len(self.sharding.readers(plan.real_counts)) - 1
            yield plan, [first, *islice(batches, num_others)], None

    def length(self, epoch: int) -> int:
        """Return the number of positions in an epoch."""
        return self._order.length(epoch)

    def identity(self) -> Mapping[str, Any]:
        """Return the values that must match those of a saved state."""
        return {"order": self._order.name, "num_samples": self._num_samples, **self._order.identity()}

    def extra_state(self, epoch: int, position: int) -> Mapping[str, Any]:
        """Return the state of the order; empty for most orders, which need only the position."""
        return self._order.extra_state(epoch, position)

    def load_extra_state(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Load the state of the order."""
        self._order.load_extra_state(epoch, state)
