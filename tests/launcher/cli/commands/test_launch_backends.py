"""A backend is a launch setting: of ours, or in the words of an Accelerate file."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

from optional_modules import skip_without

skip_without("drivetrain_backends")  # backends are not installed beside the launcher

reads_accelerate = pytest.mark.skipif(
    find_spec("drivetrain_migration") is None, reason="drivetrain-migration reads these files"
)

# Trains a step or two, and shows what the plan says was applied.
TRAIN = """\
import json, torch
from drivetrain import Accelerator

class Block(torch.nn.Linear):
    pass

with Accelerator() as accelerator:
    model = torch.nn.Sequential(Block(4, 4), torch.nn.Linear(4, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 4)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    if accelerator.is_main_process:
        settings = accelerator.plan.as_dict()["settings"]
        print(json.dumps({name: [each["applied"], each["source"]] for name, each in settings.items()}))
"""

SHARDED = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: Block
  fsdp_version: 2
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: true
"""

PARTITIONED = """\
compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 2
  gradient_clipping: 0.5
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: false
  zero3_save_16bit_model: false
  zero_stage: 3
distributed_type: DEEPSPEED
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 1
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: true
"""


@pytest.fixture
def applied(drivetrain_with_torch: Callable, script: Callable) -> Callable[..., dict[str, Any]]:
    """Train under a file of settings; gives what was applied, with its source."""

    def launch(file: str) -> dict[str, Any]:
        script(TRAIN)
        script(file, "run.yaml")
        # One process, which needs no worker that imports torch.
        done = drivetrain_with_torch("launch", "--config", "run.yaml", "--num-processes", "1", "script.py")
        assert done.returncode == 0, done.stderr
        shown = next(line for line in done.stdout.splitlines() if line.startswith('{"run.'))
        return json.loads(shown)

    return launch


@reads_accelerate
def test_an_accelerate_file_for_fsdp_is_what_the_run_gets(applied: Callable) -> None:
    found = applied(SHARDED)
    assert found["run.backend"] == ["fsdp", "run.yaml:3"]
    assert found["fsdp.strategy"] == ["shard_grad_op", "run.yaml:12"]
    assert found["fsdp.wrap"] == [["Block"], "run.yaml:14"]
    assert found["model.activation_checkpointing"] == ["full", "run.yaml:7"]
    assert found["fsdp.offload"][0] is False


@reads_accelerate
@pytest.mark.usefixtures("deepspeed_operators")
@pytest.mark.slow
def test_an_accelerate_file_for_deepspeed_is_what_the_run_gets(applied: Callable) -> None:
    found = applied(PARTITIONED)
    assert found["run.backend"] == ["deepspeed", "run.yaml:12"]
    assert found["run.gradient_accumulation_steps"] == [2, "run.yaml:5"]
    config, source = found["deepspeed.config"]
    assert source == "run.yaml:6"
    assert (config["zero_optimization"]["stage"], config["gradient_clipping"]) == (3, 0.5)


@pytest.mark.usefixtures("deepspeed_operators")
@pytest.mark.default_cases("fsdp.strategy")
@pytest.mark.parametrize(
    ("section", "setting", "value"),
    [
        ("fsdp: {strategy: shard_grad_op}", "fsdp.strategy", "shard_grad_op"),
        ("deepspeed: {stage: 1}", "deepspeed.stage", 1),
    ],
)
def test_a_line_in_a_file_of_ours_chooses_the_backend(
    applied: Callable, section: str, setting: str, value: object
) -> None:
    backend = section.partition(":")[0]
    found = applied(f"run:\n  cpu: true\n  backend: {backend}\n{section}\n")
    assert found["run.backend"] == [backend, "run.yaml:3"]
    assert found[setting] == [value, "run.yaml:4"]


def test_the_launch_wins_over_defaults_that_argparse_hands_on(
    drivetrain_with_torch: Callable, script: Callable
) -> None:
    script("""\
import argparse
from drivetrain import Accelerator
parser = argparse.ArgumentParser()
parser.add_argument("--cpu", action="store_true")
parser.add_argument("--steps", type=int, default=1)
parser.add_argument("--precision", default="no")
args = parser.parse_args()
accelerator = Accelerator(
    cpu=args.cpu, gradient_accumulation_steps=args.steps, mixed_precision=args.precision, seed=3
)
settings = accelerator.plan.as_dict()["settings"]
print(accelerator.gradient_accumulation_steps, settings["run.cpu"]["source"])
print(accelerator.mixed_precision, settings["run.mixed_precision"]["source"], settings["run.seed"]["source"])
""")
    flags = ("--cpu", "--gradient-accumulation-steps", "4", "--seed", "5")
    done = drivetrain_with_torch("launch", *flags, "script.py", "--precision", "bf16")
    assert "4 --cpu on the command line\nbf16 code code\n" in done.stdout, (done.stdout, done.stderr)
    told = "=4 from --gradient-accumulation-steps on the command line overrules 1 in code"
    assert done.stderr.count(told) == 1
    assert "run.seed=3 in code overrules --seed on the command line, which says 5" in done.stderr


@reads_accelerate
@pytest.mark.costly
def test_ranks_of_an_accelerate_file_say_once_what_it_cannot_set_and_which_class_is_misspelt(
    drivetrain_with_torch: Callable, script: Callable
) -> None:
    script(TRAIN)
    script(SHARDED, "run.yaml")
    done = drivetrain_with_torch("launch", "--config", "run.yaml", "--fsdp-wrap", "Blok", "script.py")
    assert done.returncode == 1
    left_out = "run.yaml:10 fsdp_config.fsdp_cpu_ram_efficient_loading: True: say it in the script"
    assert done.stderr.count(left_out) == 1, done.stderr
    assert done.stderr.count("Blok") == 2, (
        done.stderr
    )  # in a line at once, and in the traceback, which comes last
    assert done.stderr.count("Traceback") == 1
    assert 'script.py", line 9, in <module>' in done.stderr
    assert "drivetrain_backends/" not in done.stderr
