"""The recipes of Transformer Engine, NVIDIA's library: delayed, current and block scaling, MXFP8 and NVFP4."""

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from drivetrain_precision.conversion.converts_norms import Norms
from drivetrain_precision.conversion.layer_filter import LayerFilter, check_layers
from drivetrain_precision.conversion.library_check import check_library
from drivetrain_precision.errors import PrecisionError
from drivetrain_precision.fp8.hardware_check import check_hardware
from drivetrain_precision.fp8.product_counts import ProductCounts, counting_products
from drivetrain_precision.fp8.protocol import Products, Requirements
from drivetrain_precision.fp8.te_layers import (
    from_te,
    fuse,
    fusion_refusal,
    is_te_layer,
    is_te_linear,
    te_refusal,
    to_te,
)
from drivetrain_precision.fp8.te_library import transformer_engine
from drivetrain_precision.fp8.te_recipes import (
    TE_RECIPES,
    begin_te_scaling,
    te_recipe,
    te_scaling_state,
    te_unsupported,
)
from drivetrain_precision.support import Support


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerEngineRecipe:
    """A recipe that trains linear layers by Transformer Engine.

    Attributes:
        scaling: The values that a scale is computed from. "delayed": the largest values of the last steps, which a
            checkpoint keeps. "current": the tensor's own values. "block": blocks of 128 values. "mxfp8": 32 values.
            "nvfp4": 16 values of 4 bits.
        options: Further fields of the library's recipe class, such as {"amax_history_len": 16}.
        norms: The treatment of `nn.LayerNorm` and `nn.RMSNorm`. "keep": none; they compute as in bf16 training
            (under autocast, torch's norms return fp32 and the library's bf16). "convert": they become the library's.
            "fuse": in an `nn.Sequential`, a converted linear layer also computes the norm before it; other norms are
            converted.
        layers: The layers to convert. If norms are converted, patterns and `accept` apply to norms too.
    """

    scaling: Literal["delayed", "current", "block", "mxfp8", "nvfp4"] = "current"
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    norms: Norms = "keep"
    layers: LayerFilter = field(default_factory=LayerFilter)

    def __post_init__(self) -> None:
        """Raise PrecisionError for an unknown scaling or a wrong type; the library itself checks the options."""
        if self.scaling not in TE_RECIPES:
            raise PrecisionError(f"scaling={self.scaling!r}: must be one of {', '.join(TE_RECIPES)}")
        if not isinstance(cast("object", self.options), Mapping):
            raise PrecisionError(
                f"options={self.options!r}: must be a mapping, such as {{'amax_history_len': 16}}"
            )
        if self.norms not in get_args(Norms):
            raise PrecisionError(f"norms={self.norms!r}: must be one of {', '.join(get_args(Norms))}")
        check_layers(self.layers)

    @property
    def name(self) -> str:
        """The name that settings use."""
        return f"te_{self.scaling}"

    @property
    def requirements(self) -> Requirements:
        """The library and the hardware that the recipe needs."""
        on = TE_RECIPES[self.scaling].on
        return Requirements(
            library="transformer-engine",
            version="2.20",
            extra="te",
            capability=on.capability,
            hardware=on.name,
            backends=("single", "ddp"),  # under others the layers have never been run
            untried_backends=("ddp",),
        )

    @property
    def products(self) -> Products:
        """The formats that the recipe computes in."""
        return TE_RECIPES[self.scaling].products

    def support(self, device: torch.device) -> Support:
        """Return whether a device and the installed library can run the recipe, and why."""
        found = check_hardware(self.requirements, device, emulates=False)
        if found.level == "none":  # before the library, which is long to build
            return found
        if (missing := check_library(self.requirements)) is not None:
            return Support(level="none", reason=missing)
        if (why := te_unsupported(self.scaling)) is not None:
            return Support(level="none", reason=why)
        return found

    def refusal(self, module: nn.Module) -> str | None:
        """Return why a linear layer or a norm cannot be converted, or None if it can."""
        multiple = TE_RECIPES[self.scaling].multiple
        for name in ("in_features", "out_features") if isinstance(module, nn.Linear) else ():
            size = getattr(module, name)
            if size % multiple:
                return f"has {name}={size}, which is not divisible by {multiple}"
        return te_refusal(module)

    convert = staticmethod(to_te)
    fusion_refusal = staticmethod(fusion_refusal)
    fuse = staticmethod(fuse)
    is_converted = staticmethod(is_te_layer)
    restore = staticmethod(from_te)

    def computing(self) -> AbstractContextManager[object]:
        """Return the context in which the library's layers compute in fp8."""
        return transformer_engine().autocast(enabled=True, recipe=self._recipe())

    @contextmanager
    def counting(self) -> Generator[ProductCounts]:
        """Count the matrix products. Hooks count the library's products, which torch does not see.

        A backward's products are counted with its forward's, even if the backward runs after the block.
        """
        with counting_products() as counts:
            hook = register_module_forward_hook(partial(_count_layer, counts))
            try:
                yield counts
            finally:
                hook.remove()

    def state(self, module: nn.Module) -> Mapping[str, Tensor]:
        """Return the scales and amax histories of delayed scaling; empty for other scalings."""
        if self.scaling == "delayed" and is_te_linear(module) and not te_scaling_state(module):
            begin_te_scaling(module, self._recipe())
        return te_scaling_state(module)

    def _recipe(self) -> Any:
        return te_recipe(self.scaling, **self.options)


def _count_layer(
    counts: ProductCounts, module: nn.Module, inputs: tuple[object, ...], output: object
) -> None:
    """Count a library layer's product and, once a gradient arrives at the layer's output, the gradients' products."""
    if not hasattr(module, "fp8_meta"):
        return
    # As it is now: the next forward may be in another precision.
    is_scaled = bool(getattr(module, "fp8", False))

    def add(products: int, _: object = None) -> None:
        if is_scaled:
            counts.scaled += products
        else:
            counts.others += products

    add(1)
    first = output[0] if isinstance(output, tuple) else output
    if not isinstance(first, Tensor) or not first.requires_grad:
        return
    weight = getattr(module, "weight", None)
    trains = isinstance(weight, Tensor) and weight.requires_grad
    flows = any(isinstance(each, Tensor) and each.requires_grad for each in inputs)
    flows = flows or hasattr(module, "layer_norm_weight")  # the gradient of a norm comes through the product
    first.register_hook(partial(add, trains + flows))


# The entry points of the group drivetrain.fp8_recipes.
te_delayed = partial(TransformerEngineRecipe, scaling="delayed")
te_current = partial(TransformerEngineRecipe, scaling="current")
te_block = partial(TransformerEngineRecipe, scaling="block")
te_mxfp8 = partial(TransformerEngineRecipe, scaling="mxfp8")
te_nvfp4 = partial(TransformerEngineRecipe, scaling="nvfp4")
