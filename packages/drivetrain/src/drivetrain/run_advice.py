"""The questions of `drivetrain config` about a run, with recommended answers; torch is not imported."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Bytes of training state for each parameter in fp32: weights, gradients and Adam's two moments.
_BYTES_PER_PARAMETER = 16


def ask_mixed_precision(known: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Ask for the precision if an accelerator computes faster in a narrow precision."""
    if known["machine.accelerator"] is None or known.get("run.cpu"):
        return None
    name = known["machine.accelerator_name"] or known["machine.accelerator"]
    if known["machine.can_bf16"]:
        value, why = "bf16", f"{name} computes in bf16, which has the range of fp32 and needs no loss scale"
    elif known["machine.can_fp16"]:
        value, why = "fp16", f"{name} has no units for bf16; fp16 is scaled so that small gradients survive"
    else:
        return None
    choices = {
        "bf16": "half the traffic, the range of fp32",
        "fp16": "half the traffic, with a loss scale",
        "no": "the model's own precision",
    }
    if not known["machine.can_bf16"]:
        del choices["bf16"]
    return {"value": value, "why": why, "text": "Precision of forward and backward?", "choices": choices}


def ask_backend(known: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Ask for the backend if several processes leave a choice."""
    from drivetrain.settings import usual_backend

    installed: Mapping[str, str] = known["installed.backends"]
    alone = usual_backend(1)
    if known["plan.num_processes"] < 2 or not installed:
        return None
    memory, room = known.get("machine.accelerator_memory_bytes"), ""
    if memory is not None:  # half of it for the training state, in billions of parameters
        room = f", up to about {memory / 2 / _BYTES_PER_PARAMETER / 1e9:.1f} billion parameters here"
    return {
        "value": "auto",
        "why": "the model and this hardware decide: replicas are the fastest while the training state fits each "
        f"device{room}",
        "text": "How do the processes share the model?",
        "choices": {
            "auto": "planned when the model is prepared, by its memory and step time",
            **{name: text.rstrip(".") for name, text in installed.items() if name != alone},
        },
    }


def ask_accumulation(_known: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Ask for the number of micro-batches."""
    return {
        "value": 1,
        "why": "accumulation is for batches that do not fit the memory at once",
        "text": "How many micro-batches make one optimizer step?",
    }


def ask_project_dir(_known: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Ask for the folder of the results."""
    return {
        "value": Path("runs"),
        "why": "checkpoints and logs need a folder",
        "text": "Folder of checkpoints, logs and the plan (none: write nothing)?",
    }


def ask_log_with(known: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Ask for the trackers, if there is a folder to write to."""
    if known.get("run.project_dir") is None:
        return None
    trackers: Mapping[str, str] = known["installed.trackers"]
    return {
        "value": ("jsonl",) if "jsonl" in trackers else (),
        "why": f"a file in that folder, which needs no account; there are {', '.join(trackers)}",
        "text": "Trackers to log to, with commas between them (none: log nothing)?",
    }
