"""The commit of the code that runs, and its changes since."""

import subprocess
from pathlib import Path

from drivetrain_tracking.plain import Plain
from drivetrain_tracking.secret_masking import mask_text

_DIFF_BYTES = 1 << 20  # of changes that are kept; a larger rest is named
_TIMEOUT_SECONDS = 10.0


def git_info(folder: Path) -> dict[str, Plain] | None:
    """Return the commit, branch, remote and changes of the repository that a folder is in; None where there is none.

    The changes are those of tracked files, with secrets masked; of other files the names stand there.
    """
    root = _git(folder, "rev-parse", "--show-toplevel")
    if root is None:
        return None
    diff = _git(folder, "diff", "HEAD", "--no-color", "--no-ext-diff") or ""
    info: dict[str, Plain] = {
        "root": root,
        "commit": _git(folder, "rev-parse", "HEAD"),
        "branch": _git(folder, "rev-parse", "--abbrev-ref", "HEAD"),
        "remote": mask_text(_git(folder, "config", "--get", "remote.origin.url") or ""),
        "diff": mask_text(diff[:_DIFF_BYTES]),
        "untracked": list[Plain](
            (_git(folder, "ls-files", "--others", "--exclude-standard") or "").splitlines()[:1000]
        ),
    }
    if len(diff) > _DIFF_BYTES:
        info["diff_left_out"] = len(diff) - _DIFF_BYTES
    return info


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints, or None where it fails: no git, no repository, no commit, a slow file system."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()
