"""Consecutive skipped steps: find the layer that overflows first, and end a run that never steps."""

import logging
from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

from drivetrain_precision.errors import SkippedStepsError
from drivetrain_precision.scaling.gradient_watch import Gather, GradientWatch
from drivetrain_precision.scaling.scaler import LossScaler
from drivetrain_precision.settings import PrecisionSettings

logger = logging.getLogger(__name__)

# One skipped step is how a scale that has grown too far falls again; two one after another are rare but at the start.
_WATCHED_AFTER = 2
_MOST_ROWS = 20  # of a logged table


class SkippedSteps:
    """The consecutive skipped steps of models with a common optimizer step.

    Hooks (`GradientWatch`) find the layer that overflows. They are attached after two consecutive skipped steps, or
    when the next skip would be an error: normal steps pay nothing. A run that begins with the minimum loss scale
    therefore gets one more step, with hooks, before its error.

    Attributes:
        num_skipped: The number of consecutive skipped steps.
        is_active: Whether `stepped` must be called.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        settings: PrecisionSettings | None = None,
        *,
        scaler: LossScaler | None = None,
    ) -> None:
        self.num_skipped = 0
        self.is_active = False
        self._models = tuple(models)
        self._settings = settings or PrecisionSettings()
        self._scaler = scaler
        self._watch: GradientWatch | None = None
        self._steppers: set[object] = set()  # that skipped the last step
        self._num_stepped = 0  # since the last report

    def watch_always(self) -> None:
        """Attach the hooks for the whole run if settings ask for an underflow report. Called after placing models."""
        if self._settings.watch_underflow is not None and self._watch is None:
            self._attach(underflow=True)
            self.is_active = True

    def skipped(self, stepper: object = None, *, gather: Gather | None = None) -> None:
        """Record a step that is skipped because a gradient is not finite. Called on all ranks.

        With a `gather` for a single rank, it may be called on that rank only. If several optimizers share the
        gradients, the stepper is the optimizer that would have stepped.

        Raises:
            SkippedStepsError: The gradients overflow at the smallest loss scale, or the number of consecutive skipped
                steps reaches the settings' limit. The message names the layer that overflowed first.
        """
        if not self._is_new_step(stepper):
            return
        self.num_skipped += 1
        self.is_active = True
        limit = self._find_reached_limit()
        if limit is not None and self._watch is not None:
            raise self._make_error(limit, gather)
        if self._watch is not None:
            self._watch.forget_first()
        elif limit is not None or self.num_skipped >= _WATCHED_AFTER or self._find_reached_limit(ahead=1):
            self._attach(underflow=False)

    def stepped(self, stepper: object = None, *, gather: Gather | None = None) -> None:
        """Record a step that was not skipped; needed while `is_active`. Called on all ranks, as `skipped` is.

        If the settings ask for reports, the ranks regularly sum their counts, and rank 0 logs the sums.
        """
        self.num_skipped = 0
        every = self._settings.watch_underflow
        if every is None or self._watch is None:
            self._steppers.clear()
            self.close()
            return
        if not self._is_new_step(stepper):
            return
        self._watch.forget_first()
        self._num_stepped += 1
        if self._num_stepped == every:
            self._num_stepped = 0
            report = self._watch.report(gather=gather)
            self._watch.reset()
            if not dist.is_initialized() or dist.get_rank() == 0:
                logger.warning(
                    "gradients of the last %d steps by layer (precision.watch_underflow):\n%s",
                    every,
                    report.table(_MOST_ROWS),
                )

    def first_nonfinite(self, *, gather: Gather | None = None) -> str | None:
        """Return which layer overflowed first, and how, if hooks saw it. Called on all ranks, as `skipped` is."""
        found = None if self._watch is None else self._watch.first_nonfinite(gather=gather)
        return None if found is None else str(found)

    def close(self) -> None:
        """Remove the hooks."""
        self.is_active = False
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _is_new_step(self, stepper: object) -> bool:
        """Return whether a step begins, rather than another optimizer's part of the last one."""
        if self._steppers and stepper not in self._steppers:
            self._steppers.add(stepper)
            return False
        self._steppers = {stepper}
        return True

    def _attach(self, *, underflow: bool) -> None:
        alone = len(self._models) == 1
        models = {"" if alone else str(index): model for index, model in enumerate(self._models)}
        self._watch = GradientWatch(models, underflow=underflow)

    def _find_reached_limit(self, *, ahead: int = 0) -> str | None:
        """Return the limit that the skipped steps plus `ahead` more reach, as a clause; None if below all limits."""
        most = self._settings.max_skipped_steps
        if self._scaler is not None and not self._scaler.can_fall(after_overflows=ahead):
            return f"the loss scale is at its smallest, precision.min_scale={self._scaler.settings.min_scale}"
        if most is not None and self.num_skipped + ahead >= most:
            return f"no more are allowed, precision.max_skipped_steps={most}"
        return None

    def _make_error(self, limit: str, gather: Gather | None) -> SkippedStepsError:
        assert self._watch is not None
        found = self._watch.first_nonfinite(gather=gather)
        scale = None if self._scaler is None else self._scaler.value
        names = " and ".join(type(model).__name__ for model in self._models)
        if found is not None:
            said, layer = f"The first value that is not finite is {found}", found.layer or found.layer_type
        else:
            layer = None
            said = (
                "No module's activations or gradients held one: ranks' gradients overflow as they are summed"
                if self._watch.has_seen
                else "Which layer overflows first is not known: no forward of the model itself ran since the last "
                "step, or torch.compile compiles all of it; run it uncompiled"
            )
        skipped = f"{self.num_skipped} step{'s' * (self.num_skipped > 1)} one after another"
        at = "" if scale is None else f", the last at a loss scale of {scale}"
        return SkippedStepsError(
            f"the gradients of {names} were not finite in {skipped}{at}, so that nothing was stepped, and {limit}. "
            f"{said}. {_ADVICE if scale is None else _ADVICE_FP16}",
            num_skipped=self.num_skipped,
            scale=scale,
            layer=layer,
        )


_ADVICE = (
    "Look at the weights and the inputs of that layer; if training went well before, lower the learning rate, and go "
    "on from a checkpoint"
)
_ADVICE_FP16 = (
    "Train in mixed_precision='bf16', which has the range of fp32; if training went well before, lower the learning "
    "rate, and go on from a checkpoint; else look at the weights and the inputs of that layer"
)
