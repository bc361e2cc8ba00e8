import pytest

import drivetrain_memory

NAMES = [
    "NoBatchSizeFitsError",
    "PeakMemory",
    "find_executable_batch_size",
    "free_memory",
    "is_out_of_memory",
    "profile",
]


def test_the_public_names_are_these() -> None:
    assert drivetrain_memory.__all__ == NAMES
    assert dir(drivetrain_memory) == NAMES
    assert all(getattr(drivetrain_memory, name) is not None for name in NAMES)


def test_another_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="module 'drivetrain_memory' has no attribute 'nothing'"):
        drivetrain_memory.nothing  # noqa: B018
