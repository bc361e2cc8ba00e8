"""What can go wrong, as exceptions that say what was tried."""


class NoBatchSizeFitsError(RuntimeError):
    """Every batch size down to the smallest ran out of memory; the message lists them with what failed."""
