"""Models that nobody here wrote are divided, and compute on every rank what the whole model computes."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain_parallel import ParallelPlanError, plan_model
from optional_modules import skip_without
from parallel.divided import assert_same, with_random_values
from parallel.models import WIDTH, Attention, Block, Perceptron
from parallel.transformers_cases import CASES, VOCABULARY, Case, inputs_of

SIZES = {"gpt2": (2, 3), "llama": (2,)}
DIVIDED = [(name, size) for name in CASES for size in SIZES.get(name, (2,))]
EXAMPLE = Path(__file__).parents[3] / "examples" / "train_bytes.py"


def compare(case: Case, size: int) -> None:
    model = case.build()
    model = with_random_values(model) if case.in_fp64 else model
    plan = plan_model(model, size)
    assert plan.layers

    def call(own: nn.Module, inputs: Sequence[Tensor]) -> object:
        return own(**dict(zip(case.inputs, inputs, strict=True)))

    assert_same(model, inputs_of(case), plan, call=call, tolerance=1e-9 if case.in_fp64 else 1e-3)


@pytest.mark.parametrize(("name", "size"), DIVIDED)
@pytest.mark.default_cases("qwen3-2", "gpt2-3", "bert-2")
@pytest.mark.filterwarnings("ignore")  # transformers warns of its own classes
def test_a_model_of_transformers_computes_the_same(name: str, size: int) -> None:
    skip_without("transformers")
    compare(CASES[name], size)


HEADS = ("llama", "llama tied", "qwen2", "qwen3", "gemma2", "mistral", "gpt neox", "phi3", "deepseek v3")


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.default_cases("gemma2")  # which caps its logits
@pytest.mark.filterwarnings("ignore")
def test_a_model_of_transformers_computes_its_loss_in_parts(name: str) -> None:
    skip_without("transformers")
    model = with_random_values(CASES[name].build()).train()
    plan = plan_model(model, 2)
    assert {layer.name for layer in plan.layers if layer.style == "vocabulary_column"} == {"lm_head"}
    (tokens,) = inputs_of(CASES[name])

    def own_loss(own: nn.Module, _: Sequence[Tensor]) -> Tensor:
        logits = own(input_ids=tokens).logits
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].flatten())

    def its_loss(own: nn.Module, _: Sequence[Tensor]) -> Tensor:
        labels = tokens.masked_fill(tokens % 5 == 0, -100)
        return own(input_ids=tokens, labels=labels, num_items_in_batch=torch.tensor(7)).loss

    assert assert_same(model, [], plan, call=own_loss) == {""}
    assert assert_same(model, [], plan, call=its_loss, tolerance=1e-5) == {""}  # it computes the loss in fp32


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """The module of examples/train_bytes.py."""
    skip_without("drivetrain")
    skip_without("matplotlib")
    spec = importlib.util.spec_from_file_location("train_bytes_to_divide", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_examples_model_computes_the_same(example: ModuleType, size: int) -> None:
    model = with_random_values(example.GPT(block_size=16, width=128, num_layers=2))
    plan = plan_model(model, size)
    assert len(plan.layers) == 8
    assert_same(model, [torch.randint(256, (2, 16))], plan)


def test_torchs_encoder_computes_the_same() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    model = with_random_values(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    plan = plan_model(model, 2)
    assert [one.name.rpartition(".")[2] for one in plan.layers] == ["linear1", "linear2"] * 2
    assert_same(model, [torch.randn(2, 7, 32, dtype=torch.float64)], plan)


def test_33_features_are_divided_among_4_ranks() -> None:
    model = with_random_values(Perceptron(hidden=33))
    plan = plan_model(model, 4)
    assert plan.layers[0].cuts["weight"].sizes(4) == (8, 8, 8, 9)
    assert_same(model, [torch.randn(3, WIDTH, dtype=torch.float64)], plan)


@pytest.mark.filterwarnings("ignore")
def test_heads_of_keys_and_values_fewer_than_ranks_are_refused() -> None:
    skip_without("transformers")
    match = "among 4 ranks: each rank needs a head of its own, also of keys and values; tensor=2 may do"
    with pytest.raises(ParallelPlanError, match=match):
        plan_model(CASES["llama"].build(), 4)


@pytest.mark.filterwarnings("ignore")
def test_a_users_styles_go_before_the_models_own() -> None:
    skip_without("transformers")
    model = CASES["llama"].build()
    plan = plan_model(model, 2, {"*.layers.0.mlp.*": "whole", "lm_head": "whole"})
    divided = {one.name for one in plan.layers}
    assert not any("layers.0.mlp" in name or name == "lm_head" for name in divided)
    assert set(plan.sources.values()) == {"the model's own plan"}
    assert "model.layers.1.mlp.up_proj" in divided


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 4)),
        nn.Linear(4, 4),
        nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4)),
        nn.Module(),
    ],
    ids=["one layer behind convolutions", "one layer", "an embedding", "nothing"],
)
def test_a_model_without_two_layers_in_a_row_is_not_divided(model: nn.Module) -> None:
    plan = plan_model(model, 2)
    assert (plan.layers, plan.attributes) == ((), ())


def test_a_model_with_layers_of_which_none_can_be_divided_is_refused_with_a_reason() -> None:
    model = nn.Sequential(Perceptron(nn.LayerNorm(32)))
    with pytest.raises(
        ParallelPlanError, match=r"0\.up: no division .* 0\.down: .* Give styles by patterns, such as"
    ):
        plan_model(model, 2)


def test_planning_changes_nothing() -> None:
    model = nn.Sequential(Block(dropout=0.1), Attention(dropout=0.1))
    before, state = {name: one.clone() for name, one in model.state_dict().items()}, torch.get_rng_state()
    plan_model(model, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert all(one.grad is None for one in model.parameters())
    assert model.training
    assert model[0].num_heads == 4


def test_a_plan_is_the_same_again_on_meta_without_gradients_and_with_another_default_dtype() -> None:
    model = nn.Sequential(Block(dropout=0.1), Block(dropout=0.1))
    plan = plan_model(model, 2)
    with torch.no_grad():
        assert plan_model(model, 2) == plan
    assert plan_model(model.to("meta"), 2) == plan
    torch.set_default_dtype(torch.float64)
    try:
        assert plan_model(model, 2) == plan
    finally:
        torch.set_default_dtype(torch.float32)


def test_layers_stand_in_the_order_of_the_models_modules() -> None:
    model = nn.Sequential(Block(), Block())
    names = [name for name, _ in model.named_modules()]
    planned = [one.name for one in plan_model(model, 2).layers]
    assert planned == sorted(planned, key=names.index)
