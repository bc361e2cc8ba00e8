"""The peak of known devices, from a table of published figures."""

import re
import tomllib
from importlib.resources import files


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the dense peak of a device in FLOP/s, or None if the device or precision is not in the table.

    Args:
        device_name: The name that the device's driver reports, such as "NVIDIA H100 80GB HBM3".
        precision: "bf16", "fp16", "tf32" or "fp32".

    Example:
        >>> peak_flops("NVIDIA H100 80GB HBM3", "bf16")
        989400000000000.0
        >>> peak_flops("An unknown device", "bf16")
    """
    source = files("drivetrain_throughput").joinpath("device_peaks.toml")
    for device in tomllib.loads(source.read_text(encoding="utf-8"))["device"]:
        if re.search(str(device["name"]), device_name):
            return None if precision not in device else float(device[precision]) * 1e12
    return None
