"""How far gradients are on their way from a backward to a step, for models that torch's autograd trains.

Gradients are *open* while losses add to them, *final* once they are unscaled and normalised (at the first clip or
step of a closed window), *used* after a step, and *empty* after `zero_grad`. Models that share an optimizer or a
parameter go this way together, as a group: their losses have one normalisation and one overflow.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain_backends.accumulation import AccumulationWindow, ReferenceCount, total_count
from drivetrain_backends.carrier import GradientCarrier, ParameterGradients
from drivetrain_backends.errors import AccumulationError, UnreducedGradientError
from drivetrain_backends.losses import FirstLosses, check_loss
from drivetrain_backends.nonfinite import holds_nonfinite
from drivetrain_precision import LossScaler
from drivetrain_state import Context

Stage = Literal["empty", "open", "final", "used"]


class GradientGroup:
    """The gradients of models that share an optimizer or a parameter.

    Args:
        models: The users' modules, in the order they were prepared.
        ledger: What all groups of a backend share.

    Attributes:
        stage: How far the gradients are.
        opened_in: The window of the last loss that was this group's; -1 before the first.
        overflowed: Whether the gradients last made final held an infinity or NaN, where it was looked for: in fp16,
            and where the window says so.
        bad_loss: Whether a loss of the window was not finite, shape (); None where that is not kept.
        grad_norm: Their norm before clipping, where they were clipped by norm.
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
        self._cleared: set[int] = set()  # the optimizers that cleared theirs since the last loss
        self._judged_for: set[int] | None = (
            None  # who stepped since infinities were looked for; None: not yet
        )
        # Found once: walking through modules takes longer than a pass over small gradients.
        self._held = tuple(dict.fromkeys(p for model in self.models for p in model.parameters()))
        self._ids = frozenset(map(id, self._held))
        self._ledger = ledger
        self._is_counted = False
        self._count: Tensor | float = 0.0
        self._adds_to_used = False  # gradients that a step used were left in place
        self._num_failed = 0  # micro-batches that failed, but left nothing in these gradients

    def note(self, count: Tensor | float | None) -> None:
        """Note a loss of this group.

        Raises:
            AccumulationError: The gradients are final already, or hold a loss of the other kind; or the loss would be
                normalised together with gradients that a step used.
        """
        window = self._ledger.window
        if self.stage == "final" and self.opened_in == window.number and window.begun:
            raise AccumulationError(
                "backward() after the gradients of this window were clipped: they are final; clip after its last loss"
            )
        if self.stage in ("empty", "used"):
            self._adds_to_used = self.stage == "used" and self._hold_gradients()
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
        """Make the closed window's gradients final: unscaled, and of the mean that was asked for.

        Called on all ranks; does nothing unless they are open.

        Raises:
            AccumulationError: A micro-batch failed, and its gradients were not dropped; or what must be corrected was
                added to gradients that a step used.
        """
        if self.stage != "open":
            return
        if self.is_broken:
            raise AccumulationError(
                "the step of a window in which a micro-batch ended in an exception: what it left in the gradients is "
                "not known. Call optimizer.zero_grad() where the exception is caught, for every optimizer"
            )
        factor = self._correction()
        if factor is not None and self._adds_to_used:
            raise AccumulationError(self._used_already("of a window that closed early"))
        self.overflowed = self._ledger.carrier.settle(self.models, factor)
        self.stage = "final"

    @property
    def is_broken(self) -> bool:
        """Whether a micro-batch failed since these gradients began, or in their window."""
        return self._num_failed != self._ledger.window.num_failed

    @property
    def keeps_gathered(self) -> bool:
        """Whether `zero_grad` leaves them alone: an open window has gathered them so far.

        Many loops zero before backward: what earlier micro-batches of the window gathered must stay then.
        """
        window = self._ledger.window
        if self.is_broken or self.stage != "open" or self.opened_in != window.number:
            return False
        return not (window.closing and (window.length == 1 or self._ledger.last_backward == window.begun))

    def judge(self, optimizer: Optimizer | None = None, *, are_finite: bool = False) -> None:
        """Look for infinities and NaNs in gradients that are final, once. Called on all ranks, where it is asked for.

        Args:
            optimizer: The one that is to step, if any: its second step is on other gradients than its first.
            are_finite: They were found finite already, as a norm tells.
        """
        if self._ledger.scaler is not None:
            return  # fp16's scaler has looked as it unscaled them
        if self._judged_for is None or (optimizer is not None and id(optimizer) in self._judged_for):
            gradients = [gradient for p in self._held if (gradient := p.grad) is not None]
            self.overflowed = not are_finite and holds_nonfinite(self._ledger.context, gradients)
            self._judged_for = set()
        if optimizer is not None:
            self._judged_for.add(id(optimizer))

    def note_loss(self, loss: Tensor) -> None:
        """Keep whether a loss is finite, for the error that tells of its gradients."""
        is_bad = loss.detach().isfinite().logical_not()
        self.bad_loss = is_bad if self.bad_loss is None else self.bad_loss | is_bad

    def use(self) -> None:
        """Note that an optimizer steps, or would but for an overflow.

        Raises:
            AccumulationError: Gradients came from no loss of this group's: other models' losses were counted in this
                window, or `loss.backward()` was called where losses must be divided or scaled.
        """
        if self.stage == "empty":
            self._check_unknown_gradients()
        self.stage = "used"
        self._ledger.has_stepped = True

    def _check_unknown_gradients(self) -> None:
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
        """Note that an optimizer's gradients were cleared; once all are, so are the losses behind them."""
        if self.stage != "used":
            self._judged_for = None
        if self.stage != "empty":
            self._cleared.add(id(optimizer))
            if len(self._cleared) >= len(self.optimizers):
                self.stage = "empty"
        if self.stage == "empty":
            self._num_failed = self._ledger.window.num_failed

    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters, each once."""
        return [parameter for parameter in self._held if parameter.requires_grad]

    def holds_any(self, parameters: Sequence[Tensor]) -> bool:
        """Whether one of some parameters is these models'."""
        return any(id(parameter) in self._ids for parameter in parameters)

    def fingerprint(self) -> list[tuple[int, int]]:
        """Changes whenever a gradient does."""
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        return [(id(gradient), gradient._version) for gradient in gradients]

    def _hold_gradients(self) -> bool:
        return any(_is_nonzero(p.grad) for p in self._held if p.grad is not None)

    def _used_already(self, what: str) -> str:
        names = " and ".join(type(model).__name__ for model in self.models)
        return (
            f"a loss {what} adds to gradients of {names} that a step has used and that were not cleared: these would "
            "be normalised a second time. Call zero_grad() of every optimizer after each step"
        )

    def _correction(self) -> Tensor | float | None:
        """What reduced gradients must be multiplied by; None where they are right already."""
        ledger = self._ledger
        if not self._is_counted:
            nominal, length = ledger.window.num_micro_batches, ledger.window.length
            return None if length == nominal else nominal / length
        total = total_count(ledger.context, self._count)
        factor = ledger.reference.value(total) * ledger.context.topology.world_size / total
        ledger.reference.last_total = total
        return torch.where(total > 0, factor, torch.zeros_like(total))


