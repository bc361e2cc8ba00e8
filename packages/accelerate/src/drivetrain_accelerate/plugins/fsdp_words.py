"""The words that the fields of an FSDP plugin may have, and what of torch's they mean."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from drivetrain_accelerate.plugins.constants import (
    FSDP_AUTO_WRAP_POLICY,
    FSDP_BACKWARD_PREFETCH,
    FSDP_SHARDING_STRATEGY,
    FSDP_STATE_DICT_TYPE,
)

_MODES = {"fp8": torch.bfloat16, "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_DTYPE_FIELDS = {
    1: ("param_dtype", "reduce_dtype", "buffer_dtype"),
    2: ("param_dtype", "reduce_dtype", "output_dtype"),
}


def strategy_of(value: Any, *, field: str) -> ShardingStrategy:
    """Return torch's sharding strategy for a name or number."""
    if isinstance(value, ShardingStrategy):
        return value
    name = _name(value, FSDP_SHARDING_STRATEGY, field)
    return ShardingStrategy(FSDP_SHARDING_STRATEGY.index(name) + 1)


def prefetch_of(value: Any) -> BackwardPrefetch | None:
    """Return torch's prefetch for a name or number; None for NO_PREFETCH."""
    if value is None or isinstance(value, BackwardPrefetch):
        return value
    name = _name(value, FSDP_BACKWARD_PREFETCH, "backward_prefetch")
    return None if name == "NO_PREFETCH" else BackwardPrefetch[name]


def state_dict_type_of(value: Any) -> StateDictType:
    """Return torch's form of a state dict for a name or number."""
    if isinstance(value, StateDictType):
        return value
    return StateDictType[_name(value, FSDP_STATE_DICT_TYPE, "state_dict_type")]


def wrap_policy_of(value: str) -> Callable[..., Any] | None:
    """Return torch's wrap policy for a name; None for NO_WRAP."""
    name = value.upper()
    if name not in FSDP_AUTO_WRAP_POLICY:
        raise ValueError(f"Invalid auto wrap policy: {value}. Must be one of {FSDP_AUTO_WRAP_POLICY}")
    policies = (transformer_auto_wrap_policy, size_based_auto_wrap_policy, None)
    return policies[FSDP_AUTO_WRAP_POLICY.index(name)]


def offload_of(value: bool, version: int) -> CPUOffload | OffloadPolicy:
    """Return a version's value for parameters on the CPU, or on the device."""
    if version == 1:
        return CPUOffload(offload_params=value)
    return CPUOffloadPolicy() if value else OffloadPolicy()


def mixed_precision_of(
    value: Any, version: int, buffer: torch.dtype | None = None
) -> MixedPrecision | MixedPrecisionPolicy:
    """Return a version's policy for a mode, a dtype or a mapping with all of its fields.

    In version 1, buffers may have another dtype.
    """
    names = _DTYPE_FIELDS[version]
    dtypes: dict[str, Any]
    if isinstance(value, Mapping):
        dtypes = dict(cast("Mapping[str, Any]", value))
        if dtypes.keys() != set(names) or not set(dtypes.values()) <= set(_MODES.values()):
            raise ValueError(
                f"mixed_precision_policy={value}: a dict needs the keys {', '.join(names)}, each with torch.float32, "
                "torch.float16 or torch.bfloat16"
            )
    else:
        dtype = _MODES.get(value) if isinstance(value, str) else value
        if dtype not in _MODES.values():
            raise ValueError(
                f"Invalid mixed precision: {value}. Must be one of {list(_MODES)}, or their dtypes"
            )
        dtypes = {name: dtype for name in names}  # noqa: C420 its values are of any type
    if version == 2:
        return MixedPrecisionPolicy(**dtypes)
    if buffer is not None:
        dtypes["buffer_dtype"] = buffer
    return MixedPrecision(**dtypes)


def _name(value: Any, names: list[str], field: str) -> str:
    """Return the name that a name in any case, a number, or a number as text stands for."""
    word = str(value).upper()
    if word.isdecimal() and 1 <= int(word) <= len(names):
        return names[int(word) - 1]
    if word not in names:
        raise ValueError(f"{field}={value!r}: must be one of {', '.join(names)}")
    return word
