import pytest

from drivetrain_tracking import TrackingSettings


def test_a_failure_ends_the_run_by_default() -> None:
    assert TrackingSettings().on_error == "raise"


def test_another_choice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^on_error='ignore': say one of raise, warn"):
        TrackingSettings(on_error="ignore")  # type: ignore[arg-type]
