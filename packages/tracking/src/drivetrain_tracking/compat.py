"""Names of other libraries that they do not document, each with a test and a row in docs/platforms.md."""

from typing import Any

from drivetrain_tracking.platforms.platform import load_library

# wandb 0.31: seconds between two writes of a run's file; before it, and without it, every 32 KiB only.
WANDB_FLUSH_SETTING = "x_transaction_log_flush_interval"


def wandb_row(message: bytes) -> dict[str, str] | None:
    """Return a row of the history as JSON by name, from a message of a `.wandb` file; None for other messages."""
    record: Any = load_library("wandb.proto.wandb_internal_pb2", extra="wandb").Record.FromString(message)
    if record.WhichOneof("record_type") != "history":
        return None
    return {".".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
