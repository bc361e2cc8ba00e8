"""Check whether the library that computes a layer is installed."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededLibrary:
    """The library of converted layers, its lowest version, and the extra that installs it."""

    library: str
    version: str
    extra: str


def check_library(needed: NeededLibrary) -> str | None:
    """Return why a library cannot be used and how to install it; None if the library is usable."""
    repair = f"pip install 'drivetrain-precision[{needed.extra}]'"
    try:
        found = version(needed.library)
    except PackageNotFoundError:
        return f"{needed.library} is not installed: {repair}"
    if Version(found) < Version(needed.version):
        return f"{needed.library} {found} is too old, {needed.version} has it: {repair} --upgrade"
    return None
