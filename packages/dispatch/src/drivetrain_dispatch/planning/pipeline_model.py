"""What a forward with offloaded parts will take: computing, copying and reading, each in its turn. Pure."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Source = Literal["device", "host", "disk"]


class Work(NamedTuple):
    """A part of a model that comes at once, or stays, in the order of the forward.

    Attributes:
        compute_seconds: What it computes, its weights being there.
        size_bytes: Of its weights.
        source: Where they are when it is not its turn.
        device: The one that computes it, by its index.
        left_bytes: Of weights that came, what the device holds no more when it has been computed; None for its own.
            A part inside another one leaves that one's weights behind, and the last of them takes them along.
    """

    compute_seconds: float
    size_bytes: int
    source: Source = "device"
    device: int = 0
    left_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes in a second.

    Attributes:
        to_device: From the host's memory to the device.
        from_disk: From the disk to the host's memory.
    """

    to_device: float
    from_disk: float

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("to_device", "from_disk"):
            rate: object = getattr(self, name)
            if isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0:
                raise ValueError(
                    f"Rates: {name}={rate!r}: must be a number of bytes a second above 0, such as 25e9"
                )


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


def play(works: Sequence[Work], rates: Rates, *, windows: Sequence[float]) -> list[Turn]:
    """The time line of one forward that begins with nothing on its way.

    Reading, copying and computing go on side by side, each in the order of the works. The weights of an offloaded
    part are read or copied once its device's window has room beside those that came before and have not left: when
    enough of them have been computed. One that the window does not hold comes when it is alone there.

    Args:
        works: The parts, in order.
        rates: How fast weights come.
        windows: The bytes of coming weights that each device may hold at once.
    """
    turns: list[Turn] = []
    _run(works, rates, windows, turns)
    return turns


def seconds_of(turns: Sequence[Turn]) -> float:
    """How long it takes."""
    return turns[-1].computed[1] if turns else 0.0


def forward_seconds(
    works: Iterable[tuple[float, int, Source, int, int | None]], rates: Rates, *, windows: Sequence[float]
) -> float:
    """How long the time line is that `play` gives, found without making it.

    Args:
        works: What `Work` says of the parts, in order; plain tuples will do.
        rates: How fast weights come.
        windows: The bytes of coming weights that each device may hold at once.
    """
    return _run(works, rates, windows, None)


def _run(
    works: Iterable[tuple[float, int, Source, int, int | None]],
    rates: Rates,
    windows: Sequence[float],
    turns: list[Turn] | None,
) -> float:
    """Go through a forward and note the turns, if they are asked for; the end of the last one."""
    disk = link = compute = 0.0
    seconds_a_byte, read_seconds_a_byte = 1 / rates.to_device, 1 / rates.from_disk
    held = [0] * len(windows)
    rooms = [0.0] * len(windows)  # since when each window has had the room that it was last asked for
    leaving: list[deque[tuple[float, int]]] = [deque() for _ in windows]  # when weights leave, how many bytes
    for seconds, size_bytes, source, device, left_bytes in works:
        if source == "device":
            if turns is not None:
                turns.append(Turn((0.0, 0.0), (0.0, 0.0), (compute, compute + seconds)))
            compute += seconds
        else:
            queue, most = leaving[device], windows[device]
            now_held = held[device] + size_bytes
            while now_held > most and queue:
                rooms[device], bytes_left = queue.popleft()
                now_held -= bytes_left
            held[device], room = now_held, rooms[device]
            begin, read = max(link, room), (0.0, 0.0)
            if source == "disk":
                from_disk = max(disk, room)
                disk = from_disk + size_bytes * read_seconds_a_byte
                read, begin = (from_disk, disk), max(begin, disk)
            link = begin + size_bytes * seconds_a_byte
            start = max(compute, link)
            compute = start + seconds
            if turns is not None:
                turns.append(Turn(read, (begin, link), (start, compute)))
            if left_bytes is None:
                left_bytes = size_bytes
        if left_bytes:
            leaving[device].append((compute, left_bytes))
    return compute
