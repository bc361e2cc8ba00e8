"""Run a cluster's command, as words that no shell reads."""

from collections.abc import Mapping
from pathlib import Path

from drivetrain_launcher.errors import LaunchError

_SECONDS = 120.0


# The hints of a command whose errors need none.
_NO_HINTS: Mapping[str, str] = {}


def run_command(*words: str, folder: Path | None = None, hints: Mapping[str, str] = _NO_HINTS) -> str:
    """Run a command to its end, and return its output.

    Args:
        words: The program and its arguments.
        folder: The folder to run it in; None for that of this process.
        hints: What to do about an error, by a part of the program's message.

    Raises:
        LaunchError: The program is not installed, does not end within two minutes, or fails; the message holds what
            it said.
    """
    import subprocess  # takes tens of milliseconds, which a launcher that only looks for a cluster saves

    try:
        done = subprocess.run(
            words,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except FileNotFoundError as error:
        if folder is not None and not folder.is_dir():
            raise LaunchError(f"{folder}: no such folder, in which {words[0]} should run") from None
        raise LaunchError(
            f"{words[0]}: the command is not installed here, or not on PATH; run this on a machine of the cluster"
        ) from error
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{words[0]}: the command did not answer within {_SECONDS:g} s") from None
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        said = said.replace(f"{words[0]}: error: ", "")
        raise LaunchError(f"{words[0]} failed: {said}{hint_for(said, hints)}")
    return done.stdout


def hint_for(message: str, hints: Mapping[str, str]) -> str:
    """Return "; " and what to do about a program's message; empty if no hint fits.

    Args:
        message: The message.
        hints: What to do, by a part of the message.
    """
    return next((f"; {hint}" for part, hint in hints.items() if part in message), "")
