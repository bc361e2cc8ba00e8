"""Collate a step's samples, read for all shards, into one batch for each shard."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from drivetrain_data.errors import stop_let_out
from drivetrain_data.sampling.partition import tail_counts
from drivetrain_data.sampling.sample_signature import Place, Signature, signature_of, spaced
from drivetrain_data.sampling.sharding import DataSharding
from drivetrain_data.sources.batch_source import StepOrigin
from drivetrain_data.state.stream_state import PLACEHOLDER, Snapshotter

# The first steps of a loop of which samples are described, and the samples of a step. Both steps are read before a
# loop has its first batch.
_NUM_SIGNED, _NUM_SAMPLES = 2, 8


class CollatedStep(NamedTuple):
    """A step of an iterable dataset."""

    num_samples: int  # for all shards; 0 if a worker skips its turn
    origin: StepOrigin
    batches: list[Any]  # of this shard, or of all that have their own
    signatures: tuple[tuple[Place, Signature], ...] = ()  # of some samples of each worker's first two steps


class ShardCollate:
    """A collate function that splits a step's samples into a batch per shard and collates this rank's batches.

    The batch size is None for datasets that yield batches themselves. Padding repeats samples of the tail.
    """

    def __init__(
        self,
        collate: Callable[[Any], Any],
        batch_size: int | None,
        sharding: DataSharding,
        snapshotter: Snapshotter,
    ) -> None:
        self._collate = collate
        self._batch_size = batch_size
        self._num_unsigned = _NUM_SIGNED if sharding.compares_streams else 0
        self._sharding = replace(sharding, group=None)  # which a worker could not be sent
        self._snapshotter = snapshotter

    def __call__(self, samples: list[Any]) -> CollatedStep:
        """Split and collate the samples of a step."""
        info = get_worker_info()
        worker = info.id if info else 0
        if samples[0] is PLACEHOLDER:
            return CollatedStep(0, StepOrigin(worker), [])
        signatures: tuple[tuple[Place, Signature], ...] = ()
        if self._num_unsigned:  # now, since collating may change the samples
            self._num_unsigned -= 1
            chosen = spaced(len(samples), _NUM_SAMPLES)
            signatures = tuple(((worker, self._num_unsigned, at), signature_of(samples[at])) for at in chosen)
        size, even = self._batch_size or 1, self._sharding.even
        counts = tail_counts(len(samples), self._sharding.shard.count, size, even)
        batches: list[Any] = []
        for shard in self._sharding.readers(counts):
            if even == "pad":
                chosen = [samples[(shard * size + i) % len(samples)] for i in range(size)]
            else:
                begin = sum(counts[:shard])
                chosen = samples[begin : begin + counts[shard]] or samples[-1:]
            try:
                batches.append(self._collate(chosen[0] if self._batch_size is None else chosen))
            except StopIteration as error:
                raise stop_let_out("the collate function") from error
        # Take the snapshot last, since collating may draw from the generators too.
        return CollatedStep(len(samples), StepOrigin(worker, self._snapshotter.take()), batches, signatures)
