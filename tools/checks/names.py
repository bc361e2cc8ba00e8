"""One word, one meaning: names of public classes stand once in the workspace, but for those listed."""

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

from checks.findings import Finding
from checks.sources import Source, read_sources

# Why a name may stand several times.
CLASSES_MEANT = {
    "Accelerator": "the umbrella's, and that of Accelerate's interface",
    "AimTracker": "the one of drivetrain-tracking, and that of Accelerate's interface",
    "ClearMLTracker": "the one of drivetrain-tracking, and that of Accelerate's interface",
    "DVCLiveTracker": "the one of drivetrain-tracking, and that of Accelerate's interface",
    "MLflowTracker": "the one of drivetrain-tracking, and that of Accelerate's interface",
    "SwanLabTracker": "the one of drivetrain-tracking, and that of Accelerate's interface",
    "TensorBoardTracker": "the one of drivetrain-tracking, and that of Accelerate's interface",
    "TrackioTracker": "the one of drivetrain-tracking, and that of Accelerate's interface",
}


def check(root: Path) -> list[Finding]:
    """Look at the names of every package's public classes."""
    return classes_twice(read_sources(root, "packages/*/src/**/*.py"))


def classes_twice(sources: Iterable[Source], meant: Mapping[str, str] = CLASSES_MEANT) -> list[Finding]:
    """Return the public classes whose name another has, except those `meant`, and those `meant` that none shares."""
    places: dict[str, list[str]] = {}
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{source.path}:{node.lineno}")
    twice = {name: where for name, where in places.items() if len(where) > 1}
    return [
        Finding(
            where=where[-1],
            message=f"a class {name!r} stands in {where[0]} too: name one by its difference, or list it as meant",
        )
        for name, where in twice.items()
        if name not in meant
    ] + [
        Finding(
            where="tools/checks/names.py",
            message=f"a class {name!r} may stand several times ({reason}), and does not: take it from the list",
        )
        for name, reason in meant.items()
        if name not in twice
    ]
