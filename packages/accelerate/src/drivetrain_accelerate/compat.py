"""The private names of torch and transformers that this package uses; docs/design/platforms.md lists them."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.utils._pytree import tree_map  # torch's walk through nested values has no public name


def map_nested(function: Callable[..., Any], *values: Any) -> Any:
    """Apply a function to the leaves at the same place in several nested values; return the nested results."""
    return tree_map(function, *values)


def num_calls(scheduler: Any) -> int:
    """Return the number of steps of a torch scheduler; its construction counts as one."""
    return scheduler._step_count


def count_call(scheduler: Any) -> None:
    """Count a step of a scheduler without changing its learning rates."""
    scheduler._step_count += 1


def tied_weights_keys(model: nn.Module) -> Iterable[str] | None:
    """Return the names of tied weights that the class of a transformers model declares; None without them."""
    return getattr(model, "_tied_weights_keys", None)
