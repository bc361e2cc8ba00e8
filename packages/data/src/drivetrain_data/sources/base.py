"""The source of a sharded loader's batches: the interface between reading data and looping over it."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

from drivetrain_data.sampling.step_info import BatchPlan


class Mark(NamedTuple):
    """A note that travels with a step and comes back to the source once the loop has received the step.

    Attributes:
        worker: The index of the worker that read the step; 0 without workers.
        snapshot: The state of the worker's dataset after the step; None if none was taken.
    """

    worker: int
    snapshot: Any = None


Reading: TypeAlias = tuple[BatchPlan, Any, Mark | None]


class BatchSource(Protocol):
    """A source of a shard's batches and their plans. Every rank has one and makes the same calls.

    1. `open` starts an epoch at a position. Each step yields its plan, this rank's batch, and a mark if a resume
       needs more than the position. A source that reads for all shards yields a list in place of the batch: the
       batches of the shards that have their own, in shard order.
    2. `note_received` follows each step that has a mark, once the loop has received the step.
    3. `identity` and `extra_state` go into a saved state; `take_up` loads the latter before the next `open`.

    Attributes:
        reads_for_all: Whether each step yields the batches of all shards.
    """

    reads_for_all: bool

    @property
    def seed(self) -> int:
        """The seed of the order of every epoch; loading a state sets the saved seed."""
        ...

    @seed.setter
    def seed(self, seed: int) -> None: ...

    @property
    def order_source(self) -> str:
        """The origin of the order, as a phrase for users."""
        ...

    def open(self, epoch: int, position: int) -> Iterator[Reading]:
        """Read an epoch from a position on."""
        ...

    def note_received(self, plan: BatchPlan, mark: Mark, /) -> None:
        """Record that the loop has received a step."""
        ...

    def num_steps(self, epoch: int, position: int, /) -> int:
        """Return the number of steps of an epoch from a position on.

        Raises:
            TypeError: The number of steps cannot be known in advance.
        """
        ...

    def position_after(self, epoch: int, position: int, num_steps: int, /) -> int:
        """Return the position `num_steps` steps after `position`."""
        ...

    def identity(self) -> Mapping[str, Any]:
        """Return the values that must match those of a saved state."""
        ...

    def extra_state(self, epoch: int, position: int, /) -> Mapping[str, Any]:
        """Return what a state must hold besides the epoch and the position."""
        ...

    def take_up(self, epoch: int, state: Mapping[str, Any], /) -> None:
        """Load the state that `extra_state` returned in an epoch.

        Raises:
            DataStateError: The state does not fit this source; the source is unchanged.
        """
        ...
