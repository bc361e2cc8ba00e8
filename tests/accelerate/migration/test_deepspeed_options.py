from typing import Any

import pytest

from drivetrain_accelerate.migration.deepspeed_options import DEEPSPEED
from drivetrain_accelerate.migration.option_meanings import CombinedMeaning, read_words


def read(**words: Any) -> CombinedMeaning:
    return read_words(DEEPSPEED, words)


@pytest.mark.parametrize(
    ("word", "values", "setting"),
    [
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
        reading = read(**{word: value})
        assert {".".join(s): given for s, (_, given) in reading.settings.items()} == dict([setting])
        assert (reading.notices, reading.refused) == ({}, {})


@pytest.mark.parametrize(
    ("word", "values"),
    [
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
        reading = read(**{word: value})
        assert (reading.settings, reading.notices, reading.refused) == ({}, {}, {})


@pytest.mark.parametrize(
    ("word", "text"),
    [("zero3_init_flag", "accelerator.building()"), ("zero3_save_16bit_model", "whole weights")],
)
def test_what_is_met_in_another_way_is_told_where_it_asks_for_something(word: str, text: str) -> None:
    for stage in ({"zero_stage": 3}, {"deepspeed_config_file": "ds.json"}, {}):
        assert text in read(**{word: True}, **stage).notices[word]
    assert read(**{word: True}, zero_stage="2").notices == {}


@pytest.mark.parametrize(
    ("words", "text"),
    [
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
