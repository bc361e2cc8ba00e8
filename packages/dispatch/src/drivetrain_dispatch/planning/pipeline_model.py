"""Predict the time of a forward with offloaded parts: reads, copies and computation overlap. Pure."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from drivetrain_dispatch.planning.device_map import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidths:
    """The transfer rates of weights, in bytes per second.

    Attributes:
        to_device: The rate from the host's memory to the device.
        from_disk: The rate from the disk to the host's memory.
    """

    to_device: float
    from_disk: float

    def __post_init__(self) -> None:
        for name in ("to_device", "from_disk"):
            rate: object = getattr(self, name)
            if isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0:
                raise ValueError(
                    f"Bandwidths: {name}={rate!r}: must be a number of bytes a second above 0, such as 25e9"
                )


def forward_seconds(
    works: Iterable[tuple[float, int, Tier, int, int | None]], rates: Bandwidths, *, windows: Sequence[float]
) -> float:
    """Return the time of one forward that begins without transfers in flight, in seconds.

    Each work is a part of the model: its compute time in seconds, its bytes, their tier, the computing device, and
    the bytes of fetched weights to release after the part, None for the part's bytes.

    Reads, copies and computation overlap, each in the order of the parts. The read or copy of an offloaded part
    starts once its device's window has room; a part larger than the window waits until the window is empty.
    """
    disk = link = compute = 0.0  # the times at which the reads, the copies and the computation end
    seconds_a_byte, read_seconds_a_byte = 1 / rates.to_device, 1 / rates.from_disk
    held = [0] * len(windows)
    rooms = [0.0] * len(windows)  # the time since when each window has had room for its last fetch
    leaving: list[deque[tuple[float, int]]] = [deque() for _ in windows]  # time and bytes of each release
    on_device, on_disk = Tier.DEVICE, Tier.DISK
    for seconds, size_bytes, source, device, left_bytes in works:
        if source is not on_device:
            queue, most = leaving[device], windows[device]
            now_held = held[device] + size_bytes
            while now_held > most and queue:
                rooms[device], bytes_left = queue.popleft()
                now_held -= bytes_left
            held[device], begin = now_held, rooms[device]
            if source is on_disk:
                begin = disk = max(disk, begin) + size_bytes * read_seconds_a_byte
            link = max(link, begin) + size_bytes * seconds_a_byte
            compute = max(compute, link)
            if left_bytes is None:
                left_bytes = size_bytes
        compute += seconds
        if left_bytes:
            leaving[device].append((compute, left_bytes))
    return compute
