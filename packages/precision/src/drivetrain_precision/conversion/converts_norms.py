"""The protocol of a recipe that converts both norms and linear layers."""

from typing import Literal, Protocol, runtime_checkable

from torch import nn

Norms = Literal["keep", "convert", "fuse"]
# Exactly these classes: another one has a forward of its own.
NORMS: tuple[type[nn.Module], ...] = (nn.LayerNorm, nn.RMSNorm)


@runtime_checkable
class SupportsNormConversion(Protocol):
    """A recipe whose `refusal`, `convert` and `restore` take the norms of `NORMS` too, on every rank.

    1. The plan calls `refusal` for each norm, unless `norms` is "keep".
    2. With "fuse", it calls `fusion_refusal` for each converted norm with a converted linear layer right after it.
    3. `convert` changes the norm, then `fuse` changes the pair. `restore` undoes both.
    """

    @property
    def norms(self) -> Norms:
        """The treatment of norms: "keep", "convert", or "fuse" with the linear layer that alone reads the norm."""
        ...

    def fusion_refusal(self, norm: nn.Module, linear: nn.Linear) -> str | None:
        """Return why a norm and a linear layer, both plain, cannot be computed by one layer; None if they can."""
        ...

    def fuse(self, norm: nn.Module, linear: nn.Linear) -> nn.Module:
        """Return the layer that computes both, for the place of the linear layer.

        The norm is already converted. It keeps its parameters, and from now on returns its input.
        """
        ...
