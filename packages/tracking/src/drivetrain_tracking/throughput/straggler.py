"""Find the rank that the others wait for, from what each rank measured. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

# In these phases a rank computes for itself. In all others it may wait for the rank that is slow elsewhere: gradients
# are averaged inside backward, and backends that shard parameters gather them inside forward.
_OWN_PHASES = ("data", "optimizer", "checkpoint", "other")
_MIXED_PHASES = ("forward",)

_LEAST_RATIO = 1.25  # noise of a few per cent, at its largest over thousands of ranks, stays below
_LEAST_PART_OF_STEP = 0.05
_LEAST_DEVIATIONS = 5.0  # in robust standard deviations, so that ranks that differ anyway give no alarm
_SIGMA_OF_DEVIATION = 1.4826  # of a normal distribution's median absolute deviation
_LEAST_RANKS_TO_SPREAD = 4  # of fewer ranks, a spread says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that is slower than the others.

    Attributes:
        rank: The number of the rank.
        phase: The phase in which it is slow.
        slower_by: The seconds a step by which the rank exceeds that median.
        usual_seconds: The median of the other ranks, in seconds a step.
    """

    rank: int
    phase: str
    slower_by: float
    usual_seconds: float


def find_straggler(per_rank_phase_seconds: Sequence[Mapping[str, float]]) -> Straggler | None:
    """Return the rank that the others wait for, or None if no rank stands out.

    Phases of a rank's own work are looked at first: where one rank is late with its data, all others spend as much
    time in collectives. A rank that is slow in backward alone is not found, since the others wait for it there.

    Args:
        per_rank_phase_seconds: For each rank, the mean seconds that a step spends in each phase.

    Raises:
        ValueError: A number of seconds is negative or not finite.

    Example:
        >>> find_straggler([{"data": 0.01, "forward": 0.1}, {"data": 0.5, "forward": 0.1}]).rank
        1
    """
    for rank, phases in enumerate(per_rank_phase_seconds):
        for phase, seconds in phases.items():
            if not 0 <= seconds < float("inf"):
                raise ValueError(
                    f"rank {rank} spent {seconds!r} seconds in {phase!r}: must be finite, 0 or more"
                )
    if len(per_rank_phase_seconds) < 2:
        return None
    step_seconds = median(sum(phases.values()) for phases in per_rank_phase_seconds)
    for group in (_OWN_PHASES, _MIXED_PHASES):
        found = [
            slowest
            for phase in group
            if (slowest := _slowest(per_rank_phase_seconds, phase, step_seconds)) is not None
        ]
        if found:
            return max(found, key=lambda straggler: straggler.slower_by)
    return None


def _slowest(ranks: Sequence[Mapping[str, float]], phase: str, step_seconds: float) -> Straggler | None:
    """Return the slowest rank in a phase if it stands out there."""
    seconds = [phases.get(phase, 0.0) for phases in ranks]
    rank = max(range(len(seconds)), key=seconds.__getitem__)
    others = seconds[:rank] + seconds[rank + 1 :]
    usual = median(others)
    excess = seconds[rank] - usual
    spread = 0.0
    if len(others) >= _LEAST_RANKS_TO_SPREAD:
        spread = _SIGMA_OF_DEVIATION * median(abs(other - usual) for other in others)
    if seconds[rank] <= _LEAST_RATIO * usual or excess <= _LEAST_PART_OF_STEP * step_seconds:
        return None
    if excess <= _LEAST_DEVIATIONS * spread:
        return None
    return Straggler(rank=rank, phase=phase, slower_by=excess, usual_seconds=usual)
