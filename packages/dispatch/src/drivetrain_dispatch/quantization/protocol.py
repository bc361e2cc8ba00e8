"""The protocol of a quantisation: which layers it packs, how many bytes packed weights take, and how to pack one.

A load reads a checkpoint in full precision weight by weight, and packs each weight as it is read.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from drivetrain_dispatch.model.model_layout import REACH_INSIDE, ModelLayout, enclosing_modules, listed

_OUTPUT_HEADS = ("lm_head",)  # skipped by default, since the output head suffers most from few bits


class Quantization(Protocol):
    """A protocol for packing the weights of `nn.Linear`; any class with these members is a quantisation.

    Attributes:
        skip_modules: The modules that are not quantised, as full names or single components of names, such as
            "lm_head" at any depth; None for `lm_head` only.
    """

    @property
    def skip_modules(self) -> Collection[str] | None:
        """The names of modules that are not quantised."""
        ...

    def size_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return the bytes of a packed weight of this shape and original dtype."""
        ...

    def pack(self, weight: Tensor) -> nn.Parameter:
        """Return the packed weight, on the device of the weight."""
        ...

    def layer(self, linear: nn.Linear, weight: nn.Parameter) -> nn.Module | None:
        """Return a layer that replaces `linear`, with its bias and the packed weight; None to keep `linear`."""
        ...


@dataclass(frozen=True, slots=True)
class StoredFP8:
    """A setting that keeps fp8 weights with block scales as the checkpoint stores them, as in DeepSeek-V3.

    The weights take half the memory of bf16 on every device and on disk. Each operation dequantises the weights that
    it computes with; of stacked experts, only one matrix at a time if the model selects them one by one. The weights
    are frozen. Weights whose blocks do not fit the model's shapes are dequantised while they are read.
    """


def quantized_sizes(
    model: nn.Module,
    quantization: Quantization,
    *,
    dtype: torch.dtype | None = None,
    special_dtypes: Mapping[str, torch.dtype] | None = None,
) -> dict[str, int]:
    """Return the bytes of each weight that a load will pack, for `special_sizes` of `infer_auto_device_map`.

    Tensors are converted to `dtype` or `special_dtypes` before they are packed; a tensor with a special dtype is not
    packed. The model is ideally on the meta device.

    Raises:
        ValueError: No weight can be packed, the model lacks a named module or tensor, or packing a weight fails.
    """
    return packed_sizes(ModelLayout.of(model, dtype=dtype, special_dtypes=special_dtypes), quantization)


def packed_sizes(layout: ModelLayout, quantization: Quantization) -> dict[str, int]:
    """Return the bytes of each weight that a load will pack, by every name; see `quantized_sizes`."""
    sizes: dict[tuple[tuple[int, ...], torch.dtype], int] = {}
    found: dict[str, int] = {}
    for name, linear in layers_to_quantize(layout, quantization).items():
        key = tuple(linear.weight.shape), layout.dtypes[name]
        if key not in sizes:
            sizes[key] = quantization.size_bytes(*key)
        found[name] = sizes[key]
    return found


def layers_to_quantize(layout: ModelLayout, quantization: Quantization) -> dict[str, nn.Linear]:
    """Return the layers whose weights are packed, by every name of the weights. Pure; works on the meta device."""
    modules = layout.modules
    skipped = listed(_OUTPUT_HEADS if quantization.skip_modules is None else quantization.skip_modules)
    parts = {part for name in modules for part in (name, *name.split("."))}
    if quantization.skip_modules is not None and (unknown := sorted(set(skipped) - parts)):
        raise ValueError(f"skip_modules={unknown}: the model has no module called so; see named_modules()")
    tied = {
        name
        for names in layout.aliases
        if len({id(modules[name.rpartition(".")[0]]) for name in names}) > 1
        for name in names
    }
    left_out = {
        id(module)
        for name, module in modules.items()  # under any of its names
        if f"{name}.weight" in layout.special_dtypes
        or any(part in skipped for part in (name, *name.split(".")))
    }
    found = {
        f"{name}.weight": module
        for name, module in modules.items()
        if name
        and type(module) is nn.Linear
        and id(module) not in left_out
        and not any(isinstance(modules[outer], REACH_INSIDE) for outer in enclosing_modules(name))
        and f"{name}.weight" not in tied
        and module.weight.is_floating_point()
        and f"{name}.weight" not in layout.quantized
    }
    if not found:
        raise ValueError(
            f"{type(quantization).__name__}: the model has no weight to pack: only untied weights of nn.Linear "
            "submodules (not of its subclasses) are packed, except those that skip_modules or special_dtypes names"
        )
    for name, linear in found.items():
        if any(value for key, value in vars(linear).items() if key.endswith("_hooks") or key == "forward"):
            raise ValueError(
                f"{name!r}: its layer has hooks or a forward of its own, which could be lost: register them after "
                "the load, or name it in skip_modules"
            )
    return found
