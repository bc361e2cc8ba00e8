"""The trackers of the platforms, which call the platforms' libraries as Accelerate's trackers do."""

import importlib
import json
import time
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

from packaging.version import parse

from drivetrain_accelerate.libraries.availability import compare_versions
from drivetrain_accelerate.trackers.general_tracker import LibraryTracker, calls_on_main_process, number_of
from drivetrain_config import environ

Folder = str | PathLike[str]
_PLAIN = (int, float, str, bool, type(None))


@calls_on_main_process
class _RunTracker(LibraryTracker):
    """A tracker over a module whose `init` returns a run with `log` and `finish`."""

    main_process_only: ClassVar[bool] = False

    def start(self) -> None:
        """Begin a run; the run's name is the platform's project."""
        self.run: Any = self.module.init(project=self.run_name, **self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Add values to the run's configuration; in a resumed run, values may replace older ones."""
        self.module.config.update(values, allow_val_change=True)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values. They may be media objects of the platform."""
        self.run.log(values, step=step, **kwargs)


class TrackioTracker(_RunTracker):
    """A tracker of Trackio: `trackio.init(project=run_name, **kwargs)`."""

    name = "trackio"


@calls_on_main_process
class SwanLabTracker(_RunTracker):
    """A tracker of SwanLab: `swanlab.init(project=run_name, **kwargs)`."""

    name = "swanlab"

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images by name."""
        image = self.module.Image
        images = {name: [image(each) for each in several] for name, several in values.items()}
        self.run.log(images, step=step, **kwargs)


@calls_on_main_process
class WandBTracker(_RunTracker):
    """A tracker of Weights & Biases: `wandb.init(project=run_name, **kwargs)`."""

    name = "wandb"
    log_images = SwanLabTracker.log_images

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
        table = self.module.Table(columns=columns, data=data, dataframe=dataframe)
        self.run.log({table_name: table}, step=step, **kwargs)


@calls_on_main_process
class CometMLTracker(LibraryTracker):
    """A tracker of Comet: `comet_ml.start(**kwargs)`; the run's name is the project of the experiment."""

    name = "comet_ml"
    opened = "writer"
    configured_by = "log_parameters"
    ended_by = "end"

    def start(self) -> None:
        """Start the experiment."""
        comet = self.module
        has_start = compare_versions(parse(comet.__version__), ">=", "3.41.0")
        begin = comet.start if has_start else comet.Experiment
        self.writer: Any = begin(project_name=self.run_name, **self.init_kwargs)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics, strings as Comet's "others", and dicts as metrics under the dict's name."""
        if step is not None:
            self.writer.set_step(step)
        for name, value in values.items():
            if isinstance(value, str):
                self.writer.log_other(name, value, **kwargs)
            elif isinstance(value, dict):
                self.writer.log_metrics(value, step=step, **kwargs)
            else:
                self.writer.log_metric(name, value, step=step, **kwargs)


@calls_on_main_process
class AimTracker(LibraryTracker):
    """A tracker of Aim: a run in the repository of a folder, by `aim.Run(**kwargs)`."""

    name = "aim"
    requires_logging_directory = True
    opened = "writer"
    ended_by = "close"

    def __init__(self, run_name: str, logging_dir: Folder | None = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = logging_dir

    def start(self) -> None:
        """Open the run, under its name."""
        self.writer: Any = self.module.Run(repo=self.aim_repo_path, **self.init_kwargs)
        self.writer.name = self.run_name

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as hyperparameters."""
        self.writer["hparams"] = values

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Track each value."""
        for name, value in values.items():
            self.writer.track(value, name=name, step=step, **kwargs)

    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Track images, or pairs of an image and a caption, by name.

        `kwargs` has arguments of `aim.Image` under "aim_image", and of `Run.track` under "track".
        """
        given = kwargs or {}
        image = self.module.Image
        for name, value in values.items():
            picture, caption = value if isinstance(value, tuple) else (value, "")
            made = image(picture, caption=caption, **given.get("aim_image", {}))
            self.writer.track(made, name=name, step=step, **given.get("track", {}))


@calls_on_main_process
class MLflowTracker(LibraryTracker):
    """A tracker of MLflow. Arguments that are None are read from MLFLOW_EXPERIMENT_NAME, MLFLOW_RUN_ID and so on.

    A missing experiment is created, with `logging_dir` for its artifacts. Tags are a dict, or a dict's JSON.
    """

    name = "mlflow"
    opened = "active_run"

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: Folder | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool | None = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__(run_name)
        tags = environ.read("MLFLOW_TAGS") if tags is None else tags
        nested = environ.read("MLFLOW_NESTED_RUN") or ""
        self.experiment_name = environ.read("MLFLOW_EXPERIMENT_NAME") or experiment_name
        self.logging_dir = logging_dir
        self.run_id = environ.read("MLFLOW_RUN_ID") or run_id
        self.tags: dict[str, Any] | None = json.loads(tags) if isinstance(tags, str) else tags
        self.nested_run = nested.lower() in ("1", "true", "yes", "on") or bool(nested_run)
        self.description = description

    def start(self) -> None:
        """Start the run in its experiment."""
        mlflow = self.module
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

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the configuration as parameters; values too long for MLflow are left out, with a warning."""
        mlflow = self.module
        limits = mlflow.utils.validation
        longest, size = limits.MAX_PARAM_VAL_LENGTH, limits.MAX_PARAMS_TAGS_PER_BATCH
        for name, value in values.items():
            if len(str(value)) > longest:
                self.warn_left_out(name, value, f"longer than {longest} characters")
        pairs = [(name, value) for name, value in values.items() if len(str(value)) <= longest]
        for start in range(0, len(pairs), size):
            mlflow.log_params(dict(pairs[start : start + size]))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics; leave out other values, with a warning."""
        self.module.log_metrics(self.numbers(values), step=step, **kwargs)

    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Log a figure as a file of the run."""
        self.module.log_figure(figure=figure, artifact_file=artifact_file, **save_kwargs)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Log the files of a folder."""
        self.module.log_artifacts(local_dir=local_dir, artifact_path=artifact_path)

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Log a file."""
        self.module.log_artifact(local_path=local_path, artifact_path=artifact_path)

    def finish(self) -> None:
        """End the run."""
        self.module.end_run()


@calls_on_main_process
class ClearMLTracker(LibraryTracker):
    """A tracker of ClearML: the current task, or a new task by `Task.init(**kwargs)`, closed at the end.

    The project of a new task is CLEARML_PROJECT, or else the run's name.
    """

    name = "clearml"
    opened = "task"
    configured_by = "connect_configuration"

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.user_provided_run_name = run_name
        self._is_given = False

    def start(self) -> None:
        """Take the current task, or begin a new task."""
        task = self.module.Task
        current = task.current_task()
        self._is_given = current is not None
        options: dict[str, Any] = {
            "project_name": environ.read("CLEARML_PROJECT") or self.user_provided_run_name,
            "task_name": environ.read("CLEARML_TASK") or self.user_provided_run_name,
        }
        self.task: Any = current if self._is_given else task.init(**{**options, **self.init_kwargs})

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Report numbers as scalars; leave out other values, with a warning."""
        reporter = self.task.get_logger()
        for name, value in self.numbers(values).items():
            if step is None:
                reporter.report_single_value(name=name, value=value, **kwargs)
            else:
                reporter.report_scalar(**_split_title(name), value=value, iteration=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Report images by name."""
        reporter = self.task.get_logger()
        for name, value in values.items():
            reporter.report_image(**_split_title(name), iteration=step, image=value, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Report a table of columns and rows, or of a dataframe; without either, raise a ValueError."""
        if dataframe is None and data is None:
            raise ValueError(f"log_table({table_name!r}): give data=, a list of rows, or dataframe=")
        plot = dataframe if dataframe is not None else [*([columns] if columns else []), *(data or [])]
        self.task.get_logger().report_table(
            **_split_title(table_name), table_plot=plot, iteration=step, **kwargs
        )

    def finish(self) -> None:
        """Close the task if this tracker has begun it."""
        if not self._is_given:
            self.task.close()


@calls_on_main_process
class DVCLiveTracker(LibraryTracker):
    """A tracker of DVCLive: a given `live`, or `dvclive.Live(**kwargs)`. DVCLive has no names of runs."""

    name = "dvclive"
    opened = "live"
    configured_by = "log_params"
    ended_by = "end"

    def __init__(self, run_name: str | None = None, live: Any | None = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.live = live

    def start(self) -> None:
        """Begin to log."""
        if self.live is None:
            self.live = self.module.Live(**self.init_kwargs)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics of a step; leave out other values, with a warning."""
        if step is not None:
            self.tracker.step = step
        for name, value in self.numbers(values).items():
            self.tracker.log_metric(name, value, **kwargs)
        self.tracker.next_step()


def _split_title(name: str) -> dict[str, str]:
    """Return ClearML's title and series for a name: `eval_loss` has the title `loss` and the series `eval`."""
    for series in ("eval", "test", "train"):
        if name.startswith(f"{series}_"):
            return {"title": name.removeprefix(f"{series}_"), "series": series}
    return {"title": name, "series": "train"}


@calls_on_main_process
class TensorBoardTracker(LibraryTracker):
    """A tracker that writes event files by `SummaryWriter(**kwargs)`, into a folder named after the run."""

    name = "tensorboard"
    requires_logging_directory = True
    opened = "writer"
    ended_by = "close"

    def __init__(self, run_name: str, logging_dir: str | PathLike[str], **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir = str(Path(logging_dir) / run_name)

    def start(self) -> None:
        """Open the event files, with the writer of torch or tensorboardX."""
        try:
            module: Any = importlib.import_module("torch.utils.tensorboard")
        except ImportError:
            module = importlib.import_module("tensorboardX")
        self.writer: Any = module.SummaryWriter(self.logging_dir, **self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the configuration as hyperparameters and as a file `hparams.yml`.

        A ValueError names values that are neither a number, a string, a boolean nor None.
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


# In the order in which a run with `log_with="all"` has them.
TRACKERS: tuple[type[LibraryTracker], ...] = (
    *(TensorBoardTracker, WandBTracker, CometMLTracker, AimTracker, MLflowTracker),
    *(ClearMLTracker, DVCLiveTracker, SwanLabTracker, TrackioTracker),
)
