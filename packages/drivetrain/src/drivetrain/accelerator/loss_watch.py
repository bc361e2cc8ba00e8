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
_MOST = 256  # losses that wait for a look


class LossWatch:
    """A look every sixteen steps at the losses since the last one, that tells once, without a wait in the loop.

    A look copies a summary to the host, which the next look reads. Where no copy is made aside, it reads the losses.
    """

    def __init__(self, parts: Parts) -> None:
        device = parts.context.device
        # And not the parts, whose step calls this: a cycle would keep the models.
        self._window, self._prepared = parts.backend.window, ref(parts.prepared)
        # XLA would compile the summary.
        self._place = device if traits_of(device.type).copies_aside else torch.device("cpu")
        self._losses: list[tuple[int, Tensor]] = []  # each with its step, of all optimizers, from 1
        self._copied: list[tuple[int, Tensor]] = []  # those that the copy is of
        # Whether one is not finite; the place of the first; its value.
        self._copy = torch.zeros(3, pin_memory=self._place.type != "cpu")
        self._num_steps = 0
        self._has_told = False
        parts.prepared.on_step.append(self._end_step)

    def note(self, loss: Tensor) -> None:
        """Remember a loss."""
        if self._has_told or self._window.is_probe:
            return
        self._losses.append((self._num_steps + 1, loss.detach()))
        if len(self._losses) == _MOST:
            self._turn()

    def finish(self) -> None:
        """Look at what is left."""
        self._losses = [*self._copied, *self._losses]
        self._look(waits=True)
        self._tell()

    def _end_step(self) -> None:
        if not self._window.is_probe:
            self._num_steps += 1
            if self._num_steps % _EVERY == 0:
                self._turn()

    def _turn(self) -> None:
        self._tell()
        self._look()
        if self._place.type == "cpu":
            self._tell()

    def _look(self, *, waits: bool = False) -> None:
        if self._has_told or not self._losses:
            return
        values = torch.stack([loss.to(self._place).reshape(()) for _, loss in self._losses])
        are_bad = values.isfinite().logical_not()
        first = are_bad.to(torch.uint8).argmax().reshape(1)
        found = torch.cat([are_bad.gather(0, first).float(), first.float(), values.gather(0, first).float()])
        self._copy.copy_(found, non_blocking=not waits)
        self._losses, self._copied = [], self._losses

    def _tell(self) -> None:
        is_bad, place, value = self._copy.tolist()
        if self._has_told or not is_bad:
            return
        step, _ = self._copied[int(place)]
        self._losses, self._copied, self._has_told = [], [], True
        prepared = self._prepared()
        weights = None if prepared is None else describe_weights([one.unwrap() for one in prepared.models])
        logger.warning(
            "the loss of step %d is %s, and training goes on: run.on_nonfinite='warn' takes every step. "
            "%sGo on from a checkpoint with 'raise', which ends the run at the first such gradient and names the "
            "layer; 'skip' leaves such steps out",
            step,
            value,
            "" if weights is None else f"{weights}. ",
        )
