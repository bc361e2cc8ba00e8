"""Keep the global batch of a run whose number of processes changes, by the number of micro-batches in a step."""

import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledAccumulation:
    """The micro-batches of an optimizer step on this number of processes.

    Attributes:
        asked: The number that the settings ask for.
        meant_for: The number of processes that it is meant for.
        processes: The number of processes that read different samples.
        steps: The number of micro-batches that keeps the global batch, or comes nearest to it.
    """

    asked: int
    meant_for: int
    processes: int
    steps: int

    @property
    def is_exact(self) -> bool:
        """True if the global batch stays the same."""
        return self.steps * self.processes == self.asked * self.meant_for

    def __str__(self) -> str:
        whole = self.asked * self.meant_for
        meant = f"{self.asked} x {self.meant_for} processes"
        if self.is_exact:
            return f"{self.steps} x {self.processes} processes, the {whole} micro-batches of {meant}"
        return (
            f"{self.steps} x {self.processes} processes = {self.steps * self.processes} micro-batches, the nearest "
            f"to the {whole} of {meant}"
        )


def scale_accumulation(asked: int, *, meant_for: int | None, processes: int) -> ScaledAccumulation:
    """Return the micro-batches of a step that keep the global batch, or come nearest to it.

    Args:
        asked: The number that the settings ask for.
        meant_for: The number of processes that it is meant for; None for any number.
        processes: The number of processes that read different samples.
    """
    meant = processes if meant_for is None else meant_for
    # The nearest whole number, the larger one of two, and at least one.
    steps = max(1, (2 * asked * meant + processes) // (2 * processes))
    return ScaledAccumulation(asked=asked, meant_for=meant, processes=processes, steps=steps)


def warn_if_changed(scaled: ScaledAccumulation) -> None:
    """Warn if the global batch is another one than the settings mean. Called on rank 0."""
    if not scaled.is_exact:
        whole = scaled.asked * scaled.meant_for
        logger.warning(
            "gradient_accumulation_steps=%s for %s processes: a step of %s micro-batches cannot be split evenly over "
            "%s processes, so it takes %s, %s on each: the global batch is %.3g times what it was, and losses differ "
            "from those of a run of %s; a multiple of %s micro-batches in a step would keep it",
            *(scaled.asked, scaled.meant_for, whole, scaled.processes, scaled.steps * scaled.processes),
            *(scaled.steps, scaled.steps * scaled.processes / whole, scaled.meant_for, scaled.processes),
        )
