"""Private names of torch that this package relies on, each once."""

from collections.abc import Callable
from typing import Any

from torch.utils._pytree import tree_map  # torch's walk through nested values has no public name


def map_nested(function: Callable[..., Any], *values: Any) -> Any:
    """Return the nested values with a function applied to the leaves of equal places."""
    return tree_map(function, *values)


def num_calls(scheduler: Any) -> int:
    """Return how often a scheduler of torch was stepped, its construction included."""
    return scheduler._step_count


def count_call(scheduler: Any) -> None:
    """Count a step of a scheduler that does not change its learning rates."""
    scheduler._step_count += 1
