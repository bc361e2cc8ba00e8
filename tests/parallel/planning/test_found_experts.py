"""Experts are found by signature and sizes, and taken only if they compute alike in parts; else a reason is told."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain_parallel import Cut, ParallelPlanError, plan_experts
from optional_modules import skip_without
from parallel.divided import assert_same, with_random_values
from parallel.models import WIDTH, Experts, Perceptron, Routed
from parallel.transformers_cases import Case, inputs_of


class Squared(Experts):
    """Multiplies by the square of the weights, which a rank that sends tokens does not know."""

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(tokens * weights.sum(-1, keepdim=True), index, weights)


class Masked(Experts):
    """Takes another number of arguments."""

    def forward(self, tokens: Tensor, index: Tensor) -> Tensor:
        return super().forward(tokens, index, torch.ones(index.shape))


class WithNorm(Experts):
    """Has a parameter that is no expert's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))


def test_experts_of_each_block_are_divided_and_their_number_changes() -> None:
    plan = plan_experts(nn.Sequential(Routed(), nn.ReLU(), Routed()), 2)
    assert [(layer.name, layer.style) for layer in plan.layers] == [
        ("0.experts", "experts"),
        ("2.experts", "experts"),
    ]
    assert dict(plan.layers[0].cuts) == dict.fromkeys(
        ("up", "bias", "down"), Cut(dim=0, pieces=(5,), num_units=5)
    )
    assert [(one.module, one.attribute, one.of_rank(1, 2)) for one in plan.attributes] == [
        ("0.experts", "num_experts", 3),
        ("2.experts", "num_experts", 3),
    ]
    assert set(plan.sources.values()) == {"found"}
    assert plan.left == {}


def test_a_model_on_meta_is_planned_alike() -> None:
    assert plan_experts(nn.Sequential(Routed()).to("meta"), 2) == plan_experts(nn.Sequential(Routed()), 2)


def test_a_model_without_experts_stays_whole() -> None:
    plan = plan_experts(nn.Sequential(Perceptron(), nn.Conv1d(4, 4, 3)), 2)
    assert (plan.layers, plan.left) == ((), {})


class Listed(nn.ModuleList):
    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("experts", "size", "message"),
    [
        (lambda: Listed(Perceptron() for _ in range(5)), 2, "modules of a list; a module of experts has"),
        (Masked, 2, "does not take tokens, indices and weights; a module of experts has"),
        (WithNorm, 2, "do not all stack experts along their first dimension"),
        (Experts, 6, "it has 5 experts, fewer than the 6 ranks"),
        (Squared, 2, "its experts, divided, compute something else"),
    ],
    ids=["a list", "two arguments", "a norm", "too few", "other values"],
)
def test_what_cannot_be_divided_is_refused(experts: Callable[[], nn.Module], size: int, message: str) -> None:
    with pytest.raises(
        ParallelPlanError, match=f"Routed has no experts that {size} ranks can divide: .*{message}"
    ):
        plan_experts(Routed(experts()), size)


def test_a_block_that_cannot_be_divided_is_left_with_the_reason() -> None:
    plan = plan_experts(nn.Sequential(Routed(), Routed(Masked())), 2)
    assert [layer.name for layer in plan.layers] == ["0.experts"]
    assert list(plan.left) == ["1.experts"]


class BlockOfExperts(Routed):
    """A block whose class is called so, too."""


def test_experts_are_found_in_modules_that_are_called_experts() -> None:
    plan = plan_experts(BlockOfExperts(), 2)
    assert ([layer.name for layer in plan.layers], plan.left) == (["experts"], {})
    with pytest.raises(ParallelPlanError, match="divide: experts: its forward does not take"):
        plan_experts(BlockOfExperts(Masked()), 2)


@pytest.mark.parametrize("size", [2, 3])
def test_a_block_computes_the_same(size: int) -> None:
    model = with_random_values(nn.Sequential(Routed(), Perceptron(), Routed()))
    plan = plan_experts(model, size)
    assert_same(model, [torch.randn(2, 3, WIDTH, dtype=torch.float64)], plan)


_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 65,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
_ROUTED = {"n_routed_experts": 5, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}


def _case(name: str, **sizes: Any) -> Case:
    settings = {**_SIZES, **sizes}
    return Case(model=f"{name}ForCausalLM", config=f"{name}Config", settings=settings, in_fp64=False)


CASES = {
    "mixtral": _case("Mixtral", num_local_experts=5),
    "qwen3 moe": _case("Qwen3Moe", num_experts=5, moe_intermediate_size=16, head_dim=8),
    "deepseek v3": _case("DeepseekV3", **_ROUTED, moe_intermediate_size=16, num_key_value_heads=4),
    "gpt oss": _case("GptOss", num_local_experts=5, head_dim=8),
    "granite moe": _case("GraniteMoe", num_local_experts=5),
    "olmoe": _case("Olmoe", num_experts=5),
    "phimoe": _case("Phimoe", num_local_experts=5),
    "glm4 moe": _case("Glm4Moe", **_ROUTED, moe_intermediate_size=16),
}


@pytest.mark.parametrize("kernel", ["eager", "grouped_mm"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.default_cases("mixtral-eager", "qwen3 moe-grouped_mm")
@pytest.mark.filterwarnings("ignore")  # transformers warns of its own classes
def test_a_model_of_transformers_computes_the_same(name: str, kernel: str) -> None:
    skip_without("transformers")
    case = CASES[name]
    model = case.build()
    model.config._experts_implementation = kernel
    for parameter in model.parameters():  # some begin as zeros
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    plan = plan_experts(model, 2)
    assert len(plan.layers) == 2

    def call(own: nn.Module, inputs: Sequence[Tensor]) -> object:
        return own(**dict(zip(case.inputs, inputs, strict=True)))

    assert_same(model, inputs_of(case), plan, call=call, tolerance=1e-3)
