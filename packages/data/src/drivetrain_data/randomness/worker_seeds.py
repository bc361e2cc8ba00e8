"""Reseed persistent workers for every loop.

Torch seeds persistent workers only once, so each loop's seed travels with its indices through the queue. A side
channel would not do: workers may still be processing indices of an earlier loop that was left.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import Dataset, Sampler, get_worker_info

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


class LoopSeededDataset(Dataset[Any]):
    """A wrapper of a dataset that reseeds its worker at the first indices of each loop.

    All other attributes are those of the dataset.

    Args:
        dataset: The dataset to wrap.
    """

    def __init__(self, dataset: Any) -> None:
        # Bypasses __setattr__, which writes to the dataset.
        self.__dict__.update({_DATASET: dataset, _LOOP: 0})

    def __len__(self) -> int:
        return len(self.__dict__[_DATASET])

    def __getitem__(self, sent: Any) -> Any:
        if not (isinstance(sent, tuple) and sent and isinstance(sent[0], Loop)):
            return self.__dict__[_DATASET][sent]  # a plain index, for example from worker_init_fn
        loop, index = sent
        self._seed_for(loop)
        return self.__dict__[_DATASET][index]

    def __getitems__(self, sent: tuple[Loop, list[Any]]) -> list[Any]:
        """Return the samples of a batch."""
        loop, indices = sent
        self._seed_for(loop)
        dataset = self.__dict__[_DATASET]
        if getattr(dataset, "__getitems__", None):
            return dataset.__getitems__(indices)
        return [dataset[index] for index in indices]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__[_DATASET], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__[_DATASET], name, value)

    def __reduce__(self) -> tuple[type["LoopSeededDataset"], tuple[Any]]:
        return LoopSeededDataset, (self.__dict__[_DATASET],)

    def _seed_for(self, loop: Loop) -> None:
        if self.__dict__[_LOOP] != loop.number:
            self.__dict__[_LOOP] = loop.number
            info = get_worker_info()
            seed_global_generators(hash_key(loop.seed, info.id if info else 0))


_DATASET = "_drivetrain_dataset"  # attribute names that no dataset uses
_LOOP = "_drivetrain_loop"
