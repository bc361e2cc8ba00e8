"""The sections of a changelog, and the cut that a release makes."""

import datetime
import re

UNRELEASED = "## Unreleased"
NO_CHANGES = "- No changes; released together with the other packages."

_SECTION = re.compile(r"^## .*$", re.MULTILINE)
_OPEN = re.compile(r"## (?:\S+ \(unreleased\)|Unreleased)\s*")


def cut(text: str, *, path: str, version: str, date: datetime.date) -> str:
    """Return a changelog whose unreleased section has become that of a version.

    A new, empty unreleased section stands on top of it.

    Args:
        text: The changelog as it is.
        path: The changelog's path, which errors name.
        version: The version that is released.
        date: The day of the release.

    Raises:
        ValueError: The first section, and no other, must be the unreleased one; or the version has a section already.
    """
    sections = list(_SECTION.finditer(text))
    unreleased = [number for number, section in enumerate(sections) if _OPEN.fullmatch(section.group())]
    if unreleased != [0]:
        where = (
            "no unreleased section" if not unreleased else "an unreleased section that is not its first alone"
        )
        raise ValueError(f"{path} has {where}: begin it with one section {UNRELEASED!r}")
    if any(section.group().split()[1] == version for section in sections[1:]):
        raise ValueError(f"{path} has a section of {version} already: choose a newer version")
    first = sections[0]
    end = sections[1].start() if len(sections) > 1 else len(text)
    body = text[first.end() : end].strip("\n") or NO_CHANGES
    rest = text[end:]
    cut_section = f"{UNRELEASED}\n\n## {version} ({date.isoformat()})\n\n{body}\n"
    return text[: first.start()] + cut_section + (f"\n{rest}" if rest else "")
