"""A loader as a training loop sees it: one shard's batches on its device, with what every rank knows of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Generic, TypeVar

from drivetrain_data.active_loaders import ActiveLoaders
from drivetrain_data.device_prefetch import DeviceCopies
from drivetrain_data.errors import ResumedLoaderError
from drivetrain_data.sampling.step_info import BatchPlan
from drivetrain_data.shard import Shard
from drivetrain_data.sources.base import Source
from drivetrain_data.state.loader_state import check_state, make_state

Batch = TypeVar("Batch")


class ShardedLoader(Generic[Batch]):
    """One shard of a loader. `shard_loader` makes it.

    Each loop over it is an epoch: the first one `epoch`, the next ones count up by themselves unless `set_epoch` says
    which. After `load_state_dict`, the first loop gives the rest of the epoch that was saved.

    Args:
        source: Where batches come from.
        dataset: The user's.
        shard: Which part this is.
        batch_size: Samples of a batch on each shard; None where the user's batches are dealt out as they are.
        copies: Copies batches to the device; None leaves them.
        activity: Told of every batch.
        on_batch: Called for every batch.
        seed_source: Who said the seed, as one phrase for people.

    Attributes:
        dataset: The user's.
        shard: Which part this is.
        batch_size: Samples of a batch on each shard.
        current: What is known of the batch just yielded; None outside a loop.
        seed_source: Who said the seed.
    """

    def __init__(
        self,
        source: Source,
        *,
        dataset: Any,
        shard: Shard,
        batch_size: int | None,
        copies: DeviceCopies | None,
        activity: ActiveLoaders | None,
        on_batch: Callable[[], None] | None,
        seed_source: str = "",
    ) -> None:
        self.dataset = dataset
        self.shard = shard
        self.batch_size = batch_size
        self.current: BatchPlan | None = None
        self.seed_source = seed_source
        self._source = source
        self._copies = copies
        self._activity = activity
        self._on_batch = on_batch
        self._epoch = 0
        self._position = 0
        self._stepped = 0  # the position whose gradients are in the weights, as far as the caller has said
        self._stepped_extra: Mapping[str, Any] = {}
        self._begun = False  # the current epoch was entered: the next loop is another one
        self._finished = False
        self._newest = object()  # marks the newest loop, which alone moves the position

    @property
    def epoch(self) -> int:
        """The epoch being read, or read last; before the first loop, the one to come."""
        return self._epoch

    @property
    def seed(self) -> int:
        """What the order is drawn from, with the epoch; a loaded state brings its own."""
        return self._source.seed

    @property
    def order_source(self) -> str:
        """Where the order comes from, as one phrase for people."""
        return self._source.order_source

    @property
    def total_batch_size(self) -> int | None:
        """The samples of a step over all shards; None where the user's batches are dealt out as they are."""
        return None if self.batch_size is None else self.batch_size * self.shard.count

    def __len__(self) -> int:
        """The steps of a whole epoch, which all ranks take.

        Raises:
            TypeError: The dataset has no length.
        """
        return self._source.num_steps(self._epoch, 0)

    def num_left(self) -> int:
        """The steps that the next loop takes: after a resume those of the epoch's rest, else as `len`.

        Raises:
            TypeError: The dataset has no length.
        """
        # Of another epoch than the one being read nobody is asked: that would seed its sampler anew.
        return self._source.num_steps(self._epoch, 0 if self._begun else self._position)

    def __repr__(self) -> str:
        return (
            f"ShardedLoader(shard {self.shard.index} of {self.shard.count}, batch_size={self.batch_size}, "
            f"epoch {self._epoch}, position {self._position}: {self.order_source})"
        )

    def __iter__(self) -> Iterator[Batch]:
        return self.skipping(0)

    def skipping(self, num_batches: int) -> Iterator[Batch]:
        """Read the next epoch without its first batches. Called on all ranks.

        Raises:
            ResumedLoaderError: A state was loaded in the middle of an epoch, whose rest is still to be read.
        """
        self.check_skippable(num_batches)
        return self._loop(num_batches)

    def check_skippable(self, num_batches: int) -> None:
        """Refuse to leave out batches of a rest that was loaded: those before it are left out already.

        Raises:
            ResumedLoaderError: It was, and `num_batches` is not 0.
        """
        if num_batches and self._position and not self._begun:
            raise ResumedLoaderError(
                f"a loaded state has brought this loader to position {self._position} of epoch {self._epoch}, where "
                f"its next loop goes on: skip_first_batches({num_batches}) would leave out {num_batches} batches "
                "more, unread. Delete the call and loop over the loader itself; to begin the epoch anew instead, "
                f"call loader.set_epoch({self._epoch + 1}) and loader.set_epoch({self._epoch}) first"
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next loop. A rest to be resumed is kept if it belongs to the same one.

        Raises:
            ValueError: `epoch` is negative.
        """
        if type(epoch) is not int or epoch < 0:
            raise ValueError(f"epoch={epoch!r}: must be an integer; epochs count from 0")
        if epoch != self._epoch or self._begun:
            self._start(epoch, position=0)

    def mark_stepped(self) -> None:
        """Note that an optimizer has stepped on all that was received: its gradients are in the weights.

        A loop of your own that takes a batch before it has stepped on the one before takes it too early: let the
        loader read ahead (`copy_ahead`, `read_ahead`, workers) instead, of which nothing counts as received.
        """
        self._stepped = self._position
        self._stepped_extra = self._source.extra_state(self._epoch, self._position)

    def state_dict(self, *, stepped: bool = False) -> dict[str, Any]:
        """The position after the last batch that was received, as plain values.

        Save rank 0's: it holds for all ranks. They differ at most in what `extra` knows of a stream, by which less
        or more of it is read again.

        It is taken up with any number of ranks and any batch size, except where `order_source` says that batches
        are the user's.

        Args:
            stepped: The position of the last `mark_stepped` instead: a batch in hand, whose gradients are in no
                weights yet, comes again after a resume.
        """
        epoch, position = self._epoch, self._position
        if self._finished:
            epoch, position = epoch + 1, 0
        if stepped and not self._finished:
            position, extra = self._stepped, self._stepped_extra
        else:
            extra = self._source.extra_state(epoch, position)
        return make_state(
            epoch=epoch,
            position=position,
            seed=self._source.seed,
            identity=self._source.identity(),
            fingerprint=_fingerprint(self.dataset),
            extra=extra,
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a position: the next loop goes on with the first sample that was not received.

        Raises:
            DataStateError: The state is of other data, of another order, or of a newer format.
        """
        check_state(state, identity=self._source.identity(), fingerprint=_fingerprint(self.dataset))
        self._source.take_up(state["epoch"], state["extra"])
        self._source.seed = state["seed"]
        self.seed_source = "the loader state that was loaded"
        self._start(state["epoch"], position=state["position"])

    def _end_loop(self) -> None:
        """The loop that ran is over; if it is asked again, it raises."""
        self._newest = object()
        if self._activity is not None:
            self._activity.pop(self)
        self.current = None

    def _start(self, epoch: int, *, position: int) -> None:
        if self.current is not None:
            self._end_loop()
        self._epoch = epoch
        self._position = self._stepped = position
        self._stepped_extra = self._source.extra_state(epoch, position)
        self._begun = self._finished = False

    def _loop(self, num_skipped: int) -> Iterator[Batch]:
        if self._begun:
            self._start(self._epoch + 1, position=0)
        self._begun = True
        self._newest = this = object()
        source, activity, on_batch, copies = self._source, self._activity, self._on_batch, self._copies
        if num_skipped:
            self._position = source.position_after(self._epoch, self._position, num_skipped)
        try:
            readings = source.open(self._epoch, self._position)
            for plan, batch, mark in readings if copies is None else copies.copied(readings):
                self._position += plan.advance
                if mark is not None:
                    source.note_received(plan, mark)
                self.current = plan
                if activity is not None:
                    activity.push(self)
                if on_batch is not None:
                    on_batch()
                yield batch
                if self._newest is not this:
                    raise RuntimeError(
                        "another loop over this ShardedLoader has begun meanwhile, or set_epoch or load_state_dict "
                        "was called, and it has one position, not two: leave the loop first; for a loop within the "
                        "loop shard a second DataLoader"
                    )
            self._finished = True
        finally:
            if self._newest is this:
                self._end_loop()


class RestOfEpoch(Generic[Batch]):
    """A sharded loader whose loops leave out their first batches; all else is the loader's.

    Args:
        loader: The loader, whose position moves as this is read.
        num_batches: The batches to leave out.
    """

    def __init__(self, loader: ShardedLoader[Batch], num_batches: int) -> None:
        self.loader = loader
        self.num_batches = num_batches
        self._length: int | None = None  # of the loop that runs

    def __iter__(self) -> Iterator[Batch]:
        self._length = None
        with suppress(TypeError):
            self._length = len(self)
        yield from self.loader.skipping(self.num_batches)
        self._length = None

    def __len__(self) -> int:
        if self._length is not None and self.loader.current is not None:
            return self._length
        return max(0, self.loader.num_left() - self.num_batches)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


def skip_first_batches(loader: Iterable[Batch], num_batches: int = 0) -> RestOfEpoch[Batch]:
    """The rest of a sharded loader's epoch; where the order is ours, without reading what is left out.

    Args:
        loader: What `shard_loader` made.
        num_batches: The batches of this rank to leave out.

    Raises:
        TypeError: The loader is not sharded.
        ValueError: `num_batches` is negative.
        ResumedLoaderError: A state was loaded in the middle of an epoch: the loader goes on there by itself.
    """
    if type(num_batches) is not int or num_batches < 0:
        raise ValueError(f"num_batches={num_batches!r}: must be an integer, 0 or more batches")
    if isinstance(loader, RestOfEpoch):
        loader.loader.check_skippable(num_batches)
        return RestOfEpoch(loader.loader, loader.num_batches + num_batches)
    if not isinstance(loader, ShardedLoader):
        raise TypeError(
            f"skip_first_batches takes what prepare or shard_loader returned, not {type(loader).__name__}; prepare "
            "or shard it first"
        )
    loader.check_skippable(num_batches)
    return RestOfEpoch(loader, num_batches)


def _fingerprint(dataset: Any) -> str | None:
    """A dataset's own mark of its content, as Hugging Face datasets have."""
    mark = getattr(dataset, "_fingerprint", None)
    return mark if isinstance(mark, str) else None
