import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_launcher import LaunchError
from drivetrain_launcher.submit.job_planner import duration_seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("12:00:00", 43200),
        ("1-12:00:00", 129600),
        ("12h", 43200),
        ("90m", 5400),
        ("1d12h", 129600),
        ("45S", 45),
        ("100:00:00", 360000),
    ],
)
def test_a_time_is_a_clock_or_numbers_with_units(text: str, seconds: int) -> None:
    assert duration_seconds(text) == seconds


@pytest.mark.parametrize("text", ["12", "", "12:00", "1:60:00", "0h", "12h1d", "-1h", "1.5h", "1h; id", "١h"])
def test_another_form_is_refused_with_the_allowed_ones(text: str) -> None:
    with pytest.raises(LaunchError, match="say hours, minutes and seconds, 12:00:00, or units"):
        duration_seconds(text)


@given(st.integers(0, 30), st.integers(0, 99), st.integers(0, 59), st.integers(0, 59))
def test_both_forms_state_the_same_time(days: int, hours: int, minutes: int, seconds: int) -> None:
    whole = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if whole:
        assert duration_seconds(f"{days}-{hours}:{minutes:02}:{seconds:02}") == whole
        assert duration_seconds(f"{days}d{hours}h{minutes}m{seconds}s") == whole
