"""The check of a sharded model before each step of its optimizer."""

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer

from drivetrain_backends.composed.strategy import StepGuard
from drivetrain_backends.errors import UnreducedGradientError, UnshardedParameterError
from drivetrain_backends.fsdp.guards.misuse import check_unconverted
from drivetrain_backends.fsdp.retained_models import RetainedModel
from drivetrain_backends.gradients.tracker import GradientGroup


class ShardGuard(StepGuard):
    """Refuse steps on parameters that are not the shards of `prepare`, or on gradients that are not averaged."""

    def __init__(self, models: Mapping[nn.Module, RetainedModel]) -> None:
        self._models = models
        self._num_checked: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    def before_step(self, group: GradientGroup, optimizer: Optimizer) -> None:
        """Check the parameters of the group's models and of the optimizer."""
        models = [self._models[model] for model in group.models]
        for retained in models:
            # Parameters that a forward without backward left gathered would be stale after the step.
            retained.sharded.reshard()
            retained.sharded.check()
        self._check_known(optimizer, models)
        for retained in models if group.stage == "empty" else ():
            retained.hooks.check_carried()
            for name, parameter in retained.sharded.plain.items():
                if parameter.grad is not None:
                    raise UnreducedGradientError(
                        f"{name} is no tensor that FSDP divides, and has a gradient of loss.backward(), which ranks "
                        "have not averaged: call accelerator.backward(loss) in its place"
                    )
        for retained in models:
            if not retained.use.are_kept:
                check_unconverted([retained.sharded])
                retained.use.adopt()  # converted, and back
            retained.writes.check()

    def after_step(self, group: GradientGroup, optimizer: Optimizer) -> None:
        """Count the step, so that a backward through outputs from before it is refused."""
        del optimizer
        for model in group.models:
            self._models[model].writes.num_steps += 1

    def _check_known(self, optimizer: Optimizer, models: Sequence[RetainedModel]) -> None:
        """Check an optimizer's parameters, at its first step and whenever their number has changed."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._num_checked.get(optimizer) == count:
            return
        known = {p for retained in models for p in retained.sharded.known}
        for g, group in enumerate(optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                if parameter not in known:
                    raise UnshardedParameterError(
                        f"{type(optimizer).__name__}: parameter {i} of group {g}, of shape {tuple(parameter.shape)}, "
                        "is none of those that prepare() sharded; build the whole model before prepare(), and the "
                        "optimizer over its parameters()"
                    )
        self._num_checked[optimizer] = count
