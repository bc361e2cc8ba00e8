"""Tiny models of Transformers, from their configurations: converted, one step beside the plain model, restored."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from drivetrain_precision import LayerFilter, TorchaoRecipe, convert_model, restore_model

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}


def ids() -> dict[str, Tensor]:
    return {"input_ids": torch.arange(14).reshape(2, 7) % 32, "labels": torch.arange(14).reshape(2, 7) % 32}


def llama() -> tuple[Any, dict[str, Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=1, **SIZES)), ids()


def bert() -> tuple[Any, dict[str, Tensor]]:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(vocab_size=32, **SIZES)), ids()


def t5() -> tuple[Any, dict[str, Tensor]]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=32, d_model=64, d_kv=32, d_ff=128, num_layers=2, num_heads=2)
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config), ids()


def vit() -> tuple[Any, dict[str, Tensor]]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(image_size=32, patch_size=8, num_labels=16, **SIZES)
    return ViTForImageClassification(config), {
        "pixel_values": torch.linspace(0, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32),
        "labels": torch.tensor([1, 2]),
    }


def gpt2() -> tuple[Any, dict[str, Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=64, n_layer=2, n_head=2, n_positions=16)), ids()


# How many linear layers each converts, where the first and the last stay, and how far gradients may lie from the
# plain model's. e5m2 keeps 2 bits of a fraction; T5, which does not divide its scores by a root, loses most by it.
CASES: Mapping[str, tuple[Callable[[], tuple[Any, dict[str, Tensor]]], int, float]] = {
    "llama": (llama, 13, 0.15),
    "bert": (bert, 12, 0.15),
    "t5": (t5, 31, 0.25),
    "vit": (vit, 11, 0.15),
}
SCALINGS = ("tensorwise", "rowwise", "mxfp8")


def step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("name", "scaling"),
    [
        pytest.param(name, scaling, marks=() if scaling == "tensorwise" else pytest.mark.slow)
        for name in CASES
        for scaling in SCALINGS
    ],
)
def test_one_step_is_near_that_of_the_plain_model_and_the_model_comes_back_bit_for_bit(
    name: str, scaling: Any
) -> None:
    make, expected, bound = CASES[name]
    torch.manual_seed(0)
    model, batch = make()
    model.eval()  # no dropout
    plain = copy.deepcopy(model)
    recipe = TorchaoRecipe(scaling=scaling)
    report = convert_model(model, recipe)
    assert len(report.converted) == expected, str(report)
    assert list(model.state_dict()) == list(plain.state_dict())
    (loss, gradients), (plain_loss, plain_gradients) = step(model, batch), step(plain, batch)
    assert loss == pytest.approx(plain_loss, rel=0.02)
    assert gradients.keys() == plain_gradients.keys()
    ours, theirs = (torch.cat([g.flatten() for g in each.values()]) for each in (gradients, plain_gradients))
    assert 0 < (ours - theirs).norm() / theirs.norm() < bound
    assert restore_model(model, recipe) == report.converted
    assert step(model, batch)[0] == plain_loss
    assert [type(each) for each in model.modules()] == [type(each) for each in plain.modules()]


def test_layers_of_gpt2_are_no_linear_layers_and_the_error_says_what_they_are() -> None:
    model, _ = gpt2()
    with pytest.raises(ValueError, match=r"lm_head shares its weight with transformer\.wte\.weight"):
        convert_model(model, TorchaoRecipe(layers=LayerFilter(skip_first=False, skip_last=False)))
    assert cast("nn.Module", model).lm_head.weight is model.transformer.wte.weight
