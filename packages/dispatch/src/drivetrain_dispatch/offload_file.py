"""A model's weights written to a file of their own, from which they are used: for what is in no checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from drivetrain_dispatch.errors import WeightFilesError
from drivetrain_dispatch.weight_files import MappedFile


def write_offloaded(tensors: Mapping[str, Tensor], folder: Path | str) -> MappedFile:
    """Write tensors to a new safetensors file of a folder, and map it.

    The file has a name of its own, so that two models may use one folder. It is the user's to delete.

    Args:
        tensors: By name; each with elements of its own.
        folder: Where; made if it is not there.

    Raises:
        WeightFilesError: It could not be written; nothing is left of it.
    """
    path = Path(folder).expanduser() / f"offloaded-{uuid4().hex[:12]}.safetensors"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    except (OSError, SafetensorError) as error:
        size = sum(tensor.nbytes for tensor in tensors.values())
        raise WeightFilesError(
            f"{size / 1e9:.2f} GB of weights could not be written to {path.parent} ({error}): free the disk, or name "
            "another folder"
        ) from error
    return MappedFile(path)
