"""An accelerator that any machine has: torch's open device (PrivateUse1), made by a small C++ extension.

Its memory is the host's and its operations too, but to torch it is a device: weights are copied to it, from pinned
memory or not, on streams, with events. `device.cpp` says what it does to find those who do not wait.
"""

import shutil
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

NAME = "toy"
CAN_BE_MADE = find_spec("ninja") is not None and shutil.which("c++") is not None


def make() -> Any:
    """Have this process know the device, for good; what its memory and copies count."""
    from torch.utils.cpp_extension import load

    source = Path(__file__).with_name("device.cpp")
    extension = load("drivetrain_toy_device", [str(source)], extra_cflags=["-O1"])
    torch.utils.rename_privateuse1_backend(NAME)
    module = ModuleType(f"torch.{NAME}")
    vars(module).update(
        is_available=lambda: True,
        device_count=lambda: 2,
        current_device=lambda: 0,
        get_amp_supported_dtype=lambda: [torch.bfloat16],
        _is_in_bad_fork=lambda: False,
    )
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    return extension
