"""HfDeepSpeedConfig, held against the installed one, and under transformers' subclass of it."""

import json
import os
from base64 import urlsafe_b64encode
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from drivetrain_accelerate.plugins.deepspeed_config import HfDeepSpeedConfig as Ours
from optional_modules import skip_without

pytest.importorskip("accelerate")
from accelerate.utils.deepspeed import HfDeepSpeedConfig as Theirs

CONFIGS: list[dict[str, Any]] = [
    {
        "train_batch_size": "auto",
        "a": {"b": {"c": "auto", "d": 5}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}},
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "t": {"x": 0, "y": None},
    },
    {},
    {"zero_optimization": {}},
    {"zero_optimization": {"stage": "3"}},
    {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    {"zero_optimization": {"stage": 2, "offload_param": {"device": "none"}}},
    {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
]
NAMES = [
    "a.b.c",
    "a.b",
    "a",
    "a.x.y",
    "bf16.enabled",
    "fp16.enabled",
    "t.x",
    "t.y",
    "none",
    "train_batch_size",
]


@pytest.mark.parametrize("config", CONFIGS)
def test_it_answers_as_the_real_one(config: dict[str, Any]) -> None:
    ours, theirs = Ours(config), Theirs(config)
    for each in ("is_zero2", "is_zero3", "is_offload"):
        assert getattr(ours, each)() == getattr(theirs, each)(), each
    for name in NAMES:
        assert ours.find_config_node(name) == theirs.find_config_node(name), name
        assert ours.get_value(name) == theirs.get_value(name), name
        assert ours.get_value(name, 9) == theirs.get_value(name, 9), name
        assert ours.is_true(name) == theirs.is_true(name), name
        assert ours.is_false(name) == theirs.is_false(name), name


@pytest.mark.parametrize("name", [*NAMES, "zero_optimization.stage"])
def test_a_part_is_removed_as_by_the_real_one(name: str) -> None:
    ours, theirs = Ours(CONFIGS[0]), Theirs(CONFIGS[0])
    ours.del_config_sub_tree(name)
    theirs.del_config_sub_tree(name)
    assert ours.config == theirs.config
    with pytest.raises(ValueError, match="Can't find none entry in the config"):
        ours.del_config_sub_tree("none", must_exist=True)


def test_it_is_made_from_a_mapping_a_file_and_base64(tmp_path: Path) -> None:
    config = CONFIGS[0]
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config))
    text = urlsafe_b64encode(json.dumps(config).encode()).decode()
    for given in (config, str(file), file, text):
        assert Ours(given).config == config
        assert Ours(given).config is not config
    for wrong in ("{bad", "/no/file.json"):
        with pytest.raises(ValueError, match="must be a dict, the path of a JSON file that exists"):
            Ours(wrong)
    with pytest.raises(TypeError, match="not int"):
        Ours(3)
    file.write_text('{"a": 1, "a": 2}')
    with pytest.raises(ValueError, match="a stands there twice"):
        Ours(file)


class Arguments:
    """What of transformers' TrainingArguments a configuration is filled from."""

    world_size = 2
    per_device_train_batch_size = 4
    gradient_accumulation_steps = 2
    max_grad_norm = 1.0
    learning_rate = 1e-4
    adam_beta1, adam_beta2, adam_epsilon = 0.9, 0.999, 1e-8
    weight_decay = 0.1
    save_on_each_node = True
    fp16 = fp16_full_eval = bf16_full_eval = False
    bf16 = True

    def get_warmup_steps(self, steps: int) -> int:
        return steps // 10


class Model:
    class config:  # noqa: N801 as a pretrained model has it
        hidden_size = 16


FULL: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(
            ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"
        ),
    },
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
}


def test_transformers_subclass_fills_it_as_it_fills_the_real_one() -> None:
    integration = pytest.importorskip("transformers.integrations.deepspeed")
    skip_without("deepspeed")
    found = []
    for base in (Ours, Theirs):
        # transformers' methods over the base: its class has the one that was there when it was imported.
        methods = {
            name: value
            for kind in (integration.HfDeepSpeedConfig, integration.HfTrainerDeepSpeedConfig)
            for name, value in vars(kind).items()
            if name not in ("__init__", "__dict__", "__weakref__")
        }
        config: Any = type("Trained", (base,), methods)(deepcopy(FULL))
        config._dtype, config.mismatches = None, []
        config.trainer_config_process(Arguments())
        config.trainer_config_finalize(Arguments(), Model(), 100)
        config.del_config_sub_tree("optimizer")
        found.append((config.config, config.dtype(), config.mismatches, config.is_zero3()))
    assert found[0] == found[1]


def test_a_pipe_and_levels_without_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"a":' * 50_000 + "1" + "}" * 50_000)
    with pytest.raises(ValueError, match=r"ds\.json: is nested too deeply"):
        Ours(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match=r"ds\.json: is no regular file, but a pipe"):
        Ours(path)
