"""The results of a memory breakdown; this module does not import torch."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

KINDS = ("parameters", "gradients", "optimizer_states", "buffers", "activations")
REST = "rest"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMemory:
    """The memory of one module's own tensors in bytes, without the tensors of its submodules.

    Attributes:
        name: The name in the model, such as "layers.0.attention"; empty for the model itself.
        activations: The bytes of tensors that its forward saved for the backward, at the module's peak.
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
    """The memory of a model by kind, device and module.

    Attributes:
        by_device: The bytes of each kind ("parameters", "gradients", "optimizer_states", "buffers", "activations",
            "rest") on each device. "rest" is all other tensor memory of the device's allocator.
        modules: The modules that hold memory, in the model's order.
        shared: A dict from tensors in an earlier tensor's storage, such as tied weights, to the earlier name.
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
        """Return the memory of modules down to a depth of names, deeper submodules included.

        The depth, at least 1, is the number of parts of a name: 1 for "layers", 2 for "layers.0".
        """
        if depth < 1:
            raise ValueError(f"depth={depth}: must be at least 1")
        found: dict[str, ModuleMemory] = {}
        for module in self.modules:
            name = ".".join(module.name.split(".")[:depth])
            before = found.get(name, ModuleMemory(name=name, kind=module.kind if name == module.name else ""))
            sums = {kind: getattr(before, kind) + getattr(module, kind) for kind in KINDS}
            found[name] = replace(before, **sums)
        return tuple(found.values())

    def largest(self, number: int) -> tuple[ModuleMemory, ...]:
        """Return the modules that hold the most memory, largest first."""
        return tuple(sorted(self.modules, key=lambda module: -module.total)[:number])
