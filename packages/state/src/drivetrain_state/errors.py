"""The exceptions of this package; their messages give both sides of a conflict and a remedy."""


class DeviceError(ValueError):
    """The requested device does not exist, or there are fewer devices than processes."""


class ConnectError(RuntimeError):
    """The ranks cannot connect: a port in use, a host that does not answer, conflicting launcher variables."""


class GroupMismatchError(ConnectError):
    """An existing torch process group does not match the requested one."""


class CollectiveMismatchError(RuntimeError):
    """The ranks called a collective with data that does not match; the message shows each rank's data."""


class LeafError(ValueError):
    """A nested structure holds a leaf that the call does not accept."""


class OtherRankFailedError(RuntimeError):
    """Another rank failed, so this rank aborted too; the message holds that rank's error."""
