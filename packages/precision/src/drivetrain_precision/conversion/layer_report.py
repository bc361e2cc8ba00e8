"""Say in words what became of each layer of a model."""

from collections import Counter
from collections.abc import Sequence

from torch import nn

from drivetrain_precision.conversion.conversion_plan import LayerDecision

_MOST_SHOWN = 8


def converted_names(layers: Sequence[LayerDecision]) -> tuple[str, ...]:
    """Return the names of the layers that are converted."""
    return tuple(each.name for each in layers if each.converts)


def describe_layers(layers: Sequence[LayerDecision], converted: str) -> str:
    """Return how many layers are converted, whose verb and object are given, and why the others are not."""
    reasons = Counter(each.reason for each in layers if not each.converts)
    first = f"{len(converted_names(layers))} of {len(layers)} layers {converted}; the others:"
    return "\n".join([first, *(f"  {count:>5}  {reason}" for reason, count in reasons.most_common())])


def describe_refusals(model: nn.Module, layers: Sequence[LayerDecision]) -> str:
    """Return why the first linear layers of a model are not converted."""
    linear = [f"{each.name or type(model).__name__} {each.reason}" for each in layers if each.is_linear]
    more = f"; and {len(linear) - _MOST_SHOWN} more" if len(linear) > _MOST_SHOWN else ""
    return f"{'; '.join(linear[:_MOST_SHOWN]) or 'it has no nn.Linear'}{more}"
