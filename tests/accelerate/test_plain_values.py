"""Names, sizes and nested dicts, beside the installed Accelerate."""

from copy import deepcopy
from typing import Any

import pytest
from torch import nn

from drivetrain_accelerate import plain_values as ours

real: Any = pytest.importorskip("accelerate.utils.other")


class Named:
    class Inner:
        pass


@pytest.mark.parametrize("value", [Named, Named(), Named.Inner, Named.Inner(), deepcopy, nn.Linear(1, 1), 3])
def test_names(value: Any) -> None:
    assert ours.get_pretty_name(value) == real.get_pretty_name(value)


@pytest.mark.parametrize(
    "size", [0, 1, 1023, 1024, 1536, 2**20, 2**30 * 1.5, 2**40, 2**50, 2**60, -5, 123456789]
)
def test_sizes(size: float) -> None:
    assert ours.convert_bytes(size) == real.convert_bytes(size)


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        ({"a": {"b": 1}, "c": 2}, {"a": {"z": 3}, "c": 9, "q": 1}),
        ({"a": 1}, {"a": {"b": 5}}),
        ({"a": {"b": {"c": 1}}}, {}),
    ],
    ids=str,
)
def test_dicts_are_merged(source: dict[Any, Any], destination: dict[Any, Any]) -> None:
    theirs = real.merge_dicts(source, deepcopy(destination))
    merged = ours.merge_dicts(source, destination)
    assert merged == theirs
    assert merged is destination


def test_attributes_of_attributes() -> None:
    model = nn.Sequential(nn.Linear(1, 2))
    assert (
        ours.recursive_getattr(model, "0.out_features")
        == real.recursive_getattr(model, "0.out_features")
        == 2
    )
    with pytest.raises(AttributeError, match="no attribute 'zz'"):
        ours.recursive_getattr(model, "0.zz")
