"""What can go wrong when processes are started."""


class LaunchError(ValueError):
    """A launch that cannot be: the message says what was asked, what is possible, and what to do."""


class UsageError(LaunchError):
    """A command line that is not understood; the message names the argument and the closest one there is."""


class RankFailedError(RuntimeError):
    """A function that was launched failed on a rank; the message shows that rank's traceback first."""
