import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from safetensors.torch import save_file

from drivetrain_plan.choice import PlanChoice, Strategy
from drivetrain_plan.cli.estimate import run
from drivetrain_plan.cli.estimate_arguments import EstimateArguments
from drivetrain_plan.model.source import BuiltSource, ConfigSource
from drivetrain_plan.model.training_modes import MODES, OPTIMIZERS
from drivetrain_plan.program.rank_step import run_rank

Output = pytest.CaptureFixture[str]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SIZES, "vocab_size": 256, "max_position_embeddings": 128}
LLAMA = {"model_type": "llama", **TEXT, "num_key_value_heads": 2}
CONFIGS = {
    "llama": LLAMA,
    "tied": {**LLAMA, "tie_word_embeddings": True},
    "mixtral": {**LLAMA, "model_type": "mixtral", "num_hidden_layers": 1, "num_local_experts": 4,
                "num_experts_per_tok": 2},
    "bert": {**TEXT, "model_type": "bert", "architectures": ["BertForSequenceClassification"]},
    "vit": {**SIZES, "model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 32,
            "patch_size": 8},
    "t5": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 64, "d_kv": 16,
           "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 256, "decoder_start_token_id": 0},
}  # fmt: skip
STRATEGIES = set(get_args(Strategy)) - {"shard_grad_op"}
BY_VALUES = {
    **TEXT,
    "model_type": "longformer",
    "architectures": ["LongformerForMaskedLM"],
    "attention_window": [16, 16],
}


def folder_of(path: Path, config: dict[str, Any]) -> str:
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def estimate(capsys: Output, model: str, **arguments: Any) -> dict[str, Any]:
    assert run(EstimateArguments(model=model, json=True, **arguments)) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.default_cases("mixtral")
@pytest.mark.parametrize("name", list(CONFIGS))
def test_models_of_every_kind_are_estimated(tmp_path: Path, capsys: Output, name: str) -> None:
    pytest.importorskip("transformers")
    told = estimate(capsys, folder_of(tmp_path, CONFIGS[name]), batch=2, seq=16, mode=("fp32", "mixed"))
    for mode in ("fp32", "mixed"):
        memory = told["modes"][mode]
        assert 4 * told["parameters"] <= memory["weights"] == pytest.approx(memory["gradients"], rel=0.05)
        assert memory["optimizer_states"] == pytest.approx(2 * memory["weights"], rel=0.05)
        assert memory["activations"] > 0
        assert memory["peak"] >= memory["weights"] + memory["gradients"] + memory["optimizer_states"]


@pytest.mark.slow
def test_longer_batches_recomputing_and_sharding_change_what_they_should(
    tmp_path: Path, capsys: Output
) -> None:
    pytest.importorskip("transformers")
    folder = folder_of(tmp_path, CONFIGS["llama"])

    def memory(**arguments: Any) -> dict[str, int]:
        return estimate(capsys, folder, seq=64, mode=("fp32",), **arguments)["modes"]["fp32"]

    plain, wide = memory(batch=2), memory(batch=4)
    assert wide["activations"] == pytest.approx(2 * plain["activations"], rel=0.01)
    assert memory(batch=2, recompute=True)["activations"] < plain["activations"] / 2
    part = memory(batch=2, num_processes=4)
    assert part["weights"] == pytest.approx(plain["weights"] / 4, rel=0.01)
    assert part["peak"] > part["weights"] + part["gradients"] + part["optimizer_states"] + part["activations"]


@pytest.mark.slow
def test_each_sharding_divides_what_it_says(tmp_path: Path, capsys: Output) -> None:
    pytest.importorskip("transformers")
    folder = folder_of(tmp_path, CONFIGS["llama"])

    def memory(mode: str, **arguments: Any) -> dict[str, int]:
        return estimate(capsys, folder, seq=16, mode=(mode,), **arguments)["modes"][mode]

    whole, forward = memory("fp32"), memory("inference")
    for sharding, divided in (
        ("ddp", ()),
        ("zero1", ("optimizer_states",)),
        ("zero2", ("optimizer_states", "gradients")),
        ("zero3", ("optimizer_states", "gradients", "weights")),
        ("fsdp", ("optimizer_states", "gradients", "weights")),
    ):
        part = memory("fp32", sharding=sharding, num_processes=4)
        for name in ("weights", "gradients", "optimizer_states"):
            shares = 4 if name in divided else 1
            assert part[name] == pytest.approx(whole[name] / shares, rel=0.01)
        shares = 4 if "weights" in divided else 1
        part = memory("inference", sharding=sharding, num_processes=4)
        assert part["weights"] == pytest.approx(forward["weights"] / shares, rel=0.01)


