"""The strategy of a composed backend: what is done to models, gradients and states, as one value.

`ComposedBackend` and `ComposedPrepared` call the parts of a strategy on all ranks in this order:

1. `prepare`: `recall`, then `plan`, of each transform, before any change; then, for each model, `apply` of each
   transform in the order of the tuple; then `StateLayout.adopt` for each optimizer. After an error: `release` of the
   transforms that were applied, in reverse order, then `fail` of every transform.
2. A micro-batch: `GradientReducer.leaves` for the first losses, then `backward`, inside `local` unless the window
   closes.
3. A closed window: in `clip`, `StepGuard.before_clip`, then `StateLayout.chosen`, `GradientReducer.finalize` and
   `StateLayout.norm`; in `step`, `StepGuard.before_step`, then `finalize` unless a clip has called it, the optimizer,
   and, if it has stepped, `StepGuard.after_step`; in `zero_grad`, `GradientReducer.cleared` once all optimizers are.
4. A checkpoint: `StateLayout.open`, then `model_state` and `optimizer_state`, or `divide` and `load_model`.
5. `close`: `release` of each model by each transform in reverse order; then `close` of transforms, guards, gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from drivetrain_backends.composed.state_layout import StateLayout
from drivetrain_backends.gradients.reducer import GradientReducer
from drivetrain_backends.gradients.tracker import GradientGroup


class ModelTransform:
    """A change of each model, such as its device, its dtypes, its forward, or its division among ranks.

    A transform overrides the methods that it needs; each does nothing by default. `model` is the user's module,
    except in `apply`, which gets what the previous transform returned: the same module, or, from the last transform
    alone, a `ModuleProxy` around it, as DDP's wrapper is.
    """

    def recall(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Sequence[nn.Module]:
        """Return the user's modules, in place of wrappers that `release` has left to the user."""
        del optimizers
        return models

    def plan(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Plan the changes of new models, and refuse what cannot be changed. Nothing is changed yet."""

    def apply(self, model: nn.Module) -> nn.Module:
        """Change a model, in full or, after an error, not at all; return the module that the user calls."""
        return model

    def release(self, model: nn.Module) -> None:
        """Undo the change of a model, as far as torch can."""

    def fail(self, error: BaseException) -> None:
        """Forget the plans of a `prepare` that failed, and note in `error` what could not be undone."""

    def applied(self) -> Mapping[str, object]:
        """Return the values in force of the settings that this transform applies, read back from live objects."""
        return {}

    def close(self) -> None:
        """Release what the transform holds beside the models."""


class StepGuard:
    """A check around the use of the gradients of a closed window, such as `DriftGuard` of `ddp`.

    A guard overrides the methods that it needs; each does nothing by default.
    """

    def before_clip(self, group: GradientGroup) -> None:
        """Check the gradients of a group before they are measured and clipped."""

    def before_step(self, group: GradientGroup, optimizer: Optimizer) -> None:
        """Check the gradients of a group before an optimizer steps on them."""

    def after_step(self, group: GradientGroup, optimizer: Optimizer) -> None:
        """Check after an optimizer has stepped."""

    def close(self) -> None:
        """Release what the guard holds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Strategy:
    """A way to train on torch's autograd; docs/howto/write_a_backend.md makes one.

    Attributes:
        transforms: The changes of each model, in the order in which they are applied.
        gradients: The object that runs backwards, averages gradients over ranks and makes them final. It gets the
            backend's `scaler`. Gradients that stay in `.grad` are those of a `ParameterGradients`, which also notices
            edits.
        layout: The division of the tensors of models and optimizers among ranks.
        guards: The checks around a step, in the order in which they run.
        building: Returns a context in which the user constructs models; None for one that creates tensors on the
            run's device.
        direct: Returns a context in which torch's own code handles all parameters, for a step, a clip and
            `zero_grad`; None if it always does.
        averages_experts: Whether the gradients of experts that ranks divide are averaged over those ranks alone that
            hold the same ones.
        stages: The transform that keeps the layers of some stages, one of `transforms`; None without a pipeline.
    """

    transforms: tuple[ModelTransform, ...]
    gradients: GradientReducer
    layout: StateLayout
    guards: tuple[StepGuard, ...] = ()
    building: Callable[[], AbstractContextManager[Any]] | None = None
    direct: Callable[[], AbstractContextManager[None]] | None = None
    averages_experts: bool = False
    stages: ModelTransform | None = None
