"""Models of transformers become Megatron's, with the same logits, and come back with the same bits."""

from dataclasses import replace

import pytest
import torch

from drivetrain_megatron import megatron_from_transformers
from drivetrain_megatron.divisions import find_cuts
from drivetrain_megatron.groups import check_axes, close_parallel_state, open_parallel_state
from drivetrain_megatron.shapes import shape_of
from drivetrain_megatron.weights import from_megatron, to_megatron
from drivetrain_state import ParallelDims
from megatron_models import KINDS, NUM_TOKENS, model_of, places, tokens
from megatron_on_cpu import megatron_on_cpu
from plain_loop.backends import context


@pytest.mark.parametrize("kind", KINDS)
def test_weights_there_and_back_have_the_same_bits(kind: str) -> None:
    model = model_of(kind)
    shape = shape_of(model.config)
    before = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
    there = to_megatron(before, shape.kind, shape.sizes)
    back = from_megatron(there, shape.kind, shape.sizes)
    is_tied = shape.sizes.is_tied
    assert back.keys() == before.keys() - ({"lm_head.weight"} if is_tied else set())
    for name, value in back.items():
        assert torch.equal(value, before[name]), name
    assert sum(v.numel() for v in there.values()) == sum(p.numel() for p in model.parameters())


def check(kinds: list[str], **sizes: int) -> None:
    with megatron_on_cpu(), context(parallelism=ParallelDims(**sizes)) as where:
        check_axes(where)
        open_parallel_state(where)
        rank, size = where.ranks("tensor").index, where.ranks("tensor").size
        for kind in kinds:
            source = model_of(kind).eval()
            model = megatron_from_transformers(source)
            ids = tokens()
            with torch.no_grad():
                expected = source(ids).logits
                found = model(ids, places(ids), None, runtime_gather_output=True)
            assert (found[..., NUM_TOKENS:] == -1e4).all()
            difference = (found[..., :NUM_TOKENS] - expected).abs().max().item()
            assert difference < 1e-5, f"{kind}: logits differ by {difference}"
            cuts = find_cuts(model, rank=rank, size=size)
            assert bool(cuts) == (size > 1)
        close_parallel_state()


def test_a_state_of_another_config_is_refused() -> None:
    model = model_of("llama")
    shape = shape_of(model.config)
    state = to_megatron(dict(model.named_parameters()), shape.kind, shape.sizes)
    bias = {"decoder.layers.0.mlp.linear_fc2.bias": torch.zeros(32)}
    tied, short = replace(shape.sizes, is_tied=True), replace(shape.sizes, num_layers=1)
    for given, sizes, name in (
        (state | bias, shape.sizes, "linear_fc2.bias"),
        (state, short, "layers.1"),
        (state, tied, "output_layer"),
    ):
        with pytest.raises(ValueError, match=rf"{name}.* have no place in a llama model of this config"):
            from_megatron(given, shape.kind, sizes)


@pytest.mark.ranks(1, timeout_seconds=170)
def test_what_would_change_a_model_is_refused() -> None:
    with megatron_on_cpu(), context() as where:
        open_parallel_state(where)
        with pytest.raises(
            ValueError, match=r"options\['num_layers'\]: the model's config.*attention_dropout"
        ):
            megatron_from_transformers(model_of("llama"), options={"num_layers": 1})
        with pytest.raises(ValueError, match=r"'hidden_dropuot'.*TransformerConfig.*hidden_dropout"):
            megatron_from_transformers(model_of("llama"), options={"hidden_dropuot": 0.1})
        with pytest.raises(ValueError, match=r"options\['context_parallel_size'\]=2: .*parallel\.context"):
            megatron_from_transformers(model_of("llama"), options={"context_parallel_size": 2})
        with pytest.raises(ValueError, match=r"Linear has no config of transformers"):
            megatron_from_transformers(torch.nn.Linear(2, 2))
        with pytest.raises(ValueError, match=r"linear_proj.bias.* of only one of the two models"):
            megatron_from_transformers(model_of("gpt2"), options={"add_bias_linear": False})
        frozen = model_of("llama").requires_grad_(False)
        assert not any(p.requires_grad for p in megatron_from_transformers(frozen).parameters())
        frozen.lm_head.requires_grad_(True)
        with pytest.raises(ValueError, match="some parameters of LlamaForCausalLM are frozen"):
            megatron_from_transformers(frozen)


@pytest.mark.ranks(1, timeout_seconds=170)
def test_logits_are_those_of_the_source() -> None:
    check(list(KINDS))


@pytest.mark.ranks(2, timeout_seconds=170)
def test_logits_of_divided_models_are_those_of_the_source() -> None:
    check(list(KINDS), tensor=2)


@pytest.mark.slow
@pytest.mark.ranks(4, timeout_seconds=170)
def test_logits_of_models_divided_by_four_are_those_of_the_source() -> None:
    check(["mistral", "gpt2"], tensor=4)


@pytest.mark.ranks(2, timeout_seconds=170)
def test_tied_weights_are_refused_in_stages() -> None:
    with megatron_on_cpu(), context(parallelism=ParallelDims(pipeline=2)) as where:
        open_parallel_state(where)
        with pytest.raises(ValueError, match=r"one weight for embedding and head.*untie them"):
            megatron_from_transformers(model_of("tied llama"))
