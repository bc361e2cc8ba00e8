"""The gradient state that a backend's models share, from a backward to a step.

Models that share an optimizer or a parameter form a group: their losses have one normalisation and one overflow
check; see `GradientGroup`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import ref

from torch import Tensor, nn

from drivetrain_backends.compat import names_of_hooks
from drivetrain_backends.errors import AccumulationError
from drivetrain_backends.gradients.accumulation import AccumulationWindow, ReferenceCount
from drivetrain_backends.gradients.loss_checks import FirstLosses, check_loss
from drivetrain_backends.gradients.reducer import ONCE, BackwardOptions, GradientReducer, ParameterGradients
from drivetrain_backends.gradients.snapshot import GradientVersions, versions_of
from drivetrain_backends.gradients.stages import GradientGroup as GradientGroup
from drivetrain_backends.modules.parameter_guard import STEPS_A_LOOK, Writes
from drivetrain_backends.optim.parameter_matching import parameter_names
from drivetrain_messages import list_some
from drivetrain_precision import PrecisionSettings
from drivetrain_state import Context


class GradientTracker:
    """The state that the groups of one backend share.

    Attributes:
        context: The ranks and the device.
        window: The accumulation window.
        reducer: The object that runs backwards and reduces their gradients.
        scaler: The loss scale, for fp16.
        precision: The limits of skipped steps.
        is_plain: Whether backwards leave the final mean gradients of a full window, with nothing to correct and no
            loss to record.
        reference: The divisor of counted losses before backward.
        first_losses: The check that the first losses reach prepared models.
        last_backward: The micro-batch of the last backward; -1 before the first.
        has_stepped: Whether an optimizer stepped since the loss scale was last updated.
        in_backward: Whether a backward is running whose gradients are not final before its end.
    """

    def __init__(
        self,
        context: Context,
        window: AccumulationWindow,
        reducer: GradientReducer,
        precision: PrecisionSettings | None = None,
    ) -> None:
        self.context = context
        self.window = window
        self.reducer = reducer
        self.scaler = reducer.scaler
        self.precision = precision or PrecisionSettings()
        is_watched = window.nonfinite_gradients == "raise"
        self.is_plain = self.scaler is None and type(reducer) is ParameterGradients and not is_watched
        # Weak: a group holds the tracker, and models are to be freed with their last reference.
        self._groups: list[ref[GradientGroup]] = []
        self.reference = ReferenceCount(context, window)
        self.first_losses = FirstLosses()
        self.last_backward = -1
        self.has_stepped = False
        self.in_backward = False
        self._until_look = 0

    @property
    def groups(self) -> list[GradientGroup]:
        """All live groups; the prepared models hold them."""
        return [group for one in self._groups if (group := one()) is not None]

    @groups.setter
    def groups(self, groups: Iterable[GradientGroup]) -> None:
        self._groups = [ref(group) for group in groups]

    @property
    def was_counted_in_window(self) -> bool:
        """True if a loss of any group was counted in the present window."""
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
            AccumulationError: See `GradientGroup.add_loss`; or the loss reaches gradients that are final; or it is
                counted while ranks may run out of batches.
            PairingError: The loss trains a model that is not prepared, or has no prepared optimizer.
            TypeError, ValueError: The loss or its count is invalid.
        """
        window = self.window
        if count is not None or type(loss) is not Tensor or loss.dim() or not loss.requires_grad:
            check_loss(loss, count)
        is_plain = self.is_plain and window.num_micro_batches == 1 and self.reference.number is None
        if is_plain and len(owners) == 1 and count is None and not self.first_losses.num_left:
            # Most steps: for a small model, the other checks would take as long as the backward.
            owners[0].add_loss(None)
            options.run(loss)
        else:
            self._add(loss, count, owners, options=options)
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
            self.first_losses.follow(loss, {group: reducer.leaves(group.models) for group in self.groups})
        if self.scaler is not None:
            self.move_scale()
        if count is not None and all(group.stage in ("empty", "used") for group in self.groups):
            self.reference.renew()
        final = self._final(owners) if len(owners) > 1 else ()
        is_bad = ~loss.detach().isfinite() if window.nonfinite_gradients == "raise" else None
        for group in owners:
            if not final or group not in final:
                group.add_loss(count, is_bad=is_bad)
        if count is not None:
            loss = loss / self._reference_of(count)
        elif window.num_micro_batches > 1:
            loss = loss / window.num_micro_batches
        before = [versions_of(group.parameters()) for group in final] if final else ()
        trained = [model for group in owners for model in group.models]
        writes = self._writes_to_watch()
        self.in_backward = not (self.is_plain and window.num_micro_batches == 1 and count is None)
        try:
            reducer.backward(loss, trained, options=options)
        finally:
            self.in_backward = False
        if writes is not None:
            _check_unwritten(writes, self.groups)
        if final:
            _check_unreached(final, before)
        for group in self.groups:
            if group.stage == "open":
                group.record()

    def _writes_to_watch(self) -> Writes | None:
        """Return the writes to parameters from now on, in the first backwards and now and then; otherwise None."""
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
        """Return the loss scale, if there is one, and the reference count of counted losses."""
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
        reference: Tensor | None = state["reference_count"]
        self.reference.number = None if reference is None else reference.to(self.context.device)

    def finish_all_of(self, parameters: Sequence[Tensor]) -> list[GradientGroup]:
        """Make the gradients of parameters final and return the groups that hold any of them. Called on all ranks."""
        found = [group for group in self.groups if group.holds_any(parameters)]
        for group in found:
            group.finish()
        return found

    def _final(self, owners: Sequence[GradientGroup]) -> list[GradientGroup]:
        number = self.window.number
        return [group for group in owners if group.stage == "final" and group.last_window == number]

    def _reference_of(self, count: Tensor | float) -> Tensor:
        if self.reducer.is_joined:
            raise AccumulationError(
                "backward(count=...) inside join_uneven_inputs: a rank without batches cannot add its count; prepare "
                "the loader, which gives every rank equally many batches, or use the mean"
            )
        return self.reference.value(count)


def _check_unwritten(writes: Writes, groups: Sequence[GradientGroup]) -> None:
    """Refuse a backward in which parameters were written to."""
    if written := writes.since():
        hooks = sorted({name for group in groups for p in group.parameters() for name in names_of_hooks(p)})
        raise AccumulationError(
            f"{list_some(written)} changed while backward() ran: a hook steps there{' (' if hooks else ''}"
            f"{', '.join(hooks)}{')' if hooks else ''}, before gradients are averaged over ranks, unscaled and "
            "accumulated. Step after backward(), with an optimizer that was passed to prepare()"
        )


def _check_unreached(final: Sequence[GradientGroup], before: Sequence[GradientVersions]) -> None:
    """Refuse a backward that reached groups whose gradients are final."""
    if any(not old.are(versions_of(group.parameters())) for old, group in zip(before, final, strict=True)):
        raise AccumulationError(
            "backward() reached gradients of this window that were clipped already; clip after its last loss"
        )


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
