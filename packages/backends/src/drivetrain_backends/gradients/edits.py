"""A watch for other code that changes gradients before a step: the changed gradients are averaged, or refused."""

from collections.abc import Sequence

from torch import Tensor, nn

from drivetrain_backends.errors import AccumulationError
from drivetrain_backends.gradients.accumulation import AccumulationWindow
from drivetrain_backends.gradients.reducer import GradientReducer, ParameterGradients
from drivetrain_backends.gradients.snapshot import GradientSnapshot
from drivetrain_backends.optim.parameter_matching import parameter_names
from drivetrain_messages import list_some


class EditWatch:
    """A watch over the gradients of models for changes by other code, if a model's gradients stay in `.grad`.

    Gradients that still need a correction (unscaling or normalisation) may only be cleared, and only between two
    windows. Other gradients may be edited; replicas then average them.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        parameters: Sequence[nn.Parameter],
        reducer: GradientReducer,
        window: AccumulationWindow,
    ) -> None:
        self._models = models
        self._parameters = parameters
        self._window = window
        self._reducer = reducer if isinstance(reducer, ParameterGradients) else None
        self._is_scaled = reducer.scaler is not None
        self.snapshot = GradientSnapshot(parameters)

    @property
    def are_averaged(self) -> bool:
        """True if ranks hold replicas, and all gradients are already averaged."""
        reducer = self._reducer
        return reducer is not None and reducer.averages and reducer.are_averaged(self._models)

    def record(self, *, to_correct: bool) -> None:
        """Record the present gradients if later changes matter. Called after each pass over the gradients."""
        reducer = self._reducer
        if reducer is not None and (reducer.averages or to_correct):
            self.snapshot.take()
            reducer.have_moved(self._models)  # resets it: the snapshot includes the move

    def found(self, *, to_correct: bool) -> bool:
        """Return whether other code changed the gradients since the last record."""
        if self._reducer is None or not self.snapshot.differs():
            return False
        if to_correct and self._reducer.have_moved(self._models):
            self.snapshot.take()
            return False
        return True

    def average(self, *, to_correct: bool, are_empty: bool) -> None:
        """Average gradients that come from no loss of these models, if ranks would otherwise drift apart.

        Called on all ranks. `are_empty` says that all gradients of losses were cleared: any gradient that is present
        then comes from other code.
        """
        reducer = self._reducer
        if reducer is None or not reducer.averages:
            return
        if self.found(to_correct=to_correct) or (are_empty and not self.snapshot.is_taken):
            reducer.mark_edited(self._models)
            reducer.average(self._models)
            self.snapshot.take()

    def accept(self) -> None:
        """Accept the changed gradients, which need no correction, and have ranks average them."""
        if self._reducer is not None:
            self._reducer.mark_edited(self._models)

    def check_before_loss(self, *, is_same_window: bool, is_counted: bool) -> bool:
        """Refuse a loss if changed gradients still need a correction, unless all were cleared between windows.

        Return whether any gradient is left, to which the loss will add.
        """
        edits = self.snapshot.edits()
        is_midway = self._window.num_micro_batches > 1 and is_same_window
        if edits.edited or (is_midway and edits.cleared):
            raise self._error([*edits.edited, *edits.cleared])
        if edits.left and is_counted:
            raise self._error(edits.cleared)
        return bool(edits.left)

    def check_before_correction(self) -> None:
        """Refuse changed gradients that still need a correction; cleared gradients are allowed."""
        if edited := self.snapshot.edits().edited:
            raise self._error(edited)

    def check_unscaled(self) -> None:
        """Refuse shards scaled without a new version; see `GradientSnapshot.were_scaled`. May synchronise."""
        if self.snapshot.were_scaled():
            raise self._error([])

    def _error(self, places: Sequence[int]) -> AccumulationError:
        names: dict[Tensor, str] = parameter_names({str(i): model for i, model in enumerate(self._models)})
        listed = [names.get(self._parameters[place], "one") for place in places] or ["shards of all"]
        state = "scaled for fp16" if self._is_scaled else "sums, to be divided by their count"
        if self._window.num_micro_batches > 1:
            state = f"those of an accumulation window of {self._window.num_micro_batches} micro-batches"
        return AccumulationError(
            f"gradients of {' and '.join(type(model).__name__ for model in self._models)} "
            f"({list_some(listed, most=3)}) were changed since their last loss, and they are {state}, not yet what a "
            "step takes. In place of "
            "model.zero_grad() or p.grad = None call zero_grad() of the prepared optimizer, which leaves an open "
            "window alone; of torch's clip_grad_norm_, accelerator.clip_grad_norm_; of loss.backward(), "
            "accelerator.backward(loss). What else edits gradients does so after "
            'accelerator.clip_grad_norm_(parameters, float("inf")), which makes them final'
        )
