"""The accumulation window: which micro-batches make up one optimizer step, and how their losses are normalised.

Two meanings of a loss are kept apart, and a window that mixes them is an error:

- A *mean*: `backward(loss)`. The window's gradient is the mean of its micro-batches' means, over all ranks. Each loss
  is divided by the window's nominal length; a window that closes early is corrected to its actual length.
- A *sum*: `backward(loss_sum, count=n)`. The window's gradient is that of the mean over all items. The total is not
  known before the window closes, so each sum is divided by a reference that all ranks share and corrected once the
  total is known, before clipping. The division keeps fp16 gradients in range.
"""

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from drivetrain_backends.errors import AccumulationError
from drivetrain_state import Context, reduce

NonFiniteGradients: TypeAlias = Literal["ignore", "skip", "raise"]


class AccumulationWindow:
    """The micro-batches between two optimizer steps. One is shared by all models of an Accelerator.

    Without `begin`, every micro-batch is a window of its own, as in a plain training loop.

    Attributes:
        num_micro_batches: The nominal number of micro-batches in a window.
        next_num_micro_batches: The same of the next window; `resize` sets it.
        fixed_because: Why the number cannot change while a backend holds what was made for it; None: it can.
        nonfinite_gradients: What becomes of a step whose gradients hold an infinity or NaN: "ignore" does not look,
            "skip" leaves it out, "raise" is an error.
        length: Micro-batches in the current window so far, the current one included.
        closing: The current micro-batch is the window's last: gradients are reduced and optimizers step.
        begun: How many micro-batches have begun in all; it tells one micro-batch from the next.
        number: How many windows have begun in all.
        micro_batch_size: Samples of a micro-batch on one rank, where a loader has told; nothing is computed with it.
        num_failed: How many micro-batches have ended in an exception in all.
        num_failed_before: How many of them were of earlier windows.
    """

    __slots__ = (
        "begun",
        "closing",
        "fixed_because",
        "length",
        "micro_batch_size",
        "next_num_micro_batches",
        "nonfinite_gradients",
        "num_failed",
        "num_failed_before",
        "num_micro_batches",
        "number",
    )

    def __init__(
        self, num_micro_batches: int = 1, *, nonfinite_gradients: NonFiniteGradients = "ignore"
    ) -> None:
        _check_size(num_micro_batches)
        if nonfinite_gradients not in get_args(NonFiniteGradients):
            raise ValueError(
                f"nonfinite_gradients={nonfinite_gradients!r}: must be one of "
                f"{', '.join(get_args(NonFiniteGradients))}"
            )
        self.num_micro_batches = num_micro_batches
        self.next_num_micro_batches = num_micro_batches
        self.fixed_because: str | None = None
        self.nonfinite_gradients: NonFiniteGradients = nonfinite_gradients
        self.length = 1
        self.closing = True
        self.begun = 0
        self.number = 0
        self.micro_batch_size: int | None = None
        self.num_failed = 0
        self.num_failed_before = 0

    def begin(self, *, is_last: bool = False) -> None:
        """Begin a micro-batch; `is_last` closes the window early, as the last batch of an epoch does."""
        self.begun += 1
        if self.closing:
            self.number += 1
            self.length = 1
            self.num_micro_batches = self.next_num_micro_batches
            self.num_failed_before = self.num_failed
        else:
            self.length += 1
        self.closing = is_last or self.length >= self.num_micro_batches

    def begin_alone(self) -> None:
        """Check that a backward outside `begin` is a window of its own.

        Raises:
            AccumulationError: Windows have several micro-batches.
        """
        if self.next_num_micro_batches > 1 or not self.closing:
            raise AccumulationError(
                f"backward() outside accumulate() with gradient_accumulation_steps={self.next_num_micro_batches}: "
                "which window it belongs to is not known; put the step into `with accelerator.accumulate(model):`"
            )
        if self.num_micro_batches > 1:  # it was set to 1 since the last window
            self.begin()

    def resize(self, num_micro_batches: int) -> None:
        """Set the number of micro-batches from the next window on. Called on all ranks with the same number.

        Gradients that are there keep the divisor that they were made with.

        Raises:
            TypeError, ValueError: It is no integer of at least 1.
            AccumulationError: A window is open, or a backend holds what was made for the present number.
        """
        _check_size(num_micro_batches)
        if num_micro_batches == self.next_num_micro_batches:
            return
        given = f"gradient_accumulation_steps = {num_micro_batches}"
        if self.fixed_because is not None:
            raise AccumulationError(f"{given}: {self.fixed_because}")
        if not self.closing:
            raise AccumulationError(
                f"{given} in an open window, after {self.length} of its {self.num_micro_batches} micro-batches, "
                "whose losses were divided by that number: set it after the step that closes the window; "
                "accumulate(..., last=True) closes one early"
            )
        self.next_num_micro_batches = num_micro_batches

    def fail(self) -> None:
        """Note that the current micro-batch ended in an exception: what it left in gradients is not known.

        Steps are refused until `zero_grad` has dropped it. The window goes on where it is, as other ranks may not
        have failed; in a mean, a micro-batch that was dropped counts as one without gradient.
        """
        self.num_failed += 1

    def reset(self) -> None:
        """Leave an open window; the next micro-batch begins another. For when its gradients are let go."""
        self.closing = True
        self.length = 1


class ReferenceCount:
    """What counted losses are divided by before backward: a number that all ranks share.

    It is the last window's total; before the first one, the total of the first micro-batch times the window's
    length. It need only be about right, so that fp16 gradients are in range, for the correction is exact.

    Args:
        context: The ranks over which counts are added up.
        window: The accumulation window.

    Attributes:
        number: The reference, of shape (); None before the first count.
        last_total: The total of the window closed last, of shape (), which the next one takes.
    """

    def __init__(self, context: Context, window: AccumulationWindow) -> None:
        self.number: Tensor | None = None
        self.last_total: Tensor | None = None
        self._context = context
        self._window = window

    def value(self, count: Tensor | float) -> Tensor:
        """The reference. Called on all ranks: the first call adds up their counts."""
        if self.number is None:
            self.number = _positive(total_count(self._context, count) * self._window.num_micro_batches)
        return self.number

    def renew(self) -> None:
        """Take the last total, while no gradient of the present reference is on its way."""
        if self.last_total is not None:
            self.number, self.last_total = _positive(self.last_total), None


def total_count(context: Context, count: Tensor | float) -> Tensor:
    """Add up a count over all ranks, on the device, shape (). Called on all ranks."""
    dtype = torch.float32 if context.device.type == "mps" else torch.float64  # Metal has no float64
    if isinstance(count, Tensor):
        total = count.to(context.device, dtype, non_blocking=True).reshape(())
    else:  # filled in there: copying a number of the host's would wait for the device
        total = torch.full((), count, dtype=dtype, device=context.device)
    summed = reduce(context, total, op="sum")
    assert isinstance(summed, Tensor)
    return summed


def _check_size(num_micro_batches: object) -> None:
    if type(num_micro_batches) is not int:
        raise TypeError(
            f"gradient_accumulation_steps={num_micro_batches!r}: must be an integer, the micro-batches of a step"
        )
    if num_micro_batches < 1:
        raise ValueError(
            f"gradient_accumulation_steps={num_micro_batches!r}: must be at least 1 micro-batch a step"
        )


def _positive(total: Tensor) -> Tensor:
    return torch.where(total > 0, total, torch.ones_like(total))
