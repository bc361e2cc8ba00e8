import pytest

import drivetrain_tracking

NAMES = [
    "JSONLTracker",
    "Tracker",
    "TrackerFailedError",
    "TrackerGroup",
    "TrackerStateError",
    "TrackingSettings",
    "UnknownTrackerError",
    "ValueNotLoggableError",
    "Values",
    "make_tracker",
    "plain_config",
    "plain_values",
    "tracker_names",
]


def test_the_public_names_are_these() -> None:
    assert drivetrain_tracking.__all__ == NAMES
    assert dir(drivetrain_tracking) == NAMES
    assert all(getattr(drivetrain_tracking, name) is not None for name in NAMES)


def test_another_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="module 'drivetrain_tracking' has no attribute 'nothing'"):
        drivetrain_tracking.nothing  # noqa: B018
