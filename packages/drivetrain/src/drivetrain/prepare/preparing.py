"""Prepare a single loader or model otherwise than `prepare` does, and count the steps of a prepared loader."""

from math import ceil
from typing import Any, cast

from torch import nn

from drivetrain.parts.parts import HasParts, Parts
from drivetrain.prepare.prepare import prepare_objects
from drivetrain.prepare.schedule_length import steps_of, tell_unreached
from drivetrain_backends.modules.autocast_forward import prepare_forward
from drivetrain_data import ShardedLoader
from drivetrain_data.settings import UnevenPolicy


class Preparing(HasParts):
    """The methods of an Accelerator for single objects and for schedules."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._has_ended = False

    def _end_schedules(self, *, by_error: bool = False) -> None:
        """Warn once of schedules that training did not complete, unless it ended with an error."""
        if not by_error and not self._has_ended and self.context.topology.is_main:
            tell_unreached(self._parts.prepared.schedulers)
        self._has_ended = True

    def num_steps(
        self, loader: ShardedLoader[Any], *, epochs: float | None = None, samples: int | None = None
    ) -> int:
        """Return the number of optimizer steps in training, for a schedule; the same on all ranks.

        Args:
            loader: A prepared loader; an epoch's last batch closes its window.
            epochs: The number of epochs to train; a fraction of an epoch counts by its batches.
            samples: The number of samples to train on, over all ranks, instead of `epochs`.

        Raises:
            TypeError: The loader is not prepared, or not exactly one of `epochs` and `samples` is given.
            ValueError: The loader's length is unknown, or the number is not above 0.
        """
        if not isinstance(loader, ShardedLoader):  # pyright: ignore[reportUnnecessaryIsInstance] a user may give any
            raise TypeError(
                f"num_steps({type(loader).__name__}): pass the loader that prepare() returned; before prepare(), the "
                "batches of all ranks are counted, and an epoch has fewer steps on more ranks"
            )
        if (epochs is None) == (samples is None):
            raise TypeError(f"num_steps(epochs={epochs!r}, samples={samples!r}): give one of the two")
        amount = cast("float", samples if epochs is None else epochs)
        if not amount > 0:
            raise ValueError(f"num_steps(epochs={epochs!r}, samples={samples!r}): must be above 0")
        accumulation = self._parts.backend.window.next_num_micro_batches
        try:
            num_batches, num_samples = len(loader), len(loader.dataset)
        except TypeError as error:
            raise ValueError(
                "num_steps(): the length of this loader is not known; write the schedule in optimizer steps"
            ) from error
        if epochs is not None:
            steps = steps_of(epochs, num_batches, accumulation)
        else:
            whole, rest = divmod(cast("int", samples), num_samples)
            per_batch = loader.total_batch_size or num_samples / num_batches
            batches = min(num_batches, ceil(rest / per_batch))
            steps = steps_of(whole, num_batches, accumulation) + ceil(batches / accumulation)
        self._parts.prepared.counted_steps.add(steps)
        return steps

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
