import numpy as np
import pytest

from drivetrain_data import IndexRangeError
from drivetrain_data.sampling.drawn_order import DrawnOrder


def whole(order: DrawnOrder) -> list[object]:
    return order.take(0, np.arange(order.length(0)))


def test_a_drawn_order_is_named_after_its_sampler() -> None:
    assert DrawnOrder([0], seed=0, size=1).name == "drawn:list"


def test_keys_that_are_no_integers_are_handed_on() -> None:
    order = DrawnOrder(["b", "a"], seed=0, size=None)
    assert whole(order) == ["b", "a"]
    with pytest.raises(IndexRangeError, match="gave index 2"):
        whole(DrawnOrder([2], seed=0, size=2))
