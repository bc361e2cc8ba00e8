"""The options of DeepSpeed, and their translation into sections of drivetrain's settings."""

import math
from collections.abc import Generator
from contextlib import contextmanager
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from warnings import warn

from torch import nn

from drivetrain_accelerate.environment_variables import fill_unsaid, value_from
from drivetrain_accelerate.model_structure import get_module_class_from_name
from drivetrain_accelerate.plugins.deepspeed_config import HfDeepSpeedConfig
from drivetrain_accelerate.plugins.option_fields import (
    TranslationError,
    becomes,
    options,
    refusal,
    refused,
    without_effect,
)
from drivetrain_config import environ

_ENV = "ACCELERATE_DEEPSPEED_"
_OFFLOAD_OPTIMIZER = "deepspeed.config: zero_optimization.offload_optimizer"
_OFFLOAD_PARAM = "deepspeed.config: zero_optimization.offload_param"
# The fields that a configuration says, by the names that it has for them.
_IN_CONFIG = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}

_SCALE = {
    "initial_scale_power": "initial_scale",
    "loss_scale_window": "growth_interval",
    "min_loss_scale": "min_scale",
}
# The scale falls at each overflow, not after several; a scale that is too high costs steps, and changes no result.
_SCALE_WITHOUT_EFFECT = ("hysteresis", "consecutive_hysteresis")


