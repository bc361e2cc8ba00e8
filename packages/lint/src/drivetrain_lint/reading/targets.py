"""The files that a command line names: scripts, notebooks, folders and modules."""

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
    """A file to check.

    Attributes:
        path: The file itself.
        shown: The path as it is shown to the user.
    """

    path: Path
    shown: str


def find_targets(names: tuple[str, ...], *, base: Path) -> list[Target]:
    """Return the files that names stand for, each once, in order.

    Args:
        names: Files, folders, or modules by their dotted names. Of a folder, all scripts and notebooks in it; hidden
            folders, virtual environments and builds in it are left out.
        base: The folder that relative names start from, where modules are looked for too.

    Raises:
        LintArgumentError: A name is neither a file, nor a folder, nor a module; or a file is no script.
    """
    found: dict[Path, Target] = {}
    for name in names:
        for target in _of_name(name, base):
            found.setdefault(target.path.resolve(), target)
    return list(found.values())


def _of_name(name: str, base: Path) -> list[Target]:
    path = base / name
    if path.is_dir():
        return [
            Target(path=file, shown=_shown(Path(name) / file.relative_to(path))) for file in _in_folder(path)
        ]
    if path.exists():
        if path.is_file() and path.suffix not in SUFFIXES:
            raise LintArgumentError(
                f"{name}: is no script; say a file ending in .py or .ipynb, a folder, or a module"
            )
        return [Target(path=path, shown=_shown(Path(name)))]
    module = _module_file(name, base)
    if module is None:
        raise LintArgumentError(
            f"{name}: no such script, folder or module; paths start from {base}, and modules are looked for there "
            "and where this Python finds its packages"
        )
    return [Target(path=file, shown=_shown(file)) for file in module]


def _in_folder(folder: Path) -> list[Path]:
    def wanted(file: Path) -> bool:
        inner = file.relative_to(folder).parts[:-1]
        return not any(part in _SKIPPED or part.startswith(".") for part in inner)

    files = [file for suffix in SUFFIXES for file in folder.rglob(f"*{suffix}") if file.is_file()]
    return sorted(file for file in files if wanted(file))


def _module_file(name: str, base: Path) -> list[Path] | None:
    """Return the files of a module, or of all modules of a package, without importing a parent of it."""
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    places: list[str] | None = None
    spec = None
    for part in name.split("."):
        spec = PathFinder.find_spec(part, places)
        if spec is None and places is None:
            spec = PathFinder.find_spec(part, [str(base)])
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or [])
    if places:
        return [file for folder in places for file in _in_folder(Path(folder))]
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return [Path(spec.origin)]


def _shown(path: Path) -> str:
    return path.as_posix()
