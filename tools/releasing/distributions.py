"""The sdists and wheels of a release: what each must hold, and whether each wheel installs and imports alone."""

import os
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from packaging.metadata import Metadata

from checks.commands import failure
from checks.environments import fresh_environment, install, locked_versions
from checks.findings import Finding
from checks.workspace import Package

# What hatchling adds to an sdist beside the files of the package.
_ADDED_TO_SDIST = frozenset({"PKG-INFO", ".gitignore"})
_TRY = """
import importlib.metadata
from {module} import *
found = importlib.metadata.version("{distribution}")
if found != "{version}":
    raise SystemExit("{distribution} {version} was asked for, " + found + " is installed")
"""


def wheel_of(package: Package, version: str) -> str:
    """Return the name of a package's wheel."""
    return f"{package.module}-{version}-py3-none-any.whl"


def sdist_of(package: Package, version: str) -> str:
    """Return the name of a package's sdist."""
    return f"{package.module}-{version}.tar.gz"


def files_of(packages: Iterable[Package], version: str) -> list[str]:
    """Return the names of the sdist and the wheel of each package, in the order of the packages."""
    return [name(package, version) for package in packages for name in (sdist_of, wheel_of)]


def check_distributions(root: Path, folder: Path, packages: Sequence[Package], version: str) -> list[Finding]:
    """Check the contents and metadata of every sdist and wheel in a folder.

    Args:
        root: The tree that was built.
        folder: The folder of the sdists and wheels.
        packages: The packages to find there.
        version: The version that all must have.
    """
    wanted = {name(package, version) for package in packages for name in (sdist_of, wheel_of)}
    there = {file.name for file in folder.iterdir() if file.suffix in {".gz", ".whl"}}
    found = [Finding(where=name, message="was not built") for name in sorted(wanted - there)]
    found += [Finding(where=name, message="is no file of this release") for name in sorted(there - wanted)]
    if found:
        return found
    for package in packages:
        home = root / "packages" / package.name
        found += _check_wheel(folder / wheel_of(package, version), package, version, home)
        found += _check_sdist(folder / sdist_of(package, version), package, version, home)
    return found


def try_alone(
    root: Path, folder: Path, packages: Sequence[Package], version: str, *, names: Sequence[str] | None = None
) -> list[Finding]:
    """Install each wheel alone into a fresh environment and import all its public names.

    Other packages of the workspace come from the folder, everything else from the registry, as locked.

    Args:
        root: The tree that was built.
        folder: The folder of the wheels.
        packages: All packages of the workspace.
        version: The version that all have.
        names: The folder names of the packages to install; all of them if left out.
    """
    build = root / "build" / "release"
    constraints = locked_versions(root, build / "constraints.txt")
    with constraints.open("a", encoding="utf-8") as file:
        file.writelines(f"{package.distribution}=={version}\n" for package in packages)
    found: list[Finding] = []
    for package in packages:
        if names is not None and package.name not in names:
            continue
        requirement = f"{package.distribution}=={version}"
        print(f"  {requirement}", flush=True)
        environment = fresh_environment(build / "environment")
        try:
            install(environment, [requirement], constraints=constraints, find_links=folder)
        except subprocess.CalledProcessError as error:
            message = f"does not install alone: uv ended with exit code {error.returncode}"
            found.append(Finding(where=requirement, message=message))
            continue
        code = _TRY.format(module=package.module, distribution=package.distribution, version=version)
        command = [str(environment.scripts / "python"), "-P", "-c", code]
        found += _imports(requirement, command, cwd=build, environment=environment.variables())
    shutil.rmtree(build / "environment", ignore_errors=True)
    return found


def _imports(
    where: str, command: Sequence[str], *, cwd: Path, environment: Mapping[str, str]
) -> list[Finding]:
    variables = {**os.environ, **environment}
    finished = subprocess.run(
        command, cwd=cwd, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    return [
        Finding(where=where, message=f"does not import alone: {f.message}") for f in failure(where, finished)
    ]


def _check_wheel(file: Path, package: Package, version: str, home: Path) -> list[Finding]:
    information = f"{package.module}-{version}.dist-info/"
    with zipfile.ZipFile(file) as archive:
        names = {name for name in archive.namelist() if not name.startswith(information)}
        metadata = (
            archive.read(f"{information}METADATA") if f"{information}METADATA" in archive.namelist() else b""
        )
    sources = {f"{package.module}/{name}" for name in _files(home / "src" / package.module)}
    found = _compared(file.name, names, sources)
    for needed in ("__init__.py", "py.typed"):
        if f"{package.module}/{needed}" not in names:
            found.append(Finding(where=file.name, message=f"has no {package.module}/{needed}"))
    return [*found, *_check_metadata(file.name, metadata, package, version, home)]


def _check_sdist(file: Path, package: Package, version: str, home: Path) -> list[Finding]:
    top = f"{package.module}-{version}"
    with tarfile.open(file) as archive:
        members = {member.name: member for member in archive.getmembers() if not member.isdir()}
        stream = archive.extractfile(f"{top}/PKG-INFO") if f"{top}/PKG-INFO" in members else None
        metadata = stream.read() if stream else b""
    names = {name.removeprefix(f"{top}/") for name in members} - _ADDED_TO_SDIST
    found = _compared(file.name, names, _files(home))
    return [*found, *_check_metadata(file.name, metadata, package, version, home)]


def _compared(where: str, names: set[str], wanted: set[str]) -> list[Finding]:
    missing = [Finding(where=where, message=f"lacks {name}") for name in sorted(wanted - names)]
    extra = [
        Finding(where=where, message=f"holds {name}, which is not the package's")
        for name in sorted(names - wanted)
    ]
    return [*missing, *extra]


def _check_metadata(where: str, text: bytes, package: Package, version: str, home: Path) -> list[Finding]:
    """Check metadata against the standard, and its name, version and description against the package."""
    try:
        metadata = Metadata.from_email(text, validate=True)
    except ExceptionGroup as group:
        return [Finding(where=where, message=f"metadata: {error}") for error in group.exceptions]
    readme = (home / "README.md").read_text(encoding="utf-8")
    wanted = {
        "name": (metadata.name, package.distribution),
        "version": (str(metadata.version), version),
        "description": ((metadata.description or "").strip(), readme.strip()),
        "description's type": (metadata.description_content_type, "text/markdown"),
    }
    return [
        Finding(where=where, message=f"metadata: the {field} is {_short(given)}, not {_short(right)}")
        for field, (given, right) in wanted.items()
        if given != right
    ]


def _short(text: str | None) -> str:
    return repr(text if text is None or len(text) <= 40 else f"{text[:40]}...")


def _files(folder: Path) -> set[str]:
    files = (file for file in folder.rglob("*") if file.is_file() and file.parent.name != "__pycache__")
    return {file.relative_to(folder).as_posix() for file in files}
