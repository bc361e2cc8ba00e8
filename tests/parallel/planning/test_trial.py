from copy import deepcopy
from dataclasses import replace
from threading import current_thread, main_thread

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain_parallel import ParallelPlan, plan_model
from drivetrain_parallel.planning.regions import RegionShape, proposals
from drivetrain_parallel.planning.trial import Trial
from parallel.models import WIDTH, Attention, Conditioned, ConditionedAttention, MaskedAttention, Perceptron


def plans(module: nn.Module, size: int = 2) -> list[ParallelPlan]:
    shape = RegionShape(module=module, columns=("up",), row="down")
    if isinstance(module, Attention):
        shape = RegionShape(module=module, columns=("query", "key", "value"), row="output")
    return list(proposals(shape, size))


class DropsAlways(Perceptron):
    """Drops with a probability that stands in its code alone."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(self.up(x), 0.5, self.training))


class ScalesTwice(Perceptron):
    """Applies one scale to what is divided and to what is whole, so that neither sum nor part is its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.down(self.scale * self.up(x))


class WithWeights(Attention):
    """Returns what has another shape on a rank of fewer heads."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.split(self.query(x))


def test_a_division_that_computes_the_same_is_settled_as_it_is() -> None:
    module = Perceptron()
    (plan,) = plans(module)
    assert Trial(module, WIDTH).settled(plan) == plan


def test_of_two_proposals_the_one_that_computes_the_same_is_settled() -> None:
    trial = Trial(Attention(), WIDTH)
    without, changed = plans(Attention())
    assert trial.settled(without) is None
    assert trial.settled(changed) == changed


def test_a_module_on_meta_is_tried() -> None:
    module = Perceptron().to("meta")
    (plan,) = plans(module)
    assert Trial(module, WIDTH).settled(plan) == plan


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_module_of_another_dtype_is_tried_in_fp32(dtype: torch.dtype) -> None:
    module = Perceptron().to(dtype)
    (plan,) = plans(module)
    assert Trial(module, WIDTH).settled(plan) == plan


def test_a_module_is_not_changed() -> None:
    module = Perceptron(nn.Dropout(0.1))
    before = deepcopy(module.state_dict())
    (plan,) = plans(module)
    Trial(module, WIDTH).settled(plan)
    assert all(torch.equal(one, before[name]) for name, one in module.state_dict().items())
    assert module.up.out_features == 32
    assert module.training


def test_arguments_that_a_module_wants_may_be_none() -> None:
    assert Trial(MaskedAttention(), WIDTH).is_possible
    assert not Trial(ConditionedAttention(), WIDTH).is_possible
    assert Trial(Conditioned(ConditionedAttention()), WIDTH).is_possible


def test_what_returns_no_floats_cannot_be_tried() -> None:
    class Counts(Perceptron):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).argmax(-1)

    trial = Trial(Counts(), WIDTH)
    assert not trial.is_possible
    assert trial.settled(plans(Counts())[0]) is None


@pytest.mark.parametrize(
    ("module", "draws"),
    [
        (Perceptron(), False),
        (Perceptron(nn.Dropout(0.1)), True),
        (DropsAlways(), True),
        (Attention(dropout=0.1), True),
    ],
    ids=["no dropout", "a layer", "in code", "of attention"],
)
def test_what_draws_random_numbers_is_observed(module: nn.Module, draws: bool) -> None:
    state = torch.get_rng_state()
    trial = Trial(module, WIDTH)
    assert trial.draws is draws
    settled = next(one for plan in plans(module) if (one := trial.settled(plan)) is not None)
    assert bool(settled.random) is draws
    assert torch.equal(torch.get_rng_state(), state)


def test_threads_leave_the_generator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two that read and set it at once may wait for each other for ever.
    def fail(*_: object) -> None:
        assert current_thread() is main_thread()

    for name in ("get_rng_state", "set_rng_state"):
        given = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, given=given: fail() or given(*args))
    assert plan_model(Attention(dropout=0.5), 2).layers


def test_gradients_that_are_parts_are_summed() -> None:
    module = Perceptron(nn.PReLU())
    (plan,) = plans(module)
    settled = Trial(module, WIDTH).settled(plan)
    assert settled is not None
    summed = settled.layers[-1]
    assert (summed.name, summed.style, summed.region, dict(summed.cuts)) == ("between", "summed", "down", {})


def test_gradients_that_are_no_parts_are_refused() -> None:
    module = ScalesTwice()
    assert all(Trial(module, WIDTH).settled(plan) is None for plan in plans(module))


def test_what_else_is_returned_may_have_the_shape_of_a_rank_but_not_another_value() -> None:
    trial = Trial(WithWeights(), WIDTH)
    assert [trial.settled(plan) is not None for plan in plans(WithWeights())] == [False, True]


def test_a_wrong_plan_ends_without_waiting() -> None:
    """One rank fails where the other waits for it."""
    (plan,) = plans(Perceptron())
    wrong = replace(plan, layers=plan.layers[:1])
    assert Trial(Perceptron(), WIDTH).settled(wrong) is None
