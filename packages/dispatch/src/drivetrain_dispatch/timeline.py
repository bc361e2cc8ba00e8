"""What a forward with offloaded parts will take: computing, copying and reading, each in its turn. Pure."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Source = Literal["device", "host", "disk"]


class Work(NamedTuple):
    """A part of a model in the order of its forward.

    Attributes:
        compute_seconds: What it computes, its weights being there.
        size_bytes: Of its weights.
        source: Where they are when it is not its turn.
    """

    compute_seconds: float
    size_bytes: int
    source: Source = "device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes in a second.

    Attributes:
        to_device: From the host's memory to the device.
        from_disk: From the disk to the host's memory.
    """

    to_device: float
    from_disk: float


class Turn(NamedTuple):
    """When a part's weights are read, copied and used: begin and end, in seconds; (0, 0) where that is not needed.

    Attributes:
        read: From the disk to the host's memory.
        copied: From there to the device.
        computed: On the device.
    """

    read: tuple[float, float]
    copied: tuple[float, float]
    computed: tuple[float, float]


def play(works: Sequence[Work], rates: Rates, *, depth: int) -> list[Turn]:
    """The time line of one forward that begins with nothing on its way.

    Reading, copying and computing go on side by side, each in the order of the works. The weights of an offloaded
    part are read or copied once there is room: when that part has been computed which is `depth` + 1 offloaded ones
    before it.

    Args:
        works: The parts, in order.
        rates: How fast weights come.
        depth: How many offloaded parts may be on their way beside the one that is computed: from 0 on.
    """
    turns: list[Turn] = []
    disk = link = compute = 0.0
    leaving: deque[float] = deque(maxlen=depth + 1)  # when the last offloaded parts were done
    for work in works:
        room = leaving[0] if len(leaving) == depth + 1 else 0.0
        read = copied = (0.0, 0.0)
        ready = 0.0
        if work.source == "disk":
            start = max(disk, room)
            disk = start + work.size_bytes / rates.from_disk
            read, ready = (start, disk), disk
        if work.source != "device":
            start = max(link, room, ready)
            link = start + work.size_bytes / rates.to_device
            copied, ready = (start, link), link
        start = max(compute, ready)
        compute = start + work.compute_seconds
        turns.append(Turn(read, copied, (start, compute)))
        if work.source != "device":
            leaving.append(compute)
    return turns


def seconds_of(turns: Sequence[Turn]) -> float:
    """How long it takes."""
    return turns[-1].computed[1] if turns else 0.0
