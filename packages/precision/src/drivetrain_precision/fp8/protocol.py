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
    """The formats that a recipe computes in, such as "e4m3", "e5m2" or "bf16"; those of a product's two operands.

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
    """Return the formats of a recipe's products; those of a gradient that is not given are those before it."""
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
        wants_compile: Whether it is faster than bf16 under torch.compile alone, which fuses its casts.
        counts_emulation: Whether its emulation on a CPU runs products that `counting` tells from plain ones.
        backends: The names of the backends that it may train under; None for all of them.
        untried_backends: The names of untested backends; a run under one gets a warning.
    """

    capability: tuple[int, int]
    hardware: str
    wants_compile: bool = False
    counts_emulation: bool = False
    backends: tuple[str, ...] | None = None
    untried_backends: tuple[str, ...] = ()


@runtime_checkable
class SupportsFp8Gather(Protocol):
    """A converted layer whose weight FSDP2 gathers in 8 bits. The backend that shards calls it on all ranks.

    Attributes:
        weight: The weight, of shape (out_features, in_features).
    """

    weight: nn.Parameter

    def weight_for_all_gather(self) -> Tensor:
        """Return the weight in the form that `fully_shard` gathers in 8 bits: the same values and dtype."""
        ...

    def compute_scales(self, layers: nn.Module) -> None:
        """Compute the scales of all such layers in a module by one all-reduce, for the gathers that follow.

        Layers whose weights are gathered now are left out. Called on all ranks.
        """
        ...

    def exchange_scale(self, shard: nn.Parameter, scale: Tensor | None) -> Tensor | None:
        """Let a weight's gathers use a scale, or each compute its own; return the scale that they used.

        Args:
            shard: The layer's weight as it is divided, which the layer does not hold while it is gathered.
            scale: The scale; None if each gather computes one, by an all-reduce of its own.
        """
        ...


def gathers_in_fp8(module: nn.Module) -> TypeGuard[SupportsFp8Gather]:
    """Return whether a module is such a layer, and no wrapper that hands on the attributes of one inside."""
    return hasattr(type(module), SupportsFp8Gather.weight_for_all_gather.__name__)


class Fp8Recipe(Protocol):
    """A recipe for training in 8 bits or fewer; a frozen dataclass, registered under `drivetrain.fp8_recipes`.

    A run calls, on every rank: `support` when it is composed; for each model `refusal` of each linear layer, then
    `convert` of those that are accepted; in each step `computing` around the forward; `counting` around the first
    step alone. `state` belongs to checkpoints, and `restore` ends what `convert` began. A recipe that takes norms
    too is a `SupportsNormConversion`.
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
        """The formats that it computes in."""
        ...

    @property
    def layers(self) -> LayerFilter:
        """The layers to convert, among those that it accepts."""
        ...

    def support(self, device: torch.device) -> Support:
        """Return how far a device and the installed library can run it, and why not."""
        ...

    def refusal(self, module: nn.Module) -> str | None:
        """Return why a module cannot be converted, or None if it can."""
        ...

    def convert(self, module: nn.Module) -> nn.Module:
        """Return the module that computes in the recipe: the same one if it can be changed in place."""
        ...

    def is_converted(self, module: nn.Module) -> bool:
        """Return whether a recipe of this kind returned this module by `convert`; False for a user's own layer."""
        ...

    def restore(self, module: nn.Module) -> nn.Module:
        """Return the plain module of a converted one, with equal weights."""
        ...

    def computing(self) -> AbstractContextManager[object]:
        """Return the context of a forward."""
        ...

    def counting(self) -> AbstractContextManager[ProductCounts]:
        """Return a context that counts the matrix products in it, by whether they ran in the recipe's formats."""
        ...

    def state(self, module: nn.Module) -> Mapping[str, Tensor]:
        """Return what a converted module keeps from step to step beside its weights, such as an amax history.

        These are the tensors that the module works with: a checkpoint is loaded by copying into them.
        """
        ...
