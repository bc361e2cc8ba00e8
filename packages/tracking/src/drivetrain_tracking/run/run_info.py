"""The surroundings of a run: its commit and changes, versions, hardware and command line, without secrets."""

import os
import platform
import socket
import subprocess
import sys
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

from drivetrain_tracking.values.plain import Plain
from drivetrain_tracking.values.secret_masking import mask_command, mask_text

_DIFF_BYTES = 1 << 20  # of changes that are kept; a larger rest is named
_GIT_TIMEOUT_SECONDS = 10.0


def collect_info() -> dict[str, Plain]:
    """Return the commit, versions, hardware and command line of this process, without secrets.

    The versions cover the packages imported so far. Accelerators are listed if torch is imported.
    """
    imported = {name.partition(".")[0] for name in sys.modules}
    distributions = {  # such as PyYAML, whose module has another name
        name for module, names in packages_distributions().items() if module in imported for name in names
    }
    hardware: dict[str, Plain] = {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "num_cpus": os.cpu_count(),
        "accelerators": list[Plain](_accelerators()),
    }
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        hardware["memory_bytes"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    script = Path(sys.argv[0]).absolute().parent if sys.argv and sys.argv[0] else Path.cwd()
    return {
        "command": list[Plain](mask_command([sys.executable, *sys.argv])),
        "folder": str(Path.cwd()),
        "git": git_info(script) if script.is_dir() else git_info(Path.cwd()),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in sorted(distributions, key=str.casefold)},
        "hardware": hardware,
    }


def git_info(folder: Path) -> dict[str, Plain] | None:
    """Return the commit, branch, remote and changes of a folder's repository, secrets masked; None if it has none."""
    root = _git(folder, "rev-parse", "--show-toplevel")
    if root is None:
        return None
    diff = _git(folder, "diff", "HEAD", "--no-color", "--no-ext-diff") or ""  # of tracked files
    untracked = _git(folder, "ls-files", "--others", "--exclude-standard") or ""
    info: dict[str, Plain] = {
        "root": root,
        "commit": _git(folder, "rev-parse", "HEAD"),
        "branch": _git(folder, "rev-parse", "--abbrev-ref", "HEAD"),
        "remote": mask_text(_git(folder, "config", "--get", "remote.origin.url") or ""),
        "diff": mask_text(diff[:_DIFF_BYTES]),
        "untracked": list[Plain](untracked.splitlines()[:1000]),
    }
    if len(diff) > _DIFF_BYTES:
        info["diff_left_out"] = len(diff) - _DIFF_BYTES
    return info


def _git(folder: Path, *arguments: str) -> str | None:
    """Return git's output, or None if it fails: no git, no repository, no commit, a slow file system."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            timeout=_GIT_TIMEOUT_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()


def _accelerators() -> list[str]:
    torch: Any = sys.modules.get("torch")  # this package does not import it
    if torch is None or not torch.accelerator.is_available():
        return []
    accelerator: Any = torch.accelerator.current_accelerator()
    name_of = getattr(getattr(torch, accelerator.type), "get_device_name", None)
    return [
        f"{accelerator.type}:{index}" if name_of is None else str(name_of(index))
        for index in range(torch.accelerator.device_count())
    ]
