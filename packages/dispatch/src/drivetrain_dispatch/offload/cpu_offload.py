"""The common cases of a device map in a word: everything on the host, everything on the disk, one model at a time."""

from collections.abc import Collection
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from drivetrain_dispatch.errors import DeviceMapError, OffloadedError
from drivetrain_dispatch.model.sizes import named_tensors
from drivetrain_dispatch.offload.device_transfer import Moving
from drivetrain_dispatch.offload.dispatch import dispatch_model, dispatched
from drivetrain_dispatch.offload.forward_hooks import Around, AroundMethod, NotCopied, methods_of
from drivetrain_dispatch.planning.device_map import Device, check_places, place_of

_MARK = "_drivetrain_offload_hook"  # the model's attribute


def cpu_offload(
    model: nn.Module,
    execution_device: Device | None = None,
    *,
    offload_buffers: bool = False,
    preload_module_classes: Collection[str] = (),
) -> nn.Module:
    """Keep all weights of a model in the host's memory; each comes to the device while those before it compute.

    Args:
        model: The model, with its weights; changed in place.
        execution_device: Where it computes; the first accelerator unless said. The host itself has nothing to
            offload, and computes as ever.
        offload_buffers: Whether buffers are kept away too.
        preload_module_classes: Names of module classes whose weights come all at once.

    Returns:
        The same model; `remove_hooks` makes it an ordinary one again.

    Raises:
        DeviceMapError: There is no such device.
        OffloadedError: The model is dispatched already.
        ValueError: A class is named that the model does not have.
    """
    return dispatch_model(
        model,
        {"": "cpu"},
        main_device=_chosen(execution_device),
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
    )


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
    """Write the weights of a model to a file, and use them from there.

    An accelerator gets each while those before it compute; the host uses them in the pages of the file. A model whose
    weights are in files already needs no other: `load_checkpoint_and_dispatch`.

    Args:
        model: The model, with its weights; changed in place.
        offload_dir: Where the file is written.
        execution_device: Where it computes; the first accelerator, or the host, unless said.
        write_back: Whether training changes the file; else what it changes takes memory.
        release_pages: Whether pages that the host computed with leave this process's memory; see `dispatch_model`.
        offload_buffers: Whether buffers are kept away too.
        preload_module_classes: Names of module classes whose weights come all at once.

    Returns:
        The same model; `remove_hooks` makes it an ordinary one again.

    Raises:
        DeviceMapError: There is no such device.
        WeightFilesError: The file could not be written; the model is what it was.
        OffloadedError: The model is dispatched already.
        ValueError: A class is named that the model does not have.
    """
    return dispatch_model(
        model,
        {"": "disk"},
        main_device=_chosen(execution_device),
        offload_dir=offload_dir,
        write_back=write_back,
        release_pages=release_pages,
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
    )


class OffloadHook(NotCopied):
    """What `cpu_offload_with_hook` returns: when a model leaves the device.

    It does not hold the model, which is freed when nobody else refers to it.

    Args:
        model: The model.
        device: Where it computes.
        previous: Of the model that is to leave when this one comes.
    """

    def __init__(self, model: nn.Module, device: torch.device, previous: "OffloadHook | None") -> None:
        self._model = ref(model)
        coming = _Coming(device, previous)
        self._handles: list[RemovableHandle | Around] = [
            model.register_forward_pre_hook(coming.come, with_kwargs=True, prepend=True),
            *(AroundMethod(model, name, coming.come) for name in methods_of(model)),
        ]
        # Registered last, and so called first: it sees where the inputs came from.
        self._handles.extend(Moving(device, (), returns=False).attach(model))
        setattr(model, _MARK, self)

    def offload(self) -> None:
        """Put the model into the host's memory, if it is not gone."""
        if (model := self._model()) is not None:
            model.to("cpu")

    def remove(self) -> None:
        """Leave the model where it is from now on."""
        for handle in reversed(self._handles):
            handle.remove()
        model = self._model()
        if model is not None and model.__dict__.get(_MARK) is self:
            delattr(model, _MARK)


class _Coming(NotCopied):
    """Brings a model to its device when it is called, once the one before it has left."""

    def __init__(self, device: torch.device, previous: OffloadHook | None) -> None:
        self._device = device
        self._previous = previous

    def come(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bring it."""
        if self._previous is not None:
            self._previous.offload()
        module.to(self._device)
        return args, kwargs


def cpu_offload_with_hook(
    model: nn.Module, execution_device: Device | None = None, prev_module_hook: OffloadHook | None = None
) -> tuple[nn.Module, OffloadHook]:
    """Keep a model in the host's memory until it is called; then the whole of it comes to the device, and stays.

    Its `encode` and `decode`, if it has them, call it as its forward does.

    For several models that are called one after the other, many times each, such as the parts of a pipeline: one
    that comes sends away the one before it.

    Args:
        model: The model; moved to the host now.
        execution_device: Where it computes; the first accelerator, or the host, unless said.
        prev_module_hook: Of the model that leaves when this one comes.

    Returns:
        The same model, and its hook: `offload()` sends it away, `remove()` ends this.

    Raises:
        DeviceMapError: There is no such device, or the model has no weights yet.
        OffloadedError: The model is dispatched already, or has such a hook.
        ValueError: `prev_module_hook` is none.
    """
    _check_whole(model, prev_module_hook)
    device = place_of(_chosen(execution_device))
    check_places([device])
    if not isinstance(device, torch.device):
        raise DeviceMapError("execution_device='disk' does not compute: give an accelerator or 'cpu'")
    hook = OffloadHook(model.to("cpu"), device, prev_module_hook)
    return model, hook


def _check_whole(model: nn.Module, previous: object) -> None:
    """Check that a model can come and go as a whole.

    Raises:
        DeviceMapError: It has no weights yet.
        OffloadedError: It is dispatched already, or has such a hook.
        ValueError: What is to be the hook of another model is none.
    """
    if previous is not None and not isinstance(previous, OffloadHook):
        raise ValueError(
            f"prev_module_hook is a {type(previous).__name__}: give the OffloadHook of the model before, the second "
            "of what cpu_offload_with_hook returns"
        )
    for module in model.modules():
        if dispatched(module):
            raise OffloadedError("the model is dispatched already: call remove_hooks(model) first")
        if _MARK in module.__dict__:
            raise OffloadedError("the model has an OffloadHook already: call remove() of that one first")
    if empty := [name for name, tensor in named_tensors(model) if tensor.is_meta]:
        more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        raise DeviceMapError(
            f"{empty[0]!r}{more} on the meta device: load weights first, with load_checkpoint_in_model"
        )


def _chosen(device: Device | None) -> Device:
    if device is not None:
        return device
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else torch.device(found.type, torch.accelerator.current_device_index())
