"""Transformer Engine's layers with the state dict of torch's. Importing this module imports Transformer Engine.

Its own layers add an `_extra_state` to every state dict, without which a strict load fails: a plain checkpoint could
not be loaded, nor could a plain layer load theirs. What they keep in it, the scales of delayed scaling, is pickled,
and the library refuses to load that unless a variable says that the file is trusted. `te_state` gives these scales
as tensors instead.
"""

from typing import Any

from torch import nn

from drivetrain_precision.fp8.te_library import transformer_engine

_LIBRARY: Any = transformer_engine()


class TELinear(_LIBRARY.Linear):
    """Transformer Engine's `Linear`, whose state is weight and bias alone."""

    # torch asks whether these are a module's own, and leaves the extra state out where they are not.
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    def reset_parameters(self, defer_init: bool | None = False) -> None:
        """Give weight and bias the values that a plain layer begins with; the library's are others.

        Args:
            defer_init: Whether to leave them as they are, as the library asks for on the meta device.
        """
        if not defer_init:
            _reset_linear(self)


class TELayerNorm(_LIBRARY.LayerNorm):
    """Transformer Engine's `LayerNorm`, whose state is weight and bias alone."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


class TELayerNormLinear(_LIBRARY.LayerNormLinear):
    """Transformer Engine's `LayerNormLinear`, whose state is the parameters of norm and linear layer alone."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    def reset_parameters(self, defer_init: bool | None = False) -> None:
        """Give norm and linear layer the values that plain ones begin with; the library's are others.

        Args:
            defer_init: Whether to leave them as they are, as the library asks for on the meta device.
        """
        if not defer_init:
            nn.init.ones_(self.layer_norm_weight)
            nn.init.zeros_(self.layer_norm_bias)
            _reset_linear(self)


def _reset_linear(layer: Any) -> None:
    nn.Linear.reset_parameters(layer)  # it reads weight and bias alone, and an empty bias stays empty
