"""A view of a sharded loader that has the state of torchdata's StatefulDataLoader."""

from collections.abc import Mapping
from typing import Any

from drivetrain_data.compat import FINISHED
from drivetrain_data.loader import ShardedLoader
from drivetrain_data.state.torchdata_state import counted_from, num_yielded


class TorchdataView:
    """A view of a sharded StatefulDataLoader that saves and loads states in torchdata's format."""

    def __init__(self, loader: ShardedLoader[Any]) -> None:
        states = loader.source.states
        if states is None:
            raise RuntimeError(
                "the state of torchdata's StatefulDataLoader is asked for, and this loader was made from another "
                "kind: pass a StatefulDataLoader, or use state_dict()"
            )
        self._loader = loader
        self._source: Any = loader.source  # of one of the kinds that read torchdata's loaders
        self._states = states

    def state_dict(self) -> dict[str, Any]:
        """Return the position as a state of torchdata's StatefulDataLoader.

        A StatefulDataLoader over this shard's batches can load the state. It contains the sharded loader's own state
        if a resume needs it.
        """
        loader, source = self._loader, self._source
        own = loader.state_dict()
        state = self._states.received or self._states.loaded
        if state is None:
            state = counted_from(source.initial_state(), *source.num_before(loader.position))
        if own["epoch"] > loader.epoch:  # the epoch was read to its end
            state = {**state, FINISHED: True}
        is_all = loader.shard.count == 1 and source.identity()["order"] == "sequential"
        return dict(state) if is_all else {**state, "sharded": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict`, or torchdata's StatefulDataLoader, returned."""
        loader, source = self._loader, self._source
        self._states.check(state)
        if "sharded" in state:
            loader.load_state_dict(state["sharded"])
            fits = source.num_before(loader.position)[0] == num_yielded(state)
        else:
            fits = not state[FINISHED]
            loader.move_to(loader.epoch + (not fits), source.position_of(state) if fits else 0)
        if fits:
            self._states.load({name: value for name, value in state.items() if name != "sharded"})
