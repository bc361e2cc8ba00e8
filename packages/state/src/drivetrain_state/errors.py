"""What can go wrong between ranks, as exceptions that name both sides and the way out."""


class DeviceError(ValueError):
    """The device that was asked for is not here, or there are too few of them for the processes started."""


class ConnectError(RuntimeError):
    """The ranks could not meet: a port in use, a host that does not answer, launcher variables that disagree."""


class GroupMismatchError(ConnectError):
    """A torch process group exists already, and it is not the one that was asked for."""


class CollectiveMismatchError(RuntimeError):
    """Ranks called a collective with data that does not fit together; the message shows each rank's."""


class LeafError(ValueError):
    """A nested structure holds something that the call cannot take."""
