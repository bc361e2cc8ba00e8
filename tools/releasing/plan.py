"""The plan of a release: a frozen value, made from the texts of the repository alone."""

import datetime
import graphlib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from checks.workspace import Package
from releasing.changelog import cut
from releasing.versions import check_in_step, check_version, with_locked_version, with_version

ROOT_PROJECT = "pyproject.toml"
LOCK = "uv.lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChange:
    """A file that a release rewrites.

    Attributes:
        path: The path from the repository's root, with forward slashes.
        text: The text that the file will hold.
    """

    path: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleasePlan:
    """A release of all packages at one version.

    Attributes:
        version: The version that is released.
        previous: The version before it.
        packages: The packages in the order of publishing, each behind what it depends on.
        changes: The files to rewrite, with their new texts.
    """

    version: str
    previous: str
    packages: tuple[Package, ...]
    changes: tuple[FileChange, ...]

    @property
    def tag(self) -> str:
        """The name of the release's tag."""
        return f"v{self.version}"

    def described(self) -> str:
        """Return the plan as text for a terminal."""
        order = [f"  {number:>2}. {p.distribution}" for number, p in enumerate(self.packages, start=1)]
        files = [f"  {change.path}" for change in self.changes]
        return "\n".join([f"{self.previous} -> {self.version}, tag {self.tag}", *order, "files", *files])


def plan_release(
    version: str,
    *,
    date: datetime.date,
    packages: Mapping[str, Package],
    texts: Mapping[str, str],
    uncommitted: Sequence[str] = (),
    tags: Sequence[str] = (),
) -> ReleasePlan:
    """Plan a release.

    Args:
        version: The version to release.
        date: The day of the release, which the changelogs name.
        packages: The packages of the workspace by folder name.
        texts: The files that a release may change, by path.
        uncommitted: What git says of files that are changed or unknown.
        tags: The tags of the repository.

    Raises:
        ValueError: The working tree is not clean, the version cannot follow the present one or has a tag, a package
            is out of step, a file lacks its place for the version, or packages depend on each other in a circle.
    """
    if uncommitted:
        raise ValueError(f"the working tree is not clean: commit or remove {', '.join(uncommitted)}")
    root = tomllib.loads(texts[ROOT_PROJECT])["project"]
    previous = root["version"]
    check_in_step(tuple(packages.values()), version=previous)
    check_version(version, previous=previous)
    if f"v{version}" in tags:
        raise ValueError(f"tag v{version} exists: choose a newer version, or delete a tag that nobody has")
    siblings = [package.distribution for package in packages.values()]
    changes: list[FileChange] = []
    for path in [ROOT_PROJECT, *(f"packages/{name}/pyproject.toml" for name in packages)]:
        text = with_version(texts[path], path=path, previous=previous, version=version, siblings=siblings)
        changes.append(FileChange(path=path, text=text))
    locked = [root["name"], *siblings]
    text = with_locked_version(texts[LOCK], previous=previous, version=version, distributions=locked)
    changes.append(FileChange(path=LOCK, text=text))
    changelogs = [f"packages/{name}/CHANGELOG.md" for name in packages]
    changes += [
        FileChange(path=path, text=cut(texts[path], path=path, version=version, date=date))
        for path in changelogs
    ]
    order = publishing_order(packages.values())
    return ReleasePlan(version=version, previous=previous, packages=order, changes=tuple(changes))


def publishing_order(packages: Iterable[Package]) -> tuple[Package, ...]:
    """Return packages in an order in which each stands behind what it depends on, by name where both would do.

    Raises:
        ValueError: Packages depend on each other in a circle.
    """
    by_name = {package.distribution: package for package in packages}
    sorter = graphlib.TopologicalSorter(
        {name: by_name.keys() & set(package.dependencies) - {name} for name, package in by_name.items()}
    )
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        circle = " -> ".join(error.args[1])
        raise ValueError(f"packages depend on each other in a circle, {circle}: remove one edge") from error
    order: list[Package] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        order += [by_name[name] for name in ready]
        sorter.done(*ready)
    return tuple(order)


def read_texts(root: Path, packages: Mapping[str, Package]) -> dict[str, str]:
    """Read the files that a release may change.

    Raises:
        ValueError: A package has no changelog, or the workspace no lock.
    """
    paths = [ROOT_PROJECT, LOCK]
    for name in packages:
        paths += [f"packages/{name}/pyproject.toml", f"packages/{name}/CHANGELOG.md"]
    missing = [path for path in paths if not (root / path).is_file()]
    if missing:
        raise ValueError(f"{', '.join(missing)} is missing: a release needs it")
    return {path: (root / path).read_text(encoding="utf-8") for path in paths}
