"""Stages are balanced by what they compute; names that name nothing are refused."""

import pytest
from torch import nn

from drivetrain_parallel.errors import ParallelPlanError
from drivetrain_parallel.stages.stage_plan import plan_stages


def model_of(num_blocks: int, *, width: int = 8, words: int = 9) -> nn.Module:
    blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(num_blocks))
    return nn.ModuleDict(
        {"words": nn.Embedding(words, width), "blocks": blocks, "head": nn.Linear(width, words)}
    )


def test_blocks_are_divided_evenly_and_a_head_counts() -> None:
    assert plan_stages(model_of(9), range(4)).starts == (0, 2, 5, 8)
    heavy = plan_stages(model_of(6, words=24), range(2))
    assert len(heavy.blocks_of(0)) > len(heavy.blocks_of(1))


def test_what_is_listed_before_and_after_belongs_to_the_ends() -> None:
    plan = plan_stages(model_of(4), (0, 1, 1, 0))
    assert plan.holders["words.weight"] == plan.holders["head.weight"] == (0,)
    assert plan.holders["blocks.1.weight"] == (1,)
    looped = plan_stages(model_of(4), (0, 1, 0, 1))
    assert looped.holders["head.bias"] == (1,)


def test_a_tied_parameter_is_held_by_both_ends() -> None:
    model = model_of(2)
    model["head"].weight = model["words"].weight  # type: ignore[index]
    plan = plan_stages(model, range(2))
    assert plan.holders["words.weight"] == plan.holders["head.weight"] == (0, 1)


def test_what_the_model_lists_before_may_be_said_to_run_last() -> None:
    model = nn.ModuleDict(
        {"norm": nn.LayerNorm(8), "blocks": nn.ModuleList(nn.Linear(8, 8) for _ in range(2))}
    )
    assert plan_stages(model, range(2)).holders["norm.weight"] == (0,)
    assert plan_stages(model, range(2), last=["norm"]).holders["norm.weight"] == (1,)


def test_splits_are_taken_as_said() -> None:
    assert plan_stages(model_of(5), range(3), splits=["blocks.1", "blocks.2"]).starts == (0, 1, 2)


@pytest.mark.parametrize(
    ("number", "options", "said"),
    [
        (4, {}, r"3 blocks .blocks\.0 to blocks\.2. for 4 stages: at most 3"),
        (2, {"splits": ["blocks.9"]}, "2 stages take the names of 1 blocks"),
        (3, {"splits": ["blocks.2", "blocks.1"]}, "in order"),
        (2, {"last": ["nowhere"]}, "'nowhere' matches no module"),
    ],
)
def test_what_does_not_fit_is_refused(number: int, options: dict[str, list[str]], said: str) -> None:
    with pytest.raises(ParallelPlanError, match=said):
        plan_stages(model_of(3), range(number), **options)


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ParallelPlanError, match="Linear has no"):
        plan_stages(nn.Linear(2, 2), range(2))
