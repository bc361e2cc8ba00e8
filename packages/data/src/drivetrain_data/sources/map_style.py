"""Map-style datasets: torch's own DataLoader with a sampler of this package."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from torch import Generator
from torch.utils.data import DataLoader

from drivetrain_data.randomness.permutation import hash_key
from drivetrain_data.randomness.worker_seeds import LoopSeedSampler
from drivetrain_data.sampling.batch_sampler import WholeBatchSampler
from drivetrain_data.sampling.order import Resumable
from drivetrain_data.sampling.samplers import OrderSampler
from drivetrain_data.sampling.step_info import BatchPlan
from drivetrain_data.sources.base import Mark, Reading
from drivetrain_data.state.sampler_objects import length_of


class IndexedSource:
    """A source that reads the batches of a step sampler.

    Args:
        loader: The DataLoader over the sampler.
        sampler: The sampler that lays out the steps.
        generator: The generator of the DataLoader, which seeds its workers; this source seeds it.
        dataset: The dataset of the user's loader.
        loop_seeds: The sampler that reseeds persistent workers; None without them.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        sampler: OrderSampler | WholeBatchSampler,
        generator: Generator,
        *,
        loop_seeds: LoopSeedSampler | None,
        dataset: Any,
    ) -> None:
        self._loader = loader
        self._sampler = sampler
        self._generator = generator
        self._dataset = dataset
        self._num_samples = length_of(dataset)
        self._loop_seeds = loop_seeds
        self.reads_for_all = sampler.reads_for_all
        # Checked once, because extra_state is called at every optimizer step.
        self._resumable = self._laid_out_by if isinstance(self._laid_out_by, Resumable) else None

    @property
    def seed(self) -> int:
        """The seed of the order of every epoch."""
        return self._laid_out_by.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._laid_out_by.seed = seed

    @property
    def order_source(self) -> str:
        """The origin of the order, as a phrase for users."""
        return self._laid_out_by.source

    def open(self, epoch: int, position: int) -> Iterator[Reading]:
        """Read an epoch from a position on.

        Raises:
            ValueError: The length of the dataset has changed since the loader was sharded.
        """
        if length_of(self._dataset) != self._num_samples:
            raise ValueError(
                f"the dataset had {self._num_samples} samples when its loader was sharded, and has "
                f"{length_of(self._dataset)} now: shard a new DataLoader over it"
            )
        sampler = self._sampler
        sampler.epoch, sampler.position = epoch, position
        # The seed does not depend on the program's draws, and includes the position so that workers do not repeat
        # their draws after a resume.
        seed = hash_key(self.seed, epoch, sampler.shard.index, position)
        self._generator.manual_seed(seed >> 1)
        if self._loop_seeds is not None:
            self._loop_seeds.begin(seed)
        batches = iter(self._loader)
        plans = sampler.plans
        if not self.reads_for_all:
            for batch in batches:
                yield plans.popleft(), batch, None
            return
        for first in batches:
            plan = plans.popleft()
            num_batches = num_holders(plan, padded=sampler.even == "pad")
            yield plan, [first, *islice(batches, num_batches - 1)], None

    def note_received(self, _plan: BatchPlan, _mark: Mark) -> None:
        """Do nothing: the position is the whole state."""

    def num_steps(self, epoch: int, position: int) -> int:
        """Return the number of steps of an epoch from a position on."""
        return self._sampler.num_steps(epoch, position)

    def position_after(self, epoch: int, position: int, num_steps: int) -> int:
        """Return the position `num_steps` steps after `position`."""
        if isinstance(self._sampler, OrderSampler):
            return self._sampler.partition(epoch, position).position_after(num_steps)
        return position + num_steps * (1 if self._sampler.split else self._sampler.shard.count)

    def identity(self) -> Mapping[str, Any]:
        """Return the values that must match those of a saved state."""
        return {
            "order": self._laid_out_by.name,
            "num_samples": self._num_samples,
            **self._laid_out_by.identity(),
        }

    def extra_state(self, epoch: int, position: int) -> Mapping[str, Any]:
        """Return the state of the order; empty for most orders, which need only the position."""
        return {} if self._resumable is None else self._resumable.extra_state(epoch, position)

    def take_up(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Load the state of the order."""
        if self._resumable is not None:
            self._resumable.resume(epoch, state)

    @property
    def _laid_out_by(self) -> Any:
        return self._sampler.order if isinstance(self._sampler, OrderSampler) else self._sampler


def num_holders(plan: BatchPlan, *, padded: bool) -> int:
    """Return how many shards have a batch of their own in a step that is read for all shards."""
    assert plan.real_counts is not None
    return len(plan.real_counts) if padded else sum(count > 0 for count in plan.real_counts)
