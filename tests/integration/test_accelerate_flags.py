"""Every flag that `accelerate launch --help` (1.15) lists is accepted with its meaning, or refused with a way out."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drivetrain_config import environ
from drivetrain_launcher.cli.commands.launch import LaunchArguments
from drivetrain_launcher.cli.parser import CommandParser, build_parser
from drivetrain_launcher.errors import UsageError

ROOT = Path(__file__).parents[2]
NAMES = (Path(__file__).parent / "accelerate_flags.txt").read_text().split()
PAGE = ROOT / "docs" / "howto" / "accelerate_flags.md"

# The flag with a value -> the setting that it becomes.
MEANINGS: dict[str, dict[str, Any]] = {
    "--config_file none": {},
    "--cpu": {"run.cpu": True},
    "--debug": {"state.debug": True},
    "--deepspeed_config_file ds.json": {"deepspeed.config": "ds.json"},
    "--deepspeed_multinode_launcher standard": {},
    "--dynamo_backend no": {},
    "--enable_cpu_affinity": {"launch.bind": "auto"},
    "--fp8_amax_compute_algo max": {},
    "--fp8_amax_history_len 1024": {},
    "--fp8_backend ao": {"precision.fp8_recipe": "torchao_tensorwise"},
    "--fp8_backend te": {"precision.fp8_recipe": "te_delayed"},
    "--fp8_enable_fsdp_float8_all_gather true": {},
    "--fp8_format HYBRID": {},
    "--fp8_interval 1": {},
    "--fp8_margin 0": {},
    "--fp8_override_linear_precision false,false,false": {},
    "--fp8_pad_inner_dim true": {},
    "--fp8_use_autocast_during_eval": {},
    "--fsdp_activation_checkpointing true": {"model.activation_checkpointing": "full"},
    "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP": {},
    "--fsdp_backward_prefetch BACKWARD_PRE": {},
    "--fsdp_cpu_ram_efficient_loading true": {},
    "--fsdp_forward_prefetch true": {"fsdp.prefetch": 1},
    "--fsdp_min_num_params 1000": {"fsdp.min_num_params": "1000"},
    "--fsdp_offload_params true": {"fsdp.offload": True},
    "--fsdp_reshard_after_forward true": {"fsdp.strategy": "full_shard"},
    "--fsdp_sharding_strategy SHARD_GRAD_OP": {"fsdp.strategy": "shard_grad_op"},
    "--fsdp_state_dict_type FULL_STATE_DICT": {},
    "--fsdp_sync_module_states true": {},
    "--fsdp_transformer_layer_cls_to_wrap Block": {"fsdp.wrap": "Block"},
    "--fsdp_use_orig_params true": {},
    "--fsdp_version 2": {},
    "--gpu_ids 0,1": {"launch.devices": "0,1"},
    "--gradient_accumulation_steps 4": {"run.gradient_accumulation_steps": "4"},
    "--gradient_clipping 1.0": {"deepspeed.config": {"gradient_clipping": 1.0}},
    "--log_dir logs": {"launch.log_dir": "logs"},
    "--machine_rank 0": {"launch.node_rank": "0"},
    "--main_process_ip node0": {"launch.master_addr": "node0"},
    "--main_process_port 29501": {"launch.master_port": "29501"},
    "--main_training_function main": {},
    "--max_restarts 3": {"launch.max_restarts": "3"},
    "--megatron_lm_attention_dropout 0.1": {},
    "--megatron_lm_attention_softmax_in_fp32 true": {},
    "--megatron_lm_gradient_clipping 1.0": {},
    "--megatron_lm_hidden_dropout 0.1": {},
    "--megatron_lm_num_micro_batches 4": {"run.gradient_accumulation_steps": "4"},
    "--megatron_lm_pp_degree 2": {"parallel.pipeline": "2"},
    "--megatron_lm_recompute_activations true": {},
    "--megatron_lm_recompute_granularity full": {},
    "--megatron_lm_recompute_method uniform": {},
    "--megatron_lm_recompute_num_layers 1": {},
    "--megatron_lm_sequence_parallelism true": {},
    "--megatron_lm_tp_degree 2": {"parallel.tensor": "2"},
    "--megatron_lm_use_distributed_optimizer true": {},
    "--megatron_lm_use_rotary_position_embeddings true": {},
    "--mixed_precision bf16": {"run.mixed_precision": "bf16"},
    "--mixed_precision fp8": {"run.mixed_precision": "fp8"},
    "--module": {"launch.module": True},
    "--monitor_interval 1": {"launch.monitor_interval_seconds": "1"},
    "--multi_gpu": {"state.device": "cuda"},
    "--tpu": {"state.device": "tpu"},
    "--no_python": {"launch.program": True},
    "--no_tpu_cluster": {},
    "--num_cpu_threads_per_process 2": {"launch.threads_per_process": "2"},
    "--num_machines 2": {"launch.num_nodes": "2"},
    "--num_processes 2": {"launch.num_processes": "2"},
    "--offload_optimizer_device cpu": {"deepspeed.offload_optimizer": "cpu"},
    "--offload_optimizer_nvme_path /nvme": {"deepspeed.nvme_path": "/nvme"},
    "--offload_param_device none": {"deepspeed.offload_param": "none"},
    "--offload_param_nvme_path /nvme": {"deepspeed.nvme_path": "/nvme"},
    "--parallelism_config_cp_size 1": {},
    "--parallelism_config_dp_replicate_size 1": {},
    "--parallelism_config_dp_shard_size 1": {},
    "--parallelism_config_sp_size 1": {},
    "--parallelism_config_tp_size 1": {},
    "--quiet": {},
    "--rdzv_backend c10d": {"launch.rdzv_backend": "c10d"},
    "--rdzv_conf timeout=60": {"launch.rdzv_timeout_seconds": "60"},
    "--role default": {},
    "--same_network": {},
    "--tee 3": {},
    "--use_deepspeed": {"run.backend": "deepspeed"},
    "--use_fsdp": {"run.backend": "fsdp"},
    "--use_megatron_lm": {"run.backend": "megatron"},
    "--zero3_init_flag true": {},
    "--zero3_save_16bit_model true": {},
    "--zero_stage 2": {"deepspeed.stage": 2},
    "-m": {"launch.module": True},
    "-q": {},
    "-t 3": {},
}

# The flag with a value -> words of the error, which say what there is.
REFUSED: dict[str, str] = {
    "--aws_access_key_id x": "there is no SageMaker launcher here",
    "--aws_secret_access_key x": "there is no SageMaker launcher here",
    "--deepspeed_exclusion_filter worker-0": "run drivetrain launch on each",
    "--deepspeed_hostfile hosts": "run drivetrain launch on each",
    "--deepspeed_inclusion_filter worker-0": "run drivetrain launch on each",
    "--deepspeed_moe_layer_cls_names Moe": "leave it out",
    "--deepspeed_multinode_launcher pdsh": "run drivetrain launch on each",
    "--downcast_bf16": "--mixed-precision bf16",
    "--dynamo_backend inductor": "torch.compile(model)",
    "--dynamo_mode default": "torch.compile(model)",
    "--dynamo_use_dynamic": "torch.compile(model)",
    "--dynamo_use_fullgraph": "torch.compile(model)",
    "--dynamo_use_regional_compilation": "torch.compile(model)",
    "--env A=1": "NAME=VALUE drivetrain launch",
    "--fp8_amax_compute_algo most_recent": "options={'amax_compute_algo': 'most_recent'}",
    "--fp8_amax_history_len 16": "options={'amax_history_len': 16}",
    "--fp8_backend msamp": "MS-AMP is not here",
    "--fp8_format E4M3": "options={'fp8_format': 'e4m3'}",
    "--fp8_interval 2": "--precision-fp8-recipe",
    "--fp8_margin 1": "options={'margin': 1}",
    "--fp8_opt_level O1": "MS-AMP is not here",
    "--fp8_override_linear_precision false,false,true": "--precision-fp8-recipe torchao_rowwise_with_gw_hp",
    "--fp8_override_linear_precision true,false,false": "--precision-fp8-exclude",
    "--fsdp_activation_checkpointing_offload true": "--model-activation-checkpointing full",
    "--fsdp_backward_prefetch BACKWARD_POST": "--fsdp-prefetch N",
    "--fsdp_sharding_strategy HYBRID_SHARD_ZERO2": "--fsdp-strategy hybrid_shard",
    "--fsdp_state_dict_type LOCAL_STATE_DICT": "leave it out",
    "--main_training_function train": "notebook_launcher(function)",
    "--mpirun_hostfile hosts": "mpirun --hostfile FILE drivetrain launch",
    "--parallelism_config_cp_backend torch": "--parallel-tensor",
    "--parallelism_config_cp_comm_strategy allgather": "--parallel-tensor",
    "--parallelism_config_cp_size 2": "--parallel-context",
    "--parallelism_config_dp_replicate_size 2": "--fsdp-strategy hybrid_shard",
    "--parallelism_config_dp_shard_size 2": "--fsdp-shard-size N",
    "--parallelism_config_sp_attn_implementation sdpa": "--parallel-tensor",
    "--parallelism_config_sp_backend deepspeed": "--parallel-tensor",
    "--parallelism_config_sp_seq_length 8": "--parallel-tensor",
    "--parallelism_config_sp_seq_length_is_variable true": "--parallel-tensor",
    "--parallelism_config_sp_size 2": "--parallel-context",
    "--parallelism_config_tp_size 2": "--parallel-tensor",
    "--rdzv_conf store_type=file": "timeout=SECONDS",
    "--role trainer": "leave it out",
    "--tee 1": "--log-dir FOLDER",
    "--tpu_cluster": "drivetrain submit --on tpu-pod",
    "--tpu_use_sudo": "drivetrain submit --on tpu-pod",
    "--use_parallelism_config": "--parallel-tensor",
    "--vm x": "drivetrain submit --on tpu-pod",
    "--megatron_lm_attention_backend flash": "leave it out",
    "--megatron_lm_calculate_per_token_loss true": "count=",
    "--megatron_lm_context_parallel_size 2": "--parallel-context N",
    "--megatron_lm_decoder_last_pipeline_num_layers 1": "leave it out",
    "--megatron_lm_eod_mask_loss true": "leave it out",
    "--megatron_lm_expert_model_parallel_size 2": "--parallel-expert N",
    "--megatron_lm_expert_tensor_parallel_size 2": "--parallel-expert N",
    "--megatron_lm_no_load_optim true": "load_model",
    "--megatron_lm_no_save_optim true": "save_model",
    "--megatron_lm_optimizer_cpu_offload true": "--backend fsdp",
    "--megatron_lm_overlap_cpu_optimizer_d2h_h2d true": "--backend fsdp",
    "--megatron_lm_use_custom_fsdp true": "--backend fsdp",
    "--megatron_lm_use_precision_aware_optimizer true": "--backend fsdp",
}


@pytest.fixture(scope="module")
def launch() -> CommandParser:
    return build_parser("launch", LaunchArguments, "")


def settings(parser: CommandParser, line: str) -> dict[str, Any]:
    with environ.exported(
        HOME=None, XDG_CONFIG_HOME=None
    ):  # the settings of whoever runs the tests are no part
        arguments = parser.parse(
            ["--config", "none", *line.split(), "train.py"]
            if "config" not in line
            else [*line.split(), "train.py"]
        )
    return {
        f"{section}.{name}": found[0].value for (section, name), found in arguments.layers.entries.items()
    }


def test_every_flag_of_accelerate_has_a_row_here() -> None:
    rows = {line.split()[0] for line in (*MEANINGS, *REFUSED)}
    assert sorted(set(NAMES) - rows) == []
    assert sorted(rows - set(NAMES)) == []


@pytest.mark.parametrize("line", MEANINGS)
def test_an_accepted_flag_has_its_meaning_in_both_spellings(launch: CommandParser, line: str) -> None:
    name, _, value = line.partition(" ")
    assert settings(launch, line) == MEANINGS[line]
    assert settings(launch, f"{name.replace('_', '-')} {value}") == MEANINGS[line]
    if value:
        assert settings(launch, f"{name}={value}") == MEANINGS[line] or name.startswith("-t")


@pytest.mark.parametrize("line", REFUSED)
def test_a_refused_flag_says_what_there_is(launch: CommandParser, line: str) -> None:
    with pytest.raises(UsageError, match=re.escape(REFUSED[line])) as caught:
        settings(launch, line)
    assert str(caught.value).startswith(line.split()[0])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--num_processes 2 --num-processes 4",
            "--num-processes 4: contradicts --num_processes 2; keep one of the two",
        ),
        ("--num_machines 2 --nnodes 3", "--nnodes 3: contradicts --num_machines 2;"),
        (
            "--use_fsdp --use_deepspeed",
            "--use_deepspeed (--backend deepspeed): contradicts --use_fsdp (--backend fsdp)",
        ),
        (
            "--multi_gpu --state-device cpu",
            "--state-device cpu: contradicts --multi_gpu (--state-device cuda)",
        ),
        (
            "--fsdp-offload --fsdp_offload_params false",
            "--fsdp_offload_params false: contradicts --fsdp-offload",
        ),
        (
            "--precision-fp8-recipe te_current --fp8_backend te",
            "--fp8_backend te: contradicts --precision-fp8-recipe te_current; keep one of the two",
        ),
        ("--cpu --no-cpu", "--no-cpu: contradicts --cpu; keep one of the two"),
    ],
)
def test_flags_that_contradict_each_other_are_both_named(
    launch: CommandParser, line: str, message: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        settings(launch, line)


def test_a_flag_said_twice_with_one_value_is_fine(launch: CommandParser) -> None:
    assert settings(launch, "--num_processes 2 --num-processes 2") == {"launch.num_processes": "2"}


@pytest.mark.slow
def test_the_list_of_flags_is_what_the_installed_accelerate_has(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", minversion="1.15")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--help"]
    shown = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120, cwd=tmp_path
    ).stdout
    listed = set(re.findall(r"^  (?:-\w, )?(--[a-z0-9_]+)", shown, re.MULTILINE)) - {"--help"}
    assert sorted(listed - {*NAMES}) == []
    assert len(listed) > 100


def rows_of_the_page() -> dict[str, str]:
    rows = re.findall(r"^\| `(-[^|]*)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return {flag: text for flags, text in rows for flag in flags.split("`, `")}


def test_the_page_has_a_row_for_every_line_here_and_no_other() -> None:
    shown = rows_of_the_page()
    lines = {*MEANINGS, *REFUSED}
    expected = {line for line in lines if not line.startswith("--megatron_lm_") or MEANINGS.get(line)}
    assert sorted(expected - shown.keys()) == []
    assert sorted(shown.keys() - expected - {"--megatron_lm_..."}) == []


@pytest.mark.parametrize("line", [line for line in MEANINGS if MEANINGS[line]])
def test_the_page_names_the_flag_that_an_accepted_one_becomes(launch: CommandParser, line: str) -> None:
    (name,) = MEANINGS[line]
    section, _, field = name.partition(".")
    ours = next(flag.name for flag in launch.flags.values() if (flag.section, flag.field) == (section, field))
    assert ours in rows_of_the_page()[line]
