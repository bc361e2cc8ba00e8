"""The files of objects that a program registered for checkpoints."""

from pathlib import Path
from typing import Any

from drivetrain_accelerate.object_files import load, save


def save_custom_state(obj: Any, path: str, index: int = 0, save_on_each_node: bool = False) -> None:
    """Write the state of a registered object to `custom_checkpoint_N.pkl`, from the main process.

    Args:
        obj: The registered object.
        path: The folder of the files.
        index: The number of the object, in the order of registration.
        save_on_each_node: Whether the first process of each node writes.
    """
    save(obj.state_dict(), _file(path, index), save_on_each_node=save_on_each_node)


def load_custom_state(obj: Any, path: str, index: int = 0) -> None:
    """Load what `save_custom_state` wrote, tensors and plain values alone.

    Args:
        obj: The registered object.
        path: The folder of the files.
        index: The number of the object.
    """
    obj.load_state_dict(load(_file(path, index), map_location="cpu"))


def _file(path: str, index: int) -> Path:
    return Path(path) / f"custom_checkpoint_{index}.pkl"