@options
class DeepSpeedPlugin:
    """Options of DeepSpeed, joined in `deepspeed_config`. Options that are not given come from the environment."""

    hf_ds_config: Any = becomes("deepspeed.config", default=None)
    gradient_accumulation_steps: Any = becomes("run.gradient_accumulation_steps", default=None)
    gradient_clipping: Any = becomes("deepspeed.config: gradient_clipping", default=None)
    zero_stage: int | None = becomes("deepspeed.config: zero_optimization.stage", default=None)
    is_train_batch_min: bool = without_effect(
        "DeepSpeed's micro-batch size is for its own reports; windows are drivetrain's", default=True
    )
    offload_optimizer_device: str | None = becomes(_OFFLOAD_OPTIMIZER, default=None)
    offload_param_device: str | None = becomes(_OFFLOAD_PARAM, default=None)
    offload_optimizer_nvme_path: str | None = becomes(_OFFLOAD_OPTIMIZER, default=None)
    offload_param_nvme_path: str | None = becomes(_OFFLOAD_PARAM, default=None)
    zero3_init_flag: bool | None = without_effect(
        "read by the plugin's own zero3_init_context_manager and by transformers", default=None
    )
    zero3_save_16bit_model: bool | None = without_effect(
        "saves hold whole weights in every stage", default=None
    )
    transformer_moe_cls_names: str | None = without_effect(
        "read by the plugin's own set_moe_leaf_modules", default=None
    )
    enable_msamp: bool | None = refused(
        "run.mixed_precision",
        "drivetrain has no MS-AMP; say mixed_precision='fp8', which torchao or Transformer Engine compute",
        default=None,
    )
    msamp_opt_level: Literal["O1", "O2"] | None = without_effect(
        "of enable_msamp alone, which is refused", default=None
    )

    def __post_init__(self) -> None:
        """Fill the fields, and make the configuration; raise a ValueError if it lacks `zero_optimization`."""
        self.deepspeed_config: dict[str, Any] = {}
        self._selected = False
        self._fill_from_environment()
        if self.hf_ds_config is None:
            self.hf_ds_config = value_from(f"{_ENV}CONFIG_FILE", "none")
        if isinstance(self.hf_ds_config, (dict, HfDeepSpeedConfig, Path)) or self.hf_ds_config != "none":
            self._read_config()
        else:
            self._make_config()
        self.deepspeed_config["steps_per_print"] = math.inf  # DeepSpeed would print progress of its own
        if self.enable_msamp:
            self.deepspeed_config.setdefault("msamp", {"enabled": True, "opt_level": self.msamp_opt_level})
        if self.zero3_init_flag is None:
            self.zero3_init_flag = value_from(f"{_ENV}ZERO3_INIT", self.zero_stage == 3)
        if self.zero3_init_flag and self.zero_stage != 3:
            warn("zero3_init_flag is of stage 3 alone: it is set to False", stacklevel=3)
            self.zero3_init_flag = False

    @property
    def selected(self) -> bool:
        """True if this plugin is the selected one."""
        return self._selected

    @selected.setter
    def selected(self, value: bool) -> None:
        raise NotImplementedError(
            f"selected={value}: call AcceleratorState().select_deepspeed_plugin(name) to choose a plugin"
        )

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Mark this plugin as selected; raise a ValueError for any caller but `AcceleratorState`."""
        if not _from_accelerator_state:
            raise ValueError("call AcceleratorState().select_deepspeed_plugin(name) to choose a plugin")
        self._selected = True

    def unselect(self) -> None:
        """Mark this plugin as not selected; called by the state that all Accelerators share."""
        self._selected = False
        self.set_deepspeed_weakref()

    def is_auto(self, ds_key_long: str) -> bool:
        """Return whether a value of the configuration is "auto"."""
        return self.get_value(ds_key_long) == "auto"

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return a value of the configuration, or the default."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Replace the value "auto" by the run's. If `must_match`, add a contradicting value to `mismatches`.

        `kwargs` has the run's values by dotted name. If it has none for a value "auto", raise a ValueError.
        """
        node, key = self.hf_ds_config.find_config_node(ds_key_long)
        given = None if node is None else node.get(key)
        if node is None or given is None:
            return
        if given == "auto":
            if ds_key_long not in kwargs:
                raise ValueError(
                    f"the DeepSpeed configuration leaves {ds_key_long} to the program ('auto'), which gives "
                    "no value: write a value into the configuration"
                )
            node[key] = kwargs[ds_key_long]
        elif must_match and mismatches is not None and given != kwargs.get(ds_key_long, given):
            mismatches.append(f"- ds {ds_key_long}={given} vs arg {ds_key_long}={kwargs[ds_key_long]}")

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fill and compare all values of the configuration or a part; a ValueError lists the differences."""
        found = [] if mismatches is None else mismatches
        for key, value in (self.deepspeed_config if config is None else config).items():
            if isinstance(value, dict):
                self.deepspeed_config_process(f"{prefix}{key}.", found, value, must_match, **kwargs)
            else:
                self.fill_match(f"{prefix}{key}", found, must_match, **kwargs)
        if found and not prefix:
            listed = "\n".join(found)
            raise ValueError(
                f"the DeepSpeed configuration contradicts the program's values:\n{listed}\n"
                "Make them equal, or write 'auto' into the configuration, which takes the program's"
            )

    def set_mixed_precision(self, mixed_precision: str | None) -> None:
        """Write a precision into the configuration; a ValueError if that enables the other half precision."""
        config, mode = self.deepspeed_config, "bf16" if mixed_precision == "fp8" else mixed_precision
        other = {"fp16": "bf16", "bf16": "fp16"}.get(mode or "")
        if other is not None and config.get(other, {}).get("enabled") is True:
            raise ValueError(
                f"mixed_precision={mixed_precision!r}, and the DeepSpeed configuration enables {other}: say the same "
                "in both"
            )
        if mode == "fp16" and "fp16" not in config:
            config["fp16"] = {"enabled": True, "auto_cast": True}
        for name in ("fp16", "bf16"):
            section = config.setdefault(name, {"enabled": name == mode})
            if section.get("enabled") == "auto":
                section["enabled"] = name == mode

    def set_deepspeed_weakref(self) -> None:
        """Announce the configuration to transformers, so that transformers partitions models when it loads them."""
        config = deepcopy(self.deepspeed_config)
        for name in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu"):
            if config.get(name, "auto") == "auto":
                config[name] = 1
        if config.get("train_batch_size") == "auto":
            del config["train_batch_size"]
        if find_spec("transformers") is None:
            return
        from transformers.integrations.deepspeed import HfDeepSpeedConfig as Announced

        self.dschf = Announced(config)  # transformers holds it weakly

    def is_zero3_init_enabled(self) -> bool:
        """Return whether models are partitioned while they are built."""
        return bool(self.zero3_init_flag)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Generator[None]:
        """Run the block; models built in it are partitioned at once if `enable` is true."""
        before = self.zero3_init_flag
        self.zero3_init_flag = enable
        try:
            if before != enable:
                self.set_deepspeed_weakref()
            yield
        finally:
            self.zero3_init_flag = before

    def set_moe_leaf_modules(self, model: nn.Module) -> None:
        """Tell DeepSpeed the classes of expert layers, which it gathers whole; a ValueError refuses missing ones."""
        if self.transformer_moe_cls_names is None:
            self.transformer_moe_cls_names = environ.read(f"{_ENV}MOE_LAYER_CLS_NAMES")
        if self.transformer_moe_cls_names is None:
            return
        from deepspeed.utils import set_z3_leaf_modules

        names = [name.strip() for name in self.transformer_moe_cls_names.split(",")]
        found = {name: get_module_class_from_name(model, name) for name in names}
        if missing := [name for name, kind in found.items() if kind is None]:
            raise ValueError(
                f"transformer_moe_cls_names={self.transformer_moe_cls_names!r}: the model has no module of the class "
                f"{missing[0]!r}"
            )
        set_z3_leaf_modules(model, [kind for kind in found.values() if kind is not None])

    def _fill_from_environment(self) -> None:
        if self.gradient_accumulation_steps is None:
            text = value_from("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
            self.gradient_accumulation_steps = int(text) if text.isdigit() else text
        if self.gradient_clipping is None:
            text = value_from("ACCELERATE_GRADIENT_CLIPPING", "auto")
            self.gradient_clipping = (
                None if text.lower() == "none" else text if text == "auto" else float(text)
            )
        fill_unsaid(self, _ENV, zero_stage=2, zero3_save_16bit_model=False)
        for place in ("offload_optimizer", "offload_param"):
            fill_unsaid(self, _ENV, **{f"{place}_device": "none", f"{place}_nvme_path": "none"})
        if self.enable_msamp is None:
            self.enable_msamp = value_from("ACCELERATE_FP8_BACKEND", "none").upper() == "MSAMP"
        if self.msamp_opt_level is None:
            level: Any = value_from("ACCELERATE_FP8_OPT_LEVEL", "O1")
            self.msamp_opt_level = level

    def _read_config(self) -> None:
        """Take the given configuration. Its values have priority over fields, which only fill values "auto"."""
        said = (environ.read("ACCELERATE_CONFIG_DS_FIELDS") or "").split(",")
        if unheard := [name for name in (*_IN_CONFIG, "mixed_precision") if name in said]:
            raise ValueError(
                f"{', '.join(unheard)}: the launcher's file sets these options, but a given DeepSpeed configuration "
                "ignores them: write them into the configuration, and take them out of the launcher's file"
            )
        if not isinstance(self.hf_ds_config, HfDeepSpeedConfig):
            self.hf_ds_config = HfDeepSpeedConfig(self.hf_ds_config)
        config = self.hf_ds_config.config
        if "zero_optimization" not in config:
            raise ValueError(
                "the DeepSpeed configuration has no section zero_optimization: write one, such as "
                '{"zero_optimization": {"stage": 2}}'
            )
        config.setdefault("gradient_accumulation_steps", 1)
        for field, name in _IN_CONFIG.items():
            value = getattr(self, field)
            self.fill_match(name, **{name: value})
            setattr(self, field, self.get_value(name, value))
        self.hf_ds_config.set_stage_and_offload()
        self.deepspeed_config = config

    def _make_config(self) -> None:
        zero: dict[str, Any] = {
            "stage": self.zero_stage,
            "stage3_gather_16bit_weights_on_model_save": self.zero3_save_16bit_model,
        }
        for name in ("offload_optimizer", "offload_param"):
            device, path = getattr(self, f"{name}_device"), getattr(self, f"{name}_nvme_path")
            zero[name] = {"device": device, "nvme_path": path if device == "nvme" else None}
        config: dict[str, Any] = {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "zero_optimization": zero,
        }
        if self.gradient_clipping:
            config["gradient_clipping"] = self.gradient_clipping
        self.hf_ds_config = HfDeepSpeedConfig(config)
        self.deepspeed_config = self.hf_ds_config.config


def deepspeed_sections(plugin: DeepSpeedPlugin) -> dict[str, object]:
    """Return the `deepspeed` section: the plugin's configuration and fields joined; values "auto" stay."""
    if plugin.enable_msamp or "msamp" in plugin.deepspeed_config:
        raise refusal(plugin, "enable_msamp", True)
    config = deepcopy(plugin.deepspeed_config)
    zero = config.setdefault("zero_optimization", {})
    _agree(plugin, zero, "stage", "zero_stage", plugin.zero_stage)
    for place in ("offload_optimizer", "offload_param"):
        _add_offload(plugin, zero, place)
    if plugin.gradient_clipping not in (None, "auto"):
        _agree(plugin, config, "gradient_clipping", "gradient_clipping", plugin.gradient_clipping)
    for name in ("optimizer", "scheduler"):  # objects of the program, which `deepspeed_objects` makes
        config.pop(name, None)
    if config.get("steps_per_print") == float("inf"):
        del config["steps_per_print"]  # drivetrain's DeepSpeed prints nothing by itself
    # The loss scale is in `deepspeed_precision_sections`, and autocast casts.
    for name in ("loss_scale", "auto_cast", *_SCALE, *_SCALE_WITHOUT_EFFECT):
        config.get("fp16", {}).pop(name, None)
    return {"config": config}


