"""Transformer Engine's layers with the state dict of torch's. Importing this module imports Transformer Engine.

Its own layers add an `_extra_state` to every state dict, without which a strict load fails: a plain checkpoint could
not be loaded, nor could a plain layer load theirs. It holds the scales of delayed scaling,
pickled, and the library loads a pickle only where an environment variable declares the file trusted. `te_state` gives
the scales as tensors instead.
"""

from typing import Any, cast

from torch import Tensor, nn

from drivetrain_precision.fp8.te_library import transformer_engine

_LIBRARY: Any = transformer_engine()
LayerNormLinear: Any = _LIBRARY.LayerNormLinear


class PlainState:
    """A layer whose state is its parameters alone."""

    # torch asks whether these are a module's own, and leaves the extra state out where they are not.
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


class PlainLinear(PlainState):
    """A layer of which weight and bias begin as those of a plain linear layer."""

    def reset_parameters(self: Any, defer_init: bool | None = False) -> None:
        """Give weight and bias the values that a plain layer begins with, unless they are on the meta device."""
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

    It reads them anew in each forward, so that they may be moved and exchanged where the norm is.
    """

    norm_before: tuple[Any]  # as a module of this one its parameters would have two names

    @property
    def layer_norm_weight(self) -> nn.Parameter:
        """The weight of the norm."""
        return self.norm_before[0].weight

    @property
    def layer_norm_bias(self) -> nn.Parameter | None:
        """The bias of the norm, which an RMSNorm does not have."""
        return getattr(self.norm_before[0], "bias", None)


def take_norm(layer: Any, norm: Any) -> None:
    """Let the library's `LayerNormLinear` compute a norm with the norm's own parameters."""
    # Its constructor makes parameters of these names, so that it gets its class afterwards.
    for name in ("layer_norm_weight", "layer_norm_bias"):
        delattr(layer, name)
    layer.norm_before = (norm,)
    layer.__class__ = TENormLinear
