"""The traits in which kinds of devices differ, beside their arithmetic: one row a kind. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTraits:
    """The traits of a kind of device, as torch has it.

    Attributes:
        collectives: The communication backend of processes with such devices, such as "nccl"; None if there is none.
        copies_aside: Whether the host's memory can be pinned, and copied from on a side stream, beside computation.
        distribution: The distribution that brings such devices to torch; None for those that torch has by itself.
    """

    collectives: str | None = None
    copies_aside: bool = True
    distribution: str | None = None

    @property
    def remedy(self) -> str:
        """The words for where torch finds no such device, before other remedies; empty if torch has them itself."""
        return "" if self.distribution is None else f"install {self.distribution}, if it is missing; or "


_TRAITS: Mapping[str, DeviceTraits] = {
    "cpu": DeviceTraits(collectives="gloo", copies_aside=False),
    "cuda": DeviceTraits(collectives="nccl"),
    "xpu": DeviceTraits(collectives="xccl"),
    "npu": DeviceTraits(collectives="hccl", distribution="torch_npu"),
    "hpu": DeviceTraits(collectives="hccl"),
    "mlu": DeviceTraits(collectives="cncl", distribution="torch_mlu"),
    "mps": DeviceTraits(copies_aside=False),
    # Its streams order nothing: XLA executes in the order of the calls.
    "tpu": DeviceTraits(
        collectives="tpu_dist", copies_aside=False, distribution="torch_tpu (pip install 'drivetrain[tpu]')"
    ),
    "xla": DeviceTraits(
        copies_aside=False, distribution="torch-xla (pip install 'torch==2.9.*' 'torch-xla==2.9.*')"
    ),
}


def traits_of(kind: str) -> DeviceTraits:
    """Return what torch does with a kind of device, such as "cuda"; the cautious answers for one that is not known.

    Example:
        >>> traits_of("tpu").copies_aside
        False
    """
    return _TRAITS.get(kind, DeviceTraits(copies_aside=False))
