"""The findings of a watch: the share of underflowing gradients by layer, and the first value that is not finite."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from drivetrain_messages import format_table
from drivetrain_precision.scaling.layer_counts import LayerTotals

Where = Literal["input", "output", "output gradient", "input gradient", "parameter gradient"]
_HEADER = ("layer", "type", "dtype", "gradients", "zero", "subnormal", "not finite", "activations not finite")
_NUM_LEFT = 3  # columns of words


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteValue:
    """The first infinity or NaN in some micro-batches, in the order of the forward, then of the backward.

    Attributes:
        layer: The name of the module; empty for the model itself.
        layer_type: The class of the module.
        where: The place of the value. An "input" and an "output gradient" come from outside the module.
        parameter: The name of the parameter in the module, if the value is in a parameter's gradient; else None.
        parent: The name of the parent module, which calls the module; None for the model itself.
        call: The number of the module's call in one forward, counted from 1.
        order: The number of tensors that the watch had inspected before.
        ranks: The ranks on which this value is the first.
    """

    layer: str
    layer_type: str
    where: Where
    dtype: str
    parameter: str | None
    parent: str | None
    call: int
    order: int
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return the value and its origin as a clause."""
        call = f", call {self.call}" if self.call > 1 else ""
        name = f"{self.layer or 'the model'} ({self.layer_type}, {self.dtype}{call})"
        parent = f"the forward of {self.parent or 'the model'}"
        ranks = (
            f", on rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}" if self.ranks else ""
        )
        before = "the batch" if self.parent is None else f"{parent} before it"
        after = "the loss" if self.parent is None else f"{parent} after it, or from the loss"
        said = {
            "output": f"the output of {name}, whose inputs were finite",
            "input": f"the input of {name}: it comes from {before}",
            "output gradient": f"the gradient that reaches the output of {name}: it comes from {after}",
            "input gradient": f"the gradient of the input of {name}, of whose output it was finite",
            "parameter gradient": f"the gradient of {self.parameter} of {name}, of whose output it was finite",
        }
        return said[self.where] + ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGradients:
    """The scaled gradients of one layer, of its outputs and of its own parameters, summed over the ranks."""

    name: str
    layer_type: str
    dtype: str
    totals: LayerTotals

    @property
    def zero_share(self) -> float:
        """The share of gradient values that are zero."""
        return self.totals.zeros / max(self.totals.values, 1)

    @property
    def subnormal_share(self) -> float:
        """The share of gradient values that are not zero and below the dtype's smallest normal number."""
        return self.totals.subnormals / max(self.totals.values, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientReport:
    """The layers of a model, sorted by their share of zero and subnormal gradients, largest first.

    Attributes:
        layers: The layers that have no children or directly hold parameters.
        first_nonfinite: The first infinity or NaN; None without one.
        not_watched: The names of modules compiled by torch.compile or TorchScript, which hooks cannot see into.
    """

    layers: tuple[LayerGradients, ...]
    first_nonfinite: NonFiniteValue | None
    not_watched: tuple[str, ...]

    def table(self, most: int | None = None) -> str:
        """Return the layers as a table of at most some rows; all if None."""
        shown = self.layers[:most]
        rows = [
            (
                *(layer.name or "the model", layer.layer_type, layer.dtype, f"{layer.totals.values}"),
                *(f"{layer.zero_share:.2%}", f"{layer.subnormal_share:.2%}"),
                *(f"{layer.totals.nonfinite_gradients}", f"{layer.totals.nonfinite_activations}"),
            )
            for layer in shown
        ]
        lines = [format_table([_HEADER, *rows], right=range(_NUM_LEFT, len(_HEADER)))]
        if len(shown) < len(self.layers):
            lines.append(f"and {len(self.layers) - len(shown)} layers with smaller shares")
        if self.not_watched:
            lines.append(
                f"compiled, so not watched: {', '.join(name or 'the model' for name in self.not_watched)}"
            )
        if self.first_nonfinite is not None:
            lines.append(f"first value that is not finite: {self.first_nonfinite}")
        return "\n".join(lines)

    def __str__(self) -> str:
        """Return the table."""
        return self.table()


def first_of_ranks(found: Sequence[NonFiniteValue | None]) -> NonFiniteValue | None:
    """Return the earliest of the ranks' first non-finite values, with the ranks on which it is the first."""
    known = {rank: value for rank, value in enumerate(found) if value is not None}
    if not known:
        return None
    first = min(known.values(), key=lambda value: value.order)
    ranks = tuple(rank for rank, value in known.items() if replace(value, order=first.order) == first)
    return replace(first, ranks=ranks if len(found) > 1 else ())
