"""The `deepspeed` section for a DeepSpeed plugin, and the loss scale that its configuration says."""

from copy import deepcopy
from typing import Any

from drivetrain_accelerate.plugins.deepspeed_plugin import DeepSpeedPlugin
from drivetrain_accelerate.plugins.option_fields import TranslationError, refusal

_SCALE = {
    "initial_scale_power": "initial_scale",
    "loss_scale_window": "growth_interval",
    "min_loss_scale": "min_scale",
}
# The scale falls at each overflow, not after several; a scale that is too high costs steps, and changes no result.
_SCALE_WITHOUT_EFFECT = ("hysteresis", "consecutive_hysteresis")


def deepspeed_sections(plugin: DeepSpeedPlugin) -> dict[str, object]:
    """Return the `deepspeed` section: the plugin's configuration with its fields; "auto" stays."""
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
    """Return the fields of the `precision` section: the loss scale that a configuration's `fp16` says."""
    given = plugin.deepspeed_config.get("fp16", {})
    scale = given.get("loss_scale", 0)
    if scale not in (0, "auto"):
        raise TranslationError(
            f"DeepSpeed configuration: fp16.loss_scale={scale} (drivetrain: precision.initial_scale): the loss scale "
            "moves with overflows; write 0, and initial_scale_power for where it begins"
        )
    said = {ours: given[theirs] for theirs, ours in _SCALE.items() if given.get(theirs, "auto") != "auto"}
    if "initial_scale" in said:
        said["initial_scale"] = 2.0 ** said["initial_scale"]
    if "min_scale" in said:
        said["min_scale"] = float(said["min_scale"])
    return said


def deepspeed_accumulation(plugin: DeepSpeedPlugin) -> int | None:
    """Return the number of micro-batches in a step that a plugin says; None if it leaves it to the Accelerator."""
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
    """Write a field's value where the configuration has none, and refuse another one there."""
    given = section.get(name)
    if given in (None, "auto", "none") or given == value:
        section[name] = value
        return
    instead = f"contradicts {name}={given!r} of the configuration; keep one of the two"
    raise refusal(plugin, field, value, instead)
