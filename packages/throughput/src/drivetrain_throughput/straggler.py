"""Find the rank that the others wait for, from the measurements of each rank. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

# In these phases a rank computes for itself. In all others it may wait for the rank that is slow elsewhere.
_OWN_PHASES = ("data", "optimizer", "checkpoint", "other")

_LEAST_PART_OF_USUAL = 0.25  # noise of a few per cent, at its largest over thousands of ranks, stays below
_LEAST_PART_OF_STEP = 0.05
_LEAST_DEVIATIONS = 5.0  # in robust standard deviations, so that ranks that differ anyway give no alarm
_SIGMA_OF_DEVIATION = 1.4826  # of a normal distribution's median absolute deviation
_LEAST_RANKS_TO_SPREAD = 4  # of fewer ranks, a spread says nothing
# The part of the excess that must show in the other phases, as it does for a rank that others wait for.
_LEAST_EVIDENCE = 0.5

_Ranks = Sequence[Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that is slower than the others.

    Attributes:
        rank: The number of the rank.
        phase: The phase in which it is slow.
        slower_by: The seconds by which the rank exceeds `usual_seconds` in a step.
        usual_seconds: The median of the other ranks' seconds in a step.
    """

    rank: int
    phase: str
    slower_by: float
    usual_seconds: float


def find_straggler(per_rank_phase_seconds: Sequence[Mapping[str, float]]) -> Straggler | None:
    """Return the rank that the others wait for, or None if no rank stands out.

    If one rank is late with its data, all others spend as much time in collectives. Collectives may also run inside
    forward and backward, if a backend gathers parameters or averages gradients there. A rank with a long forward is
    therefore named only if the others did not spend that time on their own work, and a rank with a long backward only
    if the others spent that time in communication. If waits inside backward are not measured as communication, a rank
    that is slow only in backward is not found.

    Args:
        per_rank_phase_seconds: For each rank, the mean seconds that a step spends in each phase.

    Raises:
        ValueError: A number of seconds is negative or not finite.

    Example:
        >>> find_straggler([{"data": 0.01, "forward": 0.1}, {"data": 0.5, "forward": 0.1}]).rank
        1
    """
    ranks = per_rank_phase_seconds
    for rank, phases in enumerate(ranks):
        for phase, seconds in phases.items():
            if not 0 <= seconds < float("inf"):
                raise ValueError(
                    f"rank {rank} spent {seconds!r} seconds in {phase!r}: must be finite, 0 or more"
                )
    if len(ranks) < 2:
        return None
    stragglers = [one for phase in _OWN_PHASES if (one := _slowest(ranks, phase)) is not None]
    # A slow forward, unless the rank waited in it for ranks busy with their own work.
    if (one := _slowest(ranks, "forward")) is not None:
        own = [sum(phases.get(phase, 0.0) for phase in _OWN_PHASES) for phases in ranks]
        if _others_exceed(own, one.rank) < _LEAST_EVIDENCE * one.slower_by:
            stragglers.append(one)
    if (one := _slowest(ranks, "backward")) is not None:  # if the others waited for it in communication
        waits = [phases.get("communication", 0.0) for phases in ranks]
        if _others_exceed(waits, one.rank) > _LEAST_EVIDENCE * one.slower_by:
            stragglers.append(one)
    return max(stragglers, key=lambda straggler: straggler.slower_by, default=None)


def _others_exceed(seconds: Sequence[float], rank: int) -> float:
    """Return the seconds by which the median of the other ranks exceeds a rank's seconds."""
    return median([*seconds[:rank], *seconds[rank + 1 :]]) - seconds[rank]


def _slowest(ranks: _Ranks, phase: str) -> Straggler | None:
    """Return the slowest rank in a phase if it stands out there."""
    step_seconds = median(sum(phases.values()) for phases in ranks)
    seconds = [phases.get(phase, 0.0) for phases in ranks]
    rank = max(range(len(seconds)), key=seconds.__getitem__)
    others = seconds[:rank] + seconds[rank + 1 :]
    usual = median(others)
    excess = seconds[rank] - usual
    least = max(_LEAST_PART_OF_USUAL * usual, _LEAST_PART_OF_STEP * step_seconds)
    if len(others) >= _LEAST_RANKS_TO_SPREAD:
        spread = _SIGMA_OF_DEVIATION * median(abs(other - usual) for other in others)
        least = max(least, _LEAST_DEVIATIONS * spread)
    return (
        None if excess <= least else Straggler(rank=rank, phase=phase, slower_by=excess, usual_seconds=usual)
    )
