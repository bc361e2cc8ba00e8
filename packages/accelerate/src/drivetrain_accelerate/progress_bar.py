"""The progress bar of tqdm, on the first process of each node alone."""

from typing import Any

from drivetrain_accelerate.states.partial_state import current_context


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return a progress bar of tqdm that is shown on the first process of each node."""
    try:
        from tqdm.auto import tqdm as bar
    except ImportError as error:
        raise ImportError("the progress bar needs tqdm: pip install tqdm") from error
    if args and isinstance(args[0], bool):
        raise ValueError(f"tqdm({args[0]}, ...): say main_process_only={args[0]} after the iterable")
    if main_process_only and not kwargs.get("disable"):
        kwargs["disable"] = not current_context().topology.is_local_main
    return bar(*args, **kwargs)
