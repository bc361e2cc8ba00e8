import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from drivetrain_plan.choice import PlanChoice
from drivetrain_plan.cli.plan import launch_line, parse_pins, run
from drivetrain_plan.cli.plan_arguments import PlanTrainingArguments
from drivetrain_plan.errors import PlanError
from planned_models import llama_source

Output = pytest.CaptureFixture[str]


MODEL = "planned_models:perceptron"


def plan(capsys: Output, model: str = MODEL, *, status: int = 0, **arguments: Any) -> str:
    given = {"gpu": "2x8GB cpu", "batch": 8, "sequence": 32, "mode": "fp32", **arguments}
    assert run(PlanTrainingArguments(model=model, **given)) == status
    out, err = capsys.readouterr()
    return err if status else out


def test_a_model_is_planned_told_and_drawn(tmp_path: Path, capsys: Output) -> None:
    picture = tmp_path / "plans.svg"
    told = json.loads(plan(capsys, json=True, picture=picture, show=3))
    first = told["plans"][0]
    assert first["plan"] == "DDP 2"
    assert first["basis"] == "program"
    assert first["sent_bytes"]["counts"] == 4 * told["parameters"]
    assert sum(first["memory_bytes"].values()) == pytest.approx(first["peak_bytes"], abs=8)
    assert len(told["plans"]) == 3
    drawn = ElementTree.fromstring(picture.read_text())
    assert any("DDP 2" in (text.text or "") for text in drawn.iter() if text.tag.endswith("text"))


def test_a_table_ends_in_a_launch_line_and_a_settings_file(capsys: Output) -> None:
    told = plan(capsys, pin=("shard=2", "strategy=full_shard", "tensor=1", "context=1", "micro_batch=4"))
    assert "drivetrain launch --num-processes 2 --backend fsdp" in told
    assert 'fsdp:\n  strategy: "full_shard"' in told


def test_a_model_that_asks_for_values_is_planned_by_its_sizes_and_says_so(capsys: Output) -> None:
    told = plan(capsys, "planned_models:by_values")
    assert "depends on the values of tensors" in told
    told = json.loads(plan(capsys, "planned_models:by_values", json=True))
    assert {one["basis"] for one in told["plans"]} == {"formula"}
    assert told["plans"][0]["memory_bytes"]["weights"] == 4 * told["parameters"]


def test_the_sizes_of_megatrons_models_are_told_with_how_to_build_them(
    tmp_path: Path, capsys: Output
) -> None:
    pytest.importorskip("transformers")
    llama_source(tmp_path, num_hidden_layers=1)
    pins = ("backend=megatron", "tensor=2", "checkpointing=full", "sequence=true")
    told = plan(capsys, str(tmp_path), pin=pins)
    assert re.search(r"^tensor 2, Megatron's layers, sequence, recomputed .* program$", told, re.MULTILINE)
    assert "'recompute_granularity': 'full'" in told
    assert "megatron_from_transformers(model, options={'sequence_parallel': True" in told
    assert (
        "drivetrain launch --num-processes 2 --backend megatron --mixed-precision no --parallel-tensor 2"
        in told
    )


@pytest.mark.slow
def test_a_configuration_alone_is_planned(tmp_path: Path, capsys: Output) -> None:
    pytest.importorskip("transformers")
    llama_source(tmp_path)
    told = json.loads(plan(capsys, str(tmp_path), json=True, mode="mixed", sequence=2048, show=50))
    found = {one["plan"] for one in told["plans"]}
    assert {"DDP 2", "FSDP 2", "tensor 2, sequence", "context 2", "FSDP 2, recomputed"} <= found


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"gpu": "what"}, "is no size"),
        ({"pin": ("tensor=3",)}, "a size divides them"),
        ({"pin": ("tensor",)}, "say name=value"),
        ({"pin": ("strategy=full_shard", "shard=1")}, "divides among several ranks"),
        ({"pin": ("data=2", "shard=2")}, "do not divide 2 devices"),
        ({"model": "planned_models:absent"}, "name a function"),
    ],
)
def test_bad_input_says_what_would_do(capsys: Output, changed: dict[str, Any], told: str) -> None:
    assert told in plan(capsys, status=2, **changed)


@pytest.mark.slow
def test_a_model_that_fits_nowhere_says_how_much_is_missing(capsys: Output) -> None:
    error = plan(capsys, status=1, gpu="1x0.1MB cpu")
    assert "fits nowhere" in error
    assert "times the memory" in error


def test_a_folder_without_a_model_is_refused(tmp_path: Path, capsys: Output) -> None:
    assert "config.json" in plan(capsys, str(tmp_path), status=2)


@pytest.mark.parametrize("pin", ["tensor=0", "tensor=-2", "sequence=maybe", "data=two"])
def test_pins_have_types(pin: str) -> None:
    with pytest.raises(PlanError, match="--pin"):
        parse_pins([pin])


def test_the_line_of_several_hosts_names_them() -> None:
    line = launch_line(PlanChoice(shard=16, strategy="full_shard"), 2, "bf16")
    assert "--num-nodes 2" in line
    assert line.endswith("--fsdp-strategy full_shard train.py")


@pytest.mark.parametrize("command", ["plan", "estimate"])
def test_the_help_imports_no_torch(command: str) -> None:
    pytest.importorskip("drivetrain_launcher")
    source = (
        "import sys; from drivetrain_launcher.cli.main import main\n"
        f"try: main(['{command}', '--help'])\n"
        "finally: print([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert f"usage: drivetrain {command} [flags] MODEL" in done.stdout
