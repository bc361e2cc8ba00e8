"""Private names of torch and transformers that this package relies on, each once; docs/platforms.md lists them."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
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


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module inside of torch.compile's wrapper; another module is returned as it is."""
    return getattr(module, "_orig_mod", module)


def tied_weights_keys(model: nn.Module) -> Iterable[str] | None:
    """Return the names of tied weights that the class of a transformers model declares; None without them."""
    return getattr(model, "_tied_weights_keys", None)
