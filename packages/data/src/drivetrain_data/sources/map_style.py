"""Map-style datasets: torch's own DataLoader with a sampler of this package."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from torch import Generator
from torch.utils.data import DataLoader

from drivetrain_data.errors import stop_let_out
from drivetrain_data.randomness.generators import preserve_generators
from drivetrain_data.randomness.permutation import hash_key
from drivetrain_data.sampling.choose_sampler import step_sampler_of
from drivetrain_data.sampling.samplers import ItemSampler
from drivetrain_data.sampling.sharding import DataSharding
from drivetrain_data.sources.batch_source import BatchSource, Reading, StepOrigin
from drivetrain_data.sources.keyed_fetch import (
    CountedBatches,
    FetchedDataset,
    FetchSampler,
    StatefulFetchedDataset,
)
from drivetrain_data.sources.torch_loader import rebuild
from drivetrain_data.sources.wrapped_datasets import epoch_parts, may_draw
from drivetrain_data.state.sampler_parts import StatefulReader, length_of
from drivetrain_data.state.torchdata_state import num_yielded, samples_yielded


class MapStyleSource(BatchSource):
    """A source that reads a map-style dataset; a sampler of this package cuts the order into steps."""

    reads_forwards = False

    def __init__(self, loader: DataLoader[Any], sharding: DataSharding) -> None:
        sampler = step_sampler_of(loader, sharding)
        super().__init__(loader, sampler.sharding, stride=sampler.stride, batch_size=sampler.batch_size)
        self._sampler = sampler
        self._order = sampler.order
        self._reads_all = sharding.shard.count == 1 or sharding.for_all  # the batches of all shards
        self._num_samples = length_of(self.dataset)
        seeds = sharding.draws_apart or loader.num_workers > 0
        seeds = seeds and may_draw(self.dataset, loader.collate_fn)  # seeding costs as much as a small batch
        self._draws_apart = seeds and loader.num_workers == 0
        self._generator = Generator()
        self._counted: CountedBatches | None = None
        listeners = epoch_parts(self.dataset, collate=loader.collate_fn)
        has_state = self.states is not None and isinstance(self.dataset, StatefulReader)
        fetched = StatefulFetchedDataset if has_state else FetchedDataset
        self._fetched = fetched(self.dataset, listeners, seeds=seeds)
        steps: Any = FetchSampler(sampler, seeds=seeds)
        if self.states is not None:
            steps = self._counted = CountedBatches(steps)
        layout: dict[str, Any] = {"batch_sampler": steps}
        if isinstance(sampler, ItemSampler):
            layout = {"sampler": steps, "batch_size": None}
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
        """Read an epoch from a position on."""
        self._fetched.begin((self.seed, epoch))
        if length_of(self.dataset) != self._num_samples:
            raise ValueError(
                f"the dataset had {self._num_samples} samples when its loader was sharded, and has "
                f"{length_of(self.dataset)} now: shard a new DataLoader over it"
            )
        self._sampler.epoch, self._sampler.position = epoch, position
        # Torch seeds workers from it for what they draw as they start; each batch has a seed of its own. A state of
        # torchdata's holds it, and is then that of a loader of the program's own where an order begins.
        is_begin = not (epoch or position or self.sharding.shard.index)
        seed = hash_key(self.seed, epoch, self.sharding.shard.index, position) >> 1
        self._generator.manual_seed(self.seed if self.states is not None and is_begin else seed)
        if self.states is not None and self._counted is not None:
            num_batches, num_samples = self.num_before(position)
            self._counted.begun = num_samples or 0
            self.states.begin(self._loader, num_batches)
        batches = iter(self._loader)
        plans = self._sampler.plans
        if self._draws_apart:
            batches = preserve_generators(batches)
        for first in batches:
            num_batches = len(self.sharding.readers(plans[0].real_counts or ()))
            held = [first, *islice(batches, num_batches - 1)]
            if len(held) < num_batches:
                break
            origin = None if self.states is None else StepOrigin(0, state=self.states.take(self._loader))
            yield plans.popleft(), held if self.sharding.for_all else first, origin
        if plans:
            raise stop_let_out(f"the collate function of {type(self.dataset).__name__}'s loader")

    def initial_state(self) -> dict[str, Any]:
        """Return the state that torchdata's loader has at the beginning of an epoch."""
        none: dict[str, Any] = {"batch_sampler": CountedBatches(())}
        if isinstance(self._sampler, ItemSampler):
            none = {"sampler": CountedBatches(()), "batch_size": None}
        reader: Any = rebuild(self._users_loader, self.dataset, Generator(), **none)
        return reader.state_dict()

    def num_before(self, position: int) -> tuple[int, int | None]:
        """Return the numbers of batches and samples that torchdata's loader has yielded before a position."""
        num_steps = -(-position // self.stride)
        num_batches = num_steps * self.sharding.shard.count if self.sharding.for_all else num_steps
        if self.batch_size is None:
            return num_batches, None
        return num_batches, position if self._reads_all else num_steps * self.batch_size

    def position_of(self, state: Mapping[str, Any]) -> int:
        """Return the position at which torchdata's loader has a given state."""
        if not self._reads_all:
            return num_yielded(state) * self.stride
        if self.batch_size is None:
            return num_yielded(state)
        found = samples_yielded(state)
        size: Any = self._users_loader.batch_size or self._users_loader.batch_sampler.batch_size
        return min(num_yielded(state) * size, self.length(0)) if found is None else found

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
