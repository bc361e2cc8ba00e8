"""Free the memory of objects, and return unused memory of caches and the heap."""

import gc
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from drivetrain_memory.compat import end_persistent_workers, is_compiled
from drivetrain_memory.freeing.live_objects import live_objects
from drivetrain_memory.system_heap import trim_heap


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Return unused memory in the cache of the accelerator's allocator to the driver.

    With `garbage_collection`, collect garbage first, so that tensors in reference cycles are freed too.
    """
    if garbage_collection:
        gc.collect()
    if torch.accelerator.current_accelerator(check_available=True) is not None:
        torch.accelerator.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Free the memory that objects hold, and return one None for each object.

    Call it as `model, optimizer = release_memory(model, optimizer)`. The memory is free when this returns, although
    the caller's names still refer to the objects: modules lose the values of their parameters and buffers, optimizers
    their states, tensors their values and graphs, loaders the workers that they keep, containers their elements.
    All other references see the emptied objects. Parameters and buffers that another live module has, or that another
    live optimizer trains, keep their values. If a module was compiled, all compiled code of the process is dropped,
    since torch cannot drop a part; code in use is compiled again at its next call. Objects of other kinds are left
    unchanged.

    Example:
        >>> model, optimizer = torch.nn.Linear(4, 2), None
        >>> model, optimizer = release_memory(model, optimizer)
        >>> model is None
        True
    """
    released = _Released(objects)
    released.empty()
    if any(isinstance(one, nn.Module) and is_compiled(one) for one in released.objects):
        torch.compiler.reset()
    count = len(objects)
    del objects, released
    clear_device_cache(garbage_collection=True)
    trim_heap()
    return [None] * count


def free_memory(*objects: Any) -> list[None]:
    """Release objects as `release_memory` does; without any, collect garbage and return cached memory.

    Garbage is collected, the accelerator's cache goes back to its driver, and the free pages of the heap to the
    system. Referenced objects that are not passed stay allocated.
    """
    return release_memory(*objects)


class _Released:
    """The objects to release, with those inside containers."""

    def __init__(self, objects: Iterable[Any]) -> None:
        self.objects: list[Any] = []
        self._containers: list[Any] = []
        self._add(objects)

    def _add(self, objects: Iterable[Any]) -> None:
        for one in objects:
            if isinstance(one, (list, dict)):
                self._containers.append(one)
            if isinstance(one, Mapping):
                self._add(cast("Mapping[Any, Any]", one).values())
            elif isinstance(one, (list, tuple)):
                self._add(cast("list[Any]", one))
            else:
                self.objects.append(one)

    def empty(self) -> None:
        """Empty each object in place."""
        kept = self._find_used_elsewhere()
        for one in self.objects:
            if isinstance(one, nn.Module):
                for tensor in [*one.parameters(), *one.buffers()]:
                    if id(tensor) not in kept:
                        _empty_tensor(tensor)
            elif isinstance(one, Optimizer):
                for parameter in (parameter for group in one.param_groups for parameter in group["params"]):
                    if id(parameter) not in kept:
                        parameter.grad = None
                one.state.clear()
            elif isinstance(one, DataLoader):
                end_persistent_workers(cast("DataLoader[Any]", one))
            elif isinstance(one, Tensor) and id(one) not in kept:
                _empty_tensor(one)
        for container in self._containers:
            container.clear()

    def _find_used_elsewhere(self) -> set[int]:
        """Return the ids of the tensors of live modules and optimizers that are not to be released."""
        modules = [one for one in self.objects if isinstance(one, nn.Module)]
        released = {id(parameter) for one in modules for parameter in one.parameters()}
        own = {id(inner) for one in modules for inner in one.modules()} | set(map(id, self.objects))
        # A wrapper such as DDP holds the module that is released, and is no user of it beside.
        live = live_objects(nn.Module)
        own |= {id(one) for one in live if own & {id(child) for child in one.children()}}
        found: set[int] = set()
        for one in live:
            if id(one) not in own:
                found |= {
                    id(tensor) for tensor in [*one.parameters(recurse=False), *one.buffers(recurse=False)]
                }
        for one in live_objects(Optimizer):
            trained = {id(tensor) for group in one.param_groups for tensor in group["params"]}
            # One that trains nothing but parameters of released modules has no use left.
            if id(one) not in own and not (modules and trained <= released):
                found |= trained
        return found


def _empty_tensor(tensor: Tensor) -> None:
    tensor.grad = None
    if tensor.grad_fn is not None:
        tensor.detach_()
    if type(tensor) in (Tensor, nn.Parameter, nn.Buffer):  # DTensors and the like own several, and refuse
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
