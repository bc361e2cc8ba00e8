"""The options of FSDP and DeepSpeed: each is a setting, a notice, a refusal or nothing."""

from typing import Any

import pytest

from drivetrain_migration.option_families import DEEPSPEED, FSDP
from drivetrain_migration.option_meanings import CombinedMeaning, read_words


def read(**words: Any) -> CombinedMeaning:
    return read_words(FSDP if any(word.startswith("fsdp_") for word in words) else DEEPSPEED, words)


def settings(**words: Any) -> dict[str, Any]:
    reading = read(**words)
    assert (reading.notices, reading.refused) == ({}, {})
    return {".".join(setting): value for setting, (_, value) in reading.settings.items()}


@pytest.mark.parametrize(
    ("word", "values", "setting"),
    [
        ("fsdp_sharding_strategy", ("FULL_SHARD", 1, "1", "full_shard"), ("fsdp.strategy", "full_shard")),
        ("fsdp_sharding_strategy", ("SHARD_GRAD_OP", 2), ("fsdp.strategy", "shard_grad_op")),
        ("fsdp_sharding_strategy", ("NO_SHARD", 3), ("fsdp.strategy", "no_shard")),
        ("fsdp_sharding_strategy", ("HYBRID_SHARD", 4), ("fsdp.strategy", "hybrid_shard")),
        ("fsdp_reshard_after_forward", (True, "true", "FULL_SHARD"), ("fsdp.strategy", "full_shard")),
        ("fsdp_reshard_after_forward", (False, "false", "SHARD_GRAD_OP"), ("fsdp.strategy", "shard_grad_op")),
        ("fsdp_offload_params", (True, "true"), ("fsdp.offload", True)),
        ("fsdp_offload_params", (False, "False"), ("fsdp.offload", False)),
        ("fsdp_cpu_offload", (True,), ("fsdp.offload", True)),
        ("fsdp_transformer_layer_cls_to_wrap", ("Block,Head",), ("fsdp.wrap", "Block,Head")),
        ("fsdp_transformer_layer_cls_to_wrap", (["Block", "Head"],), ("fsdp.wrap", ["Block", "Head"])),
        ("fsdp_auto_wrap_policy", ("NO_WRAP", 3), ("fsdp.wrap", ())),
        ("fsdp_min_num_params", (2000,), ("fsdp.min_num_params", 2000)),
        ("fsdp_activation_checkpointing", (True, "true", "full"), ("model.activation_checkpointing", "full")),
        ("fsdp_activation_checkpointing", (False, "none"), ("model.activation_checkpointing", "none")),
        ("fsdp_activation_checkpointing", ("selective",), ("model.activation_checkpointing", "selective")),
        ("fsdp_forward_prefetch", (True, "true"), ("fsdp.prefetch", 1)),
        ("fsdp_backward_prefetch", ("NO_PREFETCH", 3), ("fsdp.prefetch", 0)),
        ("zero_stage", (3, "3"), ("deepspeed.stage", 3)),
        ("zero_stage", (0, "0"), ("deepspeed.stage", 0)),
        ("offload_optimizer_device", ("cpu",), ("deepspeed.offload_optimizer", "cpu")),
        ("offload_optimizer_device", ("none",), ("deepspeed.offload_optimizer", "none")),
        ("offload_param_device", ("nvme",), ("deepspeed.offload_param", "nvme")),
        ("offload_optimizer_nvme_path", ("/disk",), ("deepspeed.nvme_path", "/disk")),
        ("offload_param_nvme_path", ("/disk",), ("deepspeed.nvme_path", "/disk")),
        ("deepspeed_config_file", ("ds.json",), ("deepspeed.config", "ds.json")),
        ("gradient_clipping", (1.0, 1, "1.0"), ("deepspeed.config", {"gradient_clipping": 1.0})),
        ("gradient_accumulation_steps", (4,), ("run.gradient_accumulation_steps", 4)),
    ],
)
def test_a_word_sets_the_field_that_means_the_same(
    word: str, values: tuple[Any, ...], setting: tuple[str, Any]
) -> None:
    for value in values:
        assert settings(**{word: value}) == dict([setting])


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("fsdp_version", (2, "2")),
        ("fsdp_auto_wrap_policy", ("TRANSFORMER_BASED_WRAP", 1, None)),
        ("fsdp_backward_prefetch", ("BACKWARD_PRE", 1)),
        ("fsdp_backward_prefetch_policy", ("BACKWARD_PRE",)),
        ("fsdp_forward_prefetch", (False, "false")),
        ("fsdp_state_dict_type", ("FULL_STATE_DICT", "SHARDED_STATE_DICT", 1, 3)),
        ("fsdp_use_orig_params", (True, False)),
        ("fsdp_sync_module_states", (True, "true")),
        ("fsdp_cpu_ram_efficient_loading", (False,)),
        ("fsdp_activation_checkpointing_offload", (False,)),
        ("fsdp_transformer_layer_cls_to_wrap", (None, "")),
        ("offload_optimizer_nvme_path", ("none", None)),
        ("gradient_clipping", ("auto", "none", None)),
        ("gradient_accumulation_steps", ("auto",)),
        ("zero3_init_flag", (False, "false")),
        ("zero3_save_16bit_model", (False,)),
        ("deepspeed_multinode_launcher", ("standard", None)),
        ("deepspeed_hostfile", ("", None)),
        ("deepspeed_moe_layer_cls_names", (None,)),
    ],
)
def test_what_is_so_anyway_sets_nothing(word: str, values: tuple[Any, ...]) -> None:
    for value in values:
        assert settings(**{word: value}) == {}


