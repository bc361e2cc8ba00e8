"""Build models without memory, or directly on a device."""

from collections.abc import Generator
from contextlib import contextmanager

import torch

from drivetrain_dispatch import init_empty_weights as build_empty
from drivetrain_dispatch import init_on_device as build_on_device


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Generator[None]:
    """Build models in the block with parameters on the meta device.

    Args:
        include_buffers: Whether buffers go there too; None for no.
    """
    with build_empty(include_buffers=bool(include_buffers)):
        yield


@contextmanager
def init_on_device(device: torch.device, include_buffers: bool | None = None) -> Generator[None]:
    """Build models in the block with parameters on a device from the moment they are registered.

    Args:
        device: The device of the parameters.
        include_buffers: Whether buffers go there too; None for no.
    """
    with build_on_device(device, include_buffers=bool(include_buffers)):
        yield
