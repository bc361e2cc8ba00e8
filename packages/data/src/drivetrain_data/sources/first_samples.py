"""Compare the first samples that a loader reads across ranks, once.

Sharding a loader reads a few samples of a map-style dataset. Data that can only be read forwards is compared when its
first loop begins: if one rank reads for all, the others read their data's beginning only to compare.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from time import perf_counter
from typing import Any

from torch import Generator
from torch.utils.data import DataLoader

from drivetrain_data.randomness.generators import preserve_generators
from drivetrain_data.sampling.rank_agreement import FirstRead, RankAgreement
from drivetrain_data.sampling.sample_signature import (
    Place,
    Signature,
    is_vague,
    settled,
    signature_of,
    spaced,
)
from drivetrain_data.sources.batch_source import BatchSource, Reading
from drivetrain_data.sources.keyed_fetch import Fetch, FetchedDataset
from drivetrain_data.sources.torch_loader import rebuild
from drivetrain_data.sources.wrapped_datasets import holds_iterators, moves_as_read
from drivetrain_data.state.sampler_parts import length_of

# So many samples of a map-style dataset are compared; fewer, but for the first few, if that takes longer.
_NUM_SAMPLES, _FEWEST, _MOST_SECONDS = 16, 3, 0.2


def check_map_style(loader: DataLoader[Any], agreement: RankAgreement) -> None:
    """Raise ValueError on all ranks if samples of a map-style dataset differ between ranks. Called on all ranks."""
    agreement.check_samples(type(loader.dataset).__name__, _read_some(loader))


class ComparingOpener:
    """An opener of a loader's epochs that lets the ranks compare the first samples of a stream."""

    def __init__(self, source: BatchSource) -> None:
        compares = source.sharding.compares_streams and source.reads_forwards
        self._agreement = source.sharding.agreement if compares else None  # None once they have compared

    def opening(self, source: BatchSource, epoch: int, position: int) -> Callable[[], Iterator[Reading]]:
        """Return a function that begins to read an epoch. Called on all ranks, unless they have compared already."""
        agreement = self._agreement
        if agreement is None or position:
            return partial(source.open, epoch, position)
        self._agreement = None
        return partial(iter, _compare_with_ranks(source, epoch, agreement))


def _compare_with_ranks(source: BatchSource, epoch: int, agreement: RankAgreement) -> Iterator[Reading]:
    """Return the steps of an epoch if this rank reads; the iterator raises an error of the first step."""
    steps: Iterator[Reading] = iter(())
    if agreement.reads:
        steps = _read_first(source.open(epoch, 0))
        read = _describe(source.signatures)
    else:
        read = _peek(source, epoch)
    if agreement.differing(source.name, read) is None:
        return steps
    found = dict(read.signatures)
    if not agreement.is_first and not holds_iterators(source.dataset):
        again = _peek(source, epoch).signatures
        found = settled(found, again)
        # What gives other samples whenever it is read was not divided: one rank's is as good as another's.
        if agreement.for_all and not FirstRead(found).is_like(FirstRead(again)):
            found = {}
        if agreement.reads:  # which must begin anew: two reads may share a place in the stream
            steps = _read_first(source.open(epoch, 0))
    agreement.check_samples(source.name, FirstRead(found))
    return steps


def _read_some(loader: DataLoader[Any]) -> FirstRead:
    """Read some samples twice; the result is empty if reading fails or the second read gives other samples."""
    dataset: Any = loader.dataset
    size = length_of(dataset)
    if not size or moves_as_read(dataset):
        return FirstRead({})
    # All over the dataset, those that say most of it first.
    places = list(dict.fromkeys([0, size // 2, size - 1, *spaced(size, _NUM_SAMPLES)]))
    # Where the loader has workers, only a worker may read: files opened here would be shared with those that follow.
    reader = rebuild(
        loader,
        FetchedDataset(dataset, (), seeds=True),
        Generator(),
        batch_sampler=[Fetch((0, 0), 0, [place]) for place in places for _ in range(2)],
        collate_fn=_sign_first,
        num_workers=min(1, loader.num_workers),
        persistent_workers=False,
        pin_memory=False,
    )
    reads, again, begun = dict[Place, Signature](), dict[Place, Signature](), 0.0
    try:
        signatures = preserve_generators(iter(reader))
        for place, one, other in zip(places, signatures, signatures, strict=False):
            reads[place], again[place] = one, other
            begun = begun or perf_counter()  # a worker may take long to start
            if len(reads) >= _FEWEST and perf_counter() - begun > _MOST_SECONDS:
                break
    except Exception as error:  # noqa: BLE001 nobody has asked for a sample yet: the loop that does gets the error
        return FirstRead({}, f"reading it raised {error!r}")
    found = settled(reads, again)
    return _describe(found) if FirstRead(found).is_like(FirstRead(again)) else FirstRead({})


def _sign_first(samples: list[Any]) -> Signature:
    return signature_of(samples[0])


def _peek(source: BatchSource, epoch: int) -> FirstRead:
    """Read this rank's first samples, apart from the loop."""
    try:
        fresh = source.again()
        fresh.move_to(epoch, 0)
        next(fresh.open(epoch, 0), None)
    except (Exception, SystemExit) as error:  # noqa: BLE001 only the first rank needs to be able to read
        return FirstRead({}, f"reading its beginning raised {error!r}")
    return _describe(fresh.signatures)


def _describe(signatures: Mapping[Place, Signature]) -> FirstRead:
    found = settled(signatures, signatures)
    return FirstRead(found, "its samples have no values that can be compared" if is_vague(found) else "")


def _read_first(readings: Iterator[Reading]) -> Iterator[Reading]:
    """Read the first step now, and return all steps."""
    try:
        first = next(readings)
    except StopIteration:
        return iter(())
    except (Exception, SystemExit) as error:  # noqa: BLE001 raised where the steps are asked for
        return _raise_later(error)
    return chain([first], readings)


def _raise_later(error: BaseException) -> Iterator[Reading]:
    raise error
    yield  # which makes this a generator: the error is raised when a step is asked for, and not before
