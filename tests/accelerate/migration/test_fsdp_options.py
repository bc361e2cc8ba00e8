from typing import Any

import pytest

from drivetrain_accelerate.migration.fsdp_options import FSDP
from drivetrain_accelerate.migration.option_meanings import CombinedMeaning, read_words


def read(**words: Any) -> CombinedMeaning:
    return read_words(FSDP, words)


def settings(**words: Any) -> dict[str, Any]:
    reading = read(**words)
    assert not reading.refused
    return {".".join(setting): value for setting, (_, value) in reading.settings.items()}


@pytest.mark.parametrize(
    ("word", "values", "setting"),
    [
        ("fsdp_sharding_strategy", ("FULL_SHARD", 1, "1", "full_shard"), ("strategy", "full_shard")),
        ("fsdp_sharding_strategy", ("SHARD_GRAD_OP", 2), ("strategy", "shard_grad_op")),
        ("fsdp_sharding_strategy", ("NO_SHARD", 3), ("strategy", "no_shard")),
        ("fsdp_sharding_strategy", ("HYBRID_SHARD", 4), ("strategy", "hybrid_shard")),
        ("fsdp_reshard_after_forward", (True, "true", "FULL_SHARD"), ("strategy", "full_shard")),
        ("fsdp_reshard_after_forward", (False, "false", "SHARD_GRAD_OP"), ("strategy", "shard_grad_op")),
        ("fsdp_offload_params", (True, "true"), ("offload", True)),
        ("fsdp_offload_params", (False, "False"), ("offload", False)),
        ("fsdp_cpu_offload", (True,), ("offload", True)),
        ("fsdp_transformer_layer_cls_to_wrap", ("Block,Head",), ("wrap", "Block,Head")),
        ("fsdp_transformer_layer_cls_to_wrap", (["Block", "Head"],), ("wrap", ["Block", "Head"])),
        ("fsdp_auto_wrap_policy", ("NO_WRAP", 3), ("wrap", ())),
        ("fsdp_min_num_params", (2000,), ("min_num_params", 2000)),
        ("fsdp_activation_checkpointing", (True, "true", "full"), ("activation_checkpointing", "full")),
        ("fsdp_activation_checkpointing", (False, "none"), ("activation_checkpointing", "none")),
        ("fsdp_activation_checkpointing", ("selective",), ("activation_checkpointing", "selective")),
        ("fsdp_forward_prefetch", (True, "true"), ("prefetch", 1)),
        ("fsdp_backward_prefetch", ("NO_PREFETCH", 3), ("prefetch", 0)),
    ],
)
def test_a_word_sets_the_field_that_means_the_same(
    word: str, values: tuple[Any, ...], setting: tuple[str, Any]
) -> None:
    for value in values:
        assert settings(**{word: value}) == {f"fsdp.{setting[0]}": setting[1]}


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
    ],
)
def test_what_is_so_anyway_sets_nothing(word: str, values: tuple[Any, ...]) -> None:
    for value in values:
        reading = read(**{word: value})
        assert (reading.settings, reading.notices, reading.refused) == ({}, {}, {})


@pytest.mark.parametrize(
    ("word", "value", "text"),
    [
        ("fsdp_version", 1, "FSDP2 is what runs"),
        ("fsdp_cpu_ram_efficient_loading", True, "accelerator.building()"),
        ("fsdp_sync_module_states", False, "rank 0's values"),
    ],
)
def test_what_is_met_in_another_way_is_told(word: str, value: Any, text: str) -> None:
    reading = read(**{word: value})
    assert text in reading.notices[word]
    assert (reading.settings, reading.refused) == ({}, {})


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
