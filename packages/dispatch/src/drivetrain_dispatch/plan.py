"""Which block of a model stays on a device and which comes when it is needed: the plan of a device map. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from drivetrain_dispatch.blocks import Block
from drivetrain_dispatch.errors import DeviceMapError
from drivetrain_dispatch.timeline import Rates, Source, Turn, Work, play, seconds_of

_DEPTHS = (4, 3, 2, 1, 0)  # offloaded blocks on their way; room for each is taken from what could stay


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a block does in one forward.

    Attributes:
        seconds: It computes for so long, its weights being there.
        peak_bytes: Activations at their peak.
        kept_bytes: What stays on the device afterwards, such as keys and values.
    """

    seconds: float = 0.0
    peak_bytes: int = 0
    kept_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """What may be held where, in bytes.

    Attributes:
        devices: Each device that computes, in the order of the forward.
        host: The host's memory, for what is offloaded; with none of `devices` it computes itself.
        disk: The disk; None for as much as there is.
    """

    devices: tuple[int, ...]
    host: int
    disk: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacePlan:
    """Where each block is and where it computes.

    Attributes:
        sources: Where each block's weights are when it is not its turn.
        devices: The device that computes each, by its index in `Budgets.devices`.
        depth: How many offloaded blocks may be on their way beside the one that computes.
        turns: The predicted time line.
    """

    sources: tuple[Source, ...]
    devices: tuple[int, ...]
    depth: int
    turns: tuple[Turn, ...]

    @property
    def seconds(self) -> float:
        """The predicted time of a forward."""
        return seconds_of(self.turns)


@dataclass(slots=True)
class _Device:
    """A device that is being filled."""

    budget: int
    weights: int = 0
    kept: int = 0
    peak: int = 0
    members: list[int] = field(default_factory=list[int])

    def would_take(self, size_bytes: int, cost: Cost) -> int:
        return self.weights + size_bytes + self.kept + cost.kept_bytes + max(self.peak, cost.peak_bytes)

    def take(self, index: int, size_bytes: int, cost: Cost) -> None:
        self.weights += size_bytes
        self.kept += cost.kept_bytes
        self.peak = max(self.peak, cost.peak_bytes)
        self.members.append(index)
