from typing import Any

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


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("check_half", "yes", "check_half='yes': must be True or False"),
        ("fp8_skip_ends", "no", "fp8_skip_ends='no': must be True or False"),
        ("max_skipped_steps", 1.5, "max_skipped_steps=1.5: must be an integer"),
        ("watch_underflow", True, "watch_underflow=True: must be an integer"),
        ("growth_interval", "x", "growth_interval='x': must be an integer"),
        ("fp8_exclude", "ab", r"fp8_exclude='ab': must be a tuple of patterns"),
        ("keep_fp32", (3,), r"keep_fp32=\(3,\): must be a tuple of patterns"),
        ("initial_scale", float("inf"), "initial_scale=inf: must be above 0 and finite"),
    ],
)
def test_values_of_another_type_are_refused(field: str, value: object, message: str) -> None:
    given: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=message):
        PrecisionSettings(**given)
