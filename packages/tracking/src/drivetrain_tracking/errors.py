"""What can go wrong with tracking, as exceptions that name the tracker or the value and the way out."""


class UnknownTrackerError(ValueError):
    """No installed package brings a tracker of this name, or it is not among those in use."""


class ValueNotLoggableError(ValueError):
    """A value is none that a tracker takes; the message names its path and type."""


class TrackerStateError(RuntimeError):
    """A tracker was called out of order: logged to before its start, or started twice."""


class TrackerFailedError(RuntimeError):
    """A tracker raised; the message names the tracker and the call."""
