"""Exceptions of tracking; their messages name the tracker or the value, and a remedy."""


class UnknownTrackerError(ValueError):
    """No installed package registers a tracker of this name, or the tracker is not in use."""


class ValueNotLoggableError(ValueError):
    """A value has a type that cannot be logged; the message names its path and type."""


class TrackerStateError(RuntimeError):
    """A tracker was called out of order: `log` before `start`, or `start` twice."""


class TrackerFailedError(RuntimeError):
    """A tracker raised an exception; the message names the tracker and the call."""


class SpoolInUseError(RuntimeError):
    """Another process writes to the spool; the message says what to do."""


class MissingLibraryError(ImportError):
    """The library of a platform is not installed; the message names the extra that brings it."""


class DeliveryFileError(RuntimeError):
    """The file with the state of a delivery to a platform is damaged; the message says what to do."""


class DeliveryInUseError(RuntimeError):
    """Another process delivers to the platform; the message says what to do."""
