"""Platforms that take one value after another: Aim, MLflow, ClearML, DVCLive."""

import importlib
import json
from logging import getLogger
from os import PathLike
from typing import Any, ClassVar

from drivetrain_accelerate.trackers.general_tracker import GeneralTracker, on_main_process
from drivetrain_config import environ

logger = getLogger(__name__)


class AimTracker(GeneralTracker):
    """A tracker of Aim: a run in a repository.

    Args:
        run_name: The name of the run.
        logging_dir: The folder of the repository.
        **kwargs: The arguments of `aim.Run`.
    """

    name: ClassVar[str] = "aim"
    requires_logging_directory: ClassVar[bool] = True

    def __init__(self, run_name: str, logging_dir: str | PathLike[str] | None = ".", **kwargs: Any) -> None:
        super().__init__()
        self.run_name, self.aim_repo_path, self.init_kwargs = run_name, logging_dir, kwargs

    @on_main_process
    def start(self) -> None:
        """Open the run, under its name."""
        self.writer: Any = importlib.import_module("aim").Run(repo=self.aim_repo_path, **self.init_kwargs)
        self.writer.name = self.run_name

    @property
    def tracker(self) -> Any:
        """The run of Aim."""
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as hyperparameters."""
        self.writer["hparams"] = values

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Track each value."""
        for name, value in values.items():
            self.writer.track(value, name=name, step=step, **kwargs)

    @on_main_process
    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Track images, or pairs of an image and a caption, by name.

        Args:
            values: The images by name.
            step: The step they belong to.
            kwargs: Arguments of `aim.Image` under "aim_image", and of `Run.track` under "track".
        """
        given = kwargs or {}
        image = importlib.import_module("aim").Image
        for name, value in values.items():
            picture, caption = value if isinstance(value, tuple) else (value, "")
            made = image(picture, caption=caption, **given.get("aim_image", {}))
            self.writer.track(made, name=name, step=step, **given.get("track", {}))

    @on_main_process
    def finish(self) -> None:
        """Close the run."""
        self.writer.close()


class MLflowTracker(GeneralTracker):
    """A tracker of MLflow. What is None is read from MLFLOW_EXPERIMENT_NAME, MLFLOW_RUN_ID and so on.

    Args:
        experiment_name: The experiment, created if there is none.
        logging_dir: The place of a new experiment's artifacts.
        run_id: The run to continue.
        tags: Tags, as a dict or as JSON.
        nested_run: Whether the run is inside another one.
        run_name: The name of a new run.
        description: A description of the run.
    """

    name: ClassVar[str] = "mlflow"
    requires_logging_directory: ClassVar[bool] = False

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool | None = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__()
        tags = environ.read("MLFLOW_TAGS") if tags is None else tags
        nested = environ.read("MLFLOW_NESTED_RUN") or ""
        self.experiment_name = environ.read("MLFLOW_EXPERIMENT_NAME") or experiment_name
        self.logging_dir = logging_dir
        self.run_id = environ.read("MLFLOW_RUN_ID") or run_id
        self.tags: dict[str, Any] | None = json.loads(tags) if isinstance(tags, str) else tags
        self.nested_run = nested.lower() in ("1", "true", "yes", "on") or bool(nested_run)
        self.run_name, self.description = run_name, description

    @on_main_process
    def start(self) -> None:
        """Start the run in its experiment."""
        mlflow: Any = importlib.import_module("mlflow")
        found = mlflow.search_experiments(filter_string=f"name = '{self.experiment_name}'")
        if len(found) > 0:
            experiment = found[0].experiment_id
        else:
            experiment = mlflow.create_experiment(
                name=self.experiment_name, artifact_location=self.logging_dir, tags=self.tags
            )
        self.active_run: Any = mlflow.start_run(
            run_id=self.run_id,
            experiment_id=experiment,
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    @property
    def tracker(self) -> Any:
        """The active run."""
        return self.active_run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the configuration as parameters; values too long for MLflow are left out, with a warning."""
        mlflow: Any = importlib.import_module("mlflow")
        limits = mlflow.utils.validation
        kept: dict[str, Any] = {}
        for name, value in values.items():
            if len(str(value)) > limits.MAX_PARAM_VAL_LENGTH:
                _warn_left_out(
                    self.name, name, value, f"longer than {limits.MAX_PARAM_VAL_LENGTH} characters"
                )
            else:
                kept[name] = value
        pairs, size = list(kept.items()), limits.MAX_PARAMS_TAGS_PER_BATCH
        for start in range(0, len(pairs), size):
            mlflow.log_params(dict(pairs[start : start + size]))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics; what is no number is left out, with a warning."""
        numbers = _numbers(self.name, values)
        importlib.import_module("mlflow").log_metrics(numbers, step=step, **kwargs)

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Log a figure as a file of the run."""
        importlib.import_module("mlflow").log_figure(
            figure=figure, artifact_file=artifact_file, **save_kwargs
        )

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Log the files of a folder."""
        importlib.import_module("mlflow").log_artifacts(local_dir=local_dir, artifact_path=artifact_path)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Log a file."""
        importlib.import_module("mlflow").log_artifact(local_path=local_path, artifact_path=artifact_path)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        importlib.import_module("mlflow").end_run()


