"""The private names of torch and of datasets that this package uses, in one place.

They have no public API for them. They are the same in torch 2.9 to 2.15; tests/data/test_compat.py holds each one to
what is relied on, and docs/platforms.md lists them.
"""

from typing import Any

# The methods by which torch's DataLoader makes its iterator: a subclass that has its own reads in another way.
ITERATOR_METHODS = frozenset({"__iter__", "_get_iterator"})


def fingerprint_of(dataset: Any) -> str | None:
    """Return a dataset's own fingerprint of its content, as Hugging Face datasets have, or None."""
    found = getattr(dataset, "_fingerprint", None)
    return found if isinstance(found, str) else None
