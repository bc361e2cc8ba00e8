"""The progress mark of the hot path: what a rank did last, cheap enough for every batch, collective and step."""

from threading import get_ident


class Watch:
    """What this process did last; the watchdog reads it from another thread, nothing here waits or allocates.

    Attributes:
        count: How many marks were made. The watchdog notes the time at which it sees the count change, so that
            a mark reads no clock.
        label: What was done last, such as `"optimizer step"`.
        thread_id: The thread that made the last mark (or made the watch): the one whose stack tells a hang.

    Example:
        >>> watch = Watch()
        >>> watch.mark("optimizer step")
        >>> watch.count, watch.label
        (1, 'optimizer step')
    """

    __slots__ = ("count", "label", "thread_id")

    def __init__(self) -> None:
        self.count: int = 0
        self.label: str = "start"
        self.thread_id: int = get_ident()

    def mark(self, label: str) -> None:
        """Say that progress was made: `label` is what is now done or begun, in a word or two."""
        self.label = label
        self.thread_id = get_ident()
        self.count += 1
