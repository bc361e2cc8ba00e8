"""Put an object right in forked children, which copy it as it was, with locks that threads of the parent held."""

import os
from collections.abc import Callable
from typing import TypeVar
from weakref import ref

Owner = TypeVar("Owner")


def in_forked_children(owner: Owner, put_right: Callable[[Owner], None]) -> None:
    """Call `put_right(owner)` first in each forked child, as long as the owner is there."""
    known = ref(owner)

    def call() -> None:
        if (there := known()) is not None:
            put_right(there)

    os.register_at_fork(after_in_child=call)
