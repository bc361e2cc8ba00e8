"""A budget of lines for each package and for all, which docs/design.md keeps: what is added pays by what goes."""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import PurePosixPath

from checks.findings import Finding
from checks.sources import Source

DESIGN = "docs/design.md"
# | drivetrain-state | drivetrain_state | ... | 4,000 |
_LIMITS = re.compile(r"all packages have at most ([\d,]+) lines, and none more than ([\d,]+)")
_ROW = re.compile(r"^\| (?P<distribution>drivetrain[\w-]*) \|.*\| (?P<lines>[\d,]+) \|$", re.MULTILINE)


def overdrawn(files: Iterable[Source], design: str) -> list[Finding]:
    """Compare the lines of each package with its budget.

    Args:
        files: The files of all packages.
        design: The text of the page with the table of packages, whose last column is the budget.
    """
    lines: Counter[str] = Counter()
    for file in files:
        _, package, *_ = PurePosixPath(file.path).parts
        lines[package] += len(file.text.splitlines())
    budget = {
        row["distribution"].removeprefix("drivetrain-"): int(row["lines"].replace(",", ""))
        for row in _ROW.finditer(design)
    }
    limits = _LIMITS.search(design)
    if limits is None:
        return [Finding(where=DESIGN, message="no limits of lines for all packages and for one")]
    most, most_of_one = (int(text.replace(",", "")) for text in limits.groups())
    found: list[Finding] = []
    if (total := lines.total()) > most:
        found.append(
            Finding(where="packages", message=f"{total:,} lines, {total - most:,} more than in {DESIGN}")
        )
    found += [
        Finding(where=DESIGN, message=f"the budget of {package} is above {most_of_one:,} lines")
        for package, number in budget.items()
        if number > most_of_one
    ]
    for package, number in lines.items():
        if package not in budget:
            found.append(
                Finding(where=DESIGN, message=f"no budget of lines for {package} in the table of packages")
            )
        elif number > budget[package]:
            message = f"{number:,} lines, {number - budget[package]:,} more than its budget in {DESIGN}"
            found.append(Finding(where=f"packages/{package}", message=message))
    return found
