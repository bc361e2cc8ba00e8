"""The state that a rank takes over before a call, and gives up after it."""

import gc
import os
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path


def to_environment(current: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str | None]:
    """Return the changes that turn the current environment into the wanted one; None removes a variable."""
    removed: dict[str, str | None] = {name: None for name in current if name not in wanted}
    return removed | {name: text for name, text in wanted.items() if current.get(name) != text}


def leave_groups() -> None:
    """Destroy the process groups that the function has left behind; their store ends with the call."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def free_memory() -> None:
    """Free what only cycles hold, and give unused device memory back to the driver."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.accelerator.is_available():
        module = getattr(torch, torch.accelerator.current_accelerator().type, None)
        if module is not None and module.is_initialized():
            module.empty_cache()


def user_modules(*, since_ns: int) -> dict[str, int]:
    """Return the time of change of the files of imported modules that are not installed.

    Args:
        since_ns: The time, in nanoseconds since the epoch, from which a change may be later than the import; the
            time of such a file is 0.
    """
    found: dict[str, int] = {}
    libraries = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or file.startswith(libraries) or not file.endswith(".py"):
            continue
        if not any(f"{os.sep}{folder}{os.sep}" in file for folder in ("site-packages", "dist-packages")):
            try:
                changed = Path(file).stat().st_mtime_ns
            except OSError:
                continue
            found[file] = changed if changed < since_ns else 0
    return found
