"""The accumulation window: which micro-batches make up one optimizer step, and how their losses are normalised.

Two meanings of a loss are kept apart, and a window that mixes them is an error:

- A *mean*: `backward(loss)`. The window's gradient is the mean of its micro-batches' means, over all ranks. Each loss
  is divided by the window's nominal length; a window that closes early is corrected to its actual length.
- A *sum*: `backward(loss_sum, count=n)`. The window's gradient is that of the mean over all items. The total is not
  known before the window closes, so each sum is divided by a reference that all ranks share (the last window's
  total) and corrected once the total is known, before clipping. The division keeps fp16 gradients in range.
"""

from typing import Literal

import torch
from torch import Tensor

from drivetrain_backends.errors import AccumulationError
from drivetrain_state import Context, reduce


class AccumulationWindow:
    """The micro-batches between two optimizer steps. One is shared by all models of an Accelerator.

    Without `begin`, every micro-batch is a window of its own, as in a plain training loop.

    Attributes:
        num_micro_batches: The nominal number of micro-batches in a window.
        length: Micro-batches in the current window so far, the current one included.
        closing: The current micro-batch is the window's last: gradients are reduced and optimizers step.
        begun: How many micro-batches have begun in all; it tells one micro-batch from the next.
        number: How many windows have begun in all.
    """

    __slots__ = ("begun", "closing", "length", "num_micro_batches", "number")

    def __init__(self, num_micro_batches: int = 1) -> None:
        if num_micro_batches < 1:
            raise ValueError(
                f"gradient_accumulation_steps={num_micro_batches!r}: must be at least 1 micro-batch a step"
            )
        self.num_micro_batches = num_micro_batches
        self.length = 1
        self.closing = True
        self.begun = 0
        self.number = 0

    def begin(self, *, is_last: bool = False) -> None:
        """Begin a micro-batch; `is_last` closes the window early, as the last batch of an epoch does."""
        self.begun += 1
        if self.closing:
            self.number += 1
            self.length = 1
        else:
            self.length += 1
        self.closing = is_last or self.length >= self.num_micro_batches


class BackwardRecord:
    """What the models of one backend know together of backward and step; a loss may flow through several of them.

    Attributes:
        serial: How many backwards have run; a model whose gradients were finished at an older one must finish again.
        window: The window of the last backward.
        micro_batch: The micro-batch of the last backward.
        stepped_window: The window of the last step, None if the loss scale has moved since.
    """

    __slots__ = ("micro_batch", "serial", "stepped_window", "window")

    def __init__(self) -> None:
        self.serial = 0
        self.window = -1
        self.micro_batch = -1
        self.stepped_window: int | None = None

    def note_backward(self, window: AccumulationWindow) -> None:
        """A backward ran."""
        self.serial += 1
        self.window = window.number
        self.micro_batch = window.begun

    def scale_may_move(self, window: AccumulationWindow) -> bool:
        """Whether no gradient of the current scale is still to be used: a step was taken, in an earlier window.

        A loop that never begins a window steps after every backward, and its window keeps number 0.
        """
        return self.stepped_window is not None and (window.begun == 0 or self.stepped_window != window.number)


class LossNormalizer:
    """How one model's losses become gradients of the right mean.

    Args:
        context: The ranks over which counts are added up.
        window: The window that losses belong to.
    """

    def __init__(self, context: Context, window: AccumulationWindow) -> None:
        self._context = context
        self._window = window
        self._number = -1  # the window that _kind and _count speak of
        self._kind: Literal["mean", "sum"] | None = None
        self._count: Tensor | float = 0.0
        self.reference: Tensor | float | None = None  # last window's total count; the same on every rank

    def scale(self, loss: Tensor, count: Tensor | float | None) -> Tensor:
        """Divide a loss so that the window's gradients add up; note its count."""
        if count is None:
            self.note("mean")
            steps = self._window.num_micro_batches
            return loss if steps == 1 else loss / steps
        self.note("sum")
        self._count = self._count + (count.detach() if isinstance(count, Tensor) else count)
        if self.reference is None:
            self.reference = self._first_reference(count, loss.device)
        return loss / self.reference

    def note(self, kind: Literal["mean", "sum"]) -> None:
        """Note which kind of loss the window takes.

        Raises:
            AccumulationError: It has taken the other kind already.
        """
        if self._kind is None or self._number != self._window.number:
            self._number, self._kind, self._count = self._window.number, kind, 0.0
        elif self._kind != kind:
            raise AccumulationError(
                "backward(loss) and backward(loss_sum, count=...) came in one accumulation window: a mean and a sum "
                "cannot be added; pass count= for every loss of the window, or for none (and model= for each loss "
                "where several models are prepared)"
            )

    def discard(self) -> None:
        """Forget the losses of the window: their gradients were thrown away."""
        self._kind = None

    def correction(self, device: torch.device) -> Tensor | float | None:
        """What the closed window's reduced gradients must be multiplied by; None where they are right already.

        Called once a window, on all ranks: with counts it adds them up over the ranks.
        """
        kind, self._kind = self._kind, None
        if kind != "sum":
            window = self._window
            return (
                None
                if window.length == window.num_micro_batches
                else window.num_micro_batches / window.length
            )
        assert self.reference is not None  # scale() has set it
        total = self._total(self._count, device)
        reference, self.reference = self.reference, torch.where(total > 0, total, torch.ones_like(total))
        factor = reference * self._context.topology.world_size / self.reference
        return torch.where(total > 0, factor, torch.zeros_like(total))

    def _first_reference(self, count: Tensor | float, device: torch.device) -> Tensor:
        total = self._total(count, device) * self._window.num_micro_batches
        return torch.where(total > 0, total, torch.ones_like(total))

    def _total(self, count: Tensor | float, device: torch.device) -> Tensor:
        dtype = torch.float32 if device.type == "mps" else torch.float64  # Metal has no float64
        total = torch.as_tensor(count, device=device).to(dtype).reshape(())
        summed = reduce(self._context, total, op="sum")
        assert isinstance(summed, Tensor)
        return summed
