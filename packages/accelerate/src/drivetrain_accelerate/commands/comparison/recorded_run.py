"""Run a program with a recorder of the losses that go through `Accelerator.backward`, and stop it after a few.

`python -m drivetrain_accelerate.commands.comparison.recorded_run (real | ours) FILE STEPS (SCRIPT | -m MODULE) ...`.
Each loss is a line of the file; with several processes, each has a file of its own, FILE.RANK.
"""

import json
import random
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drivetrain_accelerate.installation import install
from drivetrain_config import environ
from drivetrain_launcher.run.runpy_main import run_as_main


class LossRecorder:
    """A recorder of losses.

    Args:
        path: The file to write them to.
        steps: The number of losses after which the program ends.
    """

    def __init__(self, path: Path, steps: int) -> None:
        self._path = path
        self._left = steps

    def around(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `backward` that records the loss first, and ends the program after the last one."""

        @wraps(backward)
        def recorded(accelerator: object, loss: Any, *args: Any, **kwargs: Any) -> Any:
            value = float(torch.as_tensor(loss).detach().float())
            result = backward(accelerator, loss, *args, **kwargs)
            self._record(value)
            return result

        return recorded

    def _record(self, loss: float) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(loss)}\n")
        self._left -= 1
        if self._left == 0:
            sys.stdout.flush()
            raise SystemExit(0)


def main() -> None:
    """Install the recorder, and run the program that the command line names."""
    side, file, steps, *program = sys.argv[1:]
    rank = environ.read("RANK") or "0"
    path = Path(f"{file}.{rank}")
    path.touch()
    if side == "ours":
        install()
    _seed()
    accelerator: Any = import_module("accelerate").Accelerator
    accelerator.backward = LossRecorder(path, int(steps)).around(accelerator.backward)
    is_module = program[:1] == ["-m"]
    name, *arguments = program[is_module:]
    run_as_main(name, arguments, is_module=is_module)


def _seed() -> None:
    """Seed what a program may draw from without a seed of its own, the same on both sides."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


if __name__ == "__main__":
    main()
