"""Quantised weights: which layers keep theirs in fewer bits, how many bytes those take, and who packs them.

A checkpoint in full precision is read weight by weight, and each is packed as it comes.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from drivetrain_dispatch.model.sizes import dtype_after, enclosing_modules, listed
from drivetrain_dispatch.model.tensor_subclass import is_packed
from drivetrain_dispatch.model.units import REACH_INSIDE

_OUTPUT_HEADS = ("lm_head",)  # what few bits hurt most: skipped where nothing else is said


class Quantization(Protocol):
    """How the weights of `nn.Linear` are kept. Another kind is a class with these names.

    Attributes:
        skip_modules: Names of modules, or of parts of them, such as "lm_head", wherever they stand: what is in them
            stays as it is. None skips `lm_head` alone.
    """

    @property
    def skip_modules(self) -> Collection[str] | None:
        """What stays as it is."""
        ...

    def size_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """What a weight of this shape and dtype takes when it is packed."""
        ...

    def pack(self, weight: Tensor) -> nn.Parameter:
        """The packed weight, on the device of the weight."""
        ...

    def layer(self, linear: nn.Linear, weight: nn.Parameter) -> nn.Module | None:
        """What computes with a packed weight in place of a layer, with its bias; None where the layer itself does."""
        ...


@dataclass(frozen=True, slots=True)
class StoredFP8:
    """Keep fp8 weights with block scales as the checkpoint has them, as DeepSeek-V3 is published.

    They take half of what bf16 takes, wherever they are kept, and each operation dequantises what it computes with: a
    matrix at a time of stacked experts, where the model selects one after the other. They do not learn. Weights whose
    blocks the model would cut are dequantised while they are read.
    """


def quantized_sizes(
    model: nn.Module,
    quantization: Quantization,
    *,
    dtype: torch.dtype | None = None,
    special_dtypes: Mapping[str, torch.dtype] | None = None,
) -> dict[str, int]:
    """The bytes of each weight that a load will pack, as `special_sizes` of a map's inference takes them.

    Args:
        model: The model, best on the meta device.
        quantization: How weights are kept.
        dtype: What floating-point tensors are converted to before.
        special_dtypes: Dtypes of single tensors by name; these are not packed.

    Raises:
        ValueError: There is nothing to pack, a module is named that the model does not have, or a weight cannot be
            packed.
    """
    sizes: dict[tuple[tuple[int, ...], torch.dtype], int] = {}
    found: dict[str, int] = {}
    for name, linear in layers_to_pack(model, quantization, special_dtypes or {}).items():
        key = tuple(linear.weight.shape), dtype_after(linear.weight, dtype, None)
        if key not in sizes:
            sizes[key] = quantization.size_bytes(*key)
        found[name] = sizes[key]
    return found


def layers_to_pack(
    model: nn.Module, quantization: Quantization, special_dtypes: Collection[str] = ()
) -> dict[str, nn.Linear]:
    """The layers whose weights are packed, by every name of those weights. Pure; works on the meta device.

    Those are `nn.Linear` itself, not classes of it, outside of modules of torch that use the weights of such layers
    without calling them; with weights that no other module has, that get no dtype of their own.

    Args:
        model: The model.
        quantization: What is skipped.
        special_dtypes: Names of tensors that get a dtype of their own.

    Raises:
        ValueError: There is none, a module is to be skipped that the model does not have, or a layer has hooks, which
            would be lost with it.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    skipped = listed(_OUTPUT_HEADS if quantization.skip_modules is None else quantization.skip_modules)
    parts = {part for name in modules for part in (name, *name.split("."))}
    if quantization.skip_modules is not None and (unknown := sorted(set(skipped) - parts)):
        raise ValueError(f"skip_modules={unknown}: the model has no module called so; see named_modules()")
    owners: dict[int, set[int]] = {}
    for module in modules.values():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    left_out = {
        id(module)
        for name, module in modules.items()  # under any of its names
        if f"{name}.weight" in special_dtypes or any(part in skipped for part in (name, *name.split(".")))
    }
    found = {
        f"{name}.weight": module
        for name, module in modules.items()
        if name
        and type(module) is nn.Linear
        and id(module) not in left_out
        and not any(isinstance(modules[outer], REACH_INSIDE) for outer in enclosing_modules(name))
        and len(owners[id(module.weight)]) == 1
        and module.weight.is_floating_point()
        and not is_packed(module.weight)
    }
    if not found:
        raise ValueError(
            f"{type(quantization).__name__}: the model has no weight to pack: they are those of nn.Linear inside of "
            "it (not of classes of it), but for tied ones and what skip_modules and special dtypes name"
        )
    for name, linear in found.items():
        if any(value for key, value in vars(linear).items() if key.endswith("_hooks") or key == "forward"):
            raise ValueError(
                f"{name!r}: its layer has hooks or a forward of its own, which could be lost: register them after it "
                "is loaded, or name it in skip_modules"
            )
    return found
