"""A word about the first loss that is not finite, in runs that do not check gradients."""

import logging
from weakref import ref

import torch
from torch import Tensor

from drivetrain.parts.parts import Parts
from drivetrain_backends.gradients.nonfinite import describe_weights
from drivetrain_state.device_traits import traits_of

logger = logging.getLogger(__name__)
_EVERY = 16  # steps between two looks


class LossWatch:
    """A look at one loss in sixteen steps, and at the last, that tells once, without a wait in the loop.

    A look copies the loss to the host; where the host is no device, the next one reads the copy.
    """

    def __init__(self, parts: Parts) -> None:
        device = parts.context.device
        # And not the parts, whose step calls this: a cycle would keep the models.
        self._device, self._window, self._prepared = device, parts.backend.window, ref(parts.prepared)
        self._loss: Tensor | None = None
        self._copy = torch.zeros((), pin_memory=device.type != "cpu" and traits_of(device.type).copies_aside)
        self._num_steps = self._seen = 0
        self._has_told = False
        parts.prepared.on_step.append(self._end_step)

    def note(self, loss: Tensor) -> None:
        """Remember a loss."""
        if not self._window.is_probe:
            self._loss = loss.detach() if not self._has_told else None

    def finish(self) -> None:
        """Look at the last loss."""
        self._look(waits=True)
        self._tell()

    def _end_step(self) -> None:
        if self._window.is_probe:
            return
        self._num_steps += 1
        if self._num_steps % _EVERY == 0:
            self._tell()
            self._look()
            if self._device.type == "cpu":
                self._tell()

    def _look(self, *, waits: bool = False) -> None:
        if self._loss is not None:
            self._seen = self._num_steps
            self._copy.copy_(self._loss.reshape(()), non_blocking=not waits)

    def _tell(self) -> None:
        if self._has_told or self._copy.isfinite().item():
            return
        self._loss, self._has_told = None, True
        prepared = self._prepared()
        weights = None if prepared is None else describe_weights([one.unwrap() for one in prepared.models])
        logger.warning(
            "the loss of step %d is %s, and training goes on: run.on_nonfinite='warn' takes every step. "
            "%sGo on from a checkpoint with 'raise', which ends the run at the first such gradient and names the "
            "layer; 'skip' leaves such steps out",
            self._seen,
            self._copy.item(),
            "" if weights is None else f"{weights}. ",
        )
