"""Put weights where they are kept: on a device, in the host's memory, in a file. The model changes at the end."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from drivetrain_dispatch.errors import DeviceMapError
from drivetrain_dispatch.offload_file import write_offloaded
from drivetrain_dispatch.placement import Placement
from drivetrain_dispatch.weight_files import MappedFile


def settle(
    tensors: Mapping[str, Tensor],
    placements: Mapping[str, Placement],
    mapped: Mapping[str, MappedFile],
    offload_dir: Path | str | None,
    *,
    write_back: bool = False,
) -> dict[str, MappedFile]:
    """Put tensors where they are kept.

    Args:
        tensors: By every name they have; changed in place once all have found room.
        placements: By the same names.
        mapped: Of those that are the pages of a file, that file.
        offload_dir: Where the others of the disk are written to.
        write_back: Whether what changes these changes their file.

    Returns:
        The files of all that are kept on the disk, by name.

    Raises:
        DeviceMapError: A device has no room, or there is no `offload_dir`.
        WeightFilesError: The disk has no room.
    """
    first: dict[int, str] = {}
    names = [name for name, tensor in tensors.items() if first.setdefault(id(tensor), name) == name]
    in_files = {id(tensors[name]): file for name, file in mapped.items()}
    written = {
        name: tensors[name]
        for name in names
        if placements[name].home == "disk" and id(tensors[name]) not in in_files and tensors[name].numel()
    }
    if written and offload_dir is None:
        raise DeviceMapError(
            f"device_map puts {next(iter(written))!r} and {len(written) - 1} more on the disk, and they are in no "
            "file yet: name a folder for them, offload_dir=..."
        )
    settled = {name: _kept(name, tensors[name], placements[name]) for name in names if name not in written}
    if written and offload_dir is not None:
        file = write_offloaded(written, offload_dir, write_back=write_back)
        settled.update({name: file.tensor(name) for name in written})
        in_files.update({id(tensors[name]): file for name in written})
    for name, kept in settled.items():
        tensors[name].data = kept
    return {name: in_files[id(tensor)] for name, tensor in tensors.items() if id(tensor) in in_files}


def _kept(name: str, tensor: Tensor, placement: Placement) -> Tensor:
    """A tensor where it is kept; the one that it is if it is there."""
    if placement.home == "disk":
        return tensor.data
    try:
        kept = tensor.data.to(placement.home)
        # Pages that the system cannot move are copied to an accelerator without the processor.
        return kept if placement.stays or kept.device.type != "cpu" else kept.pin_memory()
    except torch.OutOfMemoryError as error:
        raise DeviceMapError(
            f"{placement.home} has no room for {name!r} ({tensor.nbytes / 1e6:.1f} MB): give the map's inference a "
            f"smaller budget for it, max_memory={{{placement.home.index or 0}: ...}}, or use another device"
        ) from error
