"""A clock of a device's work: it records torch's events between kernels, and reads events that have passed."""

import logging

import torch

from drivetrain_throughput.phase_times import Clock, HostClock

logger = logging.getLogger(__name__)


class DeviceClock:
    """A clock of the work on a device's current stream. The host never waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def moment(self) -> torch.Event:
        """Return the moment at which the device will have finished the work now on its current stream."""
        event = torch.Event(device=self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def is_past(self, moment: torch.Event) -> bool:
        """Return whether the device has reached a moment. Never waits."""
        return moment.query()

    def seconds_between(self, start: torch.Event, end: torch.Event) -> float:
        """Return the seconds between two moments that the device has passed."""
        return start.elapsed_time(end) / 1000  # of milliseconds


def make_clock(device: torch.device) -> Clock:
    """Return the clock of a device, or the host's clock if the device's events cannot measure time.

    This waits for the device once.
    """
    if device.type == "cpu":
        return HostClock()
    clock = DeviceClock(device)
    try:
        start, end = clock.moment(), clock.moment()
        end.synchronize()
        clock.seconds_between(start, end)
    except (RuntimeError, NotImplementedError) as error:  # its events have no time
        logger.info(
            "throughput: events of %s measure no time (%s); phases are measured by the host's clock, which stops "
            "when work is handed to the device",
            device,
            str(error).partition("\n")[0],
        )
        return HostClock()
    return clock
