"""The memory of a model, its gradients and its optimizers, from the live objects. Nothing is changed."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from drivetrain_memory.breakdown.activations import ActivationMemory
from drivetrain_memory.breakdown.memory_shares import REST, MemoryBreakdown, ModuleMemory
from drivetrain_memory.storages import LiveStorage, storages_of, tensors_in
from drivetrain_memory.usage.sampler import accelerator_names


def memory_breakdown(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
    *,
    activations: ActivationMemory | None = None,
    allocated: Mapping[str, int] | None = None,
) -> MemoryBreakdown:
    """Measure the current memory of a model and its optimizers, by kind, device and module.

    Each storage counts once, under the first name that refers to it: tied weights, views and shared buffers count for
    the first module. A DTensor counts as its local shard. Any rank may call this alone.

    Args:
        model: The model; a wrapped one (DDP, FSDP) has the wrapper's names.
        optimizers: The optimizers that train it; their states count for the module that holds the parameter.
        activations: The activations that `record_activations` measured; None leaves them out.
        allocated: The bytes of tensors in each device's allocator, by the device's name, from which "rest" is
            computed. None reads the accelerators of this process.
    """
    count = _Count(model)
    count.add_model()
    if activations is not None:
        count.add_activations(activations)
    listed = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    for optimizer in listed:
        count.add_optimizer(optimizer)
    if allocated is None:
        allocated = {
            name: size_bytes
            for index, name in enumerate(accelerator_names())
            if (size_bytes := torch.accelerator.memory_allocated(index))
        }
    for device, size_bytes in allocated.items():
        counted = sum(count.by_device[device].values())
        count.by_device[device][REST] = max(0, size_bytes - counted)
    return MemoryBreakdown(
        by_device={device: dict(kinds) for device, kinds in count.by_device.items()},
        modules=tuple(module for module in count.modules.values() if module.total),
        shared=count.shared,
    )


class _Count:
    """A count in progress."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen: dict[LiveStorage, str] = {}
        self._owners: dict[int, str] = {}  # a parameter's identity -> the name of its module
        self.by_device: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.modules: dict[str, ModuleMemory] = {}
        self.shared: dict[str, str] = {}

    def add_model(self) -> None:
        for name, module in self._model.named_modules():
            self.modules[name] = ModuleMemory(name=name, kind=type(module).__name__)
        for owner, name, parameter in _iter_named(self._model, "parameters"):
            assert isinstance(parameter, nn.Parameter)
            self._owners.setdefault(id(parameter), owner)
            self._add(owner, "parameters", name, parameter)
            if parameter.grad is not None and id(parameter.grad) not in self._owners:
                self._owners[id(parameter.grad)] = owner
                self._add(owner, "gradients", f"{name} (gradient)", parameter.grad)
        for owner, name, buffer in _iter_named(self._model, "buffers"):
            self._add(owner, "buffers", name, buffer)

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, state in list(optimizer.state.items()):
            # The masters of mixed precision are the optimizer's own: they belong to no module.
            owner = self._owners.get(id(parameter), "")
            if id(parameter) not in self._owners:
                self._add(owner, "optimizer_states", "(parameter of the optimizer alone)", parameter)
            for tensor in tensors_in(state):
                self._add(owner, "optimizer_states", "(optimizer state)", tensor)

    def add_activations(self, activations: ActivationMemory) -> None:
        for device, size_bytes in activations.peak_by_device.items():
            self.by_device[device]["activations"] += size_bytes
        for name, size_bytes in activations.by_module.items():
            module = self.modules.get(name, ModuleMemory(name=name, kind=""))
            self.modules[name] = replace(module, activations=module.activations + size_bytes)

    def _add(self, owner: str, kind: str, name: str, tensor: torch.Tensor) -> None:
        for storage in storages_of(tensor):
            if storage in self._seen:
                if kind in ("parameters", "buffers"):
                    self.shared[name] = self._seen[storage]
                continue
            self._seen[storage] = name
            self.by_device[storage.device][kind] += storage.size_bytes
            module = self.modules[owner]
            self.modules[owner] = replace(module, **{kind: getattr(module, kind) + storage.size_bytes})


def _iter_named(model: nn.Module, kind: str) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield module name, tensor name and tensor; yield a tied tensor under each of its names."""
    for owner, module in model.named_modules():
        named = module.named_parameters if kind == "parameters" else module.named_buffers
        for name, tensor in named(recurse=False, remove_duplicate=False):
            yield owner, f"{owner}.{name}" if owner else name, tensor
