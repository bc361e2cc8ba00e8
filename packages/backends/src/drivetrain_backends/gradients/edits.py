"""Gradients that are changed between a backward and the step by something that knows nothing of windows and ranks.

`model.zero_grad()`, torch's `clip_grad_norm_` and a direct `loss.backward()` reach `.grad` without a word. They are
told by the gradients' identities and versions; values stay unread. A pass over 200 gradients takes about 45 us, and a
plain step of DDP makes two: one after backward, one at the step.

An identity is a weak reference: an `id` may be that of a freed gradient's successor, as where DDP's reducer
replaces a gradient by a view of its bucket, and then ranks would disagree on what they saw.
"""

from collections.abc import Sequence
from itertools import islice
from operator import is_
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

# What is compared of shards: enough that some of it is not 0.
_SAMPLED_GRADIENTS = 16
_SAMPLED_VALUES = 64


class Marks(NamedTuple):
    """The state of gradients at one moment, by parameter; None where there is none.

    Attributes:
        gradients: The gradients. Each has but one such reference while it lives, so `is` compares them.
        versions: How often each was written to.
    """

    gradients: list[ref[Tensor] | None]
    versions: list[int | None]

    def are(self, other: "Marks") -> bool:
        """Tell whether the gradients are in the same state. `==` would compare values."""
        return self.versions == other.versions and all(map(is_, self.gradients, other.gradients))


class Edits(NamedTuple):
    """The places of parameters whose gradients were changed since marks were kept.

    Attributes:
        edited: Their gradients have other values, or are new.
        cleared: Their gradients are gone, or zero.
        left: How many gradients are there and were not cleared.
    """

    edited: list[int]
    cleared: list[int]
    left: int


class GradientMarks:
    """Remembers the state of gradients, to tell later whether they were changed since.

    A write through `.grad.data` leaves no version behind and is not seen.

    Args:
        parameters: The parameters whose gradients they are.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._kept: Marks | None = None
        self._sample: Tensor | None = None

    @property
    def are_kept(self) -> bool:
        """Whether there is anything to compare with."""
        return self._kept is not None

    def keep(self) -> None:
        """Remember the gradients as they are now."""
        self._kept = marks_of(self._parameters)
        self._sample = _sample_of(self._parameters)

    def forget(self) -> None:
        """Have nothing to compare with, until the next `keep`."""
        self._kept = self._sample = None

    def differ(self) -> bool:
        """Tell whether the gradients were changed since `keep`; False while none are remembered."""
        return self._kept is not None and not self._kept.are(marks_of(self._parameters))

    def were_scaled(self) -> bool:
        """Tell whether shards of gradients were scaled since `keep`, which leaves no version behind.

        So does torch's `clip_grad_norm_` (a `torch._foreach_` write to DTensors, torch 2.15). A few values are
        compared, which waits for the device; False where gradients are no DTensors.
        """
        if self._sample is None:
            return False
        now = _sample_of(self._parameters)
        # As bytes: a gradient that is not finite is equal to itself.
        return now is not None and not torch.equal(self._sample.view(torch.uint8), now.view(torch.uint8))

    def edits(self) -> Edits:
        """Sort what was changed since `keep`. Reads the values of what was, which waits for the device."""
        edited: list[int] = []
        cleared: list[int] = []
        left = 0
        now = marks_of(self._parameters)
        before = self._kept or now
        for place, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            is_same = (
                before.gradients[place] is now.gradients[place]
                and before.versions[place] == now.versions[place]
            )
            if not is_same and (gradient is None or not is_nonzero(gradient)):
                cleared.append(place)
                continue
            left += gradient is not None
            if not is_same:
                edited.append(place)
        return Edits(edited, cleared, left)


def marks_of(parameters: Sequence[Tensor]) -> Marks:
    """Read what tells one state of each gradient from another."""
    gradients = [p.grad for p in parameters]
    return Marks(
        [None if g is None else ref(g) for g in gradients],
        [None if g is None else g._version for g in gradients],
    )


@torch.no_grad()
def _sample_of(parameters: Sequence[Tensor]) -> Tensor | None:
    """Return values of this rank's shards of some gradients, of shape (values,); None where there are no shards."""
    parts = (getattr(p.grad, "_local_tensor", None) for p in parameters)
    held = (part for part in parts if part is not None and part.numel() and not part.is_sparse)
    first = [part.reshape(-1)[:_SAMPLED_VALUES] for part in islice(held, _SAMPLED_GRADIENTS)]
    alike = [part for part in first if part.dtype == first[0].dtype and part.device == first[0].device]
    return torch.cat(alike) if alike else None


@torch.no_grad()
def is_nonzero(gradient: Tensor) -> bool:
    """Tell whether this rank's part of a gradient has values that are not zero."""
    part: Tensor = getattr(gradient, "_local_tensor", gradient)
    return bool((part._values() if part.is_sparse else part).count_nonzero())
