"""The layout of a model by name: modules, tensors, ties, sizes, and the units that are fetched together."""

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from drivetrain_dispatch.compat import BUFFERS, PARAMETERS
from drivetrain_dispatch.errors import DeviceMapError
from drivetrain_dispatch.model.quantized_tensor import is_quantized, parts_of, size_in_bytes
from drivetrain_weights.tied_parameters import memory_key

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
NORMS = (*_BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
# Modules of torch that use the weights of their submodules without calling the submodules.
REACH_INSIDE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
# Modules that are never called: the enclosing module uses the tensors that they hold.
_ONLY_HOLD = (nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelLayout:
    """The modules and tensors of a model, and the dtypes and sizes that the tensors will have.

    A layout describes the model at the time of `of`. The properties are computed on first use and cached.
    """

    model: nn.Module
    modules: dict[str, nn.Module]  # the modules under every name that they have, each before its submodules
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    # The dtype that floating-point and complex tensors will be converted to; None for no conversion.
    # Integer and boolean tensors keep their dtype, as in `Module.to(dtype)`.
    dtype: torch.dtype | None = None
    special_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict[str, torch.dtype])
    # The bytes of single tensors by name, which take precedence over dtypes: packed weights.
    special_sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    # The names of the module classes whose weights are fetched all at once.
    at_once: Collection[str] = ()

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        special_dtypes: Mapping[str, torch.dtype] | None = None,
        special_sizes: Mapping[str, int] | None = None,
        at_once: str | Collection[str] = (),
    ) -> "ModelLayout":
        """Return the layout of a model, which may be on the meta device."""
        modules = dict(model.named_modules(remove_duplicate=False))
        parameters: dict[str, Tensor] = {}
        buffers: dict[str, Tensor] = {}
        # Torch's own iterators would traverse all modules again for each.
        for outer, module in modules.items():
            prefix = f"{outer}." if outer else ""
            for attribute, into in ((PARAMETERS, parameters), (BUFFERS, buffers)):
                for name, tensor in getattr(module, attribute).items():
                    if tensor is not None:
                        into[prefix + name] = tensor
        return cls(
            model=model,
            modules=modules,
            parameters=parameters,
            buffers=buffers,
            dtype=dtype,
            special_dtypes=special_dtypes or {},
            special_sizes=special_sizes or {},
            at_once=listed(at_once),
        )

    def __post_init__(self) -> None:
        for argument in ("special_dtypes", "special_sizes"):
            special: Mapping[str, object] = getattr(self, argument)
            if unknown := sorted(name for name in special if name not in self.tensors):
                raise ValueError(
                    f"{argument}={unknown}: the model has no such parameter or buffer; see named_parameters()"
                )
        kinds = set(map(type, self.modules.values())) if self.at_once else ()
        known = {base.__name__ for kind in kinds for base in kind.__mro__}
        if absent := sorted(set(self.at_once) - known):
            raise ValueError(
                f"preload_module_classes={absent}: the model has no module of such a class; name classes as "
                "type(module).__name__ does"
            )

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The parameters, then the buffers; a tied tensor has an entry for each of its names."""
        return {**self.parameters, **self.buffers}

    @cached_property
    def state(self) -> Mapping[str, Tensor]:
        """The contents of the model's checkpoints, by name; a hook of the model may add entries."""
        return self.model.state_dict(keep_vars=True)

    @cached_property
    def aliases(self) -> list[tuple[str, ...]]:
        """The names of each distinct tensor, in the model's order; a tied tensor has several."""
        names: dict[int, list[str]] = {}
        for name, tensor in self.tensors.items():
            names.setdefault(id(tensor), []).append(name)
        return list(map(tuple, names.values()))

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each tensor after conversion, by name."""
        if self.dtype is None and not self.special_dtypes:
            return {name: tensor.dtype for name, tensor in self.tensors.items()}
        found: dict[str, torch.dtype] = {}
        for name, tensor in self.tensors.items():
            converts = tensor.is_floating_point() or tensor.is_complex()
            found[name] = self.special_dtypes.get(name, (self.dtype if converts else None) or tensor.dtype)
        return found

    @cached_property
    def quantized(self) -> frozenset[str]:
        """The names of the tensors that are made of several tensors."""
        return frozenset(name for name, tensor in self.tensors.items() if is_quantized(tensor))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The bytes of each tensor after conversion and packing, by name."""
        return {
            name: size_in_bytes(tensor) if name in self.quantized else tensor.numel() * dtype.itemsize
            for (name, tensor), dtype in zip(self.tensors.items(), self.dtypes.values(), strict=True)
        } | dict(self.special_sizes)

    @property
    def converts(self) -> bool:
        """True if any tensor changes its dtype."""
        return (self.dtype is not None or bool(self.special_dtypes)) and any(
            self.dtypes[name] != tensor.dtype for name, tensor in self.tensors.items()
        )

    @cached_property
    def running_statistics(self) -> frozenset[str]:
        """The buffers that torch's norms write to in a forward without raising their version counters."""
        norms = {name for name, module in self.modules.items() if isinstance(module, NORMS)}
        return frozenset(name for name in self.buffers if name.rpartition(".")[0] in norms)

    @cached_property
    def undivided(self) -> frozenset[str]:
        """The names of the modules whose weights are fetched all at once."""
        kinds = {
            kind: issubclass(kind, REACH_INSIDE)
            or any(base.__name__ in self.at_once for base in kind.__mro__)
            for kind in set(map(type, self.modules.values()))
        }
        return frozenset(name for name, module in self.modules.items() if kinds[type(module)])

    @cached_property
    def unit_names(self) -> Mapping[str, str]:
        """The name of each tensor's unit. A unit is fetched when its module is called, and released after the call.

        The unit is the outermost enclosing module fetched all at once, else the innermost enclosing called module.
        """
        only_hold = {name for name, module in self.modules.items() if isinstance(module, _ONLY_HOLD)}
        if not (self.undivided or only_hold):
            return {name: name.rpartition(".")[0] for name in self.tensors}
        units: dict[str, str] = {}
        for name in self.tensors:
            around = list(enclosing_modules(name))
            called = [outer for outer in around if outer not in only_hold]
            innermost = called[-1] if called else ""
            units[name] = next((outer for outer in around if outer in self.undivided), innermost)
        return units


