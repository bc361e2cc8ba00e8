"""What a launch says, in Accelerate's variables; theirs where Accelerate's launcher says the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain_accelerate.installation import told_variables
from drivetrain_config import Layers, environ
from drivetrain_launcher.cli.commands.launch import LaunchArguments
from drivetrain_launcher.cli.parser import build_parser


def of_flags(*flags: str) -> dict[str, str]:
    parser = build_parser("launch", LaunchArguments, "")
    return told_variables(parser.parse([*flags, "--config", "none", "train.py"]).layers)


def test_nothing_said_is_no_variable() -> None:
    assert told_variables(Layers({})) == {}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            "--cpu --mixed_precision bf16 --gradient_accumulation_steps 4 --debug",
            {
                "ACCELERATE_MIXED_PRECISION": "bf16",
                "ACCELERATE_USE_CPU": "true",
                "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
                "ACCELERATE_DEBUG_MODE": "true",
            },
        ),
        (
            "--use_deepspeed --zero_stage 3 --offload_param_device cpu",
            {
                "ACCELERATE_USE_DEEPSPEED": "true",
                "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
                "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
            },
        ),
        (
            "--use_fsdp --fsdp_min_num_params 100 --fsdp-strategy shard_grad_op",
            {
                "ACCELERATE_USE_FSDP": "true",
                "FSDP_VERSION": "2",
                "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP",
                "FSDP_RESHARD_AFTER_FORWARD": "false",
                "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
                "FSDP_MIN_NUM_PARAMS": "100",
            },
        ),
    ],
    ids=["run", "deepspeed", "blocks by size"],
)
def test_flags_are_told_by_variables(flags: str, expected: dict[str, str]) -> None:
    assert of_flags(*flags.split()) == expected


@pytest.mark.slow
def test_fsdp_is_told_what_accelerates_launcher_tells(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    fsdp = (
        "version 2", "reshard_after_forward true", "auto_wrap_policy TRANSFORMER_BASED_WRAP", "offload_params true",
        "transformer_layer_cls_to_wrap A,B", "activation_checkpointing true",
    )  # fmt: skip
    flags = ["--use_fsdp", *" ".join(f"--fsdp_{each}" for each in fsdp).split(), "--mixed_precision", "bf16"]
    script = tmp_path / "show.py"
    script.write_text("import json, os; print(json.dumps(dict(os.environ)))")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", *flags, str(script)]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=120, check=True)
    theirs = json.loads(done.stdout.splitlines()[-1])
    found = of_flags(*flags)
    assert found
    assert found == {name: theirs[name] for name in found}


def test_a_launch_wins_over_a_variable_and_tells_both(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("run: {mixed_precision: fp16, cpu: true}\n")
    layers = Layers.read(file=file)
    with environ.exported(ACCELERATE_MIXED_PRECISION="bf16", ACCELERATE_USE_CPU="1", RANK=None):
        found = told_variables(layers)
    assert found["ACCELERATE_MIXED_PRECISION"] == "fp16"
    (said,) = caplog.messages
    assert "ACCELERATE_MIXED_PRECISION=bf16 in the environment gives way to run.mixed_precision=fp16" in said
    assert "run.yaml" in said
    with environ.exported(ACCELERATE_MIXED_PRECISION="bf16", RANK="1"):
        told_variables(layers)
    assert len(caplog.messages) == 1  # one process tells it for all
