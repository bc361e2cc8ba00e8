"""The exceptions of this package."""


class NoBatchSizeFitsError(RuntimeError):
    """Every batch size down to the smallest ran out of memory; the message lists every size with its error."""
