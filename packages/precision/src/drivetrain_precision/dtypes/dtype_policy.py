"""The dtypes of parameters, gradients, outputs and buffers, as one frozen value for every backend."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from drivetrain_precision.errors import PrecisionError
from drivetrain_precision.settings import PrecisionSettings
from drivetrain_precision.support import supported_modes

DTYPES = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})
NAMES = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})
HALF = (torch.float16, torch.bfloat16)
_USES = ("param", "reduce", "output", "buffer")
WeightUpdate = Literal["nearest", "stochastic", "kahan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypePolicy:
    """The dtypes of parameters, reductions and outputs; None leaves the choice to the model or the backend.

    Attributes:
        param: The dtype of parameters, their gradients and optimizer states between steps.
        reduce: The dtype in which ranks add up gradients.
        output: The dtype of the floating-point tensors that a model returns.
        buffer: The dtype of floating-point buffers.
        keep_fp32: The patterns of the modules that are held and computed in fp32; see `find_islands`.
        update: The rounding of optimizer steps on parameters in bf16; None leaves it to the optimizer.
        is_update_said: Whether the user's settings give `update`.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    buffer: torch.dtype | None = None
    keep_fp32: tuple[str, ...] = ()
    update: WeightUpdate | None = None
    is_update_said: bool = False

    def said(self) -> dict[str, object]:
        """Return the settings that the user gave, by their names in the `precision` section."""
        found: dict[str, object] = {
            **{f"{use}_dtype": NAMES.get(getattr(self, use)) for use in _USES},
            "keep_fp32": self.keep_fp32 or None,
            "weight_update": self.update if self.is_update_said else None,
        }
        return {name: value for name, value in found.items() if value is not None}


def choose_dtypes(mode: str, device: torch.device, settings: PrecisionSettings) -> DtypePolicy:
    """Return the dtypes that the `precision` section asks for with the mode "no", "fp16" or "bf16".

    PrecisionError if settings contradict each other, or if the device cannot compute in `param_dtype`.
    """
    param, update = settings.param_dtype, settings.weight_update
    if param == "bf16" and mode == "fp16":
        raise PrecisionError(
            "precision.param_dtype='bf16' with mixed_precision='fp16': weights held in bf16 would be computed in "
            "another half precision; say mixed_precision='bf16' or 'no', or hold them in fp32"
        )
    if param == "bf16" and (support := supported_modes(device)["bf16"]).level == "none":
        raise PrecisionError(
            f"precision.param_dtype='bf16': {device} cannot compute in it ({support.reason}); it can hold fp32"
        )
    if update is not None and param == "fp32":
        raise PrecisionError(
            f"precision.weight_update={update!r} with precision.param_dtype='fp32': it says how updates of weights "
            "in bf16 are rounded, and none is held in bf16; leave one of the two out"
        )
    if update is None and param == "bf16":
        update = "kahan"
    said = {use: getattr(settings, f"{use}_dtype") for use in _USES}
    return DtypePolicy(
        **{use: DTYPES[name] for use, name in said.items() if name is not None},
        keep_fp32=settings.keep_fp32,
        update=update,
        is_update_said=settings.weight_update is not None,
    )
