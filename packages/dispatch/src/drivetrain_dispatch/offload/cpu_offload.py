"""The common placements without a device map: all on the host, all on the disk, or one whole model at a time."""

from collections.abc import Collection
from pathlib import Path
from typing import Any, cast
from weakref import ref

import torch
from torch import nn

from drivetrain_dispatch.errors import DeviceMapError, OffloadedError
from drivetrain_dispatch.model.model_layout import ModelLayout
from drivetrain_dispatch.offload.device_transfer import InputMover
from drivetrain_dispatch.offload.dispatch import check_has_weights, check_not_dispatched, dispatch_model
from drivetrain_dispatch.offload.forward_hooks import NotCopied, hook_calls
from drivetrain_dispatch.planning.device_map import Device, check_places, place_of

_ATTRIBUTE = "_drivetrain_offload_hook"  # the name of the model's attribute


def cpu_offload(
    model: nn.Module,
    execution_device: Device | None = None,
    *,
    offload_buffers: bool = False,
    preload_module_classes: Collection[str] = (),
) -> nn.Module:
    """Keep all weights of a model in host memory, and prefetch each while earlier modules compute.

    `execution_device` computes, by default the current accelerator; if the host computes, nothing is offloaded. The
    other arguments and the errors are those of `dispatch_model`.

    Returns:
        The same model; `remove_hooks` makes it an ordinary one again.

    Example:
        >>> model = cpu_offload(torch.nn.Linear(4, 2), torch.device("cpu"))
        >>> model(torch.ones(1, 4)).shape
        torch.Size([1, 2])
    """
    return dispatch_model(
        model, {"": "cpu"}, main_device=_choose_device(execution_device), offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
    )  # fmt: skip


def disk_offload(
    model: nn.Module,
    offload_dir: Path | str,
    execution_device: Device | None = None,
    *,
    write_back: bool = False,
    release_pages: bool = False,
    offload_buffers: bool = False,
    preload_module_classes: Collection[str] = (),
) -> nn.Module:
    """Write the weights of a model to a file in the folder `offload_dir`, and use them from there.

    For an accelerator, each weight is prefetched while earlier modules compute; the host computes with the mapped
    pages of the file. For weights that are in files already, use `load_checkpoint_and_dispatch`. `execution_device`
    computes, by default the current accelerator, or the host if there is none. The other arguments and the errors are
    those of `dispatch_model`.

    Returns:
        The same model; `remove_hooks` makes it an ordinary one again.
    """
    return dispatch_model(
        model, {"": "disk"}, main_device=_choose_device(execution_device), offload_dir=offload_dir,
        write_back=write_back, release_pages=release_pages, offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
    )  # fmt: skip


class OffloadHook(NotCopied):
    """The hook of `cpu_offload_with_hook`, which moves a model to its device and back to the host.

    The hook holds the model by a weak reference only. A call of the model offloads the previous hook's model.
    """

    def __init__(self, model: nn.Module, device: torch.device, previous: "OffloadHook | None") -> None:
        self._model = ref(model)
        self._device = device
        self._previous = previous
        # Registered last, so called first: the mover sees the inputs on the device that they came from.
        mover = InputMover(device, returns=False)
        self._handles = [*hook_calls(model, self._before), *mover.attach(model)]
        setattr(model, _ATTRIBUTE, self)

    def offload(self) -> None:
        """Move the model to host memory, unless it was freed."""
        if (model := self._model()) is not None:
            model.to("cpu")

    def remove(self) -> None:
        """Remove the hook; the model stays on its current device."""
        for handle in reversed(self._handles):
            handle.remove()
        model = self._model()
        if model is not None and model.__dict__.get(_ATTRIBUTE) is self:
            delattr(model, _ATTRIBUTE)

    def _before(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Offload the previous model, and move this one to its device."""
        if self._previous is not None:
            self._previous.offload()
        model.to(self._device)
        return args, kwargs


def cpu_offload_with_hook(
    model: nn.Module, execution_device: Device | None = None, prev_module_hook: OffloadHook | None = None
) -> tuple[nn.Module, OffloadHook]:
    """Keep a model in host memory until it is called, then move all of it to the device and leave it there.

    The methods `encode` and `decode` move the model too. A call offloads the model of `prev_module_hook`: use this
    for the models of a pipeline that are called in turn, many times each. `execution_device` computes, by default the
    current accelerator, or the host if there is none.

    Returns:
        The same model, and its hook: `offload()` moves the model to the host, `remove()` removes the hook.

    Raises:
        DeviceMapError: The device does not exist, or the model has no weights yet.
        OffloadedError: The model is dispatched already, or has an `OffloadHook`.
        ValueError: `prev_module_hook` is not an `OffloadHook`.

    Example:
        >>> host = torch.device("cpu")
        >>> encoder, hook = cpu_offload_with_hook(torch.nn.Linear(4, 4), host)
        >>> decoder, _ = cpu_offload_with_hook(torch.nn.Linear(4, 2), host, prev_module_hook=hook)
        >>> decoder(encoder(torch.ones(1, 4))).shape
        torch.Size([1, 2])
    """
    if prev_module_hook is not None and not isinstance(cast("object", prev_module_hook), OffloadHook):
        raise ValueError(
            f"prev_module_hook is a {type(prev_module_hook).__name__}: give the OffloadHook of the model before, the "
            "second of what cpu_offload_with_hook returns"
        )
    check_not_dispatched(model)
    if any(_ATTRIBUTE in module.__dict__ for module in model.modules()):
        raise OffloadedError("the model has an OffloadHook already: call remove() of that hook first")
    check_has_weights(ModelLayout.of(model))
    device = place_of(_choose_device(execution_device))
    check_places([device])
    if not isinstance(device, torch.device):
        raise DeviceMapError("execution_device='disk' does not compute: give an accelerator or 'cpu'")
    return model, OffloadHook(model.to("cpu"), device, prev_module_hook)


def _choose_device(device: Device | None) -> Device:
    if device is not None:
        return device
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else torch.device(found.type, torch.accelerator.current_device_index())
