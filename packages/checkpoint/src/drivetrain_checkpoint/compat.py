"""The private names of torch that this package uses, in one place.

torch has no public API for these names. They are the same in torch 2.9 to 2.15. tests/checkpoint/test_compat.py tests
the behaviour that this package relies on, and docs/design/platforms.md lists the names.
"""

from torch import Tensor


def version_of(tensor: Tensor) -> int:
    """Return the number of in-place changes to a tensor; -1 for an inference tensor, which counts no changes."""
    return -1 if tensor.is_inference() else tensor._version
