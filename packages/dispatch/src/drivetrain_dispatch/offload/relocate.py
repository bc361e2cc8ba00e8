"""Move weights to where they are stored: a device, host memory or a file. After an error all are unchanged."""

from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

import torch
from torch import Tensor

from drivetrain_dispatch.device_copies import copies_aside
from drivetrain_dispatch.errors import DeviceMapError, WeightFilesError
from drivetrain_dispatch.model.model_layout import ModelLayout
from drivetrain_dispatch.model.quantized_tensor import (
    parts_in_file,
    parts_of,
    put_parts,
    restore_scales,
    size_in_bytes,
)
from drivetrain_dispatch.planning.device_map import Placement
from drivetrain_messages import format_size, list_some
from drivetrain_weights import MappedFile
from drivetrain_weights.aligned_file import write_aligned


def relocate(
    layout: ModelLayout,
    placements: Mapping[str, Placement],
    mapped: Mapping[str, MappedFile],
    offload_dir: Path | str | None,
    *,
    write_back: bool = False,
) -> dict[str, MappedFile]:
    """Move tensors to their placements; return the files of tensors on the disk, `mapped` or new in `offload_dir`."""
    restore_scales(layout.model)
    tensors = layout.tensors
    names = [aliases[0] for aliases in layout.aliases]
    in_files = {id(tensors[name]): file for name, file in mapped.items()}
    written = {
        name: tensors[name]
        for name in names
        if placements[name].on_disk and id(tensors[name]) not in in_files and tensors[name].numel()
    }
    parts = {name: parts_in_file(name, tensor) for name, tensor in written.items()}
    file = None
    if written:
        if offload_dir is None:
            raise DeviceMapError(
                f"device_map puts {list_some(map(repr, written), most=1)} on the disk, and no file holds them yet: "
                "name a folder for them, offload_dir=..."
            )
        whole = {key: part for each in parts.values() for key, part in each.items()}
        file = write_offloaded(whole, offload_dir, write_back=write_back)
    pins = copies_aside(getattr(torch.accelerator.current_accelerator(check_available=True), "type", "cpu"))
    moved: list[tuple[Tensor, torch.device]] = []
    try:
        for name in names:
            tensor, device = tensors[name], tensors[name].device
            home, stays = placements[name].home, placements[name].stays
            if file is not None and name in written:
                new = [file.tensor(key) for key in parts[name]]
                in_files[id(tensor)] = file
            elif home == "disk" or (stays and device == home):
                continue  # already in place: it stays the same tensor
            else:  # one after the other: each move frees the source's memory
                try:
                    new = [part.data.to(home) for part in parts_of(tensor)]
                    if pins and not stays and home.type == "cpu":
                        # An accelerator copies from pinned memory without the processor.
                        new = [part.pin_memory() for part in new]
                # torch.OutOfMemoryError, or a driver's on memory that it cannot pin.
                except RuntimeError as error:
                    raise DeviceMapError(
                        f"{home} has no room for {name!r} ({format_size(size_in_bytes(tensor))}; {error}): give the "
                        f"map's inference a smaller budget for it, max_memory={{{home.index or 0}: ...}}, or use "
                        "another device"
                    ) from error
            put_parts(tensor, new)
            moved.append((tensor, device))
    except BaseException:
        for tensor, device in moved:
            put_parts(tensor, [part.data.to(device, copy=True) for part in parts_of(tensor)])
        if file is not None:
            file.path.unlink()
        raise
    return {name: in_files[id(tensor)] for name, tensor in tensors.items() if id(tensor) in in_files}


class WritableFile(MappedFile):
    """A safetensors file that is mapped for writing: changes to its tensors change the file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._pages = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor as the file's mapped pages."""
        private, start = super().tensor(name), self.start_of(name)
        if start is None or start % private.element_size():
            return private  # torch cannot view bytes at an unaligned offset: changes stay in memory
        return self._pages[start : start + private.nbytes].view(private.dtype).view(private.shape)

    def check_unchanged(self) -> None:
        """Check that no other file replaced this file. Changed contents are allowed, as training writes them."""
        self.check_in_place()


def write_offloaded(
    tensors: Mapping[str, Tensor], folder: Path | str, *, write_back: bool = False
) -> MappedFile:
    """Write tensors to a new safetensors file in a folder, and map it; with `write_back`, changes go to the file."""
    # A unique name, so that two models may use one folder.
    path = Path(folder).expanduser() / f"offloaded-{uuid4().hex[:12]}.safetensors"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_aligned(tensors, path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    except OSError as error:
        size = sum(tensor.nbytes for tensor in tensors.values())
        raise WeightFilesError(
            f"{format_size(size)} of weights could not be written to {path.parent} ({error}): free the disk, or name "
            "another folder"
        ) from error
    return WritableFile(path) if write_back else MappedFile(path)
