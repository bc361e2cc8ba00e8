"""The workspace's packages as a path to import from: nothing is installed, and entry points are found all the same.

Entry points stand in folders that an installer writes beside a package; here they are written from pyproject.toml.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_IMPORTED_AS = {"pyyaml": "yaml"}


def source_path(root: Path, folder: Path) -> list[Path]:
    """Write each package's metadata into a folder; return that folder and the packages' sources.

    Args:
        root: The repository.
        folder: Where to write, created if missing.
    """
    files = sorted(root.glob("packages/*/pyproject.toml"))
    for file in files:
        project = tomllib.loads(file.read_text())["project"]
        info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        )
        (info / "entry_points.txt").write_text(entry_points_text(project))
    return [folder, *(file.parent / "src" for file in files)]


def entry_points_text(project: Mapping[str, Any]) -> str:
    """What an installer would write of a project's scripts and entry points."""
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    lines: list[str] = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), ""]
    return "\n".join(lines)


def requirements(root: Path) -> list[str]:
    """The libraries of others that the packages declare, by the names that they are imported by."""
    named: set[str] = set()
    for file in root.glob("packages/*/pyproject.toml"):
        for requirement in tomllib.loads(file.read_text())["project"].get("dependencies", ()):
            name = requirement.replace("[", ">").replace("=", ">").replace("<", ">").partition(">")[0].strip()
            if not name.startswith("drivetrain"):
                named.add(name)
    return sorted(_IMPORTED_AS.get(name, name) for name in named)
