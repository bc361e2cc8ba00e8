from typing import Any

import pytest

from drivetrain_xla import XLASettings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"spmd": "ddp"}, r"^spmd='ddp': must be one of off, data, shard$"),
        (
            {"blocks": ("Block",)},
            r"^blocks=\('Block',\): modules are gathered under spmd='shard' alone, not None$",
        ),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        XLASettings(**given)
