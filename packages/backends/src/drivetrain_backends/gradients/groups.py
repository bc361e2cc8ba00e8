"""The grouping of models whose gradients are processed together."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from drivetrain_backends.errors import AccumulationError
from drivetrain_backends.gradients.tracker import GradientGroup, GradientTracker


def group_models(
    models: Sequence[nn.Module], trained_together: Sequence[Sequence[int]], tracker: GradientTracker
) -> list[GradientGroup]:
    """Return the group of each model: together with those that share a parameter or an optimizer.

    `trained_together` are the indices of the models that each optimizer trains. A group with the same models is kept.
    """
    label = list(range(len(models)))
    holders: dict[Any, int] = {}
    links = [list(indices) for indices in trained_together]
    links += [[holders.setdefault(p, i), i] for i, model in enumerate(models) for p in model.parameters()]
    for indices in links:
        for other in indices[1:]:
            old, new = label[other], label[indices[0]]
            label = [new if value == old else value for value in label]
    kept = {group.models: group for group in tracker.groups}
    groups: dict[int, GradientGroup] = {}
    for mark in dict.fromkeys(label):
        members = tuple(model for model, value in zip(models, label, strict=True) if value == mark)
        groups[mark] = kept.pop(members, None) or GradientGroup(members, tracker)
    if any(group.stage in ("open", "final") for group in kept.values()):
        raise AccumulationError(
            "prepare() while gradients are on their way to a step; call it between two windows"
        )
    for group in kept.values():
        group.skips.close()
    return [groups[mark] for mark in label]
