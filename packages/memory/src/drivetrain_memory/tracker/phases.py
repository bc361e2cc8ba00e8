"""Phases of a step, such as forward and backward, nested or not, each with its exact peaks."""

from drivetrain_memory.peaks.peak_record import PeakRecord
from drivetrain_memory.tracker.rank_summary import PhaseUse

_MOST_PHASES = 64  # names that differ; the others count as one
OTHER_PHASES = "(other)"


class PhaseStack:
    """The phases that run now, and the peaks of those that ran.

    The thread that trains enters and leaves; another may read `path` at any time.
    """

    def __init__(self) -> None:
        self.path = ""
        self.uses: dict[str, PhaseUse] = {}

    def enter(self, name: str) -> str:
        """Begin a phase within the one that runs; return the path before."""
        if not name or "/" in name:
            raise ValueError(
                f"phase {name!r}: give a name without a slash; nested phases are joined by slashes"
            )
        before, path = self.path, f"{self.path}/{name}" if self.path else name
        is_known = path in self.uses or len(self.uses) < _MOST_PHASES
        self.path = path if is_known else OTHER_PHASES
        return before

    def leave(self, before: str, seconds: float, peak: PeakRecord) -> None:
        """End the phase that runs."""
        use = self.uses.get(self.path, PhaseUse())
        self.uses[self.path] = PhaseUse(
            count=use.count + 1,
            seconds=use.seconds + seconds,
            host_peak_bytes=max(use.host_peak_bytes, peak.host_bytes),
            host_added_bytes=max(use.host_added_bytes, peak.host_bytes - peak.host_before_bytes),
            device_peak_bytes=max(use.device_peak_bytes, sum(one.peak_bytes for one in peak.devices)),
        )
        self.path = before
