"""Adapt the micro-batches of a step to the number of processes, so that the global batch stays the same."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from drivetrain_data import ShardedLoader

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledAccumulation:
    """The micro-batches of an optimizer step on this number of processes.

    Attributes:
        asked: The number of micro-batches that the settings ask for.
        meant_for: The number of processes that `asked` is meant for.
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
        asked: The number of micro-batches that the settings ask for.
        meant_for: The number of processes that `asked` is meant for; None for any number.
        processes: The number of processes that read different samples.
    """
    meant = processes if meant_for is None else meant_for
    # The nearest whole number, the larger one of two, and at least one.
    steps = max(1, (2 * asked * meant + processes) // (2 * processes))
    return ScaledAccumulation(asked=asked, meant_for=meant, processes=processes, steps=steps)


def warn_if_changed(scaled: ScaledAccumulation) -> None:
    """Warn if the global batch differs from the one that the settings mean. Called on rank 0."""
    if not scaled.is_exact:
        whole = scaled.asked * scaled.meant_for
        logger.warning(
            "gradient_accumulation_steps=%s for %s processes: a step of %s micro-batches cannot be split evenly over "
            "%s processes, so it takes %s, %s on each: the global batch is %.3g times what it was, and losses differ "
            "from those of a run of %s; a multiple of %s micro-batches in a step would keep it",
            *(scaled.asked, scaled.meant_for, whole, scaled.processes, scaled.steps * scaled.processes),
            *(scaled.steps, scaled.steps * scaled.processes / whole, scaled.meant_for, scaled.processes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """The samples of an optimizer step.

    Attributes:
        batch_size: The samples of a micro-batch on one process; None if the loader has no batch size.
        processes: The number of processes that read different samples.
        micro_batches: The micro-batches of a step.
    """

    batch_size: int | None
    processes: int
    micro_batches: int

    @classmethod
    def of(cls, loader: ShardedLoader[Any], micro_batches: int) -> "StepSize":
        """Return the samples of a step on a loader's batches."""
        return cls(batch_size=loader.batch_size, processes=loader.shard.count, micro_batches=micro_batches)

    @property
    def total(self) -> int:
        """The samples of a step; if the batch size is unknown, its micro-batches on all processes."""
        return (self.batch_size or 1) * self.processes * self.micro_batches

    def __str__(self) -> str:
        batches = "batches" if self.batch_size is None else f"batches of {self.batch_size}"
        return f"{self.total} ({batches} x {self.processes} processes x {self.micro_batches} micro-batches)"


def step_sizes(loaders: Sequence[ShardedLoader[Any]], micro_batches: int) -> dict[str, dict[str, int | None]]:
    """Return the step size of each loader that was trained on, by the loader's position, for a checkpoint."""
    return {
        str(place): asdict(StepSize.of(loader, micro_batches))
        for place, loader in enumerate(loaders)
        if loader.is_trained
    }


def warn_if_resumed_otherwise(
    saved: Mapping[str, Mapping[str, Any]], loaders: Sequence[ShardedLoader[Any]], micro_batches: int
) -> None:
    """Warn if a step takes more or fewer samples than in the checkpoint's run. Called on rank 0.

    Args:
        saved: The result of `step_sizes` in the checkpoint.
        loaders: The loaders of this run.
        micro_batches: The micro-batches of a step in this run.
    """
    for place, values in saved.items():
        loader, was = loaders[int(place)], StepSize(**values)
        now = StepSize.of(loader, micro_batches)
        if was.total == now.total or (was.batch_size is None) != (now.batch_size is None):
            continue
        one = now.total // now.micro_batches
        ways = [f"batches of {was.total // (now.processes * micro_batches)}"]
        if was.total % one == 0:
            ways = [f"gradient_accumulation_steps={was.total // one}"]
        if was.processes != now.processes and was.batch_size == now.batch_size:
            ways.append(
                f"run.accumulation_world_size={was.processes} (--accumulation-world-size {was.processes}), on any "
                f"number of processes with gradient_accumulation_steps={was.micro_batches}"
            )
        logger.warning(
            "the samples of a step of loader %s change from %s in the checkpoint to %s: an epoch has %.3g times as "
            "many steps, so that schedules and rates meant for the former no longer fit. What keeps the step: %s",
            *(place, was, now, was.total / now.total, "; or ".join(ways)),
        )
