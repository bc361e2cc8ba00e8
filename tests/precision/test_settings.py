import pytest

from drivetrain_precision import PrecisionSettings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("initial_scale", 0.0),
        ("growth_factor", 1.0),
        ("backoff_factor", 1.0),
        ("growth_interval", 0),
        ("min_scale", 0.0),
        ("min_scale", 131072.0),
        ("max_skipped_steps", 0),
        ("watch_underflow", 0),
    ],
)
def test_a_value_outside_its_range_is_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{field}={value!r}: must"):
        PrecisionSettings(**{field: value})
