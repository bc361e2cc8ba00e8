"""The private names of the platforms' libraries that this package uses, in one place.

The libraries have no public names for these uses. tests/tracking/platforms/test_compat.py checks each name, and
docs/design/platforms.md lists them. A library is imported only inside a call that gets none of its objects.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

from drivetrain_tracking.platforms.platform import load_library

# wandb 0.31: seconds between two writes of a run's file; before it, and without it, every 32 KiB only.
WANDB_FLUSH_SETTING = "x_transaction_log_flush_interval"

# comet_ml 3.58: the file in an offline experiment's `tmpdir` to which it flushes each message as a line of JSON.
COMET_MESSAGES = "messages.json"

# clearml 2.1: the file of an offline session that holds its scalars, plots and samples, a list of JSON on each line.
CLEARML_EVENTS = "metrics.jsonl"


def aim_track(
    run: Any, value: object, *, time: float, name: str, step: int, context: Mapping[str, Any]
) -> None:
    """Track a value of an aim.Run with its own time, on this thread; `Run.track` notes the time of the call."""
    run._tracker._track(value, time, name, step, None, context=dict(context))


def aim_add_to_index(run: Any) -> None:
    """Add an aim.Run to its repository's index, which queries read; otherwise only a running `aim up` does so."""
    repo = run.repo
    tree = repo.request_tree("meta", run.hash, read_only=True, skip_read_optimization=True).subtree("meta")
    tree.subtree("chunks").subtree(run.hash).finalize(index=repo._get_index_tree("meta", 0).view(()))


def aim_forget_runs(repo: Any) -> None:
    """Drop the list of runs that an aim.Repo caches for half a second."""
    repo._all_run_hashes.cache_clear()


def aim_wait_for_server(repo: Any) -> None:
    """Wait until the server of a remote aim.Repo has all values that were sent."""
    if repo.is_remote_repo:
        repo._client.get_queue().wait_for_finish()


def dvclive_sends_to_studio(live: Any) -> bool:
    """Return whether a dvclive.Live has a token of DVC Studio, to which it then posts."""
    return bool(live._dvc_studio_config)


def swanlab_emit(run: Any, event: object) -> None:
    """Pass an event to the storage thread of a swanlab.Run; unlike in `Run.log`, an event has its own time."""
    run._components.emitter.emit(event)


def swanlab_takes(run: Any, key: str, *, step: int, column_type: int) -> bool:
    """Return whether a swanlab.Run would keep a value: a key has one type, and one value per step."""
    metric = run._core._metrics.get(key)
    if metric is None:
        return True
    return metric.column_type == column_type and step > metric.min_step and step not in metric.steps


def swanlab_stop_watching(run: Any) -> None:
    """End the thread that watches files; a swanlab.Run that watched no files does not end it."""
    watcher = run._core._watcher
    if watcher is not None and getattr(watcher, "_started", True) is False:
        watcher._observer.stop()


@contextmanager
def swanlab_quiet() -> Generator[None]:
    """Keep SwanLab's greetings off the console. Its warnings in other calls stay."""
    library: Any = load_library("swanlab.sdk.internal.pkg.console", extra="swanlab")
    before, library.c.quiet = library.c.quiet, True
    try:
        yield
    finally:
        library.c.quiet = before


class SwanLabFlush(dict[str, Any]):
    """Ask SwanLab's storage thread to write all earlier events and flush its file, when it reads this event's data.

    The file buffers up to 8 KiB in this process, and the thread waits for half a second; neither offers a flush.
    """

    def __init__(self, run: Any) -> None:
        super().__init__()
        self._run = run
        self._is_done = Event()
        self._error: Exception | None = None

    def items(self) -> Any:
        """Store and flush, on the calling thread; return no items."""
        try:
            consumer = self._run._components.consumer
            consumer._flush()
            if not consumer._batch_empty:  # it puts back what it could not store, and only logs the reason
                raise OSError(f"SwanLab could not store values in {self._run.dir}; its debug.log says why")
            if (store := self._run._core._store) is not None:
                store.ensure_flushed()
        except Exception as error:  # noqa: BLE001 raised in `wait`, on the thread that writes
            self._error = error
        finally:
            self._is_done.set()
        return super().items()

    def wait(self, *, timeout_seconds: float = 60.0) -> None:
        """Wait until the thread has flushed."""
        if not self._is_done.wait(timeout_seconds):
            raise TimeoutError(f"SwanLab did not store its values in {timeout_seconds:g} s")
        if self._error is not None:
            raise self._error


def trackio_medium(value: Any, *, project: str, run: str, step: int) -> dict[str, Any]:
    """Return the entry of a medium for a row of Trackio's database; copy the medium's file to Trackio's folder."""
    if hasattr(value, "_save"):
        value._save(project, run, step)
    elif hasattr(value, "_process_data"):
        return value._to_dict(project=project, run=run, step=step)
    return value._to_dict()


def trackio_manifest(artifact: Any, project: str) -> Any:
    """Copy the files of a trackio.Artifact into a project, and return the list of the files."""
    return artifact._build_manifest(project)


def trackio_is_local(run: Any) -> bool:
    """Return whether a trackio.Run writes to the local database, and not to a Space or a server."""
    return bool(run._is_local)


def write_comet_head(
    folder: Path, *, key: str, project: str | None, workspace: str | None, is_new: bool
) -> None:
    """Write the file that Comet adds when an offline experiment ends, after its process was killed."""
    end = int((folder / COMET_MESSAGES).stat().st_mtime * 1000)
    load_library("comet_ml.offline_utils", extra="comet").write_experiment_meta_file(
        tempdir=str(folder),
        experiment_key=key,
        workspace=workspace,
        project_name=project,
        start_time=int(folder.stat().st_ctime * 1000),
        stop_time=end,
        tags=[],
        resume_strategy="create" if is_new else "get",
        user_provided_experiment_key=True,
    )


def use_clearml_threads() -> None:
    """Let ClearML report from a thread of this process: its forked process writes every 5 s and ignores a flush."""
    load_library("clearml", extra="clearml").Task._report_subprocess_enabled = False


def clearml_has_key() -> bool:
    """Return whether ClearML's environment or configuration file holds an access key."""
    given = load_library("clearml.backend_api.session.defs", extra="clearml").ENV_ACCESS_KEY.get()
    config: Any = load_library("clearml.config", extra="clearml").config_obj
    return bool(given or config.get("api.credentials.access_key", None))
