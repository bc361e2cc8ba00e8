"""A model's weights written to a file of their own, from which they are used: for what is in no checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

import torch
from torch import Tensor

from drivetrain_dispatch.errors import WeightFilesError
from drivetrain_dispatch.files.aligned_file import write_aligned
from drivetrain_dispatch.files.weight_files import MappedFile
from drivetrain_dispatch.model.tensor_subclass import parts_of


class WritableFile(MappedFile):
    """A safetensors file of which the tensors are written to: what changes them changes it.

    Args:
        path: Where.

    Raises:
        WeightFilesError: It is missing, cut, or no file of weights.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._pages = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)

    def tensor(self, name: str) -> Tensor:
        """A tensor as the file's pages."""
        private, start = super().tensor(name), self.start_of(name)
        if start is None or start % private.element_size():
            return private  # torch has no tensor that begins between two elements: its changes stay in memory
        return self._pages[start : start + private.nbytes].view(private.dtype).view(private.shape)

    def check_unchanged(self) -> None:
        """Check that it is the file that was opened: what training changes is to be found there.

        Raises:
            WeightFilesError: It was replaced, deleted, or is of another size.
        """
        self.check_in_place()


def parts_in_file(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The parts of a tensor by what they are called in a file: it alone by its name, if it is not packed."""
    parts = parts_of(tensor)
    if parts[0] is tensor:
        return {name: tensor}
    return {f"{name}/{index}": part for index, part in enumerate(parts)}


def write_offloaded(
    tensors: Mapping[str, Tensor], folder: Path | str, *, write_back: bool = False
) -> MappedFile:
    """Write tensors to a new safetensors file of a folder, and map it.

    The file has a name of its own, so that two models may use one folder. It is the user's to delete.

    Args:
        tensors: By name.
        folder: Where; made if it is not there.
        write_back: Whether what changes the tensors changes the file; else changes stay in memory.

    Raises:
        WeightFilesError: It could not be written; nothing is left of it.
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
            f"{size / 1e9:.2f} GB of weights could not be written to {path.parent} ({error}): free the disk, or name "
            "another folder"
        ) from error
    return WritableFile(path) if write_back else MappedFile(path)
