"""The source of a sharded loader's batches: the interface between reading data and the training loop."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Self, TypeAlias

from drivetrain_data.sampling.partition import num_steps
from drivetrain_data.sampling.sample_signature import Place, Signature
from drivetrain_data.sampling.sharding import DataSharding
from drivetrain_data.sampling.step_info import BatchPlan
from drivetrain_data.settings import UnevenPolicy
from drivetrain_data.state.torchdata_state import TorchdataStates, torchdata_kind


class StepOrigin(NamedTuple):
    """The origin of a step, which accompanies the step and returns to the source once the loop has the step."""

    worker: int  # 0 without workers
    snapshot: Any = None  # the state of the worker's dataset after the step, if one was taken
    state: dict[str, Any] | None = None  # of torchdata's loader after the step, where it reads


# A step's plan, this rank's batch, and an origin if a resume needs more than the position. Where one rank reads for
# all, the batch is a list of the batches of the shards that have their own, in shard order.
Reading: TypeAlias = tuple[BatchPlan, Any, StepOrigin | None]


class BatchSource(ABC):
    """A base class of sources of a shard's batches and plans. Every rank has a source and makes the same calls.

    Subclasses are constructed from a loader and a sharding.

    1. `move_to` chooses an epoch and a position, on all ranks; `open` reads from there, on the reading ranks.
    2. `note_received` is called once the loop has received a step that has an origin.
    3. A saved state holds `identity` and `extra_state`; `load_extra_state` loads the latter before the next `open`.

    A full step moves the position by `stride`. The batch size is the size on each shard; None if the user's batches
    are distributed whole.
    """

    reads_forwards = True  # whether only a loop can read the data, from its beginning on

    def __init__(self, loader: Any, sharding: DataSharding, *, stride: int, batch_size: int | None) -> None:
        self.dataset: Any = getattr(loader, "dataset", None)
        self._users_loader = loader
        self.sharding = sharding
        self.stride = stride
        self.batch_size = batch_size
        # The rows of every batch where the collate function pads, and says so by this attribute; None elsewhere.
        self.padded_size: int | None = getattr(getattr(loader, "collate_fn", None), "padded_size", None)
        self._seed = sharding.seed
        self.signatures: dict[Place, Signature] = {}  # of some samples of the first two steps, if asked for
        is_torchdata = torchdata_kind(loader) is not None  # whose loader has states of its own
        self.states = TorchdataStates(loader.num_workers) if is_torchdata else None

    @property
    def name(self) -> str:
        """The name of the dataset or loader that is read."""
        return type(self._users_loader if self.dataset is None else self.dataset).__name__

    def again(self) -> Self:
        """Return a new source of the same batches, from the beginning."""
        return self._rebuild(self.sharding)

    def with_even(self, even: UnevenPolicy) -> Self:
        """Return a source of the same batches with tails treated by `even`; a loader that drops tails still does."""
        if self.sharding.even in ("drop", even):
            return self
        return self._rebuild(replace(self.sharding, even=even))

    def _rebuild(self, sharding: DataSharding) -> Self:
        make: Any = type(self)
        fresh = make(self._users_loader, sharding)
        fresh.seed = self.seed
        return fresh

    @property
    def seed(self) -> int:
        """The seed of the order of every epoch; loading a state sets the saved seed."""
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed = seed

    @property
    @abstractmethod
    def order_source(self) -> str:
        """The origin of the order, as a phrase for users."""

    def move_to(self, epoch: int, position: int, /) -> None:  # noqa: B027 most positions say all
        """Move to the position that the loop starts from. Called on all ranks, even if one rank reads for all."""

    @abstractmethod
    def open(self, epoch: int, position: int) -> Iterator[Reading]:
        """Read an epoch from a position on."""

    @abstractmethod
    def length(self, epoch: int, /) -> int:
        """Return the number of positions in an epoch; TypeError if it cannot be known in advance."""

    def num_steps(self, epoch: int, position: int) -> int:
        """Return the number of steps of an epoch from a position on; TypeError if it cannot be known in advance."""
        return num_steps(self.length(epoch) - position, self.stride, self.sharding.even)

    @abstractmethod
    def identity(self) -> Mapping[str, Any]:
        """Return the values that must match those of a saved state."""

    def facts(self) -> dict[str, Any]:
        """Return the values that must be the same on all ranks that share the data."""
        sharding = self.sharding
        given = {
            "batch_size": self.batch_size,
            "even": sharding.even,
            "seed": sharding.seed,
            "read_by": "rank 0" if sharding.for_all else "every rank",
        }
        identity = self.identity()
        if sharding.for_all:  # the others need only know how long an epoch is
            identity = {name: identity.get(name) for name in ("num_samples", "num_positions")}
        return {**given, **identity}

    @abstractmethod
    def extra_state(self, epoch: int, position: int, /) -> Mapping[str, Any]:
        """Return the values that a state needs besides epoch and position."""

    @abstractmethod
    def load_extra_state(self, epoch: int, state: Mapping[str, Any], /) -> None:
        """Load the state that `extra_state` returned in an epoch; a DataStateError leaves the source unchanged."""

    def note_received(self, _plan: BatchPlan, origin: StepOrigin, /) -> None:
        """Record that the loop has received a step."""
        if self.states is not None:
            self.states.received = origin.state
