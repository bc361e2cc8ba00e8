import pytest
import torch

from drivetrain_precision import DtypePolicy
from drivetrain_precision.dtypes.saved_dtypes import find_conversions

NARROW, WIDE = torch.ones(1, dtype=torch.bfloat16), torch.ones(1)


@pytest.mark.parametrize(
    ("saved", "own", "dtypes", "expected"),
    [
        pytest.param(
            NARROW, WIDE, DtypePolicy(), {"a": "bfloat16 to float32"}, id="a wider dtype holds all values"
        ),
        pytest.param(WIDE, WIDE, DtypePolicy(), {}, id="the same dtype"),
        pytest.param(
            WIDE, NARROW, DtypePolicy(param=torch.bfloat16), {"a": "float32 to bfloat16"}, id="as asked"
        ),
        pytest.param(torch.ones(1, dtype=torch.int8), WIDE, DtypePolicy(), {}, id="quantized values"),
        pytest.param(None, WIDE, DtypePolicy(), {}, id="a name that was not saved"),
    ],
)
def test_conversions_are_listed(saved, own, dtypes: DtypePolicy, expected: dict[str, str]) -> None:
    assert find_conversions({"a": saved}, {"a": own}, dtypes, parameters={"a"}) == expected


@pytest.mark.parametrize(("parameters", "setting"), [({"a"}, "param_dtype"), (set(), "buffer_dtype")])
def test_values_are_not_rounded_unasked(parameters: set[str], setting: str) -> None:
    with pytest.raises(ValueError, match=f"saved in float32.*precision.{setting}"):
        find_conversions({"a": WIDE}, {"a": NARROW}, DtypePolicy(), parameters=parameters)
