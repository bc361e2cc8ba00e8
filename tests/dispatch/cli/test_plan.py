import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from drivetrain_dispatch.cli.plan import run
from drivetrain_dispatch.cli.plan_arguments import PlanArguments

Output = pytest.CaptureFixture[str]
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 500, "dtype": "bfloat16",
    "max_position_embeddings": 4096,
}  # fmt: skip
LAYER = 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64)
EMBEDDING = 2 * 500 * 64


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def planned(capsys: Output, folder: str, **given: Any) -> dict[str, Any]:
    """What the command prints as JSON."""
    pytest.importorskip("transformers")
    assert run(PlanArguments(**{"model_dir": folder, "json": True, "cpu": "1GB", "seq": 16, **given})) == 0
    return json.loads(capsys.readouterr().out)


def told(capsys: Output, folder: str, **given: Any) -> str:
    """The line that says why it cannot be."""
    assert run(PlanArguments(**{"model_dir": folder, "cpu": "1GB", "seq": 16, **given})) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("drivetrain: error: ")
    assert said.err.count("\n") == 1
    return said.err


def test_what_fits_is_on_the_gpu(folder: str, capsys: Output) -> None:
    found = planned(capsys, folder, gpu=("1GB",))
    assert found["device_map"] == {"": 0}
    assert found["dtype"] == "bfloat16"
    held = found["devices"]["0"]
    assert held["weight_bytes"] == pytest.approx(6 * LAYER + 2 * EMBEDDING, rel=0.01)
    assert held["kept_bytes"] == 6 * 2 * 17 * 64 * 2  # keys and values of the prompt and one token
    parts = ("weight_bytes", "moving_bytes", "kept_bytes", "activation_bytes")
    assert held["peak_bytes"] == sum(held[part] for part in parts)


@pytest.mark.slow
def test_what_does_not_fit_comes_and_a_slower_link_is_predicted_to_take_longer(
    folder: str, capsys: Output
) -> None:
    given = {"gpu": ("300kB", "300kB"), "cpu": "150kB"}
    fast = planned(capsys, folder, **given)
    slow = planned(capsys, folder, **given, link="1MB", disk="100kB")
    assert set(fast["device_map"].values()) == {0, 1, "cpu", "disk"}
    for device in ("0", "1", "cpu"):
        held = fast["devices"][device]
        assert held["peak_bytes"] <= held["budget_bytes"]
    assert sum(held["weight_bytes"] for held in fast["devices"].values()) == fast["size_bytes"]
    read = slow["devices"]["disk"]["weight_bytes"] / 1e5
    assert fast["token_seconds"] < read < slow["token_seconds"]


@pytest.mark.parametrize(
    ("kind", "library"),
    [("bnb-8bit", "bitsandbytes"), ("bnb-nf4", "bitsandbytes"), ("torchao-fp8", "torchao")],
)
@pytest.mark.default_cases("bnb-8bit-bitsandbytes")
def test_quantised_weights_take_less(folder: str, capsys: Output, kind: str, library: str) -> None:
    pytest.importorskip(library)
    found = planned(capsys, folder, gpu=("1GB",), quantize=kind)
    linear = 6 * (4 * 64 * 64 + 3 * 64 * 128)  # the layers', without norms, embeddings and head
    rows = 6 * (4 * 64 + 2 * 128 + 64)
    packed = linear // 2 + 4 * linear // 64 + 6 * 7 * 64 if kind == "bnb-nf4" else linear + 4 * rows
    full = planned(capsys, folder, gpu=("1GB",))
    assert found["size_bytes"] == full["size_bytes"] - 2 * linear + packed
    assert full["quantize"] is None
    assert found["quantize"] == kind


def test_without_a_gpu_the_host_computes(folder: str, capsys: Output) -> None:
    found = planned(capsys, folder, gpu=("0GB",))
    assert found["device_map"] == {"": "cpu"}
    fast = planned(capsys, folder, gpu=("0GB",), tflops=1e6, bandwidth="1000TB")
    assert fast["prefill_seconds"] < found["prefill_seconds"]


@pytest.mark.slow
def test_longer_prompts_and_more_of_them_take_more(folder: str, capsys: Output) -> None:
    one = planned(capsys, folder, gpu=("1GB",))
    many = planned(capsys, folder, gpu=("1GB",), batch=4, seq=1024)
    assert many["devices"]["0"]["kept_bytes"] == one["devices"]["0"]["kept_bytes"] / 17 * 4 * 1025
    assert many["prefill_seconds"] > one["prefill_seconds"]
    wide = planned(capsys, folder, gpu=("1GB",), dtype="fp32")
    assert wide["size_bytes"] == 2 * one["size_bytes"]


