"""What a forward with offloaded parts will take: computing, copying and reading, each in its turn. Pure."""

from collections import deque
from collections.abc import Iterable, Sequence
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
    _run(works, rates, depth, turns)
    return turns


def seconds_of(turns: Sequence[Turn]) -> float:
    """How long it takes."""
    return turns[-1].computed[1] if turns else 0.0


def forward_seconds(works: Iterable[tuple[float, int, Source]], rates: Rates, *, depth: int) -> float:
    """How long the time line is that `play` gives, found without making it.

    Args:
        works: What `Work` says of the parts, in order; plain tuples will do.
        rates: How fast weights come.
        depth: How many offloaded parts may be on their way.
    """
    return _run(works, rates, depth, None)


def _run(
    works: Iterable[tuple[float, int, Source]], rates: Rates, depth: int, turns: list[Turn] | None
) -> float:
    """Go through a forward and note the turns, if they are asked for; the end of the last one."""
    disk = link = compute = 0.0
    leaving: deque[float] = deque(maxlen=depth + 1)  # when the last offloaded parts were done
    for seconds, size_bytes, source in works:
        read = copied = (0.0, 0.0)
        start = compute
        if source != "device":
            room = leaving[0] if len(leaving) == depth + 1 else 0.0
            begin = max(link, room)
            if source == "disk":
                from_disk = max(disk, room)
                disk = from_disk + size_bytes / rates.from_disk
                read, begin = (from_disk, disk), max(begin, disk)
            link = begin + size_bytes / rates.to_device
            copied, start = (begin, link), max(compute, link)
            leaving.append(start + seconds)
        compute = start + seconds
        if turns is not None:
            turns.append(Turn(read, copied, (start, compute)))
    return compute
