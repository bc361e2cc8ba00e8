"""The recipes of torchao, PyTorch's own library: float8 by tensor and by row, MXFP8 and NVFP4."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from drivetrain_precision.errors import PrecisionError
from drivetrain_precision.fp8.class_exchange import exchange_of, undo_exchange
from drivetrain_precision.fp8.hardware_check import check_hardware, check_library
from drivetrain_precision.fp8.layer_filter import LayerFilter
from drivetrain_precision.fp8.product_counts import ProductCounts, counting_products
from drivetrain_precision.fp8.protocol import Products, Requirements
from drivetrain_precision.support import Support

Scaling = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8", "mxfp8_with_gw_hp", "nvfp4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """The facts about a way to scale: needs, formats, the multiple that a layer's sizes must be."""

    version: str
    capability: tuple[int, int]
    hardware: str
    products: Products
    multiple: int
    emulates: bool = True


_ADA, _HOPPER, _BLACKWELL = (8, 9), (9, 0), (10, 0)
_E4M3, _E5M2, _MX = "e4m3 x e4m3", "e5m2 x e4m3", "mxfp8 x mxfp8"
_FACTS: Mapping[str, _Facts] = {
    "tensorwise": _Facts(
        version="0.18",
        capability=_ADA,
        hardware="an Ada, Hopper or newer GPU",
        products=Products(
            forward=_E4M3, input_gradient=_E5M2, weight_gradient=_E5M2, all_gather="bf16, e4m3 on request"
        ),
        multiple=16,
    ),
    "rowwise": _Facts(
        version="0.18",
        capability=_HOPPER,
        hardware="a Hopper or newer GPU",
        products=Products(forward=_E4M3, input_gradient=_E4M3, weight_gradient=_E4M3, all_gather="bf16"),
        multiple=16,
    ),
    "rowwise_with_gw_hp": _Facts(
        version="0.18",
        capability=_HOPPER,
        hardware="a Hopper or newer GPU",
        products=Products(
            forward=_E4M3, input_gradient=_E4M3, weight_gradient="bf16 x bf16", all_gather="bf16"
        ),
        multiple=16,
    ),
    "mxfp8": _Facts(
        version="0.18",
        capability=_BLACKWELL,
        hardware="a Blackwell or newer GPU",
        products=Products(forward=_MX, input_gradient=_MX, weight_gradient=_MX, all_gather="bf16"),
        multiple=32,
    ),
    "mxfp8_with_gw_hp": _Facts(
        version="0.18",
        capability=_BLACKWELL,
        hardware="a Blackwell or newer GPU",
        products=Products(forward=_MX, input_gradient=_MX, weight_gradient="bf16 x bf16", all_gather="bf16"),
        multiple=32,
    ),
    "nvfp4": _Facts(
        version="0.18",
        capability=_BLACKWELL,
        hardware="a Blackwell or newer GPU",
        products=Products(
            forward="nvfp4 x nvfp4",
            input_gradient="nvfp4 x nvfp4",
            weight_gradient="nvfp4 x nvfp4",
            all_gather="bf16",
        ),
        multiple=128,
        emulates=False,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchaoRecipe:
    """Train linear layers by torchao, which computes scales anew for each tensor and keeps none between steps.

    Attributes:
        scaling: The values that share a scale. "tensorwise": all of a tensor, the fastest. "rowwise": a row, more
            accurate. "rowwise_with_gw_hp": a row, with the gradient of the weight in the weights' own precision.
            "mxfp8": 32 values, "mxfp8_with_gw_hp": with the gradient of the weight in the weights' own precision.
            "nvfp4": 16 values of 4 bits.
        round_scales: Whether scales of float8 are rounded down to powers of 2, which loses less in a product.
        all_gather: Whether FSDP2 gathers weights in float8, half the bytes of bf16; "tensorwise" alone.
        layers: The layers to convert.
    """

    scaling: Scaling = "tensorwise"
    round_scales: bool = False
    all_gather: bool = False
    layers: LayerFilter = field(default_factory=LayerFilter)

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            PrecisionError: A value is unknown, or the scaling has no such option.
        """
        if self.scaling not in _FACTS:
            raise PrecisionError(f"scaling={self.scaling!r}: must be one of {', '.join(_FACTS)}")
        if self.round_scales and self.scaling != "tensorwise":
            raise PrecisionError(
                f"round_scales=True with scaling={self.scaling!r}: its scales are powers of 2 already"
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
        facts = _FACTS[self.scaling]
        return Requirements(
            library="torchao",
            version=facts.version,
            extra="torchao",
            capability=facts.capability,
            hardware=facts.hardware,
            wants_compile=True,
            # The emulation of MXFP8 multiplies what it has rounded as plain matrices.
            counts_emulation=facts.emulates and not self.scaling.startswith("mxfp8"),
        )

    @property
    def products(self) -> Products:
        """The formats that it computes in."""
        return _FACTS[self.scaling].products

    def support(self, device: torch.device) -> Support:
        """Return how far a device and the installed torchao can run it."""
        if (missing := check_library(self.requirements)) is not None:
            return Support(level="none", reason=missing)
        return check_hardware(self.requirements, device, emulates=_FACTS[self.scaling].emulates)

    def refusal(self, module: nn.Module) -> str | None:
        """Return why a linear layer cannot be converted, or None if it can."""
        multiple = _FACTS[self.scaling].multiple
        for name in ("in_features", "out_features"):
            size = getattr(module, name)
            if size % multiple:
                return f"has {name}={size}, which is not divisible by {multiple}"
        return None

    def convert(self, module: nn.Module) -> nn.Module:
        """Let a linear layer compute in the recipe, in place."""
        from drivetrain_precision.fp8 import torchao_layers

        linear: Any = module
        if self.scaling == "nvfp4":
            torchao_layers.to_nvfp4(linear)
        elif self.scaling.startswith("mxfp8"):
            torchao_layers.to_mxfp8(linear, weight_gradient=self.scaling == "mxfp8")
        else:
            torchao_layers.to_float8(
                linear, scaling=self.scaling, round_scales=self.round_scales, all_gather=self.all_gather
            )
        return module

    def is_converted(self, module: nn.Module) -> bool:
        """Return whether a layer computes in float8, MXFP8 or NVFP4."""
        return exchange_of(module) is not None

    def restore(self, module: nn.Module) -> nn.Module:
        """Let a layer compute as before, in place."""
        undo_exchange(module)
        return module

    def computing(self) -> AbstractContextManager[object]:
        """Return a context that changes nothing: the layers know what to do."""
        return nullcontext()

    def counting(self) -> AbstractContextManager[ProductCounts]:
        """Return a context that counts the matrix products in it."""
        return counting_products()

    def after_step(self, model: nn.Module) -> None:
        """Compute the scales of weights that are gathered in float8; the others are computed at each product."""
        if self.all_gather:
            from drivetrain_precision.fp8.weight_scales import compute_weight_scales

            compute_weight_scales(model)

    def state(self, module: nn.Module) -> Mapping[str, Tensor]:
        """Return the seed of NVFP4's stochastic rounding; the others keep nothing."""
        record = exchange_of(module)
        own = dict(module.named_buffers(recurse=False))
        return {} if record is None else {name: own[name] for name in record.buffers if name.endswith("seed")}


def torchao_tensorwise() -> TorchaoRecipe:
    """Return the recipe of one scale for a tensor."""
    return TorchaoRecipe(scaling="tensorwise")


def torchao_rowwise() -> TorchaoRecipe:
    """Return the recipe of one scale for a row."""
    return TorchaoRecipe(scaling="rowwise")


def torchao_rowwise_with_gw_hp() -> TorchaoRecipe:
    """Return the recipe of one scale for a row, the gradient of the weight in high precision."""
    return TorchaoRecipe(scaling="rowwise_with_gw_hp")


def torchao_mxfp8() -> TorchaoRecipe:
    """Return the recipe of MXFP8."""
    return TorchaoRecipe(scaling="mxfp8")


def torchao_mxfp8_with_gw_hp() -> TorchaoRecipe:
    """Return the recipe of MXFP8, the gradient of the weight in high precision."""
    return TorchaoRecipe(scaling="mxfp8_with_gw_hp")


def torchao_nvfp4() -> TorchaoRecipe:
    """Return the recipe of NVFP4."""
    return TorchaoRecipe(scaling="nvfp4")
