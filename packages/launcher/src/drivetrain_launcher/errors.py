"""The errors of a launch."""


class LaunchError(ValueError):
    """An impossible launch; the message gives the request, the limits and a remedy."""


class UsageError(LaunchError):
    """An invalid command line; the message names the argument and the closest valid one."""


class RankFailedError(RuntimeError):
    """A launched function failed on a rank; the message shows that rank's traceback.

    Attributes:
        rank: The rank that failed first.
        error: The exception of that rank, without its traceback; None if the rank raised none, or if this process
            does not know its class.
    """

    def __init__(self, message: str, *, rank: int, error: BaseException | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.error = error

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows as the traceback: the rank's traceback, not the launcher's."""
        return str(self).splitlines()
