"""The accumulation window: which micro-batches make up one optimizer step, and how their losses are normalised.

A loss has one of two meanings, and a window that mixes them is an error:

- A *mean*: `backward(loss)`. The gradient of the window is the mean over its micro-batches and over all ranks. Each
  loss is divided by the window's nominal length; a window that closes early is corrected to its actual length.
- A *sum*: `backward(loss_sum, count=n)`. The gradient of the window is that of the mean over all items. The total
  count is unknown until the window closes. Each sum is therefore divided by a reference count that all ranks share,
  which keeps fp16 gradients in range. The gradient is corrected when the total is known, before clipping.
"""

from dataclasses import KW_ONLY, dataclass, field
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from drivetrain_backends.errors import AccumulationError
from drivetrain_state import Context, reduce

OnNonfinite: TypeAlias = Literal["warn", "skip", "raise"]


@dataclass(slots=True, eq=False)
class AccumulationWindow:
    """The micro-batches between two optimizer steps. All models of an Accelerator share one window.

    Without `begin`, every micro-batch is its own window, as in a plain training loop.

    Attributes:
        num_micro_batches: The nominal number of micro-batches in a window.
        next_num_micro_batches: The nominal number for the next window; set by `resize`.
        fixed_because: The reason why the number of micro-batches cannot change, set by a backend; None if it can.
        is_open_ended: Whether a window of any length closes only with `begin(is_last=True)`. Programs that count
            micro-batches themselves set this while the window is closed.
        is_probe: Whether what trains is put back afterwards: what looks at a run's steps leaves it out.
        keeps_divisor: Whether the losses of a window that closes early stay divided by its nominal length, as in
            Accelerate.
        on_nonfinite: The treatment of steps whose gradients hold an infinity or NaN: "skip" skips the step,
            "raise" is an error, "warn" takes it unchecked: whoever reads the losses may warn.
        length: The number of micro-batches in the current window so far, including the current one.
        closing: Whether the current micro-batch is the window's last: gradients are reduced and optimizers step.
        begun: The total number of micro-batches begun; it identifies the current micro-batch.
        number: The total number of windows begun.
        micro_batch_size: The samples of a micro-batch on one rank, if a loader has set it; for information only.
        num_failed: The total number of micro-batches that ended in an exception.
        num_failed_before: The number of failed micro-batches in earlier windows.
    """

    num_micro_batches: int = 1
    _: KW_ONLY
    on_nonfinite: OnNonfinite = "warn"
    next_num_micro_batches: int = field(init=False)
    fixed_because: str | None = field(default=None, init=False)
    is_open_ended: bool = field(default=False, init=False)
    is_probe: bool = field(default=False, init=False)
    keeps_divisor: bool = field(default=False, init=False)
    length: int = field(default=1, init=False)
    closing: bool = field(default=True, init=False)
    begun: int = field(default=0, init=False)
    number: int = field(default=0, init=False)
    micro_batch_size: int | None = field(default=None, init=False)
    num_failed: int = field(default=0, init=False)
    num_failed_before: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        _check_size(self.num_micro_batches)
        if self.on_nonfinite not in get_args(OnNonfinite):
            raise ValueError(
                f"on_nonfinite={self.on_nonfinite!r}: must be one of {', '.join(get_args(OnNonfinite))}"
            )
        self.next_num_micro_batches = self.num_micro_batches

    @property
    def treatment(self) -> OnNonfinite:
        """The treatment of a step now: as asked, but for a probe, whose losses may grow."""
        return "warn" if self.is_probe else self.on_nonfinite

    def begin(self, *, is_last: bool = False) -> None:
        """Begin a micro-batch; `is_last` closes the window early, as for the last batch of an epoch."""
        self.begun += 1
        if self.closing:
            self.number += 1
            self.length = 1
            self.num_micro_batches = self.next_num_micro_batches
            self.num_failed_before = self.num_failed
        else:
            self.length += 1
        self.closing = is_last or (not self.is_open_ended and self.length >= self.num_micro_batches)

    def begin_alone(self) -> None:
        """Refuse a backward outside `begin`, unless each micro-batch is its own window."""
        if self.next_num_micro_batches > 1 or not self.closing:
            raise AccumulationError(
                f"backward() outside accumulate() with gradient_accumulation_steps={self.next_num_micro_batches}: "
                "which window it belongs to is not known; put the step into `with accelerator.accumulate(model):`"
            )
        if self.num_micro_batches > 1:  # resized to 1 since the last window
            self.begin()

    def resize(self, num_micro_batches: int) -> None:
        """Set the number of micro-batches from the next window on. Called on all ranks with the same number.

        Gradients that exist already keep the former divisor.

        Raises:
            TypeError, ValueError: The number is not an integer of at least 1.
            AccumulationError: A window is open, or a backend depends on the present number.
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
        """Record that the current micro-batch ended in an exception, which leaves unknown values in the gradients.

        Steps are refused until `zero_grad` has dropped the gradients. The window continues, because other ranks may
        not have failed. In a mean, the dropped micro-batch counts as a micro-batch without gradient.
        """
        self.num_failed += 1

    def reset(self) -> None:
        """Leave a window whose gradients are dropped; the next micro-batch begins a new window."""
        self.closing = True
        self.length = 1
        self.num_failed = self.num_failed_before = 0  # nobody is left whose gradients failed


class ReferenceCount:
    """The divisor of counted losses before backward: a number that all ranks share.

    The divisor is the total count of the last window. In the first window, it is the total of the first micro-batch
    times the window's length. An estimate is enough, because the later correction is exact.
    """

    def __init__(self, context: Context, window: AccumulationWindow) -> None:
        self.number: Tensor | None = None  # the reference, of shape (); None before the first count
        # The total of the last closed window, of shape (), which becomes the next reference.
        self.last_total: Tensor | None = None
        self._context = context
        self._window = window

    def value(self, count: Tensor | float) -> Tensor:
        """Return the divisor. Called on all ranks: the first call sums the counts of all ranks."""
        if self.number is None:
            self.number = _positive(total_count(self._context, count) * self._window.num_micro_batches)
        return self.number

    def renew(self) -> None:
        """Replace the divisor by the last total. Called while no gradient that was divided by it is in use."""
        if self.last_total is not None:
            self.number, self.last_total = _positive(self.last_total), None


def total_count(context: Context, count: Tensor | float) -> Tensor:
    """Sum a count over the ranks whose losses add up, on the device, shape (). Called on all ranks."""
    dtype = torch.float32 if context.device.type == "mps" else torch.float64  # Metal has no float64
    if isinstance(count, Tensor):
        total = count.to(context.device, dtype, non_blocking=True).reshape(())
    else:  # filled on the device: a copy of a host number would synchronise
        total = torch.full((), count, dtype=dtype, device=context.device)
    summed = reduce(context, total, op="sum", over="counts")
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
