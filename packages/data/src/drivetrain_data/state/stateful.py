"""The interface of users' samplers, streams and loaders that can save their state."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class StatefulReader(Protocol):
    """An iterable with a state dict, such as a sampler, Hugging Face's datasets and torchdata's loaders."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state that the iteration depends on."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state, from which the next iteration continues."""
        ...
