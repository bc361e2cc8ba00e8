"""Find the settings file that a user saved, in a fixed list of places.

The `drivetrain` command searches the places unless `--config` names a file; a plain script does not search. Only one
file is used.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from drivetrain_config.errors import ConfigError

# The endings of settings files, in the order in which messages list them.
SUFFIXES = (".yaml", ".yml", ".toml", ".json")
# The value of `--config` for no file.
NO_FILE = "none"

# A file or folder that marks the top of a project, above which no file is looked for.
_TOP = (".git", "pyproject.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsPlace:
    """A place that may hold a settings file: the file's name without the ending, and a title for messages."""

    folder: Path
    stem: str
    title: str

    def __str__(self) -> str:
        return f"{self.folder / self.stem}.yaml"

    def file(self) -> Path | None:
        """Return the file in this place, or None; ConfigError if the place has several files."""
        there = [path for suffix in SUFFIXES if (path := self.folder / f"{self.stem}{suffix}").is_file()]
        if len(there) > 1:
            raise ConfigError(
                f"{' and '.join(map(str, there))}: both are settings files of {self.title}; keep one, or choose by "
                "--config FILE"
            )
        return there[0] if there else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsFile:
    """The settings file of a launch, and the place where it was found; None if the user named the file."""

    path: Path
    place: SettingsPlace | None = None

    def __str__(self) -> str:
        how = "named by --config" if self.place is None else f"found in {self.place.title}"
        return f"{self.path}, {how}"


def settings_places(folder: Path, environment: Mapping[str, str]) -> tuple[SettingsPlace, ...]:
    """Return the places to look for a settings file, in the order of search.

    First the working folder, then each folder above it up to the top of the project (the folder with `.git` or
    `pyproject.toml`; without a project, none), then `$XDG_CONFIG_HOME/drivetrain`, by default `~/.config/drivetrain`.
    """
    here = Path() if folder == Path.cwd() else folder
    found = [SettingsPlace(folder=here, stem="drivetrain", title="the working folder")]
    lineage = (folder.absolute(), *folder.absolute().parents)
    tops = [index for index, each in enumerate(lineage) if any((each / mark).exists() for mark in _TOP)]
    found += [
        SettingsPlace(folder=above, stem="drivetrain", title="a folder above, within the project")
        for above in lineage[1 : tops[0] + 1 if tops else 1]
    ]
    base, home = environment.get("XDG_CONFIG_HOME"), environment.get("HOME")
    if base or home:
        user = Path(base) if base else Path(home or "") / ".config"
        found.append(SettingsPlace(folder=user / "drivetrain", stem="config", title="the user's folder"))
    return tuple(found)


def find_file(folder: Path, environment: Mapping[str, str]) -> SettingsFile | None:
    """Return the first settings file in the order of places; None if no place has a file."""
    for place in settings_places(folder, environment):
        if (found := place.file()) is not None:
            return SettingsFile(path=found, place=place)
    return None


def choose_file(named: str | None, environment: Mapping[str, str]) -> SettingsFile | None:
    """Return the file that `--config` names (None for "none"); without the flag, the result of `find_file`."""
    if named is None:
        return find_file(Path.cwd(), environment)
    return None if named == NO_FILE else SettingsFile(path=Path(named).expanduser())
