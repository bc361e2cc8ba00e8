"""Private names of torch that the plugins rely on; docs/design/platforms.md lists them."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import wrap

# peft combines wrap policies by it.
either_policy: Any = wrap._or_policy  # pyright: ignore[reportPrivateUsage]


def flatten_mesh(mesh: DeviceMesh, axes: Sequence[str], name: str) -> None:
    """Give several axes of a mesh a joint name. Called on all ranks."""
    mesh[tuple(axes)]._flatten(name)  # pyright: ignore[reportPrivateUsage]


def wrapped_classes(policy: wrap.ModuleWrapPolicy) -> Iterable[type[nn.Module]]:
    """Return the classes of modules that a policy wraps."""
    return policy._module_classes  # pyright: ignore[reportPrivateUsage]
