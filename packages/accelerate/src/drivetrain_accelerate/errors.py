"""The errors of this package."""


class AlreadyImportedError(RuntimeError):
    """`install()` came after the real Accelerate was imported, whose objects the program may hold."""


class UnknownVersionError(ValueError):
    """A version of Accelerate's interface was asked for that this package does not provide."""


class NotProvidedError(NotImplementedError):
    """A name of Accelerate's interface was used that this package has no counterpart for."""
