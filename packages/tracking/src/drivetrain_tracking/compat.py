"""Names of other libraries that they do not document, each with a test and a row in docs/platforms.md."""

from pathlib import Path
from typing import Any

from drivetrain_tracking.platforms.platform import load_library

# wandb 0.31: seconds between two writes of a run's file; before it, and without it, every 32 KiB only.
WANDB_FLUSH_SETTING = "x_transaction_log_flush_interval"

# comet_ml 3.58: the file in an offline experiment's `tmpdir` to which it flushes each message as a line of JSON.
COMET_MESSAGES = "messages.json"

# clearml 2.1: the file of an offline session that holds its scalars, plots and samples, a list of JSON on each line.
CLEARML_EVENTS = "metrics.jsonl"


def wandb_row(message: bytes) -> dict[str, str] | None:
    """Return a row of the history as JSON by name, from a message of a `.wandb` file; None for other messages."""
    record: Any = load_library("wandb.proto.wandb_internal_pb2", extra="wandb").Record.FromString(message)
    if record.WhichOneof("record_type") != "history":
        return None
    return {".".join(item.nested_key) or item.key: item.value_json for item in record.history.item}


def write_comet_head(
    folder: Path, *, key: str, project: str | None, workspace: str | None, is_new: bool
) -> None:
    """Write the file that Comet adds to an offline experiment when it ends, for one whose process was killed.

    Args:
        folder: The experiment's folder of messages and files, its `tmpdir`.
        key: The experiment's key.
        project: The project; None is Comet's default.
        workspace: The workspace; None is Comet's default.
        is_new: Whether an upload creates the experiment, or appends to it.
    """
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
    """Let ClearML report from a thread of this process: its forked process writes every 5 s, whatever one flushes."""
    load_library("clearml", extra="clearml").Task._report_subprocess_enabled = False


def clearml_has_key() -> bool:
    """Return whether ClearML's environment or configuration file holds an access key."""
    given = load_library("clearml.backend_api.session.defs", extra="clearml").ENV_ACCESS_KEY.get()
    config: Any = load_library("clearml.config", extra="clearml").config_obj
    return bool(given or config.get("api.credentials.access_key", None))
