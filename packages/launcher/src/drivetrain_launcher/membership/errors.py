"""The end of a run as a node learns of it."""


class RunOverError(RuntimeError):
    """The run is over for this node; the message says why.

    Attributes:
        exit_code: The exit code for the shell.
    """

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RoundOverError(RuntimeError):
    """The round ended while this node waited for the others in it; it gets ready for the next."""
