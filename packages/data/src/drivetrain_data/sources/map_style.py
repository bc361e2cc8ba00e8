"""Map-style datasets: torch's own DataLoader with a sampler of this package."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from torch import Generator
from torch.utils.data import DataLoader

from drivetrain_data.errors import stop_let_out
from drivetrain_data.randomness.generators import leaving_generators
from drivetrain_data.randomness.permutation import hash_key
from drivetrain_data.sampling.choose_sampler import step_sampler_of
from drivetrain_data.sampling.samplers import ItemSampler
from drivetrain_data.sampling.sharding import DataSharding
from drivetrain_data.sources.batch_source import BatchSource, Reading
from drivetrain_data.sources.keyed_fetch import FetchedDataset, FetchSampler
from drivetrain_data.sources.torch_loader import rebuild
from drivetrain_data.sources.wrapped_datasets import epoch_parts, may_draw
from drivetrain_data.state.sampler_parts import length_of


class MapStyleSource(BatchSource):
    """A source that reads a map-style dataset in an order that a sampler of this package cuts into steps.

    Args:
        loader: The user's loader.
        sharding: The division of the data.
    """

    reads_forwards = False

    def __init__(self, loader: DataLoader[Any], sharding: DataSharding) -> None:
        sampler = step_sampler_of(loader, sharding)
        super().__init__(loader, sampler.sharding, stride=sampler.stride, batch_size=sampler.batch_size)
        self._sampler = sampler
        self._order = sampler.order
        self._num_samples = length_of(self.dataset)
        seeds = sharding.draws_apart or loader.num_workers > 0
        seeds = seeds and may_draw(self.dataset, loader.collate_fn)  # seeding costs as much as a small batch
        self._draws_apart = seeds and loader.num_workers == 0
        self._generator = Generator()
        listeners = epoch_parts(self.dataset, loader.collate_fn)
        self._fetched = FetchedDataset(self.dataset, listeners, seeds=seeds)
        layout: dict[str, Any] = {"batch_sampler": FetchSampler(sampler, seeds=seeds)}
        if isinstance(sampler, ItemSampler):
            layout = {"sampler": FetchSampler(sampler, seeds=seeds), "batch_size": None}
        self._loader = rebuild(loader, self._fetched, self._generator, **layout)

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
            RuntimeError: The dataset or the collate function let a StopIteration out.
        """
        self._fetched.begin((self.seed, epoch))
        if length_of(self.dataset) != self._num_samples:
            raise ValueError(
                f"the dataset had {self._num_samples} samples when its loader was sharded, and has "
                f"{length_of(self.dataset)} now: shard a new DataLoader over it"
            )
        self._sampler.epoch, self._sampler.position = epoch, position
        # Torch seeds workers from it for what they draw as they start; each batch has a seed of its own.
        self._generator.manual_seed(hash_key(self.seed, epoch, self.sharding.shard.index, position) >> 1)
        batches = iter(self._loader)
        plans = self._sampler.plans
        if self._draws_apart:
            batches = leaving_generators(batches)
        for first in batches:
            num_batches = len(self.sharding.readers(plans[0].real_counts or ()))
            held = [first, *islice(batches, num_batches - 1)]
            if len(held) < num_batches:
                break
            yield plans.popleft(), held if self.sharding.for_all else first, None
        if plans:
            raise stop_let_out(f"the collate function of {type(self.dataset).__name__}'s loader")

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
