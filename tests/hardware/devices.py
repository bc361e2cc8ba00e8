"""The device that the bodies of these tests compute on: the simulated one on any machine, CUDA where there is a card.

A body is a module-level function that a pool of processes calls: a test that `runs_on_device`, or what a test gives
`on_device`. `here()` is the device of its process.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeAlias, TypeVar

import pytest

VARIABLE = "TEST_DEVICE"  # which device a pool's process has, by its name in DEVICES


@dataclass(slots=True)
class Copies:
    """Copies between host and device, counted.

    Attributes:
        beside: From pinned memory, on another stream than the one that computes.
        pageable: From memory that is not pinned.
        to_pinned: To pinned memory.
        kept: Tensors whose memory was kept for another stream than that of their allocation (`record_stream`).
    """

    beside: int = 0
    pageable: int = 0
    to_pinned: int = 0
    kept: int = 0


class Device(Protocol):
    """A kind of device, as the bodies see it.

    Attributes:
        name: The kind, as torch names it.
        copies_aside: Whether it copies from pinned memory on side streams; else it executes as it is called.
        scale: How many times larger the memory is that bodies take, so that it exceeds what an allocator rounds to.
    """

    name: str
    copies_aside: bool
    scale: int

    def prepare(self) -> None:
        """Have this process know the device; called before its group is made."""
        ...

    def num_devices(self) -> int:
        """How many there are. Where there are fewer than ranks, all ranks share the first."""
        ...

    def collectives(self) -> str:
        """The backends of a group of several ranks, as `init_process_group` takes them."""
        ...

    def waits(self) -> AbstractContextManager[list[str]]:
        """Inside, list where the host waits for the device: on what, and the lines behind it, innermost first."""
        ...

    def copies(self) -> AbstractContextManager[Copies]:
        """Inside, count the copies to and from the device; what is found is complete at the end."""
        ...

    def bytes_in_use(self) -> int:
        """The bytes of the tensors that are on this process's device."""
        ...

    def limited(self, further_bytes: int) -> AbstractContextManager[None]:
        """Inside, this process's device has room for so many bytes more."""
        ...


def _simulated() -> Device:
    from hardware.simulated.device import NPU, SimulatedDevice

    return SimulatedDevice(NPU)


def _as_tpu() -> Device:
    from hardware.simulated.device import TPU, SimulatedDevice

    return SimulatedDevice(TPU)


def _cuda() -> Device:
    from hardware.cuda_device import CudaDevice

    return CudaDevice()


DEVICES: dict[str, Callable[[], Device]] = {"simulated": _simulated, "as_tpu": _as_tpu, "cuda": _cuda}


@cache
def here() -> Device:
    """The device of this process, which its pool has chosen."""
    return DEVICES[os.environ[VARIABLE]]()


OnDevice: TypeAlias = Callable[..., list[Any]]  # the fixture `on_device`
Body = TypeVar("Body", bound=Callable[..., None])


def runs_on_device(*num_processes: int, timeout_seconds: float = 120) -> Callable[[Body], Body]:
    """Have a test's body run in processes with the device: one, or each of these numbers in turn."""

    def mark(body: Body) -> Body:
        vars(body).update(num_processes=num_processes or (1,), timeout_seconds=timeout_seconds)
        return pytest.mark.usefixtures("on_device")(body)

    return mark


def first() -> str:
    """This process's device of the lowest index, as torch writes it."""
    return f"{here().name}:0"
