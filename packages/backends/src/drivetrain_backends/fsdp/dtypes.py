"""The dtypes of a sharded model's storage, computation, reduction and outputs."""

from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from drivetrain_backends.settings import FSDPSettings
from drivetrain_precision import Policy, PrecisionError, supported_modes

HALF = (torch.float16, torch.bfloat16)
DTYPES = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})
NAMES = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypePlan:
    """The dtypes of a run; None keeps the model's own.

    Attributes:
        param: The dtype of forward and backward.
        reduce: The dtype in which gradients are reduced.
        output: The dtype of the model's outputs.
        upcast: Whether trainable half-precision parameters are converted to fp32 before they are sharded.
    """

    param: torch.dtype | None
    reduce: torch.dtype | None
    output: torch.dtype | None
    upcast: bool

    def policy(self, *, is_root: bool) -> MixedPrecisionPolicy:
        """Return the policy for `fully_shard`; only the root casts outputs, so blocks pass on what they computed."""
        return MixedPrecisionPolicy(
            param_dtype=self.param,
            reduce_dtype=self.reduce,
            output_dtype=self.output if is_root else None,
        )


def plan_dtypes(settings: FSDPSettings, policy: Policy, device: torch.device) -> DtypePlan:
    """Return the dtypes for the section and the run's precision.

    Raises:
        PrecisionError: The device does not support `param_dtype`, or it contradicts the run's precision.
    """
    said = settings.param_dtype
    if said is not None and policy.mode not in ("no", said):
        raise PrecisionError(
            f"fsdp.param_dtype={said!r} with mixed_precision={policy.mode!r}: the run would compute in two "
            "precisions; leave param_dtype out, or say the same in both"
        )
    if said == "fp16" and policy.scaling is None:
        raise PrecisionError(
            "fsdp.param_dtype='fp16' with mixed_precision='no': small gradients would be lost without a loss scale; "
            "say mixed_precision='fp16'"
        )
    if said == "bf16" and (support := supported_modes(device)["bf16"]).level == "none":
        raise PrecisionError(f"fsdp.param_dtype='bf16': {device} cannot compute in it ({support.reason})")
    param = DTYPES[said] if said is not None else policy.autocast_dtype
    reduce = DTYPES[settings.reduce_dtype] if settings.reduce_dtype is not None else None
    return DtypePlan(
        param=param,
        reduce=torch.float32 if reduce is None and param in HALF else reduce,
        output=None if settings.output_dtype is None else DTYPES[settings.output_dtype],
        upcast=param in HALF if settings.upcast is None else settings.upcast,
    )
