"""The errors of a launch."""


class LaunchError(ValueError):
    """An impossible launch; the message gives the request, the limits and a remedy."""


class UsageError(LaunchError):
    """An invalid command line; the message names the argument and the closest valid one."""


class RankFailedError(RuntimeError):
    """A launched function failed on a rank; the message shows that rank's traceback.

    Attributes:
        rank: The rank that failed first.
        error: The exception of that rank, without its traceback; None if there is none, or if its class is not known
            in this process.
    """

    def __init__(self, message: str, *, rank: int, error: BaseException | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.error = error

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows instead of a traceback: those of the rank, not of its launcher."""
        return str(self).splitlines()