def test_tied_weights_count_once(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    found = planned(capsys, str(tmp_path), gpu=("250kB",))
    assert found["size_bytes"] == pytest.approx(6 * LAYER + EMBEDDING, rel=0.01)
    assert found["device_map"]["model.embed_tokens"] == found["device_map"]["lm_head"]


def test_the_plan_is_a_table_for_people(folder: str, capsys: Output) -> None:
    pytest.importorskip("transformers")
    assert run(PlanArguments(model_dir=folder, gpu=("300kB",), cpu="150kB", seq=16)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "LlamaForCausalLM, bfloat16, 621.22 kB; 1 x 16 tokens"
    assert lines[1].startswith("fits with weights that come and go")
    assert lines[2].startswith("prompt ")
    assert lines[3].startswith("a token ")
    assert lines[4] == "with 100 TFLOP/s, 1.00 TB/s of memory, link 25.00 GB/s, disk 3.00 GB/s"
    assert ["module", "device", "size", "of", "each", "time"] in [line.split() for line in lines]
    assert any(line.startswith("model.layers.") for line in lines)
    devices = lines[lines.index("") + 1 :]
    devices = devices[: devices.index("")]
    assert [line.split()[0] for line in devices[1:]] == ["0", "cpu", "disk"]


@pytest.mark.slow
def test_accelerators_are_described_by_count_size_and_kind(folder: str, capsys: Output) -> None:
    found = planned(capsys, folder, gpu=("2x300kB h100", "1 GB"), cpu="150kB")
    assert [found["devices"][device]["budget_bytes"] for device in "012"] == [300_000, 300_000, 10**9]
    assert run(PlanArguments(model_dir=folder, gpu=("300kB rtx 4090",), cpu="150kB", seq=16)) == 0
    assert "with 165 TFLOP/s, 1.00 TB/s of memory, link 25.00 GB/s" in capsys.readouterr().out
    assert "'gtx 1' is no kind of device that is known here" in told(capsys, folder, gpu=("24GB gtx 1",))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gpu": ("24 apples",)}, "--gpu 24 apples: '24 apples' is no size"),
        ({"cpu": "much"}, "--cpu much: 'much' is no size"),
        ({"link": "0GB"}, "--link 0GB: must be above 0"),
        ({"disk": "fast"}, "--disk fast: 'fast' is no size"),
        ({"tflops": 0.0}, "--tflops 0.0: must be above 0"),
        ({"model_dir": "/nowhere"}, "/nowhere has no config.json"),
        ({"gpu": ("50kB",)}, "give one at least"),
        ({"config": {"num_key_value_heads": 3}}, "config.json describes fails"),
        (
            {"config": {"quantization_config": {"quant_method": "gptq", "bits": 4}}},
            "has a quantization_config (gptq): its own library loads such a checkpoint; leave that key out of a "
            "copy, and plan with --quantize",
        ),
    ],
)
def test_a_mistake_is_told_in_a_line(
    given: dict[str, Any], message: str, folder: str, capsys: Output
) -> None:
    pytest.importorskip("transformers")
    given = dict(given)
    Path(folder, "config.json").write_text(json.dumps({**CONFIG, **given.pop("config", {})}))
    assert message in told(capsys, folder, **{"gpu": ("1GB",), **given})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtype": "int3"}, "--dtype int3: say one of bf16, fp16, fp32"),
        ({"batch": 0}, "--batch 0: must be at least 1"),
        ({"seq": -1}, "--seq -1: must be at least 1"),
    ],
)
def test_arguments_that_cannot_be_are_refused_and_each_choice_is_taken(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PlanArguments(model_dir=".", **given)
    for name in ("dtype", "quantize"):
        (listed, _) = get_args(get_type_hints(PlanArguments)[name])
        for choice in get_args(listed):
            PlanArguments(**{"model_dir": ".", name: choice})


def test_the_command_line_reaches_it(folder: str, capsys: Output) -> None:
    pytest.importorskip("transformers")
    cli = pytest.importorskip("drivetrain_launcher.cli.main")
    words = ["dispatch", "plan", folder, "--gpu", "1GB,2GB", "--cpu", "1GB", "--seq", "16", "--json"]
    assert cli.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: held["budget_bytes"] for name, held in found["devices"].items()} == {
        "0": 10**9, "1": 2 * 10**9, "cpu": 10**9
    }  # fmt: skip
    assert cli.main([*words, "--dtype", "int3"]) == 2
    assert "--dtype int3: no such choice; say one of" in capsys.readouterr().err


@pytest.mark.slow
def test_a_prompt_is_as_long_as_the_model_takes_or_as_usual(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "config.json"
    for most, tokens in ((64, 64), (8192, 4096)):
        file.write_text(json.dumps({**CONFIG, "max_position_embeddings": most}))
        found = planned(capsys, str(file), gpu=("1GB",), seq=None)
        assert found["devices"]["0"]["kept_bytes"] == 6 * 2 * (tokens + 1) * 64 * 2
    assert "--seq 9000: LlamaForCausalLM takes 8192 tokens at most" in told(capsys, str(tmp_path), seq=9000)
