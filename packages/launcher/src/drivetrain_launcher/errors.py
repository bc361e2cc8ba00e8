"""The errors of a launch."""


class LaunchError(ValueError):
    """An impossible launch; the message gives the request, the limits and a remedy."""


class UsageError(LaunchError):
    """An invalid command line; the message names the argument and the closest valid one."""


class RankFailedError(RuntimeError):
    """A launched function failed on a rank; the message shows that rank's traceback."""
