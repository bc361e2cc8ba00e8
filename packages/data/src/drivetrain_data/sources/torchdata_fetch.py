"""Give torchdata's StatefulDataLoader the states that it asks samplers and datasets for, where it fetches batches."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import Sampler

from drivetrain_data.sources.keyed_fetch import Fetch, FetchedDataset


class CountedBatches(Sampler[Any]):
    """A sampler whose iterations count the samples that they have sent, as those of torchdata's BatchSampler do."""

    def __init__(self, sampler: Iterable[Fetch]) -> None:
        self._sampler = sampler
        self.begun = 0  # the samples of the epoch that lie before the next iteration

    def __iter__(self) -> Iterator[Fetch]:
        return _Counted(iter(self._sampler), self.begun)


class _Counted(Iterator[Fetch]):
    """An iteration with a state, which tells torchdata not to read again from the beginning."""

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
        """Do nothing: the sampler begins where the state was taken."""


class StatefulFetchedDataset(FetchedDataset):
    """The same of a dataset with a state of its own, which torchdata's loader asks its class for."""

    def state_dict(self) -> Any:
        """Return the state of the dataset."""
        return self._drivetrain_dataset.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Load a state of the dataset."""
        self._drivetrain_dataset.load_state_dict(state)
