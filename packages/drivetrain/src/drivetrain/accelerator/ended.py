"""The answer of an Accelerator after `end_training`: one error on any number of ranks, for all that needs the run."""

from collections.abc import Callable
from typing import Any

# Those that read back, such as `plan`, `unwrap_model` or `get_state_dict`, stay; so do the ranks and `free_memory`.
_NEED_THE_RUN = (
    "accumulate", "backward", "backward_alone", "broadcast", "building", "check_trigger", "count_tokens",
    "find_executable_batch_size", "gather", "gather_for_metrics", "gathered", "init_trackers",
    "join_uneven_inputs", "load_model", "load_state", "local_main_process_first", "log", "main_process_first",
    "no_sync", "pad_across_processes", "prepare", "prepare_evaluation", "prepare_loader", "reduce",
    "register_checkpoint_hook", "register_for_checkpointing", "request_stop", "save_if_due", "save_model",
    "save_state", "set_trigger", "wait_for_everyone",
)  # fmt: skip


def end(accelerator: Any) -> None:
    """Have an Accelerator refuse whatever needs the run; its `end_training` does nothing from now on."""

    def do_nothing(accelerator: object) -> None:
        del accelerator

    kind = type(accelerator)
    methods: dict[str, Any] = {name: _refusal(name) for name in _NEED_THE_RUN}
    methods |= {"__module__": kind.__module__, "__doc__": kind.__doc__, "end_training": do_nothing}
    accelerator.__class__ = type(kind.__name__, (kind,), methods)


def _refusal(name: str) -> Callable[..., None]:
    def refuse(*args: object, **kwargs: object) -> None:
        del args, kwargs
        raise RuntimeError(
            f"{name}() after end_training(), which has finished saves and trackers, released the models and left the "
            "process group: call it before, or make a new Accelerator"
        )

    return refuse
