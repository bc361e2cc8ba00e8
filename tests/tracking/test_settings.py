from typing import Any

import pytest

from drivetrain_tracking import TrackingSettings


def test_a_failure_ends_the_run_by_default() -> None:
    assert TrackingSettings().on_error == "raise"


def test_another_choice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^on_error='ignore': say one of raise, warn"):
        TrackingSettings(on_error="ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"throughput_every_steps": 0}, r"^throughput_every_steps=0: must be at least 1 step, or none"),
        ({"throughput_every_steps": -3}, r"^throughput_every_steps=-3: must be at least 1 step"),
        (
            {"flops_per_step": -1.0},
            r"^flops_per_step=-1.0: must be finite and above 0; leave it out .* are counted",
        ),
        ({"flops_per_step": float("nan")}, r"^flops_per_step=nan: must be finite and above 0"),
        ({"flops_per_step": 0.0}, r"^flops_per_step=0.0: must be finite and above 0"),
        (
            {"peak_flops": 0.0},
            r"^peak_flops=0.0: must be finite and above 0; leave it out .* a table of devices",
        ),
        ({"peak_flops": float("inf")}, r"^peak_flops=inf: must be finite and above 0"),
        ({"token_field": ""}, r"^token_field='': must name a field of a batch, such as input_ids"),
    ],
)
def test_settings_of_the_throughput_that_mean_nothing_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TrackingSettings(**settings)
