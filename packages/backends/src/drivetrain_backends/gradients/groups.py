"""Which models go from a backward to a step together."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from drivetrain_backends.errors import AccumulationError
from drivetrain_backends.gradients.tracker import GradientGroup, GradientLedger


def group_models(
    models: Sequence[nn.Module], trained_together: Sequence[Sequence[int]], ledger: GradientLedger
) -> list[GradientGroup]:
    """Put models that share a parameter or an optimizer into one group each.

    Args:
        models: The users' modules.
        trained_together: For each optimizer the indices of the models it trains.
        ledger: Whose groups are made again; one whose models stay the same is kept as it is.

    Returns:
        A group for each model, in their order.

    Raises:
        AccumulationError: Models whose gradients are on their way would change their group.
    """
    label = list(range(len(models)))
    holders: dict[Any, int] = {}
    links = [list(indices) for indices in trained_together]
    links += [[holders.setdefault(p, i), i] for i, model in enumerate(models) for p in model.parameters()]
    for indices in links:
        for other in indices[1:]:
            old, new = label[other], label[indices[0]]
            label = [new if value == old else value for value in label]
    kept = {group.models: group for group in ledger.groups}
    groups: dict[int, GradientGroup] = {}
    for mark in dict.fromkeys(label):
        members = tuple(model for model, value in zip(models, label, strict=True) if value == mark)
        groups[mark] = kept.pop(members, None) or GradientGroup(members, ledger)
    if any(group.stage in ("open", "final") for group in kept.values()):
        raise AccumulationError(
            "prepare() while gradients are on their way to a step; call it between two windows"
        )
    ledger.groups = list(groups.values())
    return [groups[mark] for mark in label]
