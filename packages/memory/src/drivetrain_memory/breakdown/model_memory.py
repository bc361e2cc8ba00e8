"""The memory of a model, its gradients and its optimizers, from the live objects. Nothing is changed."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from drivetrain_memory.breakdown.activations import ActivationMemory
from drivetrain_memory.breakdown.storages import StorageKey, storages_of, tensors_in

KINDS = ("parameters", "gradients", "optimizer_states", "buffers", "activations")
REST = "rest"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMemory:
    """The memory of the tensors that one module itself holds, without those of the modules in it, in bytes.

    Attributes:
        name: The name in the model, such as "layers.0.attention"; empty for the model itself.
        kind: The class of the module.
        parameters: The bytes of its parameters.
        gradients: The bytes of their gradients.
        optimizer_states: The bytes of their optimizer states.
        buffers: The bytes of its buffers.
        activations: The bytes of tensors that its forward saved for the backward, at its own peak.
    """

    name: str
    kind: str
    parameters: int = 0
    gradients: int = 0
    optimizer_states: int = 0
    buffers: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """The bytes of all kinds together."""
        return self.parameters + self.gradients + self.optimizer_states + self.buffers + self.activations


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBreakdown:
    """Where memory went.

    Attributes:
        by_device: The bytes of each kind ("parameters", "gradients", "optimizer_states", "buffers", "activations",
            "rest") on each device. "rest" is what the device's allocator holds for tensors beside these.
        modules: The modules that hold memory, in the model's order.
        shared: The names of tensors that share the storage of one before them, such as tied weights, and its name.
    """

    by_device: Mapping[str, Mapping[str, int]]
    modules: tuple[ModuleMemory, ...]
    shared: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def totals(self) -> dict[str, int]:
        """The bytes of each kind over all devices."""
        found: dict[str, int] = defaultdict(int)
        for kinds in self.by_device.values():
            for kind, size_bytes in kinds.items():
                found[kind] += size_bytes
        return dict(found)

    def by_prefix(self, depth: int) -> tuple[ModuleMemory, ...]:
        """Return the memory of modules down to a depth of names, what is below them included.

        Args:
            depth: The number of parts of a name: 1 for "layers", 2 for "layers.0".

        Raises:
            ValueError: The depth is not positive.
        """
        if depth < 1:
            raise ValueError(f"depth={depth}: must be at least 1")
        found: dict[str, ModuleMemory] = {}
        for module in self.modules:
            name = ".".join(module.name.split(".")[:depth])
            before = found.get(name, ModuleMemory(name=name, kind=module.kind if name == module.name else ""))
            found[name] = _sum(before, module)
        return tuple(found.values())

    def largest(self, number: int) -> tuple[ModuleMemory, ...]:
        """Return the modules that hold most, largest first."""
        return tuple(sorted(self.modules, key=lambda module: -module.total)[:number])


def memory_breakdown(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
    *,
    activations: ActivationMemory | None = None,
    allocated: Mapping[str, int] | None = None,
) -> MemoryBreakdown:
    """Say where the memory of a model and its optimizers is now.

    Each storage counts once, under the first name that has it: tied weights, views and buffers that several modules
    share are counted where they come first. A DTensor counts as its local shard. Called on any rank by itself.

    Args:
        model: The model; a wrapped one (DDP, FSDP) has the wrapper's names.
        optimizers: The optimizers that train it; their states count for the module that holds the parameter.
        activations: The activations that `record_activations` measured; None leaves them out.
        allocated: The bytes that each device's allocator holds for tensors, by the device's name, which the rest is
            counted from; None for those of the accelerators of this process.
    """
    count = _Count(model)
    count.add_model()
    if activations is not None:
        count.add_activations(activations)
    listed = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    for optimizer in listed:
        count.add_optimizer(optimizer)
    held = _allocated() if allocated is None else allocated
    for device, size_bytes in held.items():
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
        self._seen: dict[StorageKey, str] = {}
        self._owners: dict[int, str] = {}  # a parameter's identity -> the name of its module
        self.by_device: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.modules: dict[str, ModuleMemory] = {}
        self.shared: dict[str, str] = {}

    def add_model(self) -> None:
        for name, module in self._model.named_modules():
            self.modules[name] = ModuleMemory(name=name, kind=type(module).__name__)
        for owner, name, parameter in _named(self._model, "parameters"):
            assert isinstance(parameter, nn.Parameter)
            self._owners.setdefault(id(parameter), owner)
            self._add(owner, "parameters", name, parameter)
            if parameter.grad is not None and id(parameter.grad) not in self._owners:
                self._owners[id(parameter.grad)] = owner
                self._add(owner, "gradients", f"{name} (gradient)", parameter.grad)
        for owner, name, buffer in _named(self._model, "buffers"):
            self._add(owner, "buffers", name, buffer)

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, state in list(optimizer.state.items()):
            # The masters of mixed precision are the optimizer's own: they belong to no module.
            owner = self._owners.get(id(parameter), "")
            if id(parameter) not in self._owners and isinstance(parameter, torch.Tensor):
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
            if storage.key in self._seen:
                if kind in ("parameters", "buffers"):
                    self.shared[name] = self._seen[storage.key]
                continue
            self._seen[storage.key] = name
            self.by_device[storage.key.device][kind] += storage.size_bytes
            module = self.modules[owner]
            self.modules[owner] = replace(module, **{kind: getattr(module, kind) + storage.size_bytes})


def _named(model: nn.Module, kind: str) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield module name, tensor name and tensor, tied ones under each of their names."""
    for owner, module in model.named_modules():
        named = module.named_parameters if kind == "parameters" else module.named_buffers
        for name, tensor in named(recurse=False, remove_duplicate=False):
            yield owner, f"{owner}.{name}" if owner else name, tensor


def _sum(left: ModuleMemory, right: ModuleMemory) -> ModuleMemory:
    return replace(left, **{kind: getattr(left, kind) + getattr(right, kind) for kind in KINDS})


def _allocated() -> dict[str, int]:
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return {}
    names = {f"{kind.type}:{index}": index for index in range(torch.accelerator.device_count())}
    held = {name: torch.accelerator.memory_allocated(index) for name, index in names.items()}
    return {name: size_bytes for name, size_bytes in held.items() if size_bytes}
