"""Write weights that are in no checkpoint to a file of their own, and use them from there."""

from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

import torch
from torch import Tensor

from drivetrain_dispatch.errors import WeightFilesError
from drivetrain_dispatch.model.tensor_subclass import parts_of
from drivetrain_messages import format_size
from drivetrain_weights import MappedFile
from drivetrain_weights.aligned_file import write_aligned


class WritableFile(MappedFile):
    """A safetensors file that is mapped for writing: changes to its tensors change the file.

    Args:
        path: The path of the file.

    Raises:
        WeightFilesError: The file is missing, truncated, or not a weight file.
    """

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
        """Check that the file is the one that was opened; training may have changed its contents.

        Raises:
            WeightFilesError: The file was replaced, deleted, or has another size.
        """
        self.check_in_place()


def parts_in_file(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return the parts of a tensor by their names in a file; a tensor that is not packed keeps its name."""
    parts = parts_of(tensor)
    if parts[0] is tensor:
        return {name: tensor}
    return {f"{name}/{index}": part for index, part in enumerate(parts)}


def write_offloaded(
    tensors: Mapping[str, Tensor], folder: Path | str, *, write_back: bool = False
) -> MappedFile:
    """Write tensors to a new safetensors file in a folder, and map it.

    The file has a unique name, so that two models may use one folder. The user deletes it.

    Args:
        tensors: The tensors to write, by name.
        folder: The folder for the file; created if it does not exist.
        write_back: Whether changes to the tensors change the file; otherwise they stay in memory.

    Raises:
        WeightFilesError: The file could not be written; nothing is left of it.
    """
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
