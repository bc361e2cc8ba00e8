"""The dtypes of a sharded model's storage, computation and reduction."""

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from drivetrain_backends.settings import FSDPSettings
from drivetrain_precision import DtypePolicy, Policy, PrecisionError
from drivetrain_precision.dtypes.dtype_policy import HALF, NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypePlan:
    """The dtypes of a run; None keeps the model's own.

    Attributes:
        compute: The dtype of forward and backward.
        reduce: The dtype in which gradients are reduced.
        upcast: Whether trainable half-precision parameters are converted to fp32 before they are sharded.
        held: The dtypes that parameters and buffers are held in, as far as the run's policy says them.
    """

    compute: torch.dtype | None
    reduce: torch.dtype | None
    upcast: bool
    held: DtypePolicy

    def policy(self) -> MixedPrecisionPolicy:
        """Return the policy for `fully_shard`; outputs are cast by the model's call, as under every backend."""
        return MixedPrecisionPolicy(param_dtype=self.compute, reduce_dtype=self.reduce)


def plan_dtypes(settings: FSDPSettings, policy: Policy) -> DtypePlan:
    """Return the dtypes for the section and the run's precision."""
    held = policy.dtypes
    if settings.upcast is not None and held.param is not None and settings.upcast != (held.param not in HALF):
        raise PrecisionError(
            f"fsdp.upcast={settings.upcast} with precision.param_dtype={NAMES[held.param]!r}: both say what "
            "parameters are held in, and they differ; leave fsdp.upcast out"
        )
    compute = policy.autocast_dtype or held.param
    upcast = compute in HALF and held.param is None
    return DtypePlan(
        compute=compute,
        reduce=torch.float32 if held.reduce is None and compute in HALF else held.reduce,
        upcast=upcast if settings.upcast is None else settings.upcast,
        held=held,
    )
