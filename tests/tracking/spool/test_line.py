import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_tracking.spool.line import decode, encode

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
RECORDS = st.dictionaries(
    st.text(),
    st.recursive(
        SCALARS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=6,
    ),
    min_size=1,
    max_size=4,
)


@given(RECORDS)
def test_a_record_comes_back_and_is_one_line_of_json(record: dict[str, object]) -> None:
    line = encode(record)
    assert line.count(b"\n") == 1
    assert decode(line[:-1]) == record
    if "crc" not in record:
        assert {name: value for name, value in json.loads(line).items() if name != "crc"} == record


@given(RECORDS, st.data())
def test_a_line_with_another_byte_or_a_missing_part_is_told(
    record: dict[str, object], data: st.DataObject
) -> None:
    line = encode(record)[:-1]
    at = data.draw(st.integers(0, len(line) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda byte: byte != line[at]))
    assert decode(line[:at] + bytes([other]) + line[at + 1 :]) is None
    assert decode(line[:at]) is None
    assert decode(line[at + 1 :]) is None


def test_numbers_that_json_lacks_are_strings() -> None:
    record = {"loss": float("nan"), "norms": [float("inf"), {"low": float("-inf")}]}
    assert decode(encode(record)[:-1]) == {"loss": "NaN", "norms": ["Infinity", {"low": "-Infinity"}]}


def test_an_empty_record_has_no_line() -> None:
    with pytest.raises(ValueError, match="empty record"):
        encode({})
