"""The DeepSpeed options of Accelerate's files and command line, mapped to the `deepspeed` section."""

from collections.abc import Mapping
from typing import Any

from drivetrain_accelerate.migration.option_meanings import (
    NO_CHANGE,
    Family,
    Meaning,
    Reader,
    is_set,
    notice,
    one_of,
    pass_through,
    refused,
    set_field,
    spelled,
    switch,
    unless_off,
)

_NODES = (
    "nodes are started one by one: run drivetrain launch on each, with --num-nodes N --node-rank I "
    "--master-addr HOST"
)
_BUILDING = "say it in the script: inside accelerator.building() parameters are partitioned as they are made"
_SAVING = "save_state writes whole weights in every stage, in fp32"


def _device(field: str) -> Reader:
    return one_of({device: set_field("deepspeed", field, device) for device in ("none", "cpu", "nvme")})


def _gradient_clipping(value: Any) -> Meaning:
    if not is_set(value):
        return NO_CHANGE
    try:
        return set_field("deepspeed", "config", {"gradient_clipping": float(value)})
    except (TypeError, ValueError):
        return refused("must be a number, the norm that gradients are clipped to")


def _together(given: Mapping[str, Any]) -> Mapping[str, Meaning]:
    """Refuse a clipping norm beside a configuration file; ignore options of stage 3 in other stages."""
    found: dict[str, Meaning] = {}
    file, stage = given.get("deepspeed_config_file"), given.get("zero_stage")
    if is_set(file) and is_set(given.get("gradient_clipping")):
        found["gradient_clipping"] = refused(f"write gradient_clipping into {file}, and leave it out here")
    if is_set(stage) and spelled(stage) != "3":
        found |= {word: NO_CHANGE for word in ("zero3_init_flag", "zero3_save_16bit_model") if word in given}
    return found


DEEPSPEED = Family(
    words={
        "deepspeed_config_file": pass_through("deepspeed", "config"),
        "zero_stage": one_of({str(stage): set_field("deepspeed", "stage", stage) for stage in range(4)}),
        "offload_optimizer_device": _device("offload_optimizer"),
        "offload_param_device": _device("offload_param"),
        "offload_optimizer_nvme_path": pass_through("deepspeed", "nvme_path"),
        "offload_param_nvme_path": pass_through("deepspeed", "nvme_path"),
        "gradient_accumulation_steps": pass_through("run", "gradient_accumulation_steps"),
        "gradient_clipping": _gradient_clipping,
        "zero3_init_flag": switch(on=notice(_BUILDING)),
        "zero3_save_16bit_model": switch(on=notice(_SAVING)),
        "deepspeed_hostfile": unless_off(_NODES),
        "deepspeed_exclusion_filter": unless_off(f"{_NODES}; --devices 0,1 takes some of its devices"),
        "deepspeed_inclusion_filter": unless_off(f"{_NODES}; --devices 0,1 takes some of its devices"),
        "deepspeed_multinode_launcher": one_of({"standard none null": NO_CHANGE}, otherwise=refused(_NODES)),
        "deepspeed_moe_layer_cls_names": unless_off(
            "no setting here says which layers hold experts; leave it out, and in stage 3 let all ranks use the "
            "same experts in a step"
        ),
    },
    together=_together,
)
