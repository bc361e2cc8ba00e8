import pytest
import torch
from torch import Tensor, nn

from drivetrain_parallel import ParallelPlanError, plan_model
from drivetrain_parallel.planning.found_styles import find_regions, joined, placed
from parallel.divided import divided_alike
from parallel.models import (
    WIDTH,
    Attention,
    Block,
    Conditioned,
    CountedByProperty,
    GatedPerceptron,
    GroupedAttention,
    MaskedAttention,
    Perceptron,
)

INPUTS = [torch.randn(2, 5, WIDTH, dtype=torch.float64)]
FEATURES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
OWN = ["query", "key", "value", "output"]


class ZeroAtFirst(Perceptron):
    """A residual perceptron whose last layer is zero, with a norm over what would be divided."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__(between)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class NormedInTraining(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(hidden / hidden.norm(dim=-1, keepdim=True) if self.training else hidden)


class WithMean(Perceptron):
    """Returns the mean of what would be divided, too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.up(x)
        return self.down(hidden), hidden.mean()


class WithItself(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(x + self.up(x))


class OverHeads(nn.Module):
    """A softmax over heads, which every rank would take over its own."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).unflatten(-1, (self.num_heads, -1)).softmax(-2).flatten(-2))


class IgnoresItsInput(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.ones_like(x))


@pytest.mark.parametrize(
    ("model", "size", "names"),
    [
        (Perceptron(), 2, ["up", "down"]),
        (Perceptron(hidden=33), 4, ["up", "down"]),
        (GatedPerceptron(), 2, ["gate_up", "down"]),
        (Attention(), 2, OWN),
        (Attention(), 3, OWN),
        (Attention(counts=False), 4, OWN),
        (Conditioned(MaskedAttention()), 2, [f"inner.{name}" for name in OWN]),
        (GroupedAttention(), 2, ["qkv", "output"]),
        (Block(), 2, ["qkv", "attended", "up", "down"]),
        (Block(), 4, ["qkv", "attended", "up", "down"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_a_module_is_divided_and_computes_the_same(model: nn.Module, size: int, names: list[str]) -> None:
    assert divided_alike(model, size, INPUTS) == names


@pytest.mark.parametrize(
    ("model", "summed"),
    [
        (Attention(norm=nn.LayerNorm(4)), "norm"),
        (Attention(is_scaled=True), ""),
        (Perceptron(nn.PReLU()), "between"),
    ],
    ids=["a norm of each head", "a scale of all heads", "PReLU"],
)
def test_the_gradients_of_what_every_rank_applies_to_its_own_part_are_added_up(
    model: nn.Module, summed: str
) -> None:
    assert summed in divided_alike(model, 2, INPUTS)
    (layer,) = [one for one in plan_model(model, 2).layers if one.name == summed]
    assert layer.style == "summed"


@pytest.mark.parametrize(
    "model",
    [
        Perceptron(nn.LayerNorm(32)),
        Perceptron(nn.RMSNorm(32, elementwise_affine=False)),
        Perceptron(nn.Softmax(-1)),
        Perceptron(nn.BatchNorm1d(5)),  # over the places of the trial's input, and all features
        ZeroAtFirst(nn.RMSNorm(32, elementwise_affine=False)),
        NormedInTraining(),
        WithMean(),
        WithItself(hidden=WIDTH),
        OverHeads(),
        GatedPerceptron(interleaved=True),
        CountedByProperty(),
        Attention(biases=FEATURES),
        Attention(biases=FEATURES, counts=False),
    ],
    ids=lambda model: type(model).__name__,
)
def test_a_division_that_would_compute_something_else_is_refused(model: nn.Module) -> None:
    with pytest.raises(
        ParallelPlanError, match="no division that its sizes allow computes what the whole computes"
    ):
        plan_model(model, 2)


@pytest.mark.parametrize(
    "model",
    [IgnoresItsInput(), nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.Linear(32, WIDTH))],
    ids=["a module that ignores its input", "BatchNorm over features"],
)
def test_what_does_not_run_on_one_tensor_is_refused(model: nn.Module) -> None:
    with pytest.raises(ParallelPlanError, match=r"does not run on one tensor alone.*give styles"):
        plan_model(model, 2)


def test_fewer_heads_than_ranks_are_refused() -> None:
    with pytest.raises(
        ParallelPlanError, match="Attention has no layer that 5 ranks can divide: query: no division"
    ):
        plan_model(Attention(), 5)


@pytest.mark.parametrize("first", ["the one that can be divided", "the one that cannot"])
def test_modules_of_one_class_and_size_are_each_tried_if_they_differ_inside(first: str) -> None:
    good = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
    bad = nn.Sequential(nn.Linear(WIDTH, 32), nn.LayerNorm(32), nn.Linear(32, WIDTH))
    model = nn.ModuleDict({"good": good, "bad": bad} if "can be" in first else {"bad": bad, "good": good})
    plan = find_regions(model, 2)
    assert [layer.name for layer in plan.layers] == ["good.0", "good.2"]
    assert set(plan.left) == {"bad.0", "bad.2"}


def test_blocks_of_one_make_are_all_divided() -> None:
    plan = plan_model(nn.Sequential(*(Block() for _ in range(3))), 2)
    assert len(plan.layers) == 12
    assert {change.module for change in plan.attributes} == {"0", "1", "2"}


@pytest.mark.parametrize("bad", [0, 1])
def test_a_role_is_divided_in_all_blocks_or_in_none(bad: int) -> None:
    """The numbers of heads change with the attention of a block, whatever is left of it."""
    blocks = [Block(), Block()]
    blocks[bad].between = nn.Softmax(-1)
    model = nn.Sequential(*blocks)
    assert divided_alike(model, 2, INPUTS) == ["0.qkv", "0.attended", "1.qkv", "1.attended"]
    left = plan_model(model, 2).left
    assert left[f"{1 - bad}.up"] == "the same layer of another block cannot be divided"
    assert left[f"{bad}.up"].startswith("no division that its sizes allow")


def test_heads_stay_whole_in_a_block_whose_layers_do() -> None:
    """A number that changed without its layers would divide the heads of a whole layer."""
    model = nn.Sequential(Block(), Block(num_heads=1))
    assert divided_alike(model, 2, INPUTS) == ["0.up", "0.down", "1.up", "1.down"]
    assert plan_model(model, 2).attributes == ()


def test_layers_that_share_a_parameter_stay_whole() -> None:
    model = nn.Sequential(Perceptron(), Perceptron())
    model[1].up.weight = model[0].up.weight
    plan = find_regions(model, 2)
    assert plan.layers == ()
    assert plan.left["0.up"] == "another layer holds the same parameter"


def test_layers_that_are_taken_are_not_looked_at() -> None:
    plan = find_regions(nn.Sequential(Perceptron(), Perceptron()), 2, taken=frozenset({"0.up", "0.down"}))
    assert [layer.name for layer in plan.layers] == ["1.up", "1.down"]
    assert plan.left == {}


def test_every_layer_is_divided_or_left_with_a_reason() -> None:
    model = nn.Sequential(Block(), Block(nn.Softmax(-1)))
    plan = find_regions(model, 2)
    layers = {name for name, one in model.named_modules() if type(one) is nn.Linear}
    divided = {layer.name for layer in plan.layers}
    assert divided | set(plan.left) == layers
    assert divided.isdisjoint(plan.left)
    assert all(plan.sources[name] == "found" for name in divided)


def test_a_placed_plan_is_that_of_the_model_around() -> None:
    plan = find_regions(Block(dropout=0.1), 2)
    whole = placed(plan, "blocks.3.")
    assert [one.name for one in whole.layers] == [f"blocks.3.{one.name}" for one in plan.layers]
    assert {one.region for one in whole.layers} == {"blocks.3.attended", "blocks.3.down"} == whole.random
    assert {(one.module, one.region) for one in whole.attributes} == {("blocks.3", "blocks.3.attended")}
    assert len(joined(plan, whole).layers) == 2 * len(plan.layers)
