"""Workers that live on from epoch to epoch are seeded once by torch; here each loop's seed travels with its indices.

It cannot be told to them beside the queue: they may still be busy with indices of a loop that was left.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import Dataset, Sampler, get_worker_info

from drivetrain_data.randomness.generators import seed_global_generators
from drivetrain_data.randomness.permutation import hash_key


class Loop(NamedTuple):
    """A loop over a loader.

    Attributes:
        number: Which one it is, counted from 1.
        seed: What its workers are seeded from.
    """

    number: int
    seed: int


class LoopSeedSampler(Sampler[Any]):
    """What a sampler gives, each with the loop that it is for.

    Args:
        sampler: Gives indices, or batches of them.
    """

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._sampler = sampler
        self._loop = Loop(0, 0)

    def begin(self, seed: int) -> None:
        """Say what the workers of the next loop are seeded from."""
        self._loop = Loop(self._loop.number + 1, seed)

    def __iter__(self) -> Iterator[tuple[Loop, Any]]:
        loop = self._loop
        for wanted in self._sampler:
            yield loop, wanted


class LoopSeededDataset(Dataset[Any]):
    """A dataset whose worker is seeded anew at the first indices of each loop; in all else it answers as the dataset.

    Args:
        dataset: The dataset.
    """

    def __init__(self, dataset: Any) -> None:
        self.__dict__.update({_DATASET: dataset, _LOOP: 0})

    def __len__(self) -> int:
        return len(self.__dict__[_DATASET])

    def __getitem__(self, sent: Any) -> Any:
        if not (isinstance(sent, tuple) and sent and isinstance(sent[0], Loop)):
            return self.__dict__[_DATASET][sent]  # asked for by a worker's set-up, say
        loop, index = sent
        self._seed_for(loop)
        return self.__dict__[_DATASET][index]

    def __getitems__(self, sent: tuple[Loop, list[Any]]) -> list[Any]:
        """A batch's samples."""
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


_DATASET = "_drivetrain_dataset"  # names that no dataset has
_LOOP = "_drivetrain_loop"
