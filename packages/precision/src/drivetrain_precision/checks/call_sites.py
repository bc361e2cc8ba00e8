"""The line of user code that called an operation, found in the call's stack frames."""

import inspect
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from drivetrain_precision.compat import COMPILED_PREFIX, ENGINE_FRAME

_TORCH = str(Path(torch.__file__).parent) + "/"
_ENGINE = (_TORCH + ENGINE_FRAME[0], ENGINE_FRAME[1])
_FUNCTIONAL = _TORCH + "nn/functional.py"
_LIBRARIES = tuple(
    {sysconfig.get_path(name) + "/" for name in ("purelib", "platlib", "stdlib", "platstdlib")}
)
# What torch computes by itself between a user's lines: gradients, optimizers, clipping.
_OF_TRAINING = tuple(_TORCH + part for part in ("optim/", "nn/utils/clip_grad.py", "amp/grad_scaler.py"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSite:
    """The line that called an operation, with the module and the torch.nn.functional function around it, or ""."""

    file: str
    line: int
    module: str  # its name in the model; of its class where the model is unknown
    function: str
    is_library: bool


def module_names(model: nn.Module | None) -> dict[int, str]:
    """Return the name of each module by its id, without the parts of torch.compile's wrappers."""
    if model is None:
        return {}
    return {
        id(module): name.replace(COMPILED_PREFIX, "") or type(module).__name__
        for name, module in model.named_modules()
    }


def call_site(names: Mapping[int, str]) -> CallSite | None:
    """Return the call site of the operation that is being dispatched; None for torch's own operations."""
    place: FrameType | None = None
    function = ""
    module: str | None = None
    frame = inspect.currentframe()
    while frame is not None and (place is None or module is None):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if place is None:
            if file.startswith(_OF_TRAINING) or (file, name) == _ENGINE:
                return None
            if file == _FUNCTIONAL and not name.startswith("_"):
                function = name
            if not file.startswith(_TORCH) and not _module_name(frame).startswith("drivetrain_precision."):
                place = frame
        if module is None:
            # The first argument of a method is its module.
            variables = frame.f_code.co_varnames
            owner = frame.f_locals.get(variables[0]) if frame.f_code.co_argcount and variables else None
            if isinstance(owner, nn.Module):
                module = names.get(id(owner)) if names else type(owner).__name__
        frame = frame.f_back
    if place is None:
        return None
    return CallSite(
        file=place.f_code.co_filename,
        line=place.f_lineno,
        module=module or "",
        function=function,
        is_library=place.f_code.co_filename.startswith(_LIBRARIES)
        or _module_name(place).partition(".")[0].partition("_")[0] == "drivetrain",
    )


def _module_name(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
