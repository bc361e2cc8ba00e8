import pytest
from torch import nn

from drivetrain_plan.model.layers import find_stacks, num_blocks, shortened


def model_of(*widths: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 4), nn.ModuleList(nn.Linear(4, width) for width in widths))


def test_blocks_of_several_makes_are_counted_and_kept_in_order() -> None:
    model = model_of(4, 8, 4, 8, 4)
    assert num_blocks(model) == {("1", 0): 3, ("1", 1): 2}
    with shortened(model, {("1", 0): 1, ("1", 1): 2}):
        assert [block.out_features for block in model[1]] == [4, 8, 8]
    assert len(model[1]) == 5


@pytest.mark.parametrize(
    "model", [nn.Linear(3, 3), model_of(4), model_of(4, 8), nn.ModuleList([nn.ReLU()] * 2)]
)
def test_what_repeats_nothing_has_no_stacks(model: nn.Module) -> None:
    assert find_stacks(model) == {}


def test_lists_inside_of_blocks_belong_to_the_blocks() -> None:
    inner = nn.ModuleList(nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])) for _ in range(3))
    assert list(find_stacks(nn.Sequential(inner))) == ["0"]
