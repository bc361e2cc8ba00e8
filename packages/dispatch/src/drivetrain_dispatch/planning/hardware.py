"""The link, memory and compute rates of hardware that this machine lacks, as its vendors publish them. Pure."""

import re
from typing import NamedTuple

from drivetrain_dispatch.planning.pipeline_model import Bandwidths
from drivetrain_messages import parse_size

DISK_BYTES_PER_SECOND = 3e9  # a typical NVMe drive
_COUNTED = re.compile(r"\s*(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?\s*[a-z]+)(?:\s+(.*\S))?\s*", re.IGNORECASE)

# The prefixes of a model's name, as in rtx4090.
_SERIES = re.compile(r"\b(?:nvidia|geforce|quadro|tesla|rtx|gtx|amd|instinct)")


class Hardware(NamedTuple):
    """The rates of a kind of device."""

    # The achievable bandwidth from the host's memory, about four fifths of the bus's peak.
    link_bytes_per_second: float
    memory_bytes_per_second: float
    tflops: float  # 10^12 dense operations per second in bfloat16, or in the fastest dtype without bfloat16


# PCIe 5, 4 and 3 with 16 lanes: the bandwidth that copies from pinned memory reach.
_PCIE5, _PCIE4, _PCIE3 = 50e9, 25e9, 12e9
# Keyed by a word of the device's name. The more specific kinds come first, as the first match wins.
_KINDS = {
    "gh200": Hardware(350e9, 4.0e12, 990),
    "gb200": Hardware(350e9, 8.0e12, 2500),
    "b200": Hardware(_PCIE5, 8.0e12, 2250),
    "h200": Hardware(_PCIE5, 4.8e12, 990),
    "h100": Hardware(_PCIE5, 3.35e12, 990),
    "h20": Hardware(_PCIE5, 4.0e12, 148),
    "a100": Hardware(_PCIE4, 1.9e12, 312),
    "a10": Hardware(_PCIE4, 0.6e12, 125),
    "a40": Hardware(_PCIE4, 0.7e12, 150),
    "a6000": Hardware(_PCIE4, 0.77e12, 155),
    "l40s": Hardware(_PCIE4, 0.86e12, 362),
    "l40": Hardware(_PCIE4, 0.86e12, 181),
    "l4": Hardware(_PCIE4, 0.3e12, 121),
    "v100": Hardware(_PCIE3, 0.9e12, 125),
    "t4": Hardware(_PCIE3, 0.32e12, 65),
    "5090": Hardware(_PCIE5, 1.79e12, 209),
    "4090": Hardware(_PCIE4, 1.0e12, 165),
    "4080": Hardware(_PCIE4, 0.72e12, 97),
    "3090": Hardware(_PCIE4, 0.94e12, 71),
    "3080": Hardware(_PCIE4, 0.76e12, 60),
    "2080": Hardware(_PCIE3, 0.62e12, 54),
    "mi300x": Hardware(_PCIE5, 5.3e12, 1300),
    "mi250": Hardware(_PCIE4, 3.2e12, 362),
    "cuda": Hardware(_PCIE4, 1e12, 100),
    "mps": Hardware(100e9, 0.4e12, 15),  # unified memory
    "xpu": Hardware(_PCIE4, 1e12, 100),
    "npu": Hardware(_PCIE4, 1e12, 200),
    "hpu": Hardware(_PCIE4, 2.4e12, 400),
    "cpu": Hardware(10e9, 50e9, 0.5),
}


class Described(NamedTuple):
    """The devices of a description such as "8x80GB h100"."""

    sizes: list[int]
    kind: str


def described(text: str) -> Described:
    """Parse a description of devices: a size, optionally with a count (`8x80GB`) and a kind (`8x80GB h100`)."""
    match = _COUNTED.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is no size: say the memory of a device, such as 24GB; how many there are, such as 8x80GB; and "
            "which, such as '8x80GB h100'"
        )
    count, size, kind = match.groups(default="")
    if kind:
        hardware_of(kind)
    return Described([parse_size(size)] * int(count or 1), kind)


def hardware_of(kind: str) -> Hardware:
    """Return the rates of a kind of device: a torch device type, or a name that contains a known word."""
    words = set(re.split(r"[^a-z0-9]+", _SERIES.sub(" ", kind.lower())))
    for name, hardware in _KINDS.items():
        if name in words:
            return hardware
    raise ValueError(
        f"{kind!r} is no kind of device that is known here ({', '.join(_KINDS)}): leave it out, and say how fast "
        "it is"
    )


def assumed_rates(kind: str) -> Bandwidths:
    """Return assumed transfer rates of a kind of device that this machine lacks; unknown kinds get typical rates."""
    try:
        link = hardware_of(kind).link_bytes_per_second
    except ValueError:
        link = _PCIE4
    return Bandwidths(to_device=link, from_disk=DISK_BYTES_PER_SECOND)
