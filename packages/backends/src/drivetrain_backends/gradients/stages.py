"""The stages of the gradients of models that step together, from a backward to a step.

Gradients are *open* while losses add to them, *final* once they are unscaled and normalised (at the first clip or
step of a closed window), *used* after a step, and *empty* after `zero_grad`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain_backends.errors import AccumulationError
from drivetrain_backends.gradients.accumulation import total_count
from drivetrain_backends.gradients.edits import GradientMarks, is_nonzero
from drivetrain_backends.gradients.nonfinite import holds_nonfinite
from drivetrain_backends.optim.parameter_matching import parameter_names

if TYPE_CHECKING:
    from drivetrain_backends.gradients.tracker import GradientLedger

Stage = Literal["empty", "open", "final", "used"]


class GradientGroup:
    """The gradients of models that share an optimizer or a parameter.

    Args:
        models: The users' modules, in the order they were prepared.
        ledger: The state that all groups of a backend share.

    Attributes:
        stage: The stage of the gradients.
        opened_in: The window of this group's last loss; -1 before the first.
        overflowed: Whether the last final gradients held an infinity or NaN, if that was checked: in fp16, and
            where the window says so.
        bad_loss: Whether a loss of the window was not finite, shape (); None if not recorded.
        grad_norm: The norm of the gradients before clipping; None if they were not clipped by norm.
        optimizers: The users' optimizers that train the models.
    """

    def __init__(self, models: Sequence[nn.Module], ledger: "GradientLedger") -> None:
        self.models = tuple(models)
        self.stage: Stage = "empty"
        self.opened_in = -1
        self.overflowed = False
        self.bad_loss: Tensor | None = None
        self.grad_norm: Tensor | None = None
        self.optimizers: list[Optimizer] = []
        self._cleared: set[int] = set()  # the optimizers cleared since the last loss
        self._judged_for: set[int] | None = (
            None  # the optimizers stepped since the last check; None: no check yet
        )
        # Cached: walking through modules takes longer than a pass over small gradients.
        self._held = tuple(dict.fromkeys(p for model in self.models for p in model.parameters()))
        self._ids = frozenset(map(id, self._held))
        self._marks = GradientMarks(self._held)
        self._ledger = ledger
        self._is_counted = False
        self._count: Tensor | float = 0.0
        self._adds_to_used = False  # gradients that a step used were not cleared
        self._num_failed = 0  # failed micro-batches that left nothing in these gradients

    def note(self, count: Tensor | float | None) -> None:
        """Record a loss of this group.

        Raises:
            AccumulationError: The gradients are already final, or hold a loss of the other kind; or the loss would be
                normalised together with gradients that a step used.
        """
        window = self._ledger.window
        stage = self.stage
        if stage == "final" and self.opened_in == window.number and window.begun:
            raise AccumulationError(
                "backward() after the gradients of this window were clipped: they are final; clip after its last loss"
            )
        if stage == "open" and self._were_edited():
            self._take_edits(count)
            stage = self.stage
        if stage in ("empty", "used"):
            self._adds_to_used = stage == "used" and self._hold_gradients()
            if self._adds_to_used and (count is not None or self._ledger.scaler is not None):
                raise AccumulationError(self._used_already("counted or scaled"))
            self._is_counted, self._count, self.bad_loss = count is not None, 0.0, None
            self._num_failed = max(self._num_failed, window.num_failed_before)
        elif self._is_counted != (count is not None):
            raise AccumulationError(
                "backward(loss) and backward(loss_sum, count=...) came in one accumulation window: a mean and a sum "
                "cannot be added; pass count= for every loss of the window, or for none (and model= for each loss "
                "where several models are prepared)"
            )
        self.stage, self.opened_in, self.grad_norm = "open", window.number, None
        self._cleared.clear()
        self._judged_for = None
        if count is not None:
            self._count = self._count + (count.detach() if isinstance(count, Tensor) else count)

    def finish(self) -> None:
        """Make the closed window's gradients final: unscaled, and the gradient of the requested mean.

        Called on all ranks; does nothing unless the gradients are open.

        Raises:
            AccumulationError: A micro-batch failed, and its gradients were not dropped; gradients to correct were
                added to gradients that a step used; or other code changed them since the last loss.
        """
        if self.stage != "open":
            self._average_foreign()
            return
        ledger, window = self._ledger, self._ledger.window
        if self._num_failed != window.num_failed:
            raise AccumulationError(
                "the step of a window in which a micro-batch ended in an exception: what it left in the gradients is "
                "not known. Call optimizer.zero_grad() where the exception is caught, for every optimizer"
            )
        if ledger.is_plain and not self._is_counted and window.length == window.num_micro_batches == 1:
            self.overflowed, self.stage = False, "final"
            return
        if was_edited := self._were_edited():
            self._check_final_edits()
        factor = self._correction()
        if (factor is not None or ledger.scaler is not None) and self._may_wait and self._marks.were_scaled():
            raise self._edited([])
        if factor is not None and self._adds_to_used:
            raise AccumulationError(self._used_already("of a window that closed early"))
        # Unmodified gradients still have the marks just compared; reading marks is the main cost of a plain step.
        is_kept = not was_edited and factor is None and ledger.scaler is None and self._is_averaged
        self.overflowed = ledger.carrier.settle(self.models, factor)
        self.stage = "final"
        if not is_kept:
            self.keep_marks()

    def keep_marks(self) -> None:
        """Record the present gradients if later changes by other code matter. Called after each pass."""
        carrier = self._ledger.in_grad
        if carrier is not None and (carrier.averages or (self.stage == "open" and self._is_corrected)):
            self._marks.keep()
            carrier.have_moved(self.models)  # resets it: these marks include the move

    @property
    def keeps_gathered(self) -> bool:
        """True if `zero_grad` must keep the gradients, because an open window has accumulated them.

        Many loops call `zero_grad` before backward, which must keep the gradients of earlier micro-batches.
        """
        window = self._ledger.window
        if self._num_failed != window.num_failed or self.stage != "open" or self.opened_in != window.number:
            return False
        return not (window.closing and (window.length == 1 or self._ledger.last_backward == window.begun))

    def judge(self, optimizer: Optimizer | None = None, *, are_finite: bool = False) -> None:
        """Check final gradients for infinities and NaNs, once. Called on all ranks, if the window asks for it.

        Args:
            optimizer: The optimizer about to step, if any: its second step uses other gradients than its first.
            are_finite: Whether the gradients are known to be finite, as from a finite norm.
        """
        if self._ledger.scaler is not None:
            return  # fp16's scaler checked while unscaling
        if self._judged_for is None or (optimizer is not None and id(optimizer) in self._judged_for):
            gradients = [gradient for p in self._held if (gradient := p.grad) is not None]
            self.overflowed = not are_finite and holds_nonfinite(self._ledger.context, gradients)
            self._judged_for = set()
        if optimizer is not None:
            self._judged_for.add(id(optimizer))

    def note_loss(self, loss: Tensor) -> None:
        """Record whether a loss is finite, for the error about its gradients."""
        is_bad = loss.detach().isfinite().logical_not()
        self.bad_loss = is_bad if self.bad_loss is None else self.bad_loss | is_bad

    def use(self) -> None:
        """Record that an optimizer steps, or would step but for an overflow.

        Raises:
            AccumulationError: The gradients come from no loss of this group: other models' losses were counted in
                this window, or `loss.backward()` was called where losses must be divided or scaled.
        """
        if self.stage == "empty":
            self.check_known()
        self.stage = "used"
        self._ledger.has_stepped = True

    def check_known(self) -> None:
        """Refuse gradients that come from no loss of this group; see `use`."""
        ledger = self._ledger
        names = " and ".join(type(model).__name__ for model in self.models)
        others_counted = ledger.counted_in == ledger.window.number and self.opened_in != ledger.window.number
        divided = ledger.window.num_micro_batches > 1 or ledger.scaler is not None
        if not (others_counted or divided) or all(p.grad is None for p in self.parameters()):
            return
        if others_counted:
            raise AccumulationError(
                f"an optimizer of {names} steps, but no counted loss of this window was said to be theirs: pass "
                "every model a loss trains, backward(..., model=(a, b))"
            )
        raise AccumulationError(
            f"an optimizer of {names} steps on gradients of loss.backward(), which are neither divided by the "
            "window's micro-batches nor scaled for fp16: call accelerator.backward(loss) in its place"
        )

    def cleared_by(self, optimizer: Optimizer) -> None:
        """Record that an optimizer's gradients were cleared; once all are, so are those of the losses."""
        if self.stage != "used":
            self._judged_for = None
        if self.stage != "empty":
            self._cleared.add(id(optimizer))
            if len(self._cleared) >= len(self.optimizers):
                if self.stage != "used" and self._is_averaged:
                    self._marks.keep()  # other ranks that step have nothing left to average: nor may this one
                else:
                    self._marks.forget()
                self.stage = "empty"
            elif self._marks.are_kept:
                self._marks.keep()
        if self.stage == "empty":
            self._num_failed = self._ledger.window.num_failed

    def parameters(self) -> list[nn.Parameter]:
        """Return the trainable parameters, each once."""
        return [parameter for parameter in self._held if parameter.requires_grad]

    def holds_any(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether any of the parameters belongs to these models."""
        return any(id(parameter) in self._ids for parameter in parameters)

    @property
    def _is_averaged(self) -> bool:
        carrier = self._ledger.in_grad
        return carrier is not None and carrier.averages and carrier.is_averaged(self.models)

    @property
    def _is_corrected(self) -> bool:
        """True if gradients need a correction (unscaling or normalisation) before a step can use them."""
        ledger = self._ledger
        return self._is_counted or ledger.scaler is not None or ledger.window.num_micro_batches > 1

    @property
    def _may_wait(self) -> bool:
        """True if values may be read: fp16 synchronises at this step anyway, and a debug run may."""
        context = self._ledger.context
        return self._ledger.scaler is not None or context.device.type == "cpu" or context.settings.debug

    def _were_edited(self) -> bool:
        """Return whether other code changed the gradients since the last pass."""
        carrier = self._ledger.in_grad
        if carrier is None or not self._marks.differ():
            return False
        if self._is_corrected and carrier.have_moved(self.models):
            self._marks.keep()
            return False
        return True

    def _average_foreign(self) -> None:
        """Average gradients that come from no loss of this group, if ranks would otherwise drift apart."""
        carrier = self._ledger.in_grad
        if carrier is None or not carrier.averages:
            return
        if self._were_edited() or (self.stage == "empty" and not self._marks.are_kept):
            carrier.note_foreign(self.models)
            carrier.average(self.models)
            self._marks.keep()

    def _take_edits(self, count: Tensor | float | None) -> None:
        """Refuse to add to gradients that other code changed; gradients cleared between two windows start anew.

        Raises:
            AccumulationError: The gradients are those of an open window, or have other values.
        """
        if not self._is_corrected:
            self._note_foreign()
            return
        window, edits = self._ledger.window, self._marks.edits()
        is_midway = window.num_micro_batches > 1 and self.opened_in == window.number
        if edits.edited or (is_midway and edits.cleared):
            raise self._edited([*edits.edited, *edits.cleared])
        if not edits.left:
            self.stage = "empty"
        elif self._is_counted or count is not None:
            raise self._edited(edits.cleared)

    def _check_final_edits(self) -> None:
        """Refuse gradients that other code changed before their correction.

        Raises:
            AccumulationError: There are such gradients.
        """
        if not self._is_corrected:
            self._note_foreign()
        elif edited := self._marks.edits().edited:
            raise self._edited(edited)

    def _note_foreign(self) -> None:
        if self._ledger.in_grad is not None:
            self._ledger.in_grad.note_foreign(self.models)

    def _edited(self, places: Sequence[int]) -> AccumulationError:
        names = parameter_names({str(i): model for i, model in enumerate(self.models)})
        listed = ", ".join(names.get(self._held[place], "one") for place in places[:3]) or "shards of all"
        others = f" and {len(places) - 3} others" if len(places) > 3 else ""
        ledger = self._ledger
        state = "scaled for fp16" if ledger.scaler is not None else "sums, to be divided by their count"
        if ledger.window.num_micro_batches > 1:
            state = f"those of an accumulation window of {ledger.window.num_micro_batches} micro-batches"
        return AccumulationError(
            f"gradients of {' and '.join(type(model).__name__ for model in self.models)} ({listed}{others}) were "
            f"changed since their last loss, and they are {state}, not yet what a step takes. In place of "
            "model.zero_grad() or p.grad = None call zero_grad() of the prepared optimizer, which leaves an open "
            "window alone; of torch's clip_grad_norm_, accelerator.clip_grad_norm_; of loss.backward(), "
            "accelerator.backward(loss). What else edits gradients does so after "
            'accelerator.clip_grad_norm_(parameters, float("inf")), which makes them final'
        )

    def _hold_gradients(self) -> bool:
        return any(is_nonzero(p.grad) for p in self._held if p.grad is not None)

    def _used_already(self, what: str) -> str:
        names = " and ".join(type(model).__name__ for model in self.models)
        return (
            f"a loss {what} adds to gradients of {names} that a step has used and that were not cleared: these would "
            "be normalised a second time. Call zero_grad() of every optimizer after each step"
        )

    def _correction(self) -> Tensor | float | None:
        """Return the factor that corrects reduced gradients; None if they need no correction."""
        ledger = self._ledger
        if not self._is_counted:
            nominal, length = ledger.window.num_micro_batches, ledger.window.length
            return None if length == nominal else nominal / length
        total = total_count(ledger.context, self._count)
        factor = ledger.reference.value(total) * ledger.context.topology.world_size / total
        ledger.reference.last_total = total
        return torch.where(total > 0, factor, torch.zeros_like(total))
