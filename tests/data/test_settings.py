import subprocess
import sys

import pytest

from drivetrain_data import DataSettings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"even": "odd"}, "^even='odd': must be one of uneven, pad, drop"),
        ({"seed": -1}, "^seed=-1: must be an integer between 0 and"),
        ({"seed": 2**63}, "^seed=9223372036854775808: must be an integer between 0 and"),
    ],
)
def test_a_value_out_of_range_is_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataSettings(**values)


def test_settings_are_read_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from drivetrain_data import DataSettings as S; print(S().even)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "uneven\n"
