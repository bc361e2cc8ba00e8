"""The gradients of a backend's models, from a backward to a step.

Models that share an optimizer or a parameter form a group: their losses have one normalisation and one check for
overflows. A row is a stage of a group's gradients, a column is an event, and a cell is the stage after the event:

| stage | `add_loss` | `finish` | `use` | `clear`, by all optimizers |
|---|---|---|---|---|
| empty | open | empty | used | empty |
| open | open | final | - | empty |
| final | open, in a later window | final | used | empty |
| used | open | used | used | empty |

Gradients are *open* while losses add to them, *final* once they are unscaled and normalised (at the first clip or
step of a closed window), *used* after a step, and *empty* after `zero_grad`. A step comes after `finish`. The
docstrings of the events say what they refuse, and why.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain_backends.compat import names_of_hooks
from drivetrain_backends.errors import AccumulationError
from drivetrain_backends.gradients.accumulation import AccumulationWindow, ReferenceCount, total_count
from drivetrain_backends.gradients.edits import EditWatch
from drivetrain_backends.gradients.last_forwards import LastForwards
from drivetrain_backends.gradients.loss_checks import FirstLosses, check_loss
from drivetrain_backends.gradients.nonfinite import holds_nonfinite
from drivetrain_backends.gradients.reducer import ONCE, BackwardOptions, GradientReducer, ParameterGradients
from drivetrain_backends.gradients.snapshot import is_nonzero, versions_of
from drivetrain_backends.modules.parameter_guard import STEPS_A_LOOK, Writes
from drivetrain_backends.optim.parameter_matching import parameter_names
from drivetrain_messages import list_some
from drivetrain_precision import PrecisionSettings, SkippedSteps
from drivetrain_state import Context

Stage = Literal["empty", "open", "final", "used"]


class WindowLosses(NamedTuple):
    """The properties of the losses in open gradients that are needed to make the gradients final."""

    is_counted: bool = False  # whether the losses are sums with counts, rather than means
    num_items: Tensor | float = 0.0  # the sum of this rank's counts
    adds_to_used: bool = False  # whether the losses were added to gradients that a step had used
    is_bad: Tensor | None = None  # whether a loss was not finite, of shape (); None if not recorded


class FinalGradients(NamedTuple):
    """The properties of final gradients."""

    norm: Tensor | None = None  # the norm before clipping, of shape (); None if they were not clipped by norm
    # Whether they held an infinity or NaN, if that was checked: in fp16, and where the window says so.
    overflowed: bool = False
    # The optimizers that stepped since that check, by id; None if there was none outside fp16.
    checked_for: frozenset[int] | None = None


_NO_LOSSES = WindowLosses()
_UNCHECKED = FinalGradients()


class GradientGroup:
    """The gradients of models that share an optimizer or a parameter."""

    def __init__(self, models: Sequence[nn.Module], tracker: "GradientTracker") -> None:
        self.models = tuple(models)
        self.optimizers: list[Optimizer] = []  # the users' optimizers that train the models
        self.stage: Stage = "empty"  # the stage of the gradients; the events alone change it
        self.losses = _NO_LOSSES
        self.last_window = -1  # the number of the window of the last loss; -1 before the first
        self.final = _UNCHECKED
        # The steps skipped one after another.
        self.skips = SkippedSteps(self.models, tracker.precision, scaler=tracker.scaler)
        self._cleared: set[int] = set()  # the optimizers cleared since the last loss
        self._num_failed = 0  # failed micro-batches that left nothing in these gradients
        # Cached: walking through modules takes longer than a pass over small gradients.
        self._held = tuple(dict.fromkeys(p for model in self.models for p in model.parameters()))
        self._ids = frozenset(map(id, self._held))
        self._tracker = tracker
        self._edits = EditWatch(self.models, self._held, tracker.reducer, tracker.window)

    def add_loss(self, count: Tensor | float | None, *, is_bad: Tensor | None = None) -> None:
        """Record a loss before its backward: a mean, or a sum over `count` items; `is_bad` if it is not finite."""
        window, losses, is_counted = self._tracker.window, self.losses, count is not None
        if self.stage == "final" and self.last_window == window.number and window.begun:
            raise AccumulationError(
                "backward() after the gradients of this window were clipped: they are final; clip after its last loss"
            )
        is_new = self.stage in ("empty", "used") or (
            self.stage == "open" and not self._accept_or_refuse_edits(is_counted)
        )
        if is_new:
            losses = self._first_losses(is_counted=is_counted)
        elif losses.is_counted != is_counted:
            raise AccumulationError(
                "backward(loss) and backward(loss_sum, count=...) came in one accumulation window: a mean and a sum "
                "cannot be added; pass count= for every loss of the window, or for none (and model= for each loss "
                "where several models are prepared)"
            )
        if count is not None:
            num_items = losses.num_items + (count.detach() if isinstance(count, Tensor) else count)
            losses = losses._replace(is_counted=True, num_items=num_items)
        if is_bad is not None:
            losses = losses._replace(is_bad=is_bad if losses.is_bad is None else losses.is_bad | is_bad)
        self.losses, self.last_window = losses, window.number
        self.stage, self.final = "open", _UNCHECKED
        self._cleared.clear()

    def finish(self) -> None:
        """Make the closed window's gradients final: unscaled, and the gradient of the requested mean.

        Called on all ranks. Gradients that are not open do not change, except that ranks average edits of them.
        """
        if self._tracker.in_backward:
            self.check_ended()
        if self.stage != "open":
            self._edits.average(to_correct=self._is_corrected, are_empty=self.stage == "empty")
            return
        tracker, window = self._tracker, self._tracker.window
        if self._num_failed != window.num_failed:
            raise AccumulationError(
                "the step of a window in which a micro-batch ended in an exception: what it left in the gradients is "
                "not known. Call optimizer.zero_grad() where the exception is caught, for every optimizer"
            )
        if tracker.is_plain and not self.losses.is_counted and window.length == window.num_micro_batches == 1:
            self.stage = "final"
            return
        if has_edits := self._edits.found(to_correct=self._is_corrected):
            if self._is_corrected:
                self._edits.check_before_correction()
            else:
                self._edits.accept()
        factor = self._correction()
        is_changed = factor is not None or tracker.scaler is not None
        # Values may be read where fp16 synchronises at this step anyway, and in a debug run.
        context = tracker.context
        if is_changed and (
            tracker.scaler is not None or context.device.type == "cpu" or context.settings.debug
        ):
            self._edits.check_unscaled()
        if factor is not None and self.losses.adds_to_used:
            raise self._refuse_used("of a window that closed early")
        # Unmodified gradients are still those just compared; recording them is the main cost of a plain step.
        is_recorded = not has_edits and not is_changed and self._edits.are_averaged
        self.final = FinalGradients(overflowed=tracker.reducer.finalize(self.models, factor))
        self.stage = "final"
        if not is_recorded:
            self.record()

    def check_ended(self) -> None:
        """Refuse a step or clip while a backward runs, as by a hook on a parameter."""
        if self._tracker.in_backward:
            raise AccumulationError(
                f"a step or clip of {self._names} while backward() runs, from a hook on a parameter: its gradients "
                "are not averaged over ranks, unscaled and accumulated before the end of backward. Step and clip "
                "after accelerator.backward(loss), with one optimizer over all parameters or one after the other"
            )

    def use(self) -> None:
        """Record a step of an optimizer, even if skipped for an overflow; refuse gradients of no recorded loss."""
        if self.stage == "empty":
            self._check_known()
        self.stage = "used"
        self._tracker.has_stepped = True

    def clear(self, optimizer: Optimizer) -> None:
        """Record that an optimizer's gradients were cleared; after all optimizers, the group is empty."""
        was_used = self.stage == "used"
        if not was_used and self.final.checked_for is not None:
            self.final = self.final._replace(checked_for=None)
        if self.stage != "empty":
            snapshot = self._edits.snapshot
            self._cleared.add(id(optimizer))
            if len(self._cleared) < len(self.optimizers):
                if snapshot.is_taken:
                    snapshot.take()
                return
            self._cleared.clear()
            if not was_used and self._edits.are_averaged:
                snapshot.take()  # other ranks that step have nothing left to average: nor may this one
            elif snapshot.is_taken:
                snapshot.drop()
            self.stage = "empty"
        self._num_failed = self._tracker.window.num_failed

    def record(self) -> None:
        """Record the present gradients, to detect later changes by other code. Called after each pass over these."""
        self._edits.record(to_correct=self.stage == "open" and self._is_corrected)

    def check_finite(self, optimizer: Optimizer | None = None, *, are_finite: bool = False) -> None:
        """Check final gradients once for infinities and NaNs, if the window asks for checks. Called on all ranks.

        A second step of the same `optimizer` needs a new check. `are_finite` says that a norm has shown the result.
        """
        if self._tracker.scaler is not None:
            return  # fp16's scaler checked while unscaling
        checked_for, overflowed = self.final.checked_for, self.final.overflowed
        if checked_for is None or (optimizer is not None and id(optimizer) in checked_for):
            gradients = [gradient for p in self._held if (gradient := p.grad) is not None]
            overflowed = not are_finite and holds_nonfinite(self._tracker.context, gradients)
            checked_for = frozenset[int]()
        if optimizer is not None:
            checked_for |= {id(optimizer)}
        self.final = self.final._replace(overflowed=overflowed, checked_for=checked_for)

    def skip(self) -> None:
        """Skip the steps on these final gradients, as if they had overflowed."""
        self.final = self.final._replace(overflowed=True)

    def set_norm(self, norm: Tensor) -> None:
        """Record the norm of the final gradients before clipping, of shape ()."""
        _, overflowed, checked_for = self.final
        self.final = FinalGradients(norm, overflowed, checked_for)  # `_replace` takes three times as long

    @property
    def is_accumulating(self) -> bool:
        """True if `zero_grad` must keep the gradients, because an open window has accumulated them.

        Many loops call `zero_grad` before backward, which must keep the gradients of earlier micro-batches.
        """
        window = self._tracker.window
        if self.stage != "open" or self.last_window != window.number or self._num_failed != window.num_failed:
            return False
        return not (window.closing and (window.length == 1 or self._tracker.last_backward == window.begun))

    def parameters(self) -> list[nn.Parameter]:
        """Return the trainable parameters, without duplicates."""
        return [parameter for parameter in self._held if parameter.requires_grad]

    def holds_any(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether any of the parameters belongs to these models."""
        return any(id(parameter) in self._ids for parameter in parameters)

    @property
    def _is_corrected(self) -> bool:
        """True if gradients need a correction (unscaling or normalisation) before a step can use them."""
        tracker = self._tracker
        return self.losses.is_counted or tracker.scaler is not None or tracker.window.num_micro_batches > 1

    def _first_losses(self, *, is_counted: bool) -> WindowLosses:
        """Return the record of losses for a new window, and forget failed micro-batches of earlier windows."""
        window = self._tracker.window
        self._num_failed = max(self._num_failed, window.num_failed_before)
        if self.stage != "used" or not any(is_nonzero(p.grad) for p in self._held if p.grad is not None):
            return _NO_LOSSES
        if is_counted or self._tracker.scaler is not None:
            raise self._refuse_used("counted or scaled")
        return WindowLosses(adds_to_used=True)

    def _accept_or_refuse_edits(self, is_counted: bool) -> bool:
        """Accept or refuse other code's changes to open gradients; return whether the gradients stay open."""
        if not self._edits.found(to_correct=self._is_corrected):
            return True
        if not self._is_corrected:
            self._edits.accept()
            return True
        return self._edits.check_before_loss(
            is_same_window=self.last_window == self._tracker.window.number,
            is_counted=self.losses.is_counted or is_counted,
        )

    def _check_known(self) -> None:
        """Refuse gradients that come from no loss of this group; see `use`."""
        tracker = self._tracker
        others_counted = tracker.was_counted_in_window and self.last_window != tracker.window.number
        divided = tracker.window.num_micro_batches > 1 or tracker.scaler is not None
        if not (others_counted or divided) or all(p.grad is None for p in self.parameters()):
            return
        if others_counted:
            raise AccumulationError(
                f"an optimizer of {self._names} steps, but no counted loss of this window was said to be theirs: "
                "pass every model a loss trains, backward(..., model=(a, b))"
            )
        raise AccumulationError(
            f"an optimizer of {self._names} steps on gradients of loss.backward(), which are neither divided by the "
            "window's micro-batches nor scaled for fp16: call accelerator.backward(loss) in its place"
        )

    @property
    def _names(self) -> str:
        return " and ".join(type(model).__name__ for model in self.models)

    def _refuse_used(self, what: str) -> AccumulationError:
        return AccumulationError(
            f"a loss {what} adds to gradients of {self._names} that a step has used and that were not cleared: these "
            "would be normalised a second time. Call zero_grad() of every optimizer after each step"
        )

    def _correction(self) -> Tensor | float | None:
        """Return the factor that corrects reduced gradients; None if they need no correction."""
        tracker = self._tracker
        if not self.losses.is_counted:
            window = tracker.window
            nominal, length = window.num_micro_batches, window.length
            return None if length == nominal or window.keeps_divisor else nominal / length
        total = total_count(tracker.context, self.losses.num_items)
        factor = tracker.reference.value(total) * tracker.context.ranks("counts").size / total
        tracker.reference.last_total = total
        return torch.where(total > 0, factor, torch.zeros_like(total))


class GradientTracker:
    """The groups of one backend, and their shared state: the window, the loss scale and the reference count."""

    def __init__(
        self,
        context: Context,
        window: AccumulationWindow,
        reducer: GradientReducer,
        precision: PrecisionSettings | None = None,
    ) -> None:
        self.context = context  # the ranks and the device
        self.window = window
        self.reducer = reducer  # the object that runs backwards and reduces their gradients
        self.scaler = reducer.scaler  # the loss scale, for fp16
        self.precision = precision or PrecisionSettings()  # the limits of skipped steps
        is_watched = window.on_nonfinite == "raise"
        # Whether backwards leave the final mean gradients of a full window, with nothing to correct and no loss to
        # record.
        self.is_plain = self.scaler is None and type(reducer) is ParameterGradients and not is_watched
        # Weak: a group holds the tracker, and models are to be freed with their last reference.
        self._groups: list[ref[GradientGroup]] = []
        self.reference = ReferenceCount(context, window)  # the divisor of counted losses before backward
        self.forwards: LastForwards | None = None  # to run again where gradients are not finite
        self.first_losses = FirstLosses()  # the check that the first losses reach prepared models
        self.last_backward = -1  # the micro-batch of the last backward; -1 before the first
        self.has_stepped = False  # whether an optimizer stepped since the loss scale was last updated
        self.in_backward = False  # whether a backward is running whose gradients are not final before its end
        self._until_look = 0
        # Whether a mean in a window of one micro-batch needs no other checks: they would take as long as it.
        self._is_short = False

    @property
    def groups(self) -> list[GradientGroup]:
        """All live groups; only the prepared models keep a group alive."""
        return [group for one in self._groups if (group := one()) is not None]

    @groups.setter
    def groups(self, groups: Iterable[GradientGroup]) -> None:
        self._groups = [ref(group) for group in groups]
        self._is_short = False

    @property
    def was_counted_in_window(self) -> bool:
        """True if any group has had a loss with a count in the present window."""
        number = self.window.number
        return any(group.losses.is_counted and group.last_window == number for group in self.groups)

    def backward(
        self,
        loss: Tensor,
        count: Tensor | float | None,
        owners: Sequence[GradientGroup],
        *,
        options: BackwardOptions = ONCE,
    ) -> None:
        """Add the gradients of a loss of some groups.

        Raises:
            AccumulationError: See `GradientGroup.add_loss`; or the loss reaches final gradients; or the loss has a
                count while ranks may run out of batches.
            PairingError: The loss trains a model that is not prepared, or has no prepared optimizer.
            TypeError, ValueError: The loss or its count is invalid.
        """
        window = self.window
        if count is not None or type(loss) is not Tensor or loss.dim() or not loss.requires_grad:
            check_loss(loss, count)
        if self._is_short and count is None and window.num_micro_batches == 1 and len(owners) == 1:
            if (group := owners[0]).stage == "empty" and not window.num_failed:  # `add_loss`, in most steps
                group.losses, group.last_window = _NO_LOSSES, window.number
                group.stage, group.final = "open", _UNCHECKED
            else:
                group.add_loss(None)
            if options is ONCE:
                loss.backward()
            else:
                options.run(loss)
        else:
            self._add(loss, count, owners, options=options)
            is_settled = self.reference.number is None and not self.first_losses.num_left
            self._is_short = self.is_plain and is_settled
        self.last_backward = window.begun

    def _add(
        self,
        loss: Tensor,
        count: Tensor | float | None,
        owners: Sequence[GradientGroup],
        *,
        options: BackwardOptions,
    ) -> None:
        window, reducer = self.window, self.reducer
        if self.first_losses.num_left:
            self.first_losses.follow(loss, [(group, reducer.leaves(group.models)) for group in self.groups])
        if self.scaler is not None:
            self.move_scale()
        if count is not None and all(group.stage in ("empty", "used") for group in self.groups):
            self.reference.renew()
        final = [
            group
            for group in (owners if len(owners) > 1 else ())
            if group.stage == "final" and group.last_window == window.number
        ]
        is_bad = ~loss.detach().isfinite() if window.on_nonfinite == "raise" else None
        for group in owners:
            if group not in final:
                group.add_loss(count, is_bad=is_bad)
        if count is not None:
            if reducer.is_joined:
                raise AccumulationError(
                    "backward(count=...) inside join_uneven_inputs: a rank without batches cannot add its count; "
                    "prepare the loader, which gives every rank equally many batches, or use the mean"
                )
            loss = loss / self.reference.value(count)
        elif window.num_micro_batches > 1:
            loss = loss / window.num_micro_batches
        before = [versions_of(group.parameters()) for group in final]
        trained = [model for group in owners for model in group.models]
        writes = self._writes_to_watch()
        self.in_backward = not (self.is_plain and window.num_micro_batches == 1 and count is None)
        try:
            reducer.backward(loss, trained, options=options)
        finally:
            self.in_backward = False
        if writes is not None:
            _check_unwritten(writes, self.groups)
        if any(
            not old.are(versions_of(group.parameters())) for old, group in zip(before, final, strict=True)
        ):
            raise AccumulationError(
                "backward() reached gradients of this window that were clipped already; clip after its last loss"
            )
        for group in self.groups:
            if group.stage == "open":
                group.record()

    def begin_pieces(self, group: GradientGroup) -> Tensor:
        """Open the gradients of a batch whose backward comes in pieces; return the divisor of their losses.

        A mean counts as one item. Called on all ranks.
        """
        if self.scaler is not None:
            self.move_scale()
        if all(one.stage in ("empty", "used") for one in self.groups):
            self.reference.renew()
        group.add_loss(0.0)
        self.in_backward = True
        return self.reference.value(1.0)

    def end_pieces(self, group: GradientGroup, count: Tensor) -> None:
        """Record the number of items of the pieces."""
        self.in_backward = False
        group.losses = group.losses._replace(num_items=group.losses.num_items + count)
        group.record()
        self.last_backward = self.window.begun

    def _writes_to_watch(self) -> Writes | None:
        """Return a record of writes to parameters from now on; None for most backwards after the first ones."""
        self._until_look -= 1
        if self._until_look > 0 and not self.first_losses.num_left:
            return None
        self._until_look = STEPS_A_LOOK
        if self.is_plain and self.window.num_micro_batches == 1:
            return None
        named = parameter_names({str(i): m for i, m in enumerate(m for g in self.groups for m in g.models)})
        return Writes({name: parameter for parameter, name in named.items()})

    def move_scale(self) -> None:
        """Update the loss scale after a step, unless gradients of the present scale are still in use."""
        number, begun = self.window.number, self.window.begun
        pending = begun and any(g.stage in ("open", "final") and g.last_window == number for g in self.groups)
        if self.scaler is not None and self.has_stepped and not pending:
            self.scaler.update()
            self.has_stepped = False

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale, if the run has a loss scale, and the reference count of counted losses."""
        self.move_scale()
        self.reference.renew()
        return {
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "reference_count": self.reference.number,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the loss scale and the reference count of a saved run."""
        if (state["scaler"] is None) != (self.scaler is None):
            saved, here = ("without", "scales") if state["scaler"] is None else ("with", "does not scale")
            raise ValueError(
                f"the checkpoint was saved {saved} fp16 loss scaling, and this run {here} its loss; resume in the "
                "precision it was saved in"
            )
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        self._is_short = False
        reference: Tensor | None = state["reference_count"]
        self.reference.number = None if reference is None else reference.to(self.context.device)

    def finish_all_of(self, parameters: Sequence[Tensor]) -> list[GradientGroup]:
        """Make the gradients of parameters final; return the groups that hold the parameters. Called on all ranks."""
        found = [group for group in self.groups if group.holds_any(parameters)]
        for group in found:
            group.finish()
        return found


def _check_unwritten(writes: Writes, groups: Sequence[GradientGroup]) -> None:
    """Refuse a backward in which parameters were written to."""
    if written := writes.since():
        hooks = sorted({name for group in groups for p in group.parameters() for name in names_of_hooks(p)})
        raise AccumulationError(
            f"{list_some(written)} changed while backward() ran: a hook steps there{' (' if hooks else ''}"
            f"{', '.join(hooks)}{')' if hooks else ''}, before gradients are averaged over ranks, unscaled and "
            "accumulated. Step after backward(), with an optimizer that was passed to prepare()"
        )


def group_models(
    models: Sequence[nn.Module], trained_together: Sequence[Sequence[int]], tracker: GradientTracker
) -> list[GradientGroup]:
    """Return the group of each model; models that share a parameter or an optimizer are in one group.

    `trained_together` holds, for each optimizer, the indices of its models. A group with the same models is kept.
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
