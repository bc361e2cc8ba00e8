"""Check a settings file for unknown names and values."""

import sys
from dataclasses import dataclass
from pathlib import Path

from drivetrain_config import environ
from drivetrain_config.files.found_file import find_file, settings_places
from drivetrain_config.files.settings_file import read_file
from drivetrain_config.plugins.installed import entry_points
from drivetrain_config.settings.file_review import review_file
from drivetrain_launcher.errors import LaunchError
from drivetrain_messages import argument, say

_INVALID = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigValidateArguments:
    """The arguments of `drivetrain config validate`."""

    file: Path | None = argument(
        None, "Settings file to check; the one that a launch finds by default.", positional=True
    )


def run(arguments: ConfigValidateArguments) -> int:
    """Check a settings file, and list every problem with its line; the exit code is 1 if the file has a problem."""
    path = file_or_found(arguments.file)
    review = review_file(path)
    for line in review.notices:
        say(line)
    for problem in review.problems:
        say(f"error: {problem}")
    if review.problems:
        return _INVALID
    for line in unused_sections(path):
        say(line)
    sys.stdout.write(f"{path}: {review.num_settings} settings, all valid\n")
    return 0


def file_or_found(named: Path | None) -> Path:
    """Return the named file, or the file that a launch finds; without a file, a LaunchError lists the places."""
    if named is not None:
        return named
    environment = environ.child_environment()
    found = find_file(Path.cwd(), environment)
    if found is None:
        places = ", ".join(map(str, settings_places(Path.cwd(), environment)))
        raise LaunchError(
            f"no settings file is found ({places}): name one, or write one by drivetrain config"
        )
    return found.path


def unused_sections(path: Path) -> list[str]:
    """Return a line for each section of the file that belongs to a backend other than its `run.backend`."""
    contents = read_file(path)
    chosen = (contents.data.get("run") or {}).get("backend", "auto")
    others = [point.name for point in entry_points("drivetrain.backends") if point.name != chosen]
    return [
        f"{contents.where(name)}: section {name!r} has no effect while run.backend is {chosen!r}"
        for name in others
        if chosen != "auto" and contents.data.get(name)
    ]
