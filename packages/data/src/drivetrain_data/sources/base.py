"""Where a sharded loader's batches come from: the seam between what is read and how a loop sees it."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

from drivetrain_data.sampling.step_info import BatchPlan


class Mark(NamedTuple):
    """What a source wants to hear of a step again, once the loop has it.

    Attributes:
        worker: The worker that read it.
        snapshot: Where its dataset stood after it, if it was asked.
    """

    worker: int
    snapshot: Any = None


Reading: TypeAlias = tuple[BatchPlan, Any, Mark | None]


class Source(Protocol):
    """Gives a shard's batches of an epoch with their plans. Every rank has one and makes the same calls.

    1. `open` starts an epoch at a position; each step yields what all ranks know of it, this rank's batch, and a
       mark, if a resume needs more than the position. A source that reads for all yields a list in place of the
       batch: the batches of the shards that have their own, in shard order.
    2. `note_received` follows each step that comes with a mark, once the loop has it.
    3. `identity` and `extra_state` go into a saved state; `take_up` reads the latter back before the next `open`.

    Attributes:
        reads_for_all: Whether a step's batches of all shards are given.
    """

    reads_for_all: bool

    @property
    def seed(self) -> int:
        """What the order of every epoch depends on; a resume sets the one it was saved with."""
        ...

    @seed.setter
    def seed(self, seed: int) -> None: ...

    @property
    def order_source(self) -> str:
        """Where the order comes from, as one phrase for people."""
        ...

    def open(self, epoch: int, position: int) -> Iterator[Reading]:
        """Read an epoch from a position on."""
        ...

    def note_received(self, plan: BatchPlan, mark: Mark, /) -> None:
        """A step has reached the loop."""
        ...

    def num_steps(self, epoch: int, position: int, /) -> int:
        """The steps of an epoch from a position on.

        Raises:
            TypeError: They cannot be known beforehand.
        """
        ...

    def position_after(self, epoch: int, position: int, num_steps: int, /) -> int:
        """The position when `num_steps` steps from `position` are done."""
        ...

    def identity(self) -> Mapping[str, Any]:
        """What a saved state and this source must agree on."""
        ...

    def extra_state(self, epoch: int, position: int, /) -> Mapping[str, Any]:
        """What a state must hold besides the epoch and the position."""
        ...

    def take_up(self, epoch: int, state: Mapping[str, Any], /) -> None:
        """Go on from a state that was saved in an epoch.

        Raises:
            DataStateError: It cannot be taken up here; nothing has changed.
        """
        ...