@pytest.mark.parametrize("mode", ["inference", "mixed"])
@pytest.mark.slow
def test_a_model_of_many_blocks_is_estimated_from_a_few(tmp_path: Path, capsys: Output, mode: str) -> None:
    pytest.importorskip("transformers")
    folder = folder_of(tmp_path, {**LLAMA, "num_hidden_layers": 5})
    told = estimate(capsys, folder, seq=64, batch=2, mode=(mode,))["modes"][mode]
    source = BuiltSource(ConfigSource(tmp_path), MODES[mode])
    whole = run_rank(source, PlanChoice(micro_batch=2), MODES[mode], num_tokens=64)
    assert told["peak"] == pytest.approx(whole.peak, rel=0.01)
    assert (told["weights"], told["optimizer_states"]) == (whole.weights, whole.states)


@pytest.mark.slow
def test_blocks_that_keep_keys_of_an_encoder_are_computed_again(tmp_path: Path, capsys: Output) -> None:
    pytest.importorskip("transformers")
    folder, told = folder_of(tmp_path, CONFIGS["t5"]), {}
    for recompute in (False, True):
        told[recompute] = estimate(capsys, folder, seq=64, mode=("fp32",), recompute=recompute)["modes"]
    assert told[True]["fp32"]["activations"] < told[False]["fp32"]["activations"] / 2


@pytest.mark.slow
def test_a_model_that_asks_for_values_is_named(tmp_path: Path, capsys: Output) -> None:
    pytest.importorskip("transformers")
    folder = folder_of(tmp_path, BY_VALUES)
    assert run(EstimateArguments(model=folder, seq=64, mode=("fp32", "mixed"))) == 0
    assert "fp32, mixed: not told: " in (shown := capsys.readouterr().out)
    assert "its forward depends on the values of tensors" in shown


# peft asks for a property that transformers has renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.slow
def test_adapters_train_few_weights_beside_frozen_ones(tmp_path: Path, capsys: Output) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    folder = folder_of(tmp_path, CONFIGS["llama"])
    modes = estimate(capsys, folder, seq=64, mode=("bf16", "lora"), lora_rank=2)["modes"]
    assert modes["lora"]["weights"] > modes["bf16"]["weights"]
    assert modes["lora"]["gradients"] < modes["bf16"]["gradients"] / 2


def test_files_of_weights_alone_tell_their_size_and_say_what_is_missing(
    tmp_path: Path, capsys: Output
) -> None:
    save_file({"layers.0.weight": torch.zeros(1000, 10)}, tmp_path / "model.safetensors")
    assert run(EstimateArguments(model=str(tmp_path / "model.safetensors"), mode=("mixed", "bf16"))) == 0
    shown = capsys.readouterr().out
    assert "10,000 parameters" in shown
    assert "fp32 40.00 kB   bf16 20.00 kB   int8 10.00 kB   int4 5.00 kB" in shown
    assert (
        "mixed, bf16: not told: the files of weights alone do not say what a step computes: add config.json"
        in shown
    )


def test_the_table_names_what_it_shows(tmp_path: Path, capsys: Output) -> None:
    pytest.importorskip("transformers")
    folder = folder_of(tmp_path, CONFIGS["llama"])
    assert run(EstimateArguments(model=folder, seq=16, mode=("bf16",), num_processes=2)) == 0
    shown = capsys.readouterr().out
    assert "largest block  model.layers.0" in shown
    assert "a step of 1 x 16 tokens, adamw; each of 2 processes, fsdp" in shown
    assert "bf16: all in bf16, optimizer states too" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 0}, "--batch 0: must be at least 1"),
        ({"num_processes": 0}, "--num-processes 0: must be at least 1"),
    ],
)
def test_numbers_below_one_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EstimateArguments(model="m", **arguments)


def test_the_flags_offer_all_that_there_is() -> None:
    kinds = get_type_hints(EstimateArguments)
    (mode, _) = get_args(kinds["mode"])
    assert get_args(mode) == EstimateArguments(model="m").mode == tuple(MODES)
    assert get_args(kinds["optimizer"]) == tuple(OPTIMIZERS)
    assert {"none", "full_shard", *get_args(kinds["sharding"])} - {"ddp", "fsdp"} == STRATEGIES


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "has no config.json"),
        ({"model_type": "no_such_model"}, "does not describe a model"),
        (
            LLAMA,
            "129 tokens: LlamaForCausalLM takes 128 at most; say --seq 128 or less",
        ),
        (
            {**LLAMA, "quantization_config": {"quant_method": "gptq"}},
            "quantization_config",
        ),
    ],
)
def test_what_cannot_be_estimated_is_an_error_that_says_why(
    tmp_path: Path, capsys: Output, config: dict[str, Any] | None, message: str
) -> None:
    pytest.importorskip("transformers")
    folder = str(tmp_path / "nowhere") if config is None else folder_of(tmp_path, config)
    assert run(EstimateArguments(model=folder, seq=129)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_tells_what_a_models_training_takes(tmp_path: Path) -> None:
    pytest.importorskip("drivetrain_launcher")
    folder = folder_of(tmp_path, LLAMA)
    command = [sys.executable, "-m", "drivetrain_launcher", "estimate", folder, "--seq", "32"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "bf16" in ended.stdout
    assert "activations" in ended.stdout
    assert "_pytree" not in ended.stderr