class Unit(NamedTuple):
    """A module with the tensors that its forward needs."""

    name: str
    module: nn.Module
    # The module's own tensors, under the model's names; also those of its submodules if it stays whole.
    tensors: Mapping[str, Tensor]


def units_of(layout: ModelLayout, chosen: Container[str]) -> list[Unit]:
    """Return the units of the chosen tensors, in the model's order. Pure."""
    modules = layout.modules
    held: dict[str, dict[str, Tensor]] = {}
    for name, tensor in layout.tensors.items():
        if name in chosen:
            held.setdefault(layout.unit_names[name], {})[name] = tensor
    units = {
        # A shared module is one unit, as it may be called under any of its names.
        id(modules[name]): Unit(name, modules[name], held[name])
        for name in reversed(modules)
        if name in held
    }
    return list(reversed(units.values()))


def check_devices(units: Iterable[Unit], devices: Mapping[str, torch.device]) -> None:
    """Check that a single device computes each unit."""
    for unit in units:
        found = {devices[name] for name in unit.tensors}
        if len(found) > 1:
            raise DeviceMapError(
                f"device_map: {', '.join(sorted(map(str, found)))} compute parts of {unit.name or 'the model'!r}, "
                "whose weights are fetched all at once: place this module on one device, or leave its class out of "
                "preload_module_classes"
            )


def compute_module_sizes(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    special_dtypes: Mapping[str, torch.dtype] | None = None,
    special_sizes: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Return the bytes of the parameters and buffers of a model, of each of its modules, and of each tensor.

    A tied tensor counts once in every module that contains several of its names; each name of the tensor has the full
    size. Works on the meta device.

    The sizes are computed as if `Module.to(dtype)` had converted floating-point and complex tensors to `dtype`.
    `special_dtypes` and then `special_sizes`, as `quantized_sizes` returns them, take precedence for single tensors.

    Returns:
        The bytes of each name; `""` is the model itself.

    Raises:
        ValueError: `special_dtypes` or `special_sizes` names a tensor that the model does not have.

    Example:
        >>> compute_module_sizes(torch.nn.Linear(4, 2, device="meta"))
        {'': 40, 'weight': 32, 'bias': 8}
    """
    layout = ModelLayout.of(model, dtype=dtype, special_dtypes=special_dtypes, special_sizes=special_sizes)
    sizes = dict.fromkeys(layout.modules, 0) | layout.sizes
    counted: set[tuple[str, object]] = set()
    for name, tensor in layout.tensors.items():
        key = identity(tensor)
        for module in enclosing_modules(name):
            if (module, key) not in counted:
                counted.add((module, key))
                sizes[module] += layout.sizes[name]
    return sizes


def enclosing_modules(name: str) -> Iterator[str]:
    """Yield the names of the modules around a tensor or module, from the model itself, `""`, inwards."""
    yield ""
    for position, character in enumerate(name):
        if character == ".":
            yield name[:position]


def nearest_entry(name: str, entries: Container[str]) -> str | None:
    """Return the longest entry that is a tensor's name or a module around the tensor; None without such an entry."""
    if name in entries:
        return name
    return next((outer for outer in reversed(list(enclosing_modules(name))) if outer in entries), None)


def identity(tensor: Tensor) -> object:
    """Return a key that is equal for tensors over the same elements; without memory, the object's identity."""
    has_memory = not tensor.is_meta and tensor.numel() > 0
    if has_memory and is_quantized(tensor):
        return tuple(map(identity, parts_of(tensor)))
    return memory_key(tensor)


def listed(names: str | Collection[str]) -> Collection[str]:
    """Return names as a collection; a single string becomes a tuple of one."""
    return (names,) if isinstance(names, str) else names
