"""The dtypes in force, read back from prepared models."""

from collections.abc import Sequence

from torch import Tensor, nn

from drivetrain_backends.modules.autocast_forward import PreparedForward
from drivetrain_backends.modules.compile import unwrap_compiled
from drivetrain_backends.protocol import AutoValue
from drivetrain_precision import Bf16Updates, Policy
from drivetrain_precision.dtypes.dtype_policy import NAMES
from drivetrain_precision.dtypes.fp32_islands import Fp32Island, matching_modules


def read_dtypes(
    models: Sequence[nn.Module], policy: Policy, updates: Bf16Updates | None
) -> dict[str, object]:
    """Return the fields of the `precision` section that say dtypes, as they are in the models.

    All of these fields but `reduce_dtype`, which only the backend knows. Without models, the values are those that
    will be applied.
    """
    dtypes = policy.dtypes
    names = ("param_dtype", "output_dtype", "buffer_dtype", "keep_fp32", "weight_update")
    said = dtypes.said()
    found: dict[str, object] = {name: said.get(name, () if name == "keep_fp32" else None) for name in names}
    if models:
        modules = [
            m for model in models for m in unwrap_compiled(model).modules() if not isinstance(m, Fp32Island)
        ]
        if dtypes.param is not None:
            found["param_dtype"] = _held([p for m in modules for p in m.parameters(recurse=False)])
        if dtypes.buffer is not None:
            found["buffer_dtype"] = _held([b for m in modules for b in m.buffers(recurse=False)])
        if dtypes.output is not None:
            found["output_dtype"] = _listed({_returned(model) for model in models})
        found["keep_fp32"] = tuple(p for p in dtypes.keep_fp32 if any(_are_islands(m, p) for m in models))
    if dtypes.update is not None:
        applied = "nearest" if updates is None else updates.rounding
        reason = "param_dtype='bf16' alone would lose small updates"
        found["weight_update"] = applied if dtypes.is_update_said else AutoValue(value=applied, reason=reason)
    return found


def _held(tensors: Sequence[Tensor]) -> str | None:
    """Return the names of the dtypes of plain floating-point tensors."""
    plain = [t for t in tensors if t.is_floating_point() and (t.dtype in NAMES or t.dtype.itemsize == 8)]
    return _listed({NAMES.get(t.dtype, "fp64") for t in plain})


def _returned(model: nn.Module) -> str | None:
    dtype = type(model).output_dtype if isinstance(model, PreparedForward) else None
    return None if dtype is None else NAMES[dtype]


def _listed(names: set[str | None]) -> str | None:
    return next(iter(names)) if len(names) == 1 else " and ".join(sorted(map(str, names))) or None


def _are_islands(model: nn.Module, pattern: str) -> bool:
    """Return whether a pattern matches modules of a model, all of which compute in fp32 in it."""
    matched = matching_modules(unwrap_compiled(model), pattern).values()
    return bool(matched) and all(isinstance(module, Fp32Island) for module in matched)
