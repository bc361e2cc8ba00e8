"""The errors of this package."""


class AlreadyImportedError(RuntimeError):
    """The real Accelerate was imported before `install()`, and the program may hold its objects."""


class UnknownVersionError(ValueError):
    """The requested version of Accelerate's interface is not provided by this package."""


class NotProvidedError(NotImplementedError):
    """A name of Accelerate's interface that the program uses has no counterpart in this package."""
