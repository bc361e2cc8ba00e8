import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain_dispatch.cli.huggingface import build_empty, prompt_of, token_after, whole_classes
from drivetrain_dispatch.errors import CostError
from drivetrain_dispatch.model.model_layout import ModelLayout
from drivetrain_dispatch.planning.blocks import blocks_of
from drivetrain_dispatch.planning.cost_model import ComputeRate, measure_costs

RATE = ComputeRate(flops_per_second=1.0, bytes_per_second=1e30, operation_seconds=0)  # seconds are FLOPs
TINY = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {
    "llama": TINY,
    "tied": {**TINY, "tie_word_embeddings": True},
    "mixtral": {**TINY, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 96, "n_positions": 64,
             "bos_token_id": 0, "eos_token_id": 0},
}  # fmt: skip


def folder_of(path: Path, config: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    pytest.importorskip("transformers")
    return build_empty(folder_of(tmp_path_factory.mktemp(request.param), CONFIGS[request.param]))


def test_a_model_is_built_without_memory_and_ready_to_run(model: nn.Module) -> None:
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert not model.training
    assert next(model.parameters()).dtype == torch.float32
    blocks = blocks_of(ModelLayout.of(model), no_split=whole_classes(model))
    layers = [block for block in blocks if block.name.rpartition(".")[2] in ("0", "1", "2")]
    assert len(layers) == 3  # whole
    assert len(blocks) < 10
    with pytest.raises(ValueError, match=r"65 tokens: \w+ takes 64 at most"):
        prompt_of(model, 1, 65)


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.default_cases("gpt2-2")
def test_a_token_costs_what_it_computes_and_the_cache_grows(model: nn.Module, batch_size: int) -> None:
    blocks = blocks_of(ModelLayout.of(model), no_split=whole_classes(model))
    prompt = measure_costs(model, kwargs=prompt_of(model, batch_size, 40), blocks=blocks, rate=RATE)
    token = measure_costs(model, kwargs=token_after(model, batch_size, 40), blocks=blocks, rate=RATE)
    layer = next(block.name for block in blocks if block.name.endswith(".1"))
    heads = 2 if "GPT2" not in type(model).__name__ else 4
    assert prompt[layer].kept_bytes == 2 * batch_size * heads * 40 * 8 * 4
    assert token[layer].kept_bytes == 2 * batch_size * heads * 41 * 8 * 4
    assert 20 * token[layer].seconds < prompt[layer].seconds < 41 * token[layer].seconds
    head = blocks[-1].name
    # Of a prompt too only the last token's scores are asked for.
    assert head == "lm_head"
    assert prompt[head].seconds == token[head].seconds == 2 * batch_size * 32 * 96


def test_a_mixture_of_experts_computes_those_that_are_chosen(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = build_empty(folder_of(tmp_path, CONFIGS["mixtral"]))
    blocks = blocks_of(ModelLayout.of(model), no_split=whole_classes(model))
    token = measure_costs(model, kwargs=token_after(model, 1, 40), blocks=blocks, rate=RATE)
    experts = 2 * 2 * 3 * 32 * 64  # two of four, three matrices each
    attention = 2 * 32 * (32 + 16 + 16 + 32) + 2 * 2 * 41 * 32
    assert token["model.layers.1"].seconds == pytest.approx(experts + attention + 2 * 32 * 4, rel=0.02)


def test_a_dtype_is_that_of_the_configuration_or_the_one_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = folder_of(tmp_path, {**CONFIGS["llama"], "dtype": "bfloat16"})
    assert next(build_empty(folder).parameters()).dtype == torch.bfloat16
    assert next(build_empty(folder, torch.float16).parameters()).dtype == torch.float16


class Unknown(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.layers = nn.ModuleList([nn.Identity(), *(nn.Bilinear(2, 2, 2) for _ in range(num_layers))])

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
        return input_ids


def test_a_model_that_does_not_say_keeps_its_repeated_layers_whole_and_needs_a_cache() -> None:
    assert whole_classes(Unknown(4)) == ["Bilinear"]
    assert whole_classes(nn.Linear(2, 2)) == []
    with pytest.raises(CostError, match="Unknown gives none of past_key_values, cache_params"):
        token_after(Unknown(2), 1, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "no_such_model"}', "does not describe a model"),
        ("{", r"config\.json is no JSON"),
        ('{"model_type": "xlnet", "d_model": 64, "n_head": 4, "d_head": 64}', "d_head.*should be equal"),
        ('{"model_type": "vit"}', "does not describe a language model"),
        (None, r"has no config.json: name the folder of a Hugging Face model"),
    ],
)
def test_a_configuration_of_something_else_is_told(text: str | None, message: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        build_empty(tmp_path)


def test_without_transformers_it_is_said_which_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install transformers"):
        build_empty(folder_of(tmp_path, CONFIGS["llama"]))
