"""States of torchdata's StatefulDataLoader, which a source that reads such a loader passes on with its batches.

Without workers, a state counts the batches of the epoch. With workers, a state holds a snapshot of the workers after
some batch, and counts the batches since the snapshot.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from drivetrain_data.compat import (
    FINISHED,
    MAIN_SNAPSHOT,
    NUM_WORKERS,
    NUM_YIELDED,
    SAMPLER_STATE,
    SAMPLER_YIELDED,
    SNAPSHOT,
    SNAPSHOT_STEP,
    STEPS_SINCE,
    WORKER_SNAPSHOTS,
)
from drivetrain_data.errors import DataStateError


def torchdata_kind(loader: Any) -> Any:
    """Return torchdata's StatefulDataLoader class if a loader is an instance of it, else None."""
    kinds = (kind for kind in type(loader).__mro__ if kind.__name__ == "StatefulDataLoader")
    return next((kind for kind in kinds if kind.__module__.startswith("torchdata.stateful_dataloader")), None)


class TorchdataStates:
    """The states of a StatefulDataLoader during a loop over it."""

    def __init__(self, num_workers: int) -> None:
        self.received: dict[str, Any] | None = None  # behind the last batch that the loop has received
        self.loaded: dict[str, Any] | None = None  # that the next loop begins from, if there is one
        self._num_workers = num_workers
        self._num_before = 0

    def reset(self) -> None:
        """Forget the states, because the position was moved."""
        self.received = self.loaded = None

    def load(self, state: Mapping[str, Any]) -> None:
        """Make the next loop begin from a state. torchdata itself would read the batches since the snapshot again."""
        behind = state.get(STEPS_SINCE, 0)
        if behind and any(
            each["dataset_state"] is not None for each in state[SNAPSHOT][WORKER_SNAPSHOTS].values()
        ):
            raise DataStateError(
                f"the loader's state was saved {behind} batches behind the last snapshot of its dataset; build the "
                "loader that saves it with snapshot_every_n_steps=1"
            )
        self.received = None
        self.loaded = {**counted_from(state, behind), STEPS_SINCE: 0} if behind else dict(state)

    def begin(self, loader: Any, num_before: int) -> None:
        """Make the next iteration over the loader begin from the loaded state, or count from `num_before` batches."""
        loaded = self.loaded
        self.reset()
        self._num_before = num_before if loaded is None else 0
        if loaded is not None:  # else its persistent workers go on
            loader.load_state_dict(loaded)

    def take(self, loader: Any) -> dict[str, Any]:
        """Return the state after the batch that was read last."""
        state: dict[str, Any] = loader.state_dict()
        if not self._num_workers:  # else it came from the workers as a copy
            state = deepcopy(state)
        return counted_from(state, self._num_before) if self._num_before else state

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise DataStateError if a state is not torchdata's or was saved with another number of workers."""
        if FINISHED not in state or not {SNAPSHOT, NUM_YIELDED} & set(state):
            raise DataStateError(
                f"this is no state of torchdata's StatefulDataLoader: it has {sorted(map(str, state))}; pass what "
                "state_dict() gave"
            )
        saved = state[SNAPSHOT][MAIN_SNAPSHOT][NUM_WORKERS] if SNAPSHOT in state else 0
        if saved != self._num_workers:
            raise DataStateError(
                f"the loader's state was saved with num_workers={saved} and this loader has {self._num_workers}: "
                "torchdata keeps a state of each worker; use as many workers as before"
            )


def num_yielded(state: Mapping[str, Any]) -> int:
    """Return the number of batches of the epoch that were yielded before a state."""
    if SNAPSHOT in state:
        return state[SNAPSHOT][SNAPSHOT_STEP] + state[STEPS_SINCE]
    return state[NUM_YIELDED]


def samples_yielded(state: Mapping[str, Any]) -> int | None:
    """Return the number of samples yielded before a state; None if the state does not hold this number."""
    main: Any = state[SNAPSHOT][MAIN_SNAPSHOT] if SNAPSHOT in state else state
    if state.get(STEPS_SINCE) or main[SAMPLER_STATE] is None:
        return None
    return main[SAMPLER_STATE].get("samples_yielded")


def counted_from(
    state: Mapping[str, Any], num_batches: int, num_samples: int | None = None
) -> dict[str, Any]:
    """Return a state with earlier batches added to its count; if it counts samples, with earlier samples too."""
    counted = dict(state)
    if SNAPSHOT in state:
        snapshot = counted[SNAPSHOT] = dict(state[SNAPSHOT])
        main = snapshot[MAIN_SNAPSHOT] = dict(snapshot[MAIN_SNAPSHOT])
        snapshot[SNAPSHOT_STEP] += num_batches
    else:
        main = counted
        counted[NUM_YIELDED] += num_batches
    main[SAMPLER_YIELDED] += num_batches
    if num_samples is not None and main[SAMPLER_STATE] is not None:
        main[SAMPLER_STATE] = {"samples_yielded": num_samples}
    return counted
