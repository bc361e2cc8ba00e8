"""Read untrusted files of `torch.save` that Accelerate wrote, without running any code in them."""

from pathlib import Path
from typing import Any

from drivetrain_checkpoint.errors import ForeignStateError
from drivetrain_checkpoint.export.reader import checkpoint_errors
from drivetrain_weights import UnsafePickleError, read_torch_file


def read_pickle(path: Path, *, mapped: bool = False) -> Any:
    """Read a file of `torch.save`: tensors, plain values and NumPy arrays, on the CPU.

    Args:
        path: The path of the file.
        mapped: Whether to memory-map the tensors, which reads them on use; until then the file must not change.
    """
    with checkpoint_errors():
        try:
            return read_torch_file(path, mapped=mapped, arrays=True)
        except UnsafePickleError as error:
            raise ForeignStateError(
                f"{path.name} holds more than tensors and plain values ({error.found}), and reading that could run "
                "code: save those objects as plain values, or remove the file to go on without it"
            ) from error
