"""The figures of a training step of one rank, and those of a model with more blocks or samples. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TypeAlias

from drivetrain_plan.hardware import Collective
from drivetrain_state.mesh import View


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """The bytes, operations and collectives of a step of one micro-batch on one rank.

    The peaks of phases are those of what is allocated beside weights, optimizer states and inputs, in a step in which
    gradients are new. A value of each is an affine function of the number of blocks and of samples, or nearly so.

    Attributes:
        weights: The bytes of parameters and buffers.
        gradients: The bytes of gradients.
        states: The bytes of optimizer states.
        inputs: The bytes of the batch.
        activations: The bytes that the forward leaves for the backward.
        forward: The peak of the forward.
        early: The peak where the backward begins: outside of blocks and in the first, with their gradients.
        late: The peak of its rest.
        stepping: The peak of the optimizer's step, with all gradients.
        computing: The peak of forward and backward without gradients, to which a step adds all gradients that exist
            before it, such as those of earlier micro-batches.
        flops: The operations of matrix products, convolutions and attention, in forward and backward.
        moved: The bytes that other operations read and write there.
        stepped: The bytes that the optimizer's step reads and writes.
        operations: The number of operations.
        payloads: The bytes of the collectives by view and kind: of the whole that is summed, gathered or exchanged.
        calls: The number of these collectives.
    """

    weights: float = 0
    gradients: float = 0
    states: float = 0
    inputs: float = 0
    activations: float = 0
    forward: float = 0
    early: float = 0
    late: float = 0
    stepping: float = 0
    computing: float = 0
    flops: float = 0
    moved: float = 0
    stepped: float = 0
    operations: float = 0
    payloads: Mapping[tuple[View, Collective], float] = field(
        default_factory=dict[tuple[View, Collective], float]
    )
    calls: Mapping[tuple[View, Collective], float] = field(
        default_factory=dict[tuple[View, Collective], float]
    )

    def plus(self, other: "StepFigures", times: float = 1) -> "StepFigures":
        """Return these figures with `times` those of another added.

        Example:
            >>> StepFigures(weights=4.0).plus(StepFigures(weights=1.0), times=3).weights
            7.0
        """
        added = {name: getattr(self, name) + times * getattr(other, name) for name in _VALUES}
        return StepFigures(
            **added,
            payloads=_plus(self.payloads, other.payloads, times),
            calls=_plus(self.calls, other.calls, times),
        )

    def changed(self, **values: float) -> "StepFigures":
        """Return these figures with others in some places."""
        return replace(self, **values)

    def scaled(self, share: float) -> "StepFigures":
        """Return a share of all figures, as one of several stages has."""
        return StepFigures().plus(self, times=share)

    @property
    def peak(self) -> float:
        """The most bytes that a step of one micro-batch holds at once."""
        held = self.weights + self.states + self.inputs
        return held + max(self.forward, self.early, self.late, self.stepping)


# The figures that are numbers.
_VALUES = tuple(each.name for each in fields(StepFigures) if each.name not in ("payloads", "calls"))
_Sums: TypeAlias = Mapping[tuple[View, Collective], float]


def _plus(mine: _Sums, theirs: _Sums, times: float) -> _Sums:
    return {key: mine.get(key, 0) + times * theirs.get(key, 0) for key in {**mine, **theirs}}


def extrapolate(least: StepFigures, more: Sequence[StepFigures], wanted: Sequence[int]) -> StepFigures:
    """Return the figures of a model with `wanted` blocks of each make beyond those of `least`.

    For each make of blocks, `more` has the figures with one more of it than `least`.

    Example:
        >>> two, three = StepFigures(weights=20), StepFigures(weights=25)
        >>> extrapolate(two, [three], wanted=[30]).weights
        170
    """
    found = least
    for figures, times in zip(more, wanted, strict=True):
        found = found.plus(figures.plus(least, times=-1), times=times)
    return found
