"""The result of an investigation: the leaks, the cycles, and what only looked like a leak."""

from collections.abc import Sequence
from dataclasses import dataclass

from drivetrain_memory.leaks.cycles import TensorCycle
from drivetrain_memory.leaks.findings import Leak
from drivetrain_memory.leaks.growth import Growth


@dataclass(frozen=True, slots=True, kw_only=True)
class LeakReport:
    """The result of an investigation of growing memory.

    Attributes:
        first_step: The step at which the investigation began.
        last_step: The step at which it ended.
        leaks: The memory that grows, the largest first; empty if none does.
        cycles: The reference cycles that held tensors.
        is_fragmented: Whether the allocator of the host or the device takes more memory while what is in use does not
            grow.
        growth: The growth of each measurement before the investigation, by name.
    """

    first_step: int
    last_step: int
    leaks: Sequence[Leak]
    cycles: Sequence[TensorCycle] = ()
    is_fragmented: bool = False
    growth: "dict[str, Growth]"

    def __str__(self) -> str:
        where = f"steps {self.first_step} to {self.last_step}"
        lines = [f"memory grows ({where}):" if self.leaks else f"no memory leaks ({where})"]
        lines += [f"  {one}" for one in self.leaks]
        lines += [f"  {one}" for one in self.cycles]
        if self.is_fragmented:
            lines.append(
                "  the allocator takes more memory while what is in use does not grow: fragmentation"
            )
        return "\n".join(lines)
