"""The throughput of a run, as its Accelerator tells it."""

from collections.abc import Callable
from typing import Any

from drivetrain.parts.parts import HasParts
from drivetrain_throughput import Throughput
from drivetrain_throughput.step_watch import StepWatch


class Measuring(HasParts):
    """The part of an Accelerator that tells how fast the training is."""

    @property
    def throughput(self) -> Throughput:
        """The throughput of the last steps: as many as `tracking.throughput_every_steps`, else 50.

        Samples are those of all ranks. Phases are those of this rank. May be read on any rank.

        Raises:
            RuntimeError: No setting has the throughput measured.
        """
        return self._watch().over_window()

    @property
    def total_throughput(self) -> Throughput:
        """The throughput since training began, with evaluation and saves between the steps; see `throughput`."""
        return self._watch().in_total()

    def count_tokens(self, function: Callable[[Any], float]) -> None:
        """Count tokens by a function, in place of the elements of `tracking.token_field`. Called on all ranks.

        Args:
            function: A function from a batch of this rank to its number of tokens. It runs in the loop: a number
                that it reads from a device makes the host wait.

        Raises:
            RuntimeError: No setting has the throughput measured.
        """
        self._watch().counts.count_tokens = function

    def _watch(self) -> StepWatch:
        if self._parts.watch is None:
            raise RuntimeError(
                "the throughput is not measured: say so before the run, as "
                'Accelerator(sections={"tracking": {"throughput": True}}), or log it by itself with '
                '{"throughput_every_steps": 50}'
            )
        return self._parts.watch
