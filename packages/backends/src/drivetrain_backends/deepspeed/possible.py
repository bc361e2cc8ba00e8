"""Checks of a full configuration for what DeepSpeed drops, does wrong, or fails on with a cryptic error."""

from collections.abc import Mapping
from typing import Any

from drivetrain_backends.errors import EngineConfigError

_STAGES = (0, 1, 2, 3)
_ELSEWHERE = {
    "scheduler": "build it from torch.optim.lr_scheduler and pass it to prepare(), which steps it with the optimizer",
    "pipeline": "DeepSpeed reads it for its PipelineModule alone, which is not trained here",
    "tensor_parallel": "DeepSpeed's tensor parallelism is not trained with here",
}


def check_possible(flat: Mapping[str, Any], mode: str, world_size: int) -> None:
    """Refuse a configuration that DeepSpeed would not apply, or not correctly."""
    stage = flat["zero_optimization.stage"]
    if stage not in _STAGES:
        raise EngineConfigError(f"zero_optimization.stage={stage!r}: must be 0, 1, 2 or 3")
    if stage == 0 and mode != "no":
        raise EngineConfigError(
            f"deepspeed.stage=0 with models that compute in {mode}: DeepSpeed adds gradients up in {mode} there; say "
            "stage 1, which adds them up in fp32, or backend='ddp'"
        )
    for section, instead in _ELSEWHERE.items():
        if any(name.split(".")[0] == section for name in flat):
            raise EngineConfigError(f"the DeepSpeed configuration has a section {section}: {instead}")
    clipping = flat["gradient_clipping"]
    if not isinstance(clipping, int | float) or isinstance(clipping, bool) or not clipping >= 0:
        raise EngineConfigError(f"gradient_clipping={clipping!r}: must be a norm, and 0 clips nothing")
    _check_batch_sizes(flat, world_size)
    for name, where, stages in (
        ("offload_optimizer", "cpu", (1, 2, 3)),
        ("offload_optimizer", "nvme", (3,)),
        ("offload_param", "cpu", (3,)),
        ("offload_param", "nvme", (3,)),
    ):
        _check_offload(flat, name, where, stages)


def _check_batch_sizes(flat: Mapping[str, Any], world_size: int) -> None:
    whole = flat["train_batch_size"]
    micro, windows = flat["train_micro_batch_size_per_gpu"], flat["gradient_accumulation_steps"]
    if whole != micro * windows * world_size:
        raise EngineConfigError(
            f"train_batch_size={whole!r} is not train_micro_batch_size_per_gpu={micro!r} x "
            f"gradient_accumulation_steps={windows!r} x {world_size} processes; make them agree, or write "
            '"auto" for one of the first two'
        )


def _check_offload(flat: Mapping[str, Any], name: str, where: str, stages: tuple[int, ...]) -> None:
    prefix, stage = f"zero_optimization.{name}", flat["zero_optimization.stage"]
    if flat.get(f"{prefix}.device", "none") != where:
        return
    if stage not in stages:
        allowed = " or ".join(map(str, stages))
        raise EngineConfigError(f"{name} to {where} in stage {stage}: it takes stage {allowed}")
    if where == "nvme" and flat.get(f"{prefix}.nvme_path") is None:
        raise EngineConfigError(f"{name} to nvme without a folder: say nvme_path, on that disk")
