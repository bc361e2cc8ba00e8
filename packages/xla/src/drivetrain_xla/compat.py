"""The private names of torch-xla and torch that this package relies on; tests/xla/test_compat.py holds each."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils import _pytree

# The leaves of nested dicts, lists and tuples; and the same structure with each leaf of a type replaced.
tree_leaves, tree_map_only = _pytree.tree_leaves, _pytree.tree_map_only


def devices_are_chosen(torch_xla: Any) -> bool:
    """Return whether a tensor has been made on an XLA device, after which SPMD cannot begin."""
    return bool(torch_xla._XLAC._xla_get_spmd_config_is_locked())


def cache_is_open(torch_xla: Any) -> bool:
    """Return whether this process has compiled a graph, after which no persistent cache can be opened."""
    return bool(torch_xla._XLAC._xla_computation_cache_is_initialized())


def sharding_of(torch_xla: Any, tensor: Any) -> str:
    """Return how a tensor is cut over devices, as XLA writes it; empty if nothing was said."""
    return str(torch_xla._XLAC._get_xla_sharding_spec(tensor))


@contextmanager
def remembering_hooks(module: nn.Module, added: list[Any]) -> Generator[None]:
    """Add to a list what removes each backward hook that the block registers on a module."""
    hooks = module._backward_hooks  # pyright: ignore[reportPrivateUsage]
    before = set(hooks)
    yield
    added.extend(partial(hooks.pop, key, None) for key in hooks.keys() - before)


def forward_pre_hooks(module: nn.Module) -> Iterable[Any]:
    """Return the hooks that run before a module's forward."""
    return tuple(module._forward_pre_hooks.values())  # pyright: ignore[reportPrivateUsage]
