"""Plan a dispatch: check model and arguments, and decide where each tensor is stored and computed. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from drivetrain_dispatch.arguments import check_dtype
from drivetrain_dispatch.errors import DeviceMapError, OffloadedError
from drivetrain_dispatch.model.model_layout import ModelLayout
from drivetrain_dispatch.model.quantized_tensor import why_unready
from drivetrain_dispatch.model.units import Unit, check_devices, units_of
from drivetrain_dispatch.offload.dispatched_model import check_has_weights, check_not_dispatched
from drivetrain_dispatch.offload.parameter import is_offloaded
from drivetrain_dispatch.planning.device_map import Device
from drivetrain_dispatch.planning.placement import Placement, check_places, placements_of


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchPlan:
    """A decision where each tensor of a model is stored and computed, and which are fetched."""

    layout: ModelLayout
    placements: Mapping[str, Placement]
    compute_dtypes: Mapping[str, torch.dtype]
    fetched_units: Sequence[Unit]


def plan_dispatch(
    model: nn.Module,
    device_map: Mapping[str, Device],
    *,
    main_device: Device | None = None,
    write_back: bool = False,
    offload_buffers: bool = False,
    preload_module_classes: Collection[str] = (),
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> DispatchPlan:
    """Return the plan of a dispatch, after all checks that need no tensor to be moved; see `dispatch_model`."""
    layout = ModelLayout.of(model)
    placements = placements_of(layout, device_map, main_device=main_device, offload_buffers=offload_buffers)
    _check_dtypes(layout, dtypes or {})
    if write_back and not any(placement.on_disk for placement in placements.values()):
        raise DeviceMapError(
            "write_back=True: device_map puts nothing on 'disk' that training could change; leave it out, or put "
            "weights there"
        )
    check_dispatchable(layout, placements)
    # Norms write to running statistics in a forward, and nothing tells so: these keep their dtype.
    compute_dtypes = {
        name: dtype for name, dtype in (dtypes or {}).items() if name not in layout.running_statistics
    }
    fetched = [
        name for name, placement in placements.items() if name in compute_dtypes or placement.is_fetched
    ]
    units = units_of(layout, fetched, whole=preload_module_classes)
    check_devices(units, {name: placement.device for name, placement in placements.items()})
    return DispatchPlan(
        layout=layout, placements=placements, compute_dtypes=compute_dtypes, fetched_units=units
    )


def _check_dtypes(layout: ModelLayout, dtypes: Mapping[str, torch.dtype]) -> None:
    """Check the compute dtypes of single tensors."""
    if unknown := sorted(dtypes.keys() - layout.tensors.keys()):
        raise ValueError(
            f"dtypes={unknown}: the model has no such parameter or buffer; see named_parameters()"
        )
    for name, dtype in dtypes.items():
        check_dtype(f"dtypes[{name!r}]", dtype)
        if name in layout.quantized and dtype != layout.tensors[name].dtype:
            raise DeviceMapError(
                f"dtypes[{name!r}]={dtype}: it is a quantised weight, which says by itself what it is computed in"
            )


def check_dispatchable(layout: ModelLayout, placements: Mapping[str, Placement]) -> None:
    """Check all of a model that can be checked before any tensor is moved."""
    check_not_dispatched(layout.model)
    tensors = layout.tensors
    for name, tensor in tensors.items():
        if is_offloaded(tensor):
            raise OffloadedError(
                f"{name!r} belongs to another model that is dispatched: call remove_hooks on that one first"
            )
        if tensor.is_inference():
            raise DeviceMapError(
                f"{name!r} was made in torch.inference_mode, where nothing tells when a tensor is written to: build "
                "and load the model outside of it"
            )
        layer = layout.modules[name.rpartition(".")[0]]
        if name in layout.quantized and not tensor.is_meta and (reason := why_unready(tensor, layer)):
            raise DeviceMapError(
                f"{name!r} is a quantised weight that {reason}: quantise it and freeze it before the model is "
                "dispatched, or load it with load_checkpoint_and_dispatch(quantization=...)"
            )
    check_places([place for placement in placements.values() for place in placement])
    check_has_weights(tensors.items())
