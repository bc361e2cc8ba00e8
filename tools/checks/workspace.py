"""The packages of this workspace, as their pyproject.toml files tell."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One publishable package.

    Attributes:
        name: Its folder under packages/ and under tests/: "state".
        distribution: Its name on an index: "drivetrain-state".
        module: Its import name: "drivetrain_state".
        version: The version that its wheel bears.
        description: What it is for, in a line.
        dependencies: The distributions it declares, without versions and extras.
        alone_extras: Its own extras that its tests need, declared under [tool.drivetrain].
        backends: The training backends it registers: name -> "module:Class".
    """

    name: str
    distribution: str
    module: str
    version: str
    description: str
    dependencies: tuple[str, ...]
    alone_extras: tuple[str, ...]
    backends: Mapping[str, str]


def read_packages(root: Path) -> dict[str, Package]:
    """Every package under `root/packages`, by folder name."""
    files = sorted(root.glob("packages/*/pyproject.toml"))
    return {file.parent.name: _read(file) for file in files}


def siblings(package: Package, packages: Mapping[str, Package]) -> tuple[Package, ...]:
    """The packages of this workspace that installing `package` brings along, itself not included."""
    by_distribution = {other.distribution: other for other in packages.values()}
    found: dict[str, Package] = {}
    pending = list(package.dependencies)
    while pending:
        other = by_distribution.get(pending.pop())
        if other is not None and other.name not in found and other.name != package.name:
            found[other.name] = other
            pending.extend(other.dependencies)
    return tuple(found[name] for name in sorted(found))


def _read(file: Path) -> Package:
    content = tomllib.loads(file.read_text())
    project = content["project"]
    return Package(
        name=file.parent.name,
        distribution=project["name"],
        module=project["name"].replace("-", "_"),
        version=project["version"],
        description=project.get("description", ""),
        dependencies=tuple(_distribution(requirement) for requirement in project.get("dependencies", ())),
        alone_extras=tuple(content.get("tool", {}).get("drivetrain", {}).get("alone-extras", ())),
        backends=project.get("entry-points", {}).get("drivetrain.backends", {}),
    )


def _distribution(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement)
    if match is None:
        raise ValueError(f"requirement={requirement!r}: must begin with a distribution's name")
    return match.group().lower().replace("_", "-")
