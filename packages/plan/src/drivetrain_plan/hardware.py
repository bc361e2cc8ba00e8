"""The hardware to plan for: a description in words becomes rates. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from drivetrain_dispatch.planning.hardware import Hardware, described, hardware_of
from drivetrain_plan.errors import PlanError

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]

# "8x80GB h100 x 4 hosts 400Gb": the devices of a host, as `drivetrain dispatch plan` reads them; then the hosts.
_HOSTS = re.compile(
    r"(?P<devices>.*?)(?:\s+x\s+(?P<hosts>\d+)\s+(?:hosts?|nodes?)(?:\s+(?P<network>\d+(?:\.\d+)?)\s*(?-i:Gb)(?:it)?(?:/s|ps)?)?)?",
    re.IGNORECASE,
)
_EXAMPLE = "say the memory, number and kind of a host's devices, and the hosts: '8x80GB h100 x 4 hosts 400Gb'"

# The bytes per second in each direction between a device of a kind and the others of its host: half of what the
# datasheets of NVIDIA (NVLink 2 to 5) and AMD (Infinity Fabric) give for both. Others use the host's bus.
_PEER_LINKS = {
    "gb200": 900e9, "b200": 900e9, "gh200": 450e9, "h200": 450e9, "h100": 450e9, "h20": 450e9, "a100": 300e9,
    "v100": 150e9, "mi300x": 448e9, "mi250": 400e9,
}  # fmt: skip
# Operations in fp32 for each in bf16, without tensor cores: torch's default for matrix products.
_FP32_SHARE = 1 / 15
_NETWORK = 100e9 / 8  # bytes per second of a device to other hosts, where a description says none


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHardware:
    """The devices of a run, and the rates between them; all devices are alike.

    Attributes:
        kind: The kind of the devices, such as "h100"; "cpu" for processes without an accelerator.
        num_hosts: The number of hosts.
        devices_per_host: The number of devices of each.
        memory_bytes: The memory of a device.
        flops: The dense operations per second of a device in bf16.
        fp32_flops: The dense operations per second in fp32.
        memory_rate: The bytes per second that a device reads and writes in its memory.
        host_rate: The bytes per second between a device and its host's memory.
        peer_rate: The bytes per second that a device sends to the others of its host.
        network_rate: The bytes per second that a device sends to other hosts.
        latency_seconds: The time of an exchange of nothing.
        operation_seconds: The host's time for an operation, whatever its size.
        shares: The share of a link's rate that a kind of collective reaches, where it differs from an all-reduce's.
        efficiency: The share of the rates above that a step reaches.
        link_efficiency: The share of the links' rates that collectives reach; 1 where they are measured.
        overlaps: Whether collectives run beside computation: not on the CPU, whose cores do both.
        basis: The source of the rates: "published" or "measured".
    """

    kind: str
    num_hosts: int
    devices_per_host: int
    memory_bytes: int
    flops: float
    fp32_flops: float
    memory_rate: float
    host_rate: float
    peer_rate: float
    network_rate: float = _NETWORK
    latency_seconds: float = 15e-6
    operation_seconds: float = 5e-6
    shares: Mapping[Collective, float] = field(default_factory=dict[Collective, float])
    efficiency: float = 0.6
    link_efficiency: float = 0.8
    overlaps: bool = True
    basis: str = "published"

    @property
    def num_devices(self) -> int:
        """The number of devices of all hosts."""
        return self.num_hosts * self.devices_per_host

    def described(self) -> str:
        """Return the hardware in words that `parse_hardware` reads."""
        kind = "" if self.kind == "cpu" else f" {self.kind}"
        said = f"{self.devices_per_host}x{self.memory_bytes / 1e9:g}GB{kind}"
        if self.num_hosts == 1:
            return said
        return f"{said} x {self.num_hosts} hosts {self.network_rate * 8 / 1e9:g}Gb"


def parse_hardware(text: str) -> RunHardware:
    """Return the hardware that a description names: devices of a host, and hosts.

    Raises:
        PlanError: The description cannot be read; the message says what can.

    Example:
        >>> parse_hardware("8x80GB h100 x 4 hosts 400Gb").num_devices
        32
    """
    match = _HOSTS.fullmatch(text.strip())
    if match is None or not match["devices"]:
        raise PlanError(f"{text!r} describes no hardware: {_EXAMPLE}")
    try:
        sizes, kind = described(match["devices"])
        rates = hardware_of(kind or "cuda")
    except ValueError as error:
        raise PlanError(f"{error}; or {_EXAMPLE}") from error
    if any(mark in kind.lower() for mark in (" x ", "gb", "host", "node")):
        raise PlanError(f"{text!r}: {kind!r} is no kind of device; {_EXAMPLE}")
    if not sizes or not all(sizes) or int(match["hosts"] or 1) < 1 or float(match["network"] or 1) <= 0:
        raise PlanError(f"{text!r}: there must be a device with memory, a host and a rate; {_EXAMPLE}")
    found = published_rates(kind or "cuda", rates, int(match["hosts"] or 1), sizes)
    if match["network"]:
        found = replace(found, network_rate=float(match["network"]) * 1e9 / 8)
    return found


def published_rates(kind: str, rates: Hardware, num_hosts: int, sizes: Sequence[int]) -> RunHardware:
    """Return hosts whose devices have these bytes of memory, with what is published of their kind."""
    word = next((name for name in _PEER_LINKS if name in kind.lower()), None)
    return RunHardware(
        kind=kind,
        num_hosts=num_hosts,
        devices_per_host=len(sizes),
        memory_bytes=min(sizes),
        flops=rates.tflops * 1e12,
        fp32_flops=rates.tflops * 1e12 * (1 if kind == "cpu" else _FP32_SHARE),
        memory_rate=rates.memory_bytes_per_second,
        host_rate=rates.link_bytes_per_second,
        peer_rate=rates.link_bytes_per_second if word is None else _PEER_LINKS[word],
        overlaps=kind != "cpu",
    )
