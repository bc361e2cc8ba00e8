"""Transformer Engine's layers with the state dict of torch's. Importing this module imports Transformer Engine.

The library's own layers add an `_extra_state` to every state dict and require it in a strict load: they could not
load a plain checkpoint, nor could a plain layer load theirs. The `_extra_state` holds the pickled scales of delayed
scaling, which the library loads only if an environment variable declares the file trusted. `te_state` gives the
scales as tensors instead.
"""

from typing import Any, cast

from torch import Tensor, nn

from drivetrain_precision.fp8.te_library import transformer_engine

_LIBRARY: Any = transformer_engine()
LayerNormLinear: Any = _LIBRARY.LayerNormLinear


class PlainState:
    """A layer whose state dict holds only its parameters."""

    # torch asks whether these are a module's own, and leaves the extra state out where they are not.
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


class PlainLinear(PlainState):
    """A layer with the initial weight and bias of a plain linear layer."""

    def reset_parameters(self: Any, defer_init: bool | None = False) -> None:
        """Give weight and bias a plain layer's initial values, unless they are on the meta device."""
        if not defer_init:
            nn.Linear.reset_parameters(self)  # it reads weight and bias alone, and an empty bias stays empty


class HandsOn(PlainState):
    """A norm that returns its input once the next linear layer computes the norm."""

    is_computed_by_next = False

    def forward(self: Any, input: Tensor) -> Tensor:
        """Return the norm of the input, or the input."""
        return input if self.is_computed_by_next else cast("Any", super()).forward(input)


class TELinear(PlainLinear, _LIBRARY.Linear):
    """Transformer Engine's `Linear`."""


class TELayerNorm(HandsOn, _LIBRARY.LayerNorm):
    """Transformer Engine's `LayerNorm`."""


class TERMSNorm(HandsOn, _LIBRARY.RMSNorm):
    """Transformer Engine's `RMSNorm`."""


class TENormLinear(PlainLinear, LayerNormLinear):
    """Transformer Engine's `LayerNormLinear`, which computes a norm with the parameters that the norm keeps.

    The layer reads the norm's parameters in each forward, so that they may be moved or replaced in the norm.
    """

    norm_before: tuple[Any]  # as a module of this one its parameters would have two names

    @property
    def layer_norm_weight(self) -> nn.Parameter:
        """The weight of the norm."""
        return self.norm_before[0].weight

    @property
    def layer_norm_bias(self) -> nn.Parameter | None:
        """The bias of the norm; None for an RMSNorm."""
        return getattr(self.norm_before[0], "bias", None)


def take_norm(layer: Any, norm: Any) -> None:
    """Make the library's `LayerNormLinear` compute a norm with the norm's own parameters."""
    # Its constructor makes parameters of these names, so that it gets its class afterwards.
    for name in ("layer_norm_weight", "layer_norm_bias"):
        delattr(layer, name)
    layer.norm_before = (norm,)
    layer.__class__ = TENormLinear
