from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from drivetrain_dispatch import compute_module_sizes, init_empty_weights
from drivetrain_dispatch.model.sizes import enclosing_modules


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.arange(6), persistent=False)


EXPECTED = {
    "embed": 160, "embed.weight": 160, "blocks": 160, "blocks.0": 80, "blocks.0.weight": 64, "blocks.0.bias": 16,
    "blocks.1": 80, "blocks.1.weight": 64, "blocks.1.bias": 16, "head": 160, "head.weight": 160, "positions": 48,
    "": 160 + 160 + 48,
}  # fmt: skip


@pytest.mark.parametrize("empty", [False, True])
def test_every_part_has_its_size_and_what_is_tied_counts_once(empty: bool) -> None:
    with init_empty_weights(include_buffers=True) if empty else nullcontext():
        model = Model()
    assert compute_module_sizes(model) == EXPECTED
    sizes = compute_module_sizes(
        model, dtype=torch.bfloat16, special_dtypes={"blocks.0.weight": torch.float32}
    )
    assert (sizes[""], sizes["positions"]) == (80 + (64 + 8) + 40 + 48, 48)


def test_two_parameters_over_one_memory_count_once() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model["b"].weight.data = model["a"].weight.data
    assert compute_module_sizes(model)[""] == 64


def test_a_module_under_two_names_counts_once() -> None:
    block = nn.Linear(4, 4)
    sizes = compute_module_sizes(nn.Sequential(block, block))
    assert (sizes[""], sizes["0"], sizes["1"]) == (80, 80, 80)


@given(st.lists(st.integers(min_value=1, max_value=5), min_size=1, max_size=5))
def test_a_model_is_the_sum_of_its_parts(widths: list[int]) -> None:
    model = nn.Sequential(*(nn.Linear(width, width) for width in widths))
    sizes = compute_module_sizes(model)
    assert sizes[""] == sum(sizes[str(index)] for index in range(len(widths)))
    assert sizes[""] == sum(parameter.numel() * 4 for parameter in model.parameters())


def test_the_modules_around_a_name_are_listed_inwards() -> None:
    assert list(enclosing_modules("a.b.weight")) == ["", "a", "a.b"]
    assert list(enclosing_modules("weight")) == [""]
