"""A loader of one shard: torch's DataLoader underneath, positions that survive any change of ranks on top."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch

from drivetrain_data._nested import map_tensors
from drivetrain_data.active import ActiveLoaders
from drivetrain_data.errors import ResumeError
from drivetrain_data.partition import BatchPlan
from drivetrain_data.source import Source, check_fingerprint

Batch = TypeVar("Batch")
_STATE_FORMAT = 1


class ShardedLoader(Generic[Batch]):
    """What `shard_loader` makes: yields this shard's batches, as many on every rank.

    Each pass reads the next epoch; a pass that was left early does not repeat its order. `set_epoch` chooses.

    Args:
        source: Where batches come from.
        dataset: The user's dataset.
        device: Where tensors are moved; None leaves them.
        non_blocking: Whether copies from pinned memory overlap with computing.
        activity: Is told which loader is being read.
        on_batch: Called for every batch.

    Attributes:
        dataset: The user's dataset.
        epoch: The epoch being read, or to be read next.
        current: What every rank knows of the batch last yielded; None outside a pass.
    """

    def __init__(
        self,
        source: Source,
        *,
        dataset: Any,
        device: torch.device | None,
        non_blocking: bool,
        activity: ActiveLoaders | None,
        on_batch: Callable[[], None] | None,
    ) -> None:
        self.dataset = dataset
        self.epoch = 0
        self.current: BatchPlan | None = None
        self._source = source
        self._moves = device if device is not None and device.type != "cpu" else None
        self._non_blocking = non_blocking
        self._activity = activity or ActiveLoaders()
        self._on_batch = on_batch
        self._consumed = 0
        self._entered = False  # the epoch has been begun: the next pass reads the following one
        self._generation = 0  # a pass that another has overtaken must not touch the position

    @property
    def batch_size(self) -> int | None:
        """Samples of this shard's batch; None where a batch sampler decides."""
        return self._source.batch_size

    @property
    def total_batch_size(self) -> int | None:
        """Samples of all shards' batches together; None where a batch sampler decides."""
        return self._source.total_batch_size

    @property
    def order_source(self) -> str:
        """Where the order comes from, for people."""
        return self._source.description

    def __len__(self) -> int:
        """Batches of a whole epoch on this shard, the same on every rank."""
        return self._source.num_batches(0)

    def __iter__(self) -> Iterator[Batch]:
        """Read the next epoch, or the rest of the one a saved position is in."""
        if self._entered:
            self.epoch, self._consumed = self.epoch + 1, 0
        self._entered = True
        self._generation += 1
        return self._read(self._generation)

    def _read(self, generation: int) -> Iterator[Batch]:
        activity, on_batch, moves = self._activity, self._on_batch, self._moves
        activity.opened(self)
        try:
            for batch, plan, consumed in self._source.begin(self.epoch, self._consumed):
                if moves is not None:
                    batch = self._moved(batch)
                self.current = plan
                self._consumed = consumed
                if activity.current is not self:
                    activity.yields(self)
                if on_batch is not None:
                    on_batch()
                yield batch
            if generation == self._generation:
                self.epoch, self._consumed, self._entered = self.epoch + 1, 0, False
        finally:
            if generation == self._generation:
                self.current = None
            activity.closed(self)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. A position loaded in that epoch is kept, any other forgotten."""
        if epoch != self.epoch or self._entered:
            self.epoch, self._consumed, self._entered = epoch, 0, False

    def skip(self, batches: int) -> None:
        """Begin the next pass so many batches into its epoch, without reading what is skipped."""
        if batches < 0:
            raise ValueError(f"skip({batches}): must be 0 batches at least")
        if self._entered:
            self.epoch, self._entered = self.epoch + 1, False
        self._consumed = self._source.units_of(batches)

    def state_dict(self) -> dict[str, Any]:
        """The position: a few integers, the same on every rank, of use at any number of ranks."""
        return {
            "format": _STATE_FORMAT,
            "epoch": self.epoch,
            "consumed": self._consumed,
            "of": dict(self._source.fingerprint()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a position: the next pass reads the rest of its epoch, each sample once.

        Raises:
            ResumeError: The position is of another format, or of other data.
        """
        if state.get("format") != _STATE_FORMAT:
            raise ResumeError(
                f"the saved position has format {state.get('format')!r}, and this version reads {_STATE_FORMAT}; "
                "update drivetrain-data"
            )
        check_fingerprint(state["of"], self._source.fingerprint())
        self.epoch, self._consumed, self._entered = state["epoch"], state["consumed"], False
        self._generation += 1

    def _moved(self, batch: Any) -> Any:
        return map_tensors(lambda tensor: tensor.to(self._moves, non_blocking=self._non_blocking), batch)


class SkippedLoader(Generic[Batch]):
    """The rest of one epoch of a loader; every pass skips again."""

    def __init__(self, loader: ShardedLoader[Batch], batches: int) -> None:
        self.loader = loader
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        self.loader.skip(self._batches)
        return iter(self.loader)

    def __len__(self) -> int:
        return max(0, len(self.loader) - self._batches)


def skip_first_batches(loader: ShardedLoader[Batch], num_batches: int = 0) -> SkippedLoader[Batch]:
    """A view of a loader whose passes begin `num_batches` batches into their epoch, in constant time.

    Args:
        loader: A loader from `shard_loader`.
        num_batches: Batches of this shard to leave out.
    """
    return SkippedLoader(loader, num_batches)
