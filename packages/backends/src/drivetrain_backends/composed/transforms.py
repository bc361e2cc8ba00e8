"""The transforms that most strategies share: a model's device, its dtypes, and its forward under autocast."""

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from drivetrain_backends.composed.strategy import ModelTransform
from drivetrain_backends.modules.autocast_forward import Note, prepare_forward, restore_forward
from drivetrain_backends.modules.held_dtypes import Islands, hold_model, plan_islands
from drivetrain_backends.modules.model_checks import check_values
from drivetrain_precision import Policy
from drivetrain_state import Context


class MoveToDevice(ModelTransform):
    """Move a model to the run's device, where it stays after `release`."""

    def __init__(self, context: Context) -> None:
        self._device = context.device

    def plan(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Refuse a model without values."""
        del optimizers
        for model in models:
            check_values(model)

    def apply(self, model: nn.Module) -> nn.Module:
        """Move the parameters and buffers, in place."""
        return model.to(self._device)


class HoldDtypes(ModelTransform):
    """Cast a model's tensors to the dtypes that the run holds them in; some modules stay in fp32."""

    def __init__(self, context: Context, policy: Policy) -> None:
        self._device, self._policy = context.device, policy
        self._known: list[nn.Module] = []
        self._islands: Islands = {}

    def plan(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Choose the modules that stay in fp32; refuse patterns that match none."""
        del optimizers
        self._islands = plan_islands(models, self._policy, known=self._known)

    def apply(self, model: nn.Module) -> nn.Module:
        """Cast the tensors, in place."""
        hold_model(model, self._policy, self._device, self._islands.pop(model))
        self._known.append(model)
        return model

    def release(self, model: nn.Module) -> None:
        """Forget the model; its tensors keep their dtypes."""
        self._known.remove(model)

    def fail(self, error: BaseException) -> None:
        """Forget the models that were to be cast, and note what those before them have lost."""
        if self._policy.dtypes.param is not None:
            error.add_note(
                "prepare() failed: models may hold rounded values by now, in precision.param_dtype"
            )
        self.close()

    def close(self) -> None:
        """Forget the models of a refused `prepare`."""
        self._islands.clear()


class PreparedForwards(ModelTransform):
    """Run a model's forward under the run's autocast, and record it as progress."""

    def __init__(self, context: Context, policy: Policy, note: Note | None = None) -> None:
        self._context, self._policy, self._note = context, policy, note

    def apply(self, model: nn.Module) -> nn.Module:
        """Exchange the model's class for one whose call runs under autocast."""
        progress = self._context.progress
        prepare_forward(model, self._policy, self._context.device, progress=progress, note=self._note)
        return model

    def release(self, model: nn.Module) -> None:
        """Restore the model's class."""
        restore_forward(model)


def on_one_device(context: Context, policy: Policy, note: Note | None = None) -> tuple[ModelTransform, ...]:
    """Return the transforms of a model that one device trains; those of replicas begin with them."""
    return MoveToDevice(context), HoldDtypes(context, policy), PreparedForwards(context, policy, note)
