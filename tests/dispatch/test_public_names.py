import pytest

import drivetrain_dispatch

NAMES = [
    "TiedParametersError",
    "compute_module_sizes",
    "find_tied_parameters",
    "init_empty_weights",
    "init_on_device",
    "retie_parameters",
]


def test_the_public_names_are_these() -> None:
    assert drivetrain_dispatch.__all__ == NAMES
    assert dir(drivetrain_dispatch) == NAMES
    assert all(getattr(drivetrain_dispatch, name) is not None for name in NAMES)


def test_another_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="module 'drivetrain_dispatch' has no attribute 'nothing'"):
        drivetrain_dispatch.nothing  # noqa: B018
