"""Reseed persistent workers for every loop.

Torch seeds persistent workers only once, so each loop's seed travels with its indices through the queue. A side
channel would not do: workers may still be processing indices of an earlier loop that was left.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import Dataset, Sampler, get_worker_info

from drivetrain_data.dataset_proxy import DatasetProxy
from drivetrain_data.randomness.generators import seed_global_generators
from drivetrain_data.randomness.permutation import hash_key


class Loop(NamedTuple):
    """A loop over a loader.

    Attributes:
        number: The number of the loop, from 1.
        seed: The seed of the loop's workers.
    """

    number: int
    seed: int


class LoopSeedSampler(Sampler[Any]):
    """A sampler that pairs the items of another sampler with the loop that they belong to.

    Args:
        sampler: The sampler of indices, or of batches of indices.
    """

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._sampler = sampler
        self._loop = Loop(0, 0)

    def begin(self, seed: int) -> None:
        """Set the seed of the workers of the next loop."""
        self._loop = Loop(self._loop.number + 1, seed)

    def __iter__(self) -> Iterator[tuple[Loop, Any]]:
        loop = self._loop
        for wanted in self._sampler:
            yield loop, wanted


class LoopSeededDataset(DatasetProxy, Dataset[Any]):
    """A proxy of a dataset that reseeds its worker at the first indices of each loop.

    Args:
        dataset: The dataset to read.
    """

    _drivetrain_loop: int

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset, _drivetrain_loop=0)

    def __len__(self) -> int:
        return len(self._drivetrain_dataset)

    def __getitem__(self, sent: Any) -> Any:
        if not (isinstance(sent, tuple) and sent and isinstance(sent[0], Loop)):
            return self._drivetrain_dataset[sent]  # a plain index, for example from worker_init_fn
        loop, index = sent
        self._seed_for(loop)
        return self._drivetrain_dataset[index]

    def __getitems__(self, sent: tuple[Loop, list[Any]]) -> list[Any]:
        """Return the samples of a batch."""
        loop, indices = sent
        self._seed_for(loop)
        dataset = self._drivetrain_dataset
        if getattr(dataset, "__getitems__", None):
            return dataset.__getitems__(indices)
        return [dataset[index] for index in indices]

    def __reduce__(self) -> tuple[type["LoopSeededDataset"], tuple[Any]]:
        return type(self), (self._drivetrain_dataset,)

    def _seed_for(self, loop: Loop) -> None:
        if self._drivetrain_loop != loop.number:
            vars(self)["_drivetrain_loop"] = loop.number
            info = get_worker_info()
            seed_global_generators(hash_key(loop.seed, info.id if info else 0))


class StatefulLoopSeededDataset(LoopSeededDataset):
    """The same of a dataset with a state of its own, which torchdata's loader asks its class for."""

    def state_dict(self) -> Any:
        """Return the state of the dataset."""
        return self._drivetrain_dataset.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Load a state of the dataset."""
        self._drivetrain_dataset.load_state_dict(state)
