"""The files that a command line names: scripts, notebooks, folders and modules."""

import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from drivetrain_lint.errors import LintArgumentError

SUFFIXES = (".py", ".ipynb")
# Folders that hold other people's code, or none.
_SKIPPED = frozenset(
    {"__pycache__", "node_modules", "site-packages", "venv", "env", "build", "dist", ".ipynb_checkpoints"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A file to check, and its path as it is shown to the user."""

    path: Path
    shown: str


def find_targets(names: tuple[str, ...], *, base: Path) -> list[Target]:
    """Return the files for names of files, folders or modules, each file once, in order.

    A folder stands for all scripts and notebooks in it, except in hidden folders, virtual environments and builds.
    Relative names and modules are looked for in `base`. LintArgumentError if a name is none of these, or a file is no
    script.
    """
    found: dict[Path, Target] = {}
    for name in names:
        path = base / name
        if path.is_dir():
            files = [(file, Path(name) / file.relative_to(path)) for file in _find_scripts(path)]
        elif path.is_file() and path.suffix not in SUFFIXES:
            raise LintArgumentError(
                f"{name}: is no script; say a file ending in .py or .ipynb, a folder, or a module"
            )
        elif path.exists():
            files = [(path, Path(name))]
        else:
            files = [(file, file) for file in _find_module_files(name, base)]
        for file, shown in files:
            found.setdefault(file.resolve(), Target(path=file, shown=shown.as_posix()))
    return list(found.values())


def _find_scripts(folder: Path) -> list[Path]:
    def is_wanted(file: Path) -> bool:
        inner = file.relative_to(folder).parts[:-1]
        return file.is_file() and not any(part in _SKIPPED or part.startswith(".") for part in inner)

    return sorted(file for suffix in SUFFIXES for file in folder.rglob(f"*{suffix}") if is_wanted(file))


def _find_module_files(name: str, base: Path) -> list[Path]:
    """Return the files of a module, or of all modules of a package, without importing a parent package."""
    folders, spec = [*sys.path, str(base)], None
    for part in name.split(".") if all(map(str.isidentifier, name.split("."))) else ():
        spec = PathFinder.find_spec(part, folders)
        if spec is None:
            break
        folders = list(spec.submodule_search_locations or [])
    if spec is not None and folders:
        return [file for folder in folders for file in _find_scripts(Path(folder))]
    if spec is not None and (spec.origin or "").endswith(".py"):
        return [Path(spec.origin or "")]
    raise LintArgumentError(
        f"{name}: no such script, folder or module; paths start from {base}, and modules are looked for "
        "there and where this Python finds its packages"
    )
