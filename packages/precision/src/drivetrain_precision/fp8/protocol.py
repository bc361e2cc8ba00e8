"""The protocol of a recipe: a way to compute the matrix products of linear layers in 8 bits or fewer."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor, nn

from drivetrain_precision.conversion.layer_filter import LayerFilter
from drivetrain_precision.conversion.library_check import NeededLibrary
from drivetrain_precision.fp8.product_counts import ProductCounts
from drivetrain_precision.support import Support


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """The formats of the two operands of a recipe's products, such as "e4m3", "e5m2" or "bf16".

    Attributes:
        forward: The formats of input and weight, whose product is the output.
        input_gradient: The formats of the output's gradient and the weight.
        weight_gradient: The formats of the output's gradient and the input.
        all_gather: The format in which FSDP2 gathers weights.
        attention: The format of attention's products.
    """

    forward: str
    input_gradient: str
    weight_gradient: str
    all_gather: str
    attention: str = "bf16"


def products_of(
    forward: str, gradients: str = "", *, weight_gradient: str = "", all_gather: str = "bf16"
) -> Products:
    """Return the formats of a recipe's products. A gradient without a format gets the previous product's format."""
    gradients = gradients or forward
    return Products(
        forward=forward,
        input_gradient=gradients,
        weight_gradient=weight_gradient or gradients,
        all_gather=all_gather,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements(NeededLibrary):
    """The library, the hardware and the compiler that a recipe needs, for checks and for the table in the docs.

    Attributes:
        capability: The first CUDA compute capability whose tensor cores compute the formats.
        hardware: The devices in words.
        wants_compile: Whether the recipe is faster than bf16 only under torch.compile, which fuses its casts.
        counts_emulation: Whether `counting` can tell products emulated on a CPU from plain products.
        backends: The names of the backends that allow the recipe; None for all.
        untried_backends: The names of untested backends; a run under such a backend gets a warning.
    """

    capability: tuple[int, int]
    hardware: str
    wants_compile: bool = False
    counts_emulation: bool = False
    backends: tuple[str, ...] | None = None
    untried_backends: tuple[str, ...] = ()


@runtime_checkable
class SupportsFp8Gather(Protocol):
    """A converted layer whose weight FSDP2 gathers in 8 bits. The sharding backend calls it on all ranks.

    Attributes:
        weight: The weight, of shape (out_features, in_features).
    """

    weight: nn.Parameter

    def weight_for_all_gather(self) -> Tensor:
        """Return the weight in the form that `fully_shard` gathers in 8 bits: the same values and dtype."""
        ...

    def compute_scales(self, layers: nn.Module) -> None:
        """Compute the scales of all such layers in a module by one all-reduce, for the next gathers.

        Layers with a currently gathered weight are left out. Called on all ranks.
        """

    def exchange_scale(self, shard: nn.Parameter, scale: Tensor | None) -> Tensor | None:
        """Set the scale of a weight's gathers, and return the old scale.

        Args:
            shard: The rank's part of the layer's weight; while gathered, the layer holds the full weight instead.
            scale: The scale; None if each gather computes a scale by an all-reduce.
        """
        ...


def gathers_in_fp8(module: nn.Module) -> TypeGuard[SupportsFp8Gather]:
    """Return whether a module is such a layer itself, not a wrapper that forwards an inner layer's attributes."""
    return hasattr(type(module), SupportsFp8Gather.weight_for_all_gather.__name__)


class Fp8Recipe(Protocol):
    """A recipe for training in 8 bits or fewer; a frozen dataclass, registered under `drivetrain.fp8_recipes`.

    A run makes these calls on every rank. When it is composed: `support`. For each model: `refusal` for each linear
    layer, then `convert` for accepted layers. In each step: `computing` around the forward. In the first step:
    `counting`. Checkpoints call `state`; `restore` undoes `convert`. To convert norms, see `SupportsNormConversion`.
    """

    @property
    def name(self) -> str:
        """The name that settings use, such as "torchao_rowwise"."""
        ...

    @property
    def requirements(self) -> Requirements:
        """The library and the hardware that the recipe needs."""
        ...

    @property
    def products(self) -> Products:
        """The formats that the recipe computes in."""
        ...

    @property
    def layers(self) -> LayerFilter:
        """The layers to convert, among the layers that the recipe accepts."""
        ...

    def support(self, device: torch.device) -> Support:
        """Return whether a device and the installed library can run the recipe, and why."""
        ...

    def refusal(self, module: nn.Module) -> str | None:
        """Return why a module cannot be converted, or None if it can."""
        ...

    def convert(self, module: nn.Module) -> nn.Module:
        """Return the module that computes in the recipe: the same module if it can be changed in place."""
        ...

    def is_converted(self, module: nn.Module) -> bool:
        """Return whether `convert` of a recipe of this kind returned the module; False for a user's own layer."""
        ...

    def restore(self, module: nn.Module) -> nn.Module:
        """Return the plain module for a converted module, with equal weights."""
        ...

    def computing(self) -> AbstractContextManager[object]:
        """Return the context of a forward."""
        ...

    def counting(self) -> AbstractContextManager[ProductCounts]:
        """Return a context that counts its matrix products: those in the recipe's formats and all others."""
        ...

    def state(self, module: nn.Module) -> Mapping[str, Tensor]:
        """Return the tensors besides weights that a converted module keeps between steps, such as an amax history.

        The tensors must be the module's own, not copies: loading a checkpoint copies values into them.
        """
        ...
