"""Platforms with a run object that programs reach: Weights & Biases, Trackio, SwanLab, Comet."""

import importlib
from typing import Any, ClassVar

from packaging.version import parse

from drivetrain_accelerate.libraries.versions import compare_versions
from drivetrain_accelerate.trackers.general_tracker import GeneralTracker, on_main_process


class _RunTracker(GeneralTracker):
    """A tracker over a module whose `init` returns a run with `config.update`, `log` and `finish`."""

    name: ClassVar[str]
    requires_logging_directory: ClassVar[bool] = False
    main_process_only: ClassVar[bool] = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    @on_main_process
    def start(self) -> None:
        """Begin a run of the project that the run's name says."""
        self.run: Any = importlib.import_module(self.name).init(project=self.run_name, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The platform's run."""
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Add to the run's configuration; values may differ from those of a resumed run."""
        importlib.import_module(self.name).config.update(values, allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values, which may be media of the platform's own."""
        self.run.log(values, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        self.run.finish()

    def _images(self, values: dict[str, Any]) -> dict[str, list[Any]]:
        image = importlib.import_module(self.name).Image
        return {name: [image(each) for each in several] for name, several in values.items()}


class WandBTracker(_RunTracker):
    """A tracker of Weights & Biases: `wandb.init(project=run_name, **kwargs)`.

    Args:
        run_name: The name of the project.
        **kwargs: The arguments of `wandb.init`.
    """

    name: ClassVar[str] = "wandb"

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images by name."""
        self.run.log(self._images(values), step=step, **kwargs)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table of columns and rows, or of a dataframe."""
        table = importlib.import_module("wandb").Table(columns=columns, data=data, dataframe=dataframe)
        self.run.log({table_name: table}, step=step, **kwargs)


class TrackioTracker(_RunTracker):
    """A tracker of Trackio: `trackio.init(project=run_name, **kwargs)`.

    Args:
        run_name: The name of the project.
        **kwargs: The arguments of `trackio.init`.
    """

    name: ClassVar[str] = "trackio"


class SwanLabTracker(_RunTracker):
    """A tracker of SwanLab: `swanlab.init(project=run_name, **kwargs)`.

    Args:
        run_name: The name of the project.
        **kwargs: The arguments of `swanlab.init`.
    """

    name: ClassVar[str] = "swanlab"

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images by name."""
        self.run.log(self._images(values), step=step, **kwargs)


class CometMLTracker(GeneralTracker):
    """A tracker of Comet: an experiment of the project that the run's name says.

    Args:
        run_name: The name of the project.
        **kwargs: The arguments of `comet_ml.start`.
    """

    name: ClassVar[str] = "comet_ml"
    requires_logging_directory: ClassVar[bool] = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    @on_main_process
    def start(self) -> None:
        """Start the experiment."""
        comet: Any = importlib.import_module("comet_ml")
        # comet_ml has start() since 3.41.
        begin = (
            comet.start if compare_versions(parse(comet.__version__), ">=", "3.41.0") else comet.Experiment
        )
        self.writer: Any = begin(project_name=self.run_name, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The experiment of Comet."""
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the configuration as parameters."""
        self.writer.log_parameters(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics, strings as others, and dicts as metrics under their name."""
        if step is not None:
            self.writer.set_step(step)
        for name, value in values.items():
            if isinstance(value, str):
                self.writer.log_other(name, value, **kwargs)
            elif isinstance(value, dict):
                self.writer.log_metrics(value, step=step, **kwargs)
            else:
                self.writer.log_metric(name, value, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the experiment."""
        self.writer.end()