@pytest.mark.parametrize(
    ("word", "value", "text"),
    [
        ("fsdp_version", 1, "FSDP2 is what runs"),
        ("fsdp_cpu_ram_efficient_loading", True, "accelerator.building()"),
        ("fsdp_sync_module_states", False, "rank 0's values"),
        ("zero3_init_flag", True, "accelerator.building()"),
        ("zero3_save_16bit_model", True, "whole weights"),
    ],
)
def test_what_is_met_in_another_way_is_told(word: str, value: Any, text: str) -> None:
    reading = read(**{word: value})
    assert text in reading.notices[word]
    assert (reading.settings, reading.refused) == ({}, {})


@pytest.mark.parametrize("word", ["zero3_init_flag", "zero3_save_16bit_model"])
def test_an_option_of_stage_3_is_told_where_it_asks_for_something(word: str) -> None:
    assert read(**{word: True}, zero_stage=3).notices
    assert read(**{word: True}, deepspeed_config_file="ds.json").notices
    assert read(**{word: True}, zero_stage="2").notices == {}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"}, "--fsdp-strategy hybrid_shard"),
        ({"fsdp_sharding_strategy": "ZERO"}, "say one of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD"),
        ({"fsdp_reshard_after_forward": "NO_RESHARD"}, "--fsdp-strategy no_shard"),
        ({"fsdp_version": 3}, "say one of 2, 1"),
        ({"fsdp_offload_params": "maybe"}, "say one of true, false"),
        ({"fsdp_backward_prefetch": "BACKWARD_POST"}, "--fsdp-prefetch N"),
        ({"fsdp_state_dict_type": "LOCAL_STATE_DICT"}, "whole tensors by name"),
        ({"fsdp_activation_checkpointing_offload": True}, "not offloaded here"),
        ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}, "say fsdp_min_num_params"),
        ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 0}, "say fsdp_min_num_params"),
        (
            {"fsdp_min_num_params": 9, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
            "goes with SIZE_BASED_WRAP, not with TRANSFORMER_BASED_WRAP",
        ),
        (
            {"fsdp_reshard_after_forward": False, "fsdp_sharding_strategy": "FULL_SHARD"},
            "contradicts fsdp_reshard_after_forward=False",
        ),
        (
            {"fsdp_transformer_layer_cls_to_wrap": "Block", "fsdp_auto_wrap_policy": "NO_WRAP"},
            "contradicts fsdp_transformer_layer_cls_to_wrap=Block",
        ),
        ({"zero_stage": 4}, "say one of 0, 1, 2, 3"),
        ({"offload_param_device": "disk"}, "say one of none, cpu, nvme"),
        ({"gradient_clipping": "some"}, "must be a number"),
        (
            {"gradient_clipping": 1.0, "deepspeed_config_file": "ds.json"},
            "write gradient_clipping into ds.json",
        ),
        (
            {"offload_param_nvme_path": "/a", "offload_optimizer_nvme_path": "/b"},
            "contradicts offload_param_nvme_path=/a",
        ),
        ({"deepspeed_hostfile": "hosts"}, "--num-nodes N"),
        ({"deepspeed_multinode_launcher": "pdsh"}, "--num-nodes N"),
        ({"deepspeed_inclusion_filter": "worker-1:0"}, "--devices 0,1"),
        ({"deepspeed_exclusion_filter": "worker-1:0"}, "--devices 0,1"),
        ({"deepspeed_moe_layer_cls_names": "MixtralSparseMoeBlock"}, "leave it out"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_way_out(words: dict[str, Any], text: str) -> None:
    (reason,) = read(**words).refused.values()
    assert text in reason


def test_two_words_that_say_the_same_agree() -> None:
    words = {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_reshard_after_forward": False}
    assert settings(**words) == {"fsdp.strategy": "shard_grad_op"}


def test_the_policy_says_whether_a_size_counts() -> None:
    by_size = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": "100"}
    assert settings(**by_size) == {"fsdp.min_num_params": "100"}
    by_class = {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_min_num_params": 0,
        "fsdp_transformer_layer_cls_to_wrap": "Block",
    }
    assert settings(**by_class) == {"fsdp.wrap": "Block"}
