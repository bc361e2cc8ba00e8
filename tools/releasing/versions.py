"""Versions, and the places in files that name them."""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from checks.workspace import Package


def check_version(version: str, *, previous: str) -> None:
    """Check that a version can follow another.

    Raises:
        ValueError: The version is malformed, is not written in its normal form, is local, or is older.
    """
    try:
        parsed = Version(version)
    except InvalidVersion as error:
        raise ValueError(f"VERSION={version!r} is no version: give one of PEP 440, such as 0.2.0") from error
    if str(parsed) != version:
        raise ValueError(f"VERSION={version!r} is not in its normal form: write {parsed}")
    if parsed.local is not None:
        raise ValueError(f"VERSION={version!r} is local, which no index takes: write {parsed.public}")
    if parsed < Version(previous):  # the present one has a tag once it is released
        raise ValueError(f"VERSION={version!r} is older than the present {previous}: choose a newer one")


def check_in_step(packages: Sequence[Package], *, version: str) -> None:
    """Check that every package has the version of the workspace.

    Raises:
        ValueError: A package has another version.
    """
    for package in packages:
        if package.version != version:
            raise ValueError(
                f"{package.distribution} has version {package.version}, the workspace {version}: "
                f"write {version} into packages/{package.name}/pyproject.toml"
            )


def with_version(text: str, *, path: str, previous: str, version: str, siblings: Sequence[str]) -> str:
    """Return a pyproject.toml with a new version, in its project table and in its pins of siblings.

    Args:
        text: The file as it is.
        path: The path of the file, which errors name.
        previous: The version that the file names now.
        version: The version to write.
        siblings: The distributions of the workspace, whose pins (`==`, `~=`) follow the version.

    Raises:
        ValueError: The version cannot be found, or a sibling is required at versions without the new one.
    """
    written = _pins(siblings, previous).sub(rf"\g<1>{version}", text)
    field = re.compile(rf'^(version\s*=\s*"){re.escape(previous)}(")', re.MULTILINE)
    written = field.sub(rf"\g<1>{version}\g<2>", written, count=1)
    content = tomllib.loads(written)
    if content["project"]["version"] != version:
        raise ValueError(
            f"{path} does not say version = {previous!r} in [project]: write it there, on one line"
        )
    for requirement in _requirements(content):
        is_sibling = canonicalize_name(requirement.name) in siblings
        if is_sibling and not requirement.specifier.contains(version, prereleases=True):
            raise ValueError(f"{path} requires {requirement}, which {version} is not: change the requirement")
    return written


def with_locked_version(text: str, *, previous: str, version: str, distributions: Sequence[str]) -> str:
    """Return a uv.lock that names a new version for the packages of the workspace.

    Args:
        text: The lock as it is.
        previous: The version that the lock names now.
        version: The version to write.
        distributions: The packages of the workspace, its root included.

    Raises:
        ValueError: The lock does not name a package at its present version.
    """
    for name in distributions:
        entry = re.compile(
            rf'^(name = "{re.escape(name)}"\nversion = "){re.escape(previous)}(")', re.MULTILINE
        )
        text, count = entry.subn(rf"\g<1>{version}\g<2>", text)
        if count != 1:
            raise ValueError(f"uv.lock does not name {name} at {previous}: run `uv lock` and commit")
    return text


def _pins(siblings: Sequence[str], previous: str) -> re.Pattern[str]:
    names = "|".join(re.escape(name) for name in siblings)
    return re.compile(rf'("(?:{names})(?:\[[^\]"]*\])?\s*[=~]=\s*){re.escape(previous)}(?=["\s;,])')


def _requirements(content: Mapping[str, Any]) -> Iterator[Requirement]:
    project = content["project"]
    groups = [project.get("dependencies", ()), *project.get("optional-dependencies", {}).values()]
    for group in groups:
        yield from (Requirement(requirement) for requirement in group)
