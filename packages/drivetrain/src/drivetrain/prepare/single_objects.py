"""Prepare a single object otherwise than `prepare` does: a loader with another tail, a model that is not trained."""

from typing import Any

from torch import nn

from drivetrain.parts.parts import HasParts
from drivetrain.prepare.prepare import prepare_objects
from drivetrain_backends.modules.autocast_forward import prepare_forward
from drivetrain_data import ShardedLoader
from drivetrain_data.settings import UnevenPolicy


class SingleObjects(HasParts):
    """The part of an Accelerator that prepares a single object by rules of its own."""

    def prepare_evaluation(self, model: nn.Module) -> nn.Module:
        """Move a model that is not trained to the device, and have it compute in the run's precision, in place.

        It may be given to `prepare` later, to be trained.

        Args:
            model: The model, such as the reference of a preference loss. Nothing wraps, shards or saves it.
        """
        parts = self._parts
        parts.prepared.restore_evaluated([model])
        model.to(parts.context.device)
        prepare_forward(model, parts.policy, parts.context.device)
        parts.prepared.evaluated.add(model)
        return model

    def prepare_loader(self, loader: Any, *, even: UnevenPolicy) -> ShardedLoader[Any]:
        """Prepare one loader, its tail treated as `even` says and not as `data.even`. Called on all ranks."""
        prepare_objects([loader], self._parts, even=even)
        return self._parts.prepared.loaders[-1]
