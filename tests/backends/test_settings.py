import pytest

from drivetrain_backends import DDPSettings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bucket_size_mb", 0.0),
        ("communication_hook", "zip"),
        ("power_sgd_rank", 0),
        ("power_sgd_start_step", 1),
    ],
)
def test_a_value_outside_its_range_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field}={value!r}: must"):
        DDPSettings(**{field: value})


def test_a_static_graph_needs_no_search_for_unused_parameters() -> None:
    with pytest.raises(ValueError, match="find_unused_parameters must stay off"):
        DDPSettings(static_graph=True, find_unused_parameters=True)