class ClearMLTracker(GeneralTracker):
    """A tracker of ClearML: the current task, or a new one, which it closes.

    Args:
        run_name: The project of a new task, unless CLEARML_PROJECT says one.
        **kwargs: The arguments of `clearml.Task.init`.
    """

    name: ClassVar[str] = "clearml"
    requires_logging_directory: ClassVar[bool] = False

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.user_provided_run_name, self.init_kwargs = run_name, kwargs
        self._is_given = False

    @on_main_process
    def start(self) -> None:
        """Take the current task, or begin one."""
        task: Any = importlib.import_module("clearml").Task
        current = task.current_task()
        self._is_given = current is not None
        options: dict[str, Any] = {
            "project_name": environ.read("CLEARML_PROJECT") or self.user_provided_run_name,
            "task_name": environ.read("CLEARML_TASK") or self.user_provided_run_name,
        }
        self.task: Any = current if self._is_given else task.init(**{**options, **self.init_kwargs})

    @property
    def tracker(self) -> Any:
        """The task of ClearML."""
        return self.task

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Connect the configuration to the task."""
        self.task.connect_configuration(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Report numbers as scalars; what is no number is left out, with a warning."""
        reporter = self.task.get_logger()
        for name, value in _numbers(self.name, values).items():
            if step is None:
                reporter.report_single_value(name=name, value=value, **kwargs)
            else:
                reporter.report_scalar(**_titled(name), value=value, iteration=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Report images by name."""
        reporter = self.task.get_logger()
        for name, value in values.items():
            reporter.report_image(**_titled(name), iteration=step, image=value, **kwargs)

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
        """Report a table of columns and rows, or of a dataframe.

        Raises:
            ValueError: There are neither rows nor a dataframe.
        """
        if dataframe is None and data is None:
            raise ValueError(f"log_table({table_name!r}): give data=, a list of rows, or dataframe=")
        plot = dataframe if dataframe is not None else [*([columns] if columns else []), *(data or [])]
        self.task.get_logger().report_table(**_titled(table_name), table_plot=plot, iteration=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Close the task, if it was begun here."""
        if not self._is_given:
            self.task.close()


class DVCLiveTracker(GeneralTracker):
    """A tracker of DVCLive.

    Args:
        run_name: Not used: DVCLive has no names of runs.
        live: The `Live` to log to; None for a new one.
        **kwargs: The arguments of `dvclive.Live`.
    """

    name: ClassVar[str] = "dvclive"
    requires_logging_directory: ClassVar[bool] = False

    def __init__(self, run_name: str | None = None, live: Any | None = None, **kwargs: Any) -> None:
        del run_name
        super().__init__()
        self.live, self.init_kwargs = live, kwargs

    @on_main_process
    def start(self) -> None:
        """Begin to log."""
        if self.live is None:
            self.live = importlib.import_module("dvclive").Live(**self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The `Live` of DVCLive."""
        return self.live

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the configuration as parameters."""
        self.tracker.log_params(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics of a step; what is no number is left out, with a warning."""
        if step is not None:
            self.tracker.step = step
        for name, value in _numbers(self.name, values).items():
            self.tracker.log_metric(name, value, **kwargs)
        self.tracker.next_step()

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        self.tracker.end()


def _titled(name: str) -> dict[str, str]:
    """Return ClearML's title and series of a name: `eval_loss` is the series `eval` of `loss`."""
    for series in ("eval", "test", "train"):
        if name.startswith(f"{series}_"):
            return {"title": name.removeprefix(f"{series}_"), "series": series}
    return {"title": name, "series": "train"}


def _numbers(tracker: str, values: dict[str, Any]) -> dict[str, int | float]:
    """Return the numbers among values; those of NumPy and torch of one element are numbers too."""
    found: dict[str, int | float] = {}
    for name, value in values.items():
        is_one = hasattr(value, "item") and getattr(value, "shape", None) in ((), (1,))
        number = value.item() if is_one else value
        if isinstance(number, int | float):
            found[name] = number
        else:
            _warn_left_out(tracker, name, value, "no number")
    return found


def _warn_left_out(tracker: str, name: str, value: Any, what: str) -> None:
    logger.warning("%s: %s of type %s is left out: it is %s", tracker, name, type(value).__name__, what)
