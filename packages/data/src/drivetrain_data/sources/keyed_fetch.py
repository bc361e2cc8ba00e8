"""Fetch a map-style dataset's batches. Random draws during a fetch depend only on the batch's place in the data.

A batch's epoch and seed are sent with its indices, because any worker may read the batch, and some workers may still
read for an abandoned loop. torchdata's StatefulDataLoader also takes its states from the classes here.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch.utils.data import Dataset, Sampler

from drivetrain_data.dataset_proxy import DatasetProxy
from drivetrain_data.errors import stop_let_out
from drivetrain_data.randomness.generators import GlobalSeeder, KeyedDraws
from drivetrain_data.randomness.permutation import hash_key
from drivetrain_data.sampling.samplers import StepSampler
from drivetrain_data.sampling.step_info import BatchPlan


class Fetch(NamedTuple):
    """A request to read a batch, with the seed of random draws while the batch is read and collated."""

    epoch: tuple[int, int]  # the seed of all epochs, and the number of this one
    seed: int
    wanted: Any  # the indices of the batch, or a single one


class FetchSampler(Sampler[Any]):
    """A sampler that adds the epoch and, with `seeds`, a seed to each batch of another sampler.

    The seed depends on the data's seed, the epoch, the shard that reads the batch and the position of the step.
    """

    def __init__(self, sampler: StepSampler, *, seeds: bool) -> None:
        self._sampler = sampler
        self._seeds = seeds

    def __iter__(self) -> Iterator[Fetch]:
        # Not a generator, as the sampler's own __iter__ is not one.
        return self._fetches(iter(self._sampler), self._sampler.plans)

    def _fetches(self, batches: Iterator[Any], plans: deque[BatchPlan]) -> Iterator[Fetch]:
        sampler, sharding = self._sampler, self._sampler.sharding
        epoch, position = (sampler.order.seed, sampler.epoch), sampler.position
        if not self._seeds:
            yield from (Fetch(epoch, 0, wanted) for wanted in batches)
            return
        seed = base = hash_key(*epoch)
        readers = deque[int]()
        for wanted in batches:
            if not readers:
                seed = hash_key(base, position)
                position += sampler.stride
                readers.extend(sharding.readers(plans[-1].real_counts or ()))
            yield Fetch(epoch, hash_key(seed, readers.popleft()), wanted)


class FetchedDataset(DatasetProxy, Dataset[Any]):
    """A proxy of a dataset that reads the batches that a `FetchSampler` requests.

    Before a process reads a new epoch, the proxy calls `set_epoch` of the listeners. With `seeds`, it seeds the
    global generators for each batch.
    """

    _drivetrain_seeder: GlobalSeeder | None
    _drivetrain_listeners: tuple[Any, ...]
    _drivetrain_epoch: tuple[int, int] | None

    def __init__(
        self, dataset: Any, listeners: tuple[Any, ...], *, seeds: bool, epoch: tuple[int, int] | None = None
    ) -> None:
        super().__init__(dataset, seeder=GlobalSeeder() if seeds else None, listeners=listeners, epoch=epoch)

    def __len__(self) -> int:
        return len(self._drivetrain_dataset)

    def __getitem__(self, sent: Any) -> Any:
        if not isinstance(sent, Fetch):
            return self._drivetrain_dataset[sent]  # a plain index, for example from worker_init_fn
        return self._fetch(sent, [sent.wanted])[0]

    def __getitems__(self, sent: Fetch) -> list[Any]:
        """Return the samples of a batch."""
        return self._fetch(sent, sent.wanted, getattr(self._drivetrain_dataset, "__getitems__", None))

    def __reduce__(self) -> Any:
        make = partial(type(self), seeds=self._drivetrain_seeder is not None, epoch=self._drivetrain_epoch)
        return make, (self._drivetrain_dataset, self._drivetrain_listeners)

    def begin(self, epoch: tuple[int, int]) -> None:
        """Announce a new epoch, (seed, number), to the listeners in this process."""
        if self._drivetrain_epoch != epoch:
            vars(self)["_drivetrain_epoch"] = epoch
            for listener in self._drivetrain_listeners:
                with KeyedDraws(*epoch).active():  # it may draw, and must draw alike everywhere
                    listener.set_epoch(epoch[1])

    def _fetch(self, sent: Fetch, indices: list[Any], read_batch: Any = None) -> list[Any]:
        self.begin(sent.epoch)
        if self._drivetrain_seeder is not None:
            self._drivetrain_seeder.seed(sent.seed)
        dataset, samples = self._drivetrain_dataset, list[Any]()
        try:
            if read_batch is not None:
                return read_batch(indices)
            for index in indices:
                samples.append(dataset[index])
        except StopIteration as error:
            read = f"the batch {indices}" if read_batch else f"sample {indices[len(samples)]!r}"
            raise stop_let_out(f"{type(dataset).__name__}, reading {read},") from error
        return samples


class CountedBatches(Sampler[Any]):
    """A sampler that counts the samples of its iterations, as torchdata's BatchSampler does."""

    def __init__(self, sampler: Iterable[Fetch]) -> None:
        self._sampler = sampler
        self.begun = 0  # the samples of the epoch that lie before the next iteration

    def __iter__(self) -> Iterator[Fetch]:
        return _Counted(iter(self._sampler), self.begun)


class _Counted(Iterator[Fetch]):
    """An iteration with a state, so that torchdata does not read again from the beginning."""

    def __init__(self, fetches: Iterator[Fetch], begun: int) -> None:
        self._fetches = fetches
        self._num_samples = begun

    def __next__(self) -> Fetch:
        sent = next(self._fetches)
        self._num_samples += len(sent.wanted) if hasattr(sent.wanted, "__len__") else 1
        return sent

    def state_dict(self) -> dict[str, int]:
        return {"samples_yielded": self._num_samples}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Do nothing: the sampler already begins at the state's position."""


class StatefulFetchedDataset(FetchedDataset):
    """A `FetchedDataset` of a dataset with a state; torchdata's loader looks for the state methods in the class."""

    def state_dict(self) -> Any:
        """Return the state of the dataset."""
        return self._drivetrain_dataset.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Load a state of the dataset."""
        self._drivetrain_dataset.load_state_dict(state)
