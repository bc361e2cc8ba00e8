import psutil
import pytest
import torch
from torch import nn

from drivetrain_dispatch.errors import DeviceMapError
from drivetrain_dispatch.model.model_layout import ModelLayout
from drivetrain_dispatch.planning.blocks import Block, blocks_of
from drivetrain_dispatch.planning.memory_budget import balanced_budgets, get_max_memory


def test_what_is_free_of_every_device() -> None:
    free = get_max_memory()
    assert list(free) == [*range(torch.accelerator.device_count()), "cpu"]
    assert 0 < free["cpu"] < psutil.virtual_memory().total


def test_what_is_given_is_read_in_its_order() -> None:
    given = {1: "1GB", "cpu": 5, "disk": "2TB", "cuda:0": 0}
    assert list(get_max_memory(given).items()) == [
        (1, 10**9), ("cpu", 5), ("disk", 2 * 10**12), ("cuda:0", 0)
    ]  # fmt: skip
    with pytest.raises(DeviceMapError, match="'gpu' is no device"):
        get_max_memory({"gpu": 1})
    with pytest.raises(DeviceMapError, match="'0' is no device: give the number 0, without quotes"):
        get_max_memory({"0": 1})


@pytest.mark.parametrize("given", [10**9, "20GB", ["20GB"]])
def test_one_size_for_all_is_refused(given: object) -> None:
    with pytest.raises(
        ValueError, match=r'give a size for each device, such as \{0: "20GB", "cpu": "60GB"\}'
    ):
        get_max_memory(given)


def layers(number: int) -> list[Block]:
    """Blocks of 400 bytes each."""
    model = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(number)))
    return blocks_of(ModelLayout.of(model))


@pytest.mark.parametrize(
    ("budgets", "low_zero", "expected"),
    [
        # A model is spread evenly.
        ({0: 10_000, 1: 10_000, 2: 10_000, "cpu": 50}, False, {0: 1200, 1: 1200, 2: 10_000, "cpu": 50}),
        ({0: 500, 1: 10_000}, False, {0: 500, 1: 10_000}),  # no device gets more than it has
        ({0: 9000, 1: 1500, 2: 9000}, True, {0: 0, 1: 1500, 2: 9000}),  # the first one may be kept free
        ({0: 9000, 1: 700, 2: 700}, True, {0: 1000, 1: 700, 2: 700}),
        ({0: 100, "cpu": 9000}, False, {0: 100, "cpu": 9000}),  # one accelerator has nothing to balance
    ],
)
def test_budgets_are_balanced(
    budgets: dict[int | str, int], low_zero: bool, expected: dict[int | str, int]
) -> None:
    assert balanced_budgets(budgets, layers(6), low_zero=low_zero) == expected
