"""TensorBoard's files, by torch's SummaryWriter, which programs reach through `tracker.writer`."""

import importlib
import json
import time
from os import PathLike
from pathlib import Path
from typing import Any

from drivetrain_accelerate.trackers.general_tracker import LibraryTracker, calls_on_main_process, number_of

_PLAIN = (int, float, str, bool, type(None))


@calls_on_main_process
class TensorBoardTracker(LibraryTracker):
    """A tracker that writes event files into a folder of the run's name.

    Args:
        run_name: The name of the run, a folder in `logging_dir`.
        logging_dir: The folder of logs.
        **kwargs: The arguments of `SummaryWriter`.

    Attributes:
        writer: The SummaryWriter of torch, once the tracker has started.
    """

    name = "tensorboard"
    requires_logging_directory = True
    opened = "writer"

    def __init__(self, run_name: str, logging_dir: str | PathLike[str], **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir = str(Path(logging_dir) / run_name)

    def start(self) -> None:
        """Open the event files, with torch's writer or that of tensorboardX."""
        try:
            module: Any = importlib.import_module("torch.utils.tensorboard")
        except ImportError:
            module = importlib.import_module("tensorboardX")
        self.writer: Any = module.SummaryWriter(self.logging_dir, **self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the configuration as hyperparameters and as a file `hparams.yml`.

        Raises:
            ValueError: A value is neither a number, a string, a boolean nor None.
        """
        if unfit := [name for name, value in values.items() if not isinstance(value, _PLAIN)]:
            raise ValueError(
                f"TensorBoard's hyperparameters are numbers, strings and booleans, not {', '.join(unfit)}: leave "
                "them out of init_trackers(config=), or give str(value)"
            )
        self.writer.add_hparams(values, metric_dict={})
        self.writer.flush()
        folder = Path(self.logging_dir) / str(time.time())
        folder.mkdir(parents=True, exist_ok=True)
        # JSON's words for plain values are YAML's.
        lines = [f"{json.dumps(str(name))}: {json.dumps(value)}\n" for name, value in values.items()]
        (folder / "hparams.yml").write_text("".join(lines), encoding="utf-8")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write numbers as scalars, strings as texts, and a dict of numbers as curves of one chart."""
        for name, value in values.items():
            if isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                self.writer.add_scalars(name, value, global_step=step, **kwargs)
            elif number_of(value) is not None:
                self.writer.add_scalar(name, value, global_step=step, **kwargs)
        self.writer.flush()

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write batches of images, as `SummaryWriter.add_images` takes them."""
        for name, value in values.items():
            self.writer.add_images(name, value, global_step=step, **kwargs)

    def finish(self) -> None:
        """Close the event files."""
        self.writer.close()