class GradientLedger:
    """What the groups of one backend share.

    Args:
        context: Ranks and device.
        window: The accumulation window.
        scaler: The loss scale, for fp16.
        carrier: What runs backwards and holds their gradients; `.grad` of the parameters by default.

    Attributes:
        groups: Every group.
        reference: What counted losses are divided by before backward.
        first_losses: Whether the first losses reach what is prepared.
        counted_in: The window of the last counted loss.
        num_backwards: How many have run.
        last_backward: The micro-batch of the last one.
        has_stepped: Whether an optimizer stepped since the loss scale last moved.
        is_joined: Whether ranks may run out of batches at different steps.
        unreduced: The parameters whose gradients are not averaged over ranks, with their names: those that were
            frozen when their model was replicated.
    """

    def __init__(
        self,
        context: Context,
        window: AccumulationWindow,
        scaler: LossScaler | None,
        carrier: GradientCarrier | None = None,
    ) -> None:
        self.context = context
        self.window = window
        self.scaler = scaler
        self.carrier = carrier or ParameterGradients(scaler)
        self.groups: list[GradientGroup] = []
        self.reference = ReferenceCount(context, window)
        self.first_losses = FirstLosses()
        self.counted_in = -1
        self.num_backwards = 0
        self.last_backward = -1
        self.has_stepped = False
        self.is_joined = False
        self.unreduced: dict[Tensor, str] = {}

    def check_reduced(self, optimizer: Optimizer) -> None:
        """Refuse to step on gradients that are not averaged over ranks.

        Raises:
            UnreducedGradientError: A parameter was trained that was frozen when its model was prepared.
        """
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter in self.unreduced:
                    raise UnreducedGradientError(
                        f"{self.unreduced[parameter]} was frozen when prepare() replicated its model, and has a "
                        "gradient now, which ranks do not average: their weights would drift apart. Set "
                        "requires_grad before prepare(); to unfreeze later, free_memory() and prepare() again"
                    )

    def backward(self, loss: Tensor, count: Tensor | float | None, owners: Sequence[GradientGroup]) -> None:
        """Add the gradients of a loss of some groups.

        Raises:
            AccumulationError: See `GradientGroup.note`; or the loss reaches gradients that are final; or it is
                counted while ranks may run out of batches.
            PairingError: The loss trains a model that was not prepared, or whose optimizer was not.
            TypeError, ValueError: It is no loss, or its count no count.
        """
        check_loss(loss, count)
        if not self.first_losses.are_over:
            self.first_losses.follow(
                loss, {group: self.carrier.leaves(group.models) for group in self.groups}
            )
        if self.scaler is not None:
            self.move_scale()
        if count is not None and all(group.stage in ("empty", "used") for group in self.groups):
            self.reference.renew()
        final = self._final(owners) if len(owners) > 1 else ()
        for group in owners:
            if group not in final:
                group.note(count)
                if self.window.nonfinite_gradients == "raise":
                    group.note_loss(loss)
        if count is not None:
            loss = loss / self._reference_of(count)
        elif self.window.num_micro_batches > 1:
            loss = loss / self.window.num_micro_batches
        before = [group.fingerprint() for group in final] if final else None
        self.carrier.run(loss, [model for group in owners for model in group.models])
        self.num_backwards += 1
        self.last_backward = self.window.begun
        if final and before != [group.fingerprint() for group in final]:
            raise AccumulationError(
                "backward() reached gradients of this window that were clipped already; clip after its last loss"
            )

    def move_scale(self) -> None:
        """Move the loss scale after a step, unless gradients of the present scale are still to be used."""
        number, begun = self.window.number, self.window.begun
        pending = begun and any(g.stage in ("open", "final") and g.opened_in == number for g in self.groups)
        if self.scaler is not None and self.has_stepped and not pending:
            self.scaler.update()
            self.has_stepped = False

    def state_dict(self) -> dict[str, Any]:
        """The loss scale, where there is one, and the reference of counted losses."""
        self.move_scale()
        self.reference.renew()
        return {
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "reference_count": self.reference.number,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the loss scale and the reference of a saved run.

        Raises:
            ValueError: The saved run scaled its loss and this one does not, or the reverse.
        """
        if (state["scaler"] is None) != (self.scaler is None):
            saved, here = ("without", "scales") if state["scaler"] is None else ("with", "does not scale")
            raise ValueError(
                f"the checkpoint was saved {saved} fp16 loss scaling, and this run {here} its loss; resume in the "
                "precision it was saved in"
            )
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        reference: Tensor | None = state["reference_count"]
        self.reference.number = None if reference is None else reference.to(self.context.device)

    def finish_all_of(self, parameters: Sequence[Tensor]) -> list[GradientGroup]:
        """Make the gradients of parameters final. Called on all ranks.

        Returns:
            The groups they belong to.
        """
        found = [group for group in self.groups if group.holds_any(parameters)]
        for group in found:
            group.finish()
        return found

    def _final(self, owners: Sequence[GradientGroup]) -> list[GradientGroup]:
        number = self.window.number
        return [group for group in owners if group.stage == "final" and group.opened_in == number]

    def _reference_of(self, count: Tensor | float) -> Tensor:
        if self.is_joined:
            raise AccumulationError(
                "backward(count=...) inside join_uneven_inputs: a rank without batches cannot add its count; prepare "
                "the loader, which gives every rank equally many batches, or use the mean"
            )
        self.counted_in = self.window.number
        return self.reference.value(count)


def _is_nonzero(gradient: Tensor) -> bool:
    """Whether this rank's part of a gradient has values that are not zero."""
    part: Tensor = getattr(gradient, "_local_tensor", gradient)
    return bool((part._values() if part.is_sparse else part).count_nonzero())
