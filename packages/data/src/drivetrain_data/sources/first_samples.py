"""Compare over ranks the first samples that a loader reads, once.

A map-style dataset is asked for a few samples when its loader is sharded. What can only be read forwards is compared
as its first loop begins: where one rank reads for all, the others read the beginning of their own for this alone.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

from torch import Generator
from torch.utils.data import DataLoader

from drivetrain_data.randomness.generators import leaving_generators
from drivetrain_data.sampling.rank_agreement import RankAgreement
from drivetrain_data.sampling.sample_signature import Signature, alike, signature_of
from drivetrain_data.sources.batch_source import BatchSource, Reading
from drivetrain_data.sources.keyed_fetch import Fetch, FetchedDataset
from drivetrain_data.sources.torch_loader import rebuild
from drivetrain_data.sources.wrapped_datasets import holds_iterators, moves_as_read
from drivetrain_data.state.sampler_parts import length_of


def check_map_style(loader: DataLoader[Any], agreement: RankAgreement) -> None:
    """Check that a map-style dataset gives the same samples on every rank. Called on all ranks.

    Raises:
        ValueError: It gives others on a rank; raised on all ranks.
    """
    rank = agreement.differing(_some_of(loader))
    if rank is not None:
        agreement.refuse_samples(type(loader.dataset).__name__, rank)


class ComparingOpener:
    """An opener of a loader's epochs, which has the ranks compare what they read first of data that is read forwards.

    Args:
        source: The source of the loader.
    """

    def __init__(self, source: BatchSource) -> None:
        compares = source.sharding.compares_streams and source.reads_forwards
        self._agreement = source.sharding.agreement if compares else None  # None once they have compared

    def opening(self, source: BatchSource, epoch: int, position: int) -> Callable[[], Iterator[Reading]]:
        """Return a function that begins to read an epoch. Called on all ranks, if they have yet to compare.

        Raises:
            ValueError: Another rank reads other samples; raised on all ranks.
        """
        agreement = self._agreement
        if agreement is None or position:
            return partial(source.open, epoch, position)
        self._agreement = None
        return partial(iter, _begun_alike(source, epoch, agreement))


def _begun_alike(source: BatchSource, epoch: int, agreement: RankAgreement) -> Iterator[Reading]:
    """Return the steps of an epoch, where this rank reads; an error in the first is raised when it is asked for."""
    steps: Iterator[Reading] = iter(())
    is_read_once = holds_iterators(source.dataset)
    if agreement.reads:
        steps = _begun(source.open(epoch, 0))
        mine = source.signature
    else:
        mine = _peeked(source, epoch)
    rank = agreement.differing(mine)
    if rank is not None:
        # What gives other samples whenever it is read was not divided: one rank's is as good as another's.
        repeats = agreement.reads or is_read_once or mine is None or alike(mine, _peeked(source, epoch))
        if agreement.all_say(repeats):
            agreement.refuse_samples(source.name, rank)
    return steps


def _some_of(loader: DataLoader[Any]) -> Signature | None:
    """Return the signature of some samples; None if they cannot be read, or are others when they are read again."""
    dataset: Any = loader.dataset
    size = length_of(dataset)
    if not size or moves_as_read(dataset):
        return None
    fetch = Fetch((0, 0), 0, sorted({0, size // 2, size - 1}))
    # Where the loader has workers, only a worker may read: files opened here would be shared with those that follow.
    reader = rebuild(
        loader,
        FetchedDataset(dataset, (), seeds=True),
        Generator(),
        batch_sampler=[fetch, fetch],
        collate_fn=signature_of,
        num_workers=min(1, loader.num_workers),
        persistent_workers=False,
        pin_memory=False,
    )
    try:
        one, other = leaving_generators(iter(reader))
    except Exception:  # noqa: BLE001 nobody has asked for a sample yet: the loop that does gets the error
        return None
    return one if alike(one, other) else None


def _peeked(source: BatchSource, epoch: int) -> Signature | None:
    """Return the signature of what this rank would read first; None if it cannot."""
    try:
        fresh = source.again()
        fresh.move_to(epoch, 0)
        next(fresh.open(epoch, 0), None)
    except (Exception, SystemExit):  # noqa: BLE001 only the first rank needs to be able to read
        return None
    return fresh.signature


def _begun(readings: Iterator[Reading]) -> Iterator[Reading]:
    try:
        first = next(readings)
    except StopIteration:
        return iter(())
    except (Exception, SystemExit) as error:  # noqa: BLE001 raised where the steps are asked for
        return _raising(error)
    return chain([first], readings)


def _raising(error: BaseException) -> Iterator[Reading]:
    raise error
    yield
