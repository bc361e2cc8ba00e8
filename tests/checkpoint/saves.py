"""What tests of checkpoints do over and over: save little, and damage a file."""

from pathlib import Path
from typing import Any

from drivetrain_checkpoint import Checkpointer


def save(checkpointer: Checkpointer, step: int, model: Any = None, **given: Any) -> Any:
    """Save a model's state, or none, and what is given besides."""
    models = {} if model is None else {"model": model}
    return checkpointer.save(step, **{"models": models, "replicated": {}, "per_rank": {}, **given})


def flip(path: Path, position: int) -> None:
    """Change a bit of the byte at a position, which may count from the end."""
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)
