"""The protocol of a recipe that converts norms beside linear layers."""

from typing import Literal, Protocol, runtime_checkable

from torch import nn

Norms = Literal["keep", "convert", "fuse"]
# Exactly these classes: another one has a forward of its own.
NORMS: tuple[type[nn.Module], ...] = (nn.LayerNorm, nn.RMSNorm)


@runtime_checkable
class SupportsNormConversion(Protocol):
    """A recipe whose `refusal`, `convert` and `restore` take the norms of `NORMS` too, on every rank.

    1. The plan calls `refusal` of each norm, unless `norms` is "keep".
    2. With "fuse" it calls `fusion_refusal` of each norm that a linear layer follows directly, both to be converted.
    3. The norm is changed by `convert`, then the pair by `fuse`, and each of them is given back by `restore`.
    """

    @property
    def norms(self) -> Norms:
        """The treatment of norms: they stay, are converted, or are computed by the layer that alone reads them."""
        ...

    def fusion_refusal(self, norm: nn.Module, linear: nn.Linear) -> str | None:
        """Return why a norm and a linear layer, both plain, cannot be computed by one layer; None if they can."""
        ...

    def fuse(self, norm: nn.Module, linear: nn.Linear) -> nn.Module:
        """Return the layer that computes both, for the place of the linear layer.

        The norm is converted already: it keeps its parameters, and from now on hands on what it is given.
        """
        ...
