"""The recipes of torchao, PyTorch's own library: float8 by tensor and by row, MXFP8 and NVFP4."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor, nn

from drivetrain_precision.conversion.class_exchange import (
    added_names,
    exchange_class,
    exchange_of,
    name_clash,
    undo_exchange,
)
from drivetrain_precision.conversion.layer_filter import LayerFilter, check_layers
from drivetrain_precision.conversion.library_check import check_library
from drivetrain_precision.errors import PrecisionError
from drivetrain_precision.fp8.hardware_check import ADA, BLACKWELL, HOPPER, GPUGeneration, check_hardware
from drivetrain_precision.fp8.product_counts import counting_products
from drivetrain_precision.fp8.protocol import Products, Requirements, products_of
from drivetrain_precision.support import Support

Scaling = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8", "mxfp8_with_gw_hp", "nvfp4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """A way to scale: the hardware, the formats, and the number that must divide a layer's sizes."""

    on: GPUGeneration
    products: Products
    multiple: int
    emulates: bool = True


_E4M3, _MX, _BF16 = "e4m3 x e4m3", "mxfp8 x mxfp8", "bf16 x bf16"
_WAYS: Mapping[str, _Way] = {
    "tensorwise": _Way(
        on=ADA, multiple=16, products=products_of(_E4M3, "e5m2 x e4m3", all_gather="bf16, e4m3 on request")
    ),
    "rowwise": _Way(on=HOPPER, multiple=16, products=products_of(_E4M3)),
    "rowwise_with_gw_hp": _Way(on=HOPPER, multiple=16, products=products_of(_E4M3, weight_gradient=_BF16)),
    "mxfp8": _Way(on=BLACKWELL, multiple=32, products=products_of(_MX)),
    "mxfp8_with_gw_hp": _Way(on=BLACKWELL, multiple=32, products=products_of(_MX, weight_gradient=_BF16)),
    "nvfp4": _Way(on=BLACKWELL, multiple=128, products=products_of("nvfp4 x nvfp4"), emulates=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchaoRecipe:
    """A recipe that trains linear layers by torchao, which keeps no scales between steps.

    Attributes:
        scaling: The values that share a scale. "tensorwise": a whole tensor, the fastest. "rowwise": a row, more
            accurate. "rowwise_with_gw_hp": a row, with the weight's gradient in the weight's precision. "mxfp8": 32
            values. "mxfp8_with_gw_hp": 32 values, with the weight's gradient in the weight's precision. "nvfp4": 16
            values of 4 bits.
        round_scales: Whether float8's scales are rounded down to powers of 2, which loses less in a product.
        all_gather: Whether FSDP2 gathers weights in float8, half the bytes of bf16; only with "tensorwise".
        layers: The layers to convert.

    Example:
        >>> TorchaoRecipe(scaling="rowwise").name
        'torchao_rowwise'
    """

    scaling: Scaling = "tensorwise"
    round_scales: bool = False
    all_gather: bool = False
    layers: LayerFilter = field(default_factory=LayerFilter)

    def __post_init__(self) -> None:
        """Raise PrecisionError for an unknown value, a wrong type, or an option that the scaling lacks."""
        if self.scaling not in _WAYS:
            raise PrecisionError(f"scaling={self.scaling!r}: must be one of {', '.join(_WAYS)}")
        for name in ("round_scales", "all_gather"):
            if type(getattr(self, name)) is not bool:
                raise PrecisionError(f"{name}={getattr(self, name)!r}: must be True or False")
        check_layers(self.layers)
        if self.round_scales and self.scaling != "tensorwise":
            raise PrecisionError(
                f"round_scales=True with scaling={self.scaling!r}: its scales are powers of 2 already"
            )
        if self.round_scales and self.all_gather:
            raise PrecisionError(
                "round_scales=True with all_gather=True: torchao does not round the scales of weights that FSDP2 "
                "gathers; leave one of them out"
            )
        if self.all_gather and self.scaling != "tensorwise":
            raise PrecisionError(
                f"all_gather=True with scaling={self.scaling!r}: torchao gathers weights with one scale each: "
                "scaling='tensorwise'"
            )

    @property
    def name(self) -> str:
        """The name that settings use."""
        return f"torchao_{self.scaling}"

    @property
    def requirements(self) -> Requirements:
        """The library and the hardware that the recipe needs."""
        way = _WAYS[self.scaling]
        return Requirements(
            library="torchao",
            version="0.18",
            extra="torchao",
            capability=way.on.capability,
            hardware=way.on.name,
            wants_compile=True,
            # The emulation of MXFP8 multiplies what it has rounded as plain matrices.
            counts_emulation=way.emulates and not self.scaling.startswith("mxfp8"),
        )

    @property
    def products(self) -> Products:
        """The formats that the recipe computes in."""
        return _WAYS[self.scaling].products

    def support(self, device: torch.device) -> Support:
        """Return whether a device and the installed torchao can run the recipe, and why."""
        found = check_hardware(self.requirements, device, emulates=_WAYS[self.scaling].emulates)
        if found.level != "none" and (missing := check_library(self.requirements)) is not None:
            return Support(level="none", reason=missing)
        return found

    def refusal(self, module: nn.Module) -> str | None:
        """Return why a linear layer cannot be converted, or None if it can."""
        multiple = _WAYS[self.scaling].multiple
        for name in ("in_features", "out_features"):
            size = getattr(module, name)
            if size % multiple:
                return f"has {name}={size}, which is not divisible by {multiple}"
        linear = cast("nn.Linear", module)
        # torchao rounds no fp64 to MXFP8, and few devices sum products of fp64 operands.
        if linear.weight.dtype == torch.float64:
            return "holds its weight in torch.float64, in which torchao's products do not run on every device"
        added = added_names(linear)
        return name_clash(added, self._convert_layer(linear)) if added else None

    def convert(self, module: nn.Module) -> nn.Module:
        """Make a linear layer compute in the recipe, in place."""
        return exchange_class(
            module, self._convert_layer(cast("nn.Linear", module)), owner="fp8", recipe=self.name
        )

    def is_converted(self, module: nn.Module) -> bool:
        """Return whether a recipe of torchao has converted a layer."""
        record = exchange_of(module)
        return record is not None and record.owner == "fp8"

    def computing(self) -> AbstractContextManager[object]:
        """Return a context that does nothing, because converted layers need none."""
        return nullcontext()

    counting = staticmethod(counting_products)
    restore = staticmethod(undo_exchange)

    def state(self, module: nn.Module) -> Mapping[str, Tensor]:
        """Return the seed of NVFP4's stochastic rounding; empty for other scalings."""
        record = exchange_of(module)
        own = dict(module.named_buffers(recurse=False))
        return {} if record is None else {name: own[name] for name in record.buffers if name.endswith("seed")}

    def _convert_layer(self, linear: nn.Linear) -> nn.Module:
        """Return the torchao layer whose class a linear layer gets."""
        from drivetrain_precision.fp8 import torchao_layers

        if self.scaling == "nvfp4":
            return torchao_layers.nvfp4_like(linear.weight.device)
        if self.scaling.startswith("mxfp8"):
            return torchao_layers.mxfp8_like(weight_gradient=self.scaling == "mxfp8")
        return torchao_layers.float8_like(
            scaling=self.scaling, round_scales=self.round_scales, all_gather=self.all_gather
        )


# The entry points of the group drivetrain.fp8_recipes.
torchao_tensorwise = partial(TorchaoRecipe, scaling="tensorwise")
torchao_rowwise = partial(TorchaoRecipe, scaling="rowwise")
torchao_rowwise_with_gw_hp = partial(TorchaoRecipe, scaling="rowwise_with_gw_hp")
torchao_mxfp8 = partial(TorchaoRecipe, scaling="mxfp8")
torchao_mxfp8_with_gw_hp = partial(TorchaoRecipe, scaling="mxfp8_with_gw_hp")
torchao_nvfp4 = partial(TorchaoRecipe, scaling="nvfp4")