def deepspeed_precision_sections(plugin: DeepSpeedPlugin) -> dict[str, object]:
    """Return the fields of the `precision` section: the loss scale options of the configuration's `fp16`."""
    given = plugin.deepspeed_config.get("fp16", {})
    scale = given.get("loss_scale", 0)
    if scale not in (0, "auto"):
        raise TranslationError(
            f"DeepSpeed configuration: fp16.loss_scale={scale} (drivetrain: precision.initial_scale): the loss scale "
            "moves with overflows; write 0, and set its first value by initial_scale_power"
        )
    said = {ours: given[theirs] for theirs, ours in _SCALE.items() if given.get(theirs, "auto") != "auto"}
    if "initial_scale" in said:
        said["initial_scale"] = 2.0 ** said["initial_scale"]
    if "min_scale" in said:
        said["min_scale"] = float(said["min_scale"])
    return said


def deepspeed_accumulation(plugin: DeepSpeedPlugin) -> int | None:
    """Return a plugin's number of micro-batches in a step; None if the Accelerator decides the number."""
    steps = plugin.deepspeed_config.get("gradient_accumulation_steps", plugin.gradient_accumulation_steps)
    return None if steps in (None, "auto") else int(steps)


def _add_offload(plugin: DeepSpeedPlugin, zero: dict[str, Any], place: str) -> None:
    device, path = getattr(plugin, f"{place}_device"), getattr(plugin, f"{place}_nvme_path")
    if _is_said(device):
        _agree(plugin, zero.setdefault(place, {}), "device", f"{place}_device", device)
        if _is_said(path) and device == "nvme":
            _agree(plugin, zero[place], "nvme_path", f"{place}_nvme_path", path)
    elif _is_said(path) and zero.get(place, {}).get("device") != "nvme":
        instead = f"is for {place}_device='nvme'; say that, or leave it out"
        raise refusal(plugin, f"{place}_nvme_path", path, instead)
    if zero.get(place, {}).get("nvme_path", "") in (None, "none"):
        del zero[place]["nvme_path"]


def _is_said(value: str | None) -> bool:
    return value not in (None, "none", "auto")


def _agree(plugin: DeepSpeedPlugin, section: dict[str, Any], name: str, field: str, value: object) -> None:
    """Write a field's value into the configuration if it has none; refuse a field that contradicts it."""
    given = section.get(name)
    if given in (None, "auto", "none") or given == value:
        section[name] = value
        return
    instead = f"contradicts {name}={given!r} of the configuration; keep one of the two"
    raise refusal(plugin, field, value, instead)
