"""Allocate the memory of a load before anything is read, and say what fits where there is no room."""

from collections.abc import MutableMapping, Sequence

import torch
from torch import Tensor

from drivetrain_dispatch.errors import LoadError
from drivetrain_dispatch.loading.load_plan import PlannedTensor
from drivetrain_dispatch.planning.memory_budget import free_bytes
from drivetrain_messages import format_size


def allocate(tensors: Sequence[PlannedTensor], into: MutableMapping[str, Tensor]) -> None:
    """Allocate all tensors that are read, but for packed ones, which get their memory one by one.

    The host needs room for those that stay pages of a file too, as they may be written to.

    Args:
        tensors: The tensors of the load.
        into: The mapping that gets the memory, by the checkpoint's name.

    Raises:
        LoadError: A device has no room; `into` is empty then, so that a kept error holds no memory.
    """
    in_memory = [planned for planned in tensors if planned.in_memory]
    try:
        _check_host(in_memory)
        for index, planned in enumerate(in_memory):
            if planned.is_packed or planned.maps:
                continue
            try:
                memory = torch.empty(planned.shape, dtype=planned.dtype, device=planned.place)
            except (RuntimeError, MemoryError) as error:  # here torch raises only for lack of memory
                raise no_room(planned, in_memory[:index], in_memory) from error
            into[planned.stored] = memory
    except LoadError:
        into.clear()
        raise


def _check_host(tensors: Sequence[PlannedTensor]) -> None:
    """Check that the host has room for its tensors, as the system overcommits memory and kills the process later.

    Raises:
        LoadError: The host has no room.
    """
    free = free_bytes(torch.device("cpu"))
    taken = 0
    here = [planned for planned in tensors if str(planned.place) == "cpu"]
    for index, planned in enumerate(here):
        taken += planned.size_bytes
        if free is not None and taken > free:
            raise no_room(planned, here[:index], here, free=free - taken + planned.size_bytes)


def no_room(
    planned: PlannedTensor,
    before: Sequence[PlannedTensor],
    tensors: Sequence[PlannedTensor],
    *,
    free: int | None = None,
) -> LoadError:
    """Return the error for a tensor that a device has no room for.

    Args:
        planned: The tensor without room.
        before: The tensors that have room.
        tensors: All tensors that need room.
        free: The bytes that the device has left, if known.
    """
    place = planned.place
    taken = sum(other.size_bytes for other in before if other.place == place)
    wanted = sum(other.size_bytes for other in tensors if other.place == place)
    if free is None and place != "disk":
        free = free_bytes(place)
    fits = "" if free is None else f", {format_size(free)} are left, so about {format_size(taken + free)} fit"
    return LoadError(
        f"{place} has no room for {planned.names[0]!r} ({format_size(planned.size_bytes)}): of the "
        f"{format_size(wanted)} that device_map puts there {format_size(taken)} went before{fits}. Put less there "
        "(on another device, or on 'disk'), or give a smaller dtype. The model is as it was"
    )
