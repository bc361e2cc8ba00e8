from collections.abc import Sequence
from copy import deepcopy
from weakref import ReferenceType, ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from drivetrain_parallel import (
    Cut,
    GroupRanks,
    LayerPlan,
    ParallelPlan,
    divide_model,
    named_cuts,
    part_of,
    plan_model,
)
from drivetrain_parallel.layers.divided_layers import is_divided, kind_of
from parallel.divided import ThreadRanks, assert_near, assert_same, on_threads, with_random_values
from parallel.models import WIDTH, Attention, Perceptron

INPUT = torch.randn(2, 5, WIDTH, dtype=torch.float64)


class OwnLinear(nn.Linear):
    """Another class, whose forward may be another."""


class CountingRanks:
    """Counts the sums that it is asked for."""

    def __init__(self, ranks: ThreadRanks) -> None:
        self.rank, self.size, self.num_sums = ranks.rank, ranks.size, 0
        self.inner = ranks

    def add_up(self, tensor: Tensor) -> None:
        self.num_sums += 1
        self.inner.add_up(tensor)

    def join(self, tensor: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        return self.inner.join(tensor, dim, sizes)

    def exchange(
        self, tensor: Tensor, sent: Sequence[int] | None = None, received: Sequence[int] | None = None
    ) -> Tensor:
        return self.inner.exchange(tensor, sent, received)

    def meet(self, place: str, by: str) -> None:
        self.inner.meet(place, by)


def embedding_plan(rows: int, size: int) -> ParallelPlan:
    cuts = {"weight": Cut(dim=0, pieces=(rows,), num_units=rows)}
    return ParallelPlan(size=size, layers=(LayerPlan(name="0", style="vocabulary", cuts=cuts),))


def test_kinds_are_known_by_their_class() -> None:
    linear, embedding = kind_of(nn.Linear(2, 3)), kind_of(nn.Embedding(2, 3))
    assert linear is not None
    assert embedding is not None
    assert (linear.outputs, linear.inputs) == (0, 1)
    assert (embedding.outputs, embedding.inputs) == (0, None)
    assert kind_of(OwnLinear(2, 3)) is None
    assert kind_of(nn.Conv1d(2, 3, 1)) is None
    assert kind_of(nn.Bilinear(2, 2, 2)) is None


def test_a_divided_layer_has_no_kind() -> None:
    model = Perceptron()
    plan = plan_model(model, 2)

    def work(ranks: ThreadRanks) -> None:
        own = deepcopy(model)
        divide_model(own, plan, ranks)
        assert is_divided(own.up)
        assert is_divided(own.down)
        assert kind_of(own.up) is None
        assert not is_divided(own.between)

    on_threads(2, work)
    assert not is_divided(model.up)


def test_a_forward_that_fails_between_layers_keeps_no_graph() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Perceptron(between=nn.GELU()))
    plan = plan_model(model, 2)

    def work(ranks: ThreadRanks) -> None:
        own = deepcopy(model)
        divide_model(own, plan, ranks)
        inputs: list[ReferenceType[Tensor]] = []
        own[1].register_forward_pre_hook(lambda _, args: inputs.append(ref(args[0])))

        def fail(*_: object) -> None:
            raise ValueError("between")

        own[1].between.register_forward_hook(fail)  # type: ignore[union-attr]
        with pytest.raises(ValueError, match="between"):
            own(INPUT.float())
        assert [one() for one in inputs] == [None]

    on_threads(2, work)


def test_query_key_and_value_add_up_one_gradient() -> None:
    model = with_random_values(Attention())
    plan = plan_model(model, 2)

    def work(ranks: ThreadRanks) -> int:
        own, counting = deepcopy(model), CountingRanks(ranks)
        divide_model(own, plan, counting)
        own(INPUT.clone().requires_grad_()).sum().backward()
        return counting.num_sums

    assert on_threads(2, work) == [2, 2]  # the output, and the gradient of the input


def test_an_input_that_wants_no_gradient_sends_none() -> None:
    model = with_random_values(Attention())
    plan = plan_model(model, 2)

    def work(ranks: ThreadRanks) -> int:
        own, counting = deepcopy(model), CountingRanks(ranks)
        divide_model(own, plan, counting)
        own(INPUT).sum().backward()
        return counting.num_sums

    assert on_threads(2, work) == [1, 1]


def test_gradients_of_gradients_are_those_of_the_whole() -> None:
    whole = with_random_values(nn.Sequential(Perceptron(), Attention()))
    plan = plan_model(whole, 2)

    def penalise(model: nn.Module) -> dict[str, Tensor]:
        given = INPUT.clone().requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):
            (gradient,) = torch.autograd.grad(model(given).square().sum(), given, create_graph=True)
            (gradient.norm(dim=-1) - 1).square().sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    expected = penalise(deepcopy(whole))

    def work(ranks: ThreadRanks) -> None:
        own = deepcopy(whole)
        divide_model(own, plan, ranks)
        cuts = {name: cut for name, _, cut in named_cuts(own, plan)}
        found = penalise(own)
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            wanted = expected[name]
            wanted = part_of(wanted, cuts[name], ranks.rank, 2) if name in cuts else wanted
            assert_near(f"the gradient of {name}", gradient, wanted, 1e-9, 1.0)

    on_threads(2, work)


def test_layers_without_a_bias_are_divided() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 32, bias=False), nn.GELU(), nn.Linear(32, WIDTH, bias=False))
    model = with_random_values(model)
    plan = plan_model(model, 3)
    assert [list(layer.cuts) for layer in plan.layers] == [["weight"], ["weight"]]
    assert_same(model, [INPUT], plan)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("token", [9, -1, 1000])
def test_a_token_that_no_rank_has_is_refused_on_every_rank(token: int, size: int) -> None:
    model = nn.Sequential(nn.Embedding(9, 4))
    plan = embedding_plan(9, size)

    def work(ranks: ThreadRanks) -> None:
        own = deepcopy(model)
        divide_model(own, plan, ranks)
        with pytest.raises(IndexError, match="index out of range"):
            own(torch.tensor([[1, token]]))

    on_threads(size, work)


def test_gradients_of_the_padding_stay_zero() -> None:
    model = with_random_values(nn.Sequential(nn.Embedding(9, 4, padding_idx=6)))
    plan = embedding_plan(9, 3)
    assert_same(model, [torch.tensor([[6, 0, 8], [6, 5, 5]])], plan)


class FailsInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError(f"weight of {self.weight.numel()}")


def test_a_summed_layer_that_fails_has_its_parameters_again() -> None:
    plan = ParallelPlan(size=1, layers=(LayerPlan(name="0", style="summed"),))

    def work(ranks: ThreadRanks) -> None:
        model = nn.Sequential(FailsInside())
        weight = model[0].weight
        divide_model(model, plan, ranks)
        with pytest.raises(RuntimeError, match="weight of 4"):
            model(torch.ones(4))
        assert model[0].weight is weight
        assert list(model.parameters()) == [weight]

    on_threads(1, work)


@pytest.mark.ranks(2)
def test_a_fast_path_of_torch_does_not_bypass_divided_layers() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).double().eval()
    tokens = torch.randn(2, 5, 16, dtype=torch.float64)
    with torch.no_grad():
        expected = model(tokens)
        plan = plan_model(model, 2, {"linear1": "column", "linear2": "row"})
        divide_model(model, plan, GroupRanks(dist.group.WORLD))
        torch.testing.assert_close(model(tokens), expected, rtol=1e-9, atol=1e-9)
