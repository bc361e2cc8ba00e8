"""The private names of torch that this package uses, in one place.

torch has no public API for them. They are the same in torch 2.9 to 2.15; tests/data/test_compat.py holds each one to
what is relied on, and docs/platforms.md lists them.
"""

# The methods by which torch's DataLoader makes its iterator: a subclass that has its own reads in another way.
ITERATOR_METHODS = frozenset({"__iter__", "_get_iterator"})
