"""The layout of a model: its modules and tensors by name, found in one walk and handed on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from drivetrain_dispatch.compat import BUFFERS, PARAMETERS
from drivetrain_dispatch.model.quantized_tensor import is_quantized, size_in_bytes

NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelLayout:
    """The modules and tensors of a model, and the dtypes and sizes that the tensors will have.

    A layout describes the model as it was when `of` walked it. The properties are computed on first use and kept.
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

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        special_dtypes: Mapping[str, torch.dtype] | None = None,
        special_sizes: Mapping[str, int] | None = None,
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
        )

    def __post_init__(self) -> None:
        for argument in ("special_dtypes", "special_sizes"):
            special: Mapping[str, object] = getattr(self, argument)
            if unknown := sorted(name for name in special if name not in self.tensors):
                raise ValueError(
                    f"{argument}={unknown}: the model has no such parameter or buffer; see named_parameters()"
                )

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The parameters, then the buffers, under every name that they have."""
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
