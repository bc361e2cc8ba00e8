"""What tests of checkpoints do over and over: save little, hold a save back, and damage a file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any
from unittest.mock import patch

from drivetrain_checkpoint import Checkpointer


def save(checkpointer: Checkpointer, step: int, model: Any = None, **given: Any) -> Any:
    """Save a model's state, or none, and what is given besides."""
    models = {} if model is None else {"model": model}
    return checkpointer.save(step, **{"models": models, "replicated": {}, "per_rank": {}, **given})


@contextmanager
def saves_held_back() -> Iterator[None]:
    """Let the threads of saves that begin in the block do nothing until it ends."""
    run, is_held, goes_on = Thread.run, Event(), Event()

    def run_later(thread: Thread) -> None:
        if thread.name.startswith("drivetrain save"):
            is_held.set()
            goes_on.wait()
        run(thread)

    with patch.object(Thread, "run", run_later):
        try:
            yield
            assert is_held.wait(60)  # a thread begins a moment after its start
        finally:
            goes_on.set()


def flip(path: Path, position: int) -> None:
    """Change a bit of the byte at a position, which may count from the end."""
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)
