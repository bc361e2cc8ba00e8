"""One word, one meaning: names of public classes and of files stand once in the workspace, but for those listed."""

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

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
_ONE_A_PACKAGE, _ONE_A_BACKEND = "the same concept, one a package", "the same part, one a backend"
_OF_A_COMMAND = "a command beside what it does"
FILES_MEANT = {
    "accelerator": "the umbrella's, and that of Accelerate's interface",
    "errors": _ONE_A_PACKAGE,
    "settings": _ONE_A_PACKAGE,
    "arguments": _ONE_A_PACKAGE,
    "protocol": _ONE_A_PACKAGE,
    "registry": _ONE_A_PACKAGE,
    "compat": _ONE_A_PACKAGE,
    "testing": "contracts for third parties, one module a package",
    "local": "the storage and the cluster that are this machine",
    "meta_init": "dispatch and backends build on meta, and know nothing of each other",
    "applied": _ONE_A_BACKEND,
    "backend": _ONE_A_BACKEND,
    "gradients": _ONE_A_BACKEND,
    "optimizer": _ONE_A_BACKEND,
    "prepared": _ONE_A_BACKEND,
    "state": "the folder of a loader's state, and a backend's part",
    "merge": _OF_A_COMMAND,
    "verify": _OF_A_COMMAND,
    "scatter": "the collective of state, and what data distributes from rank 0",
    "shard": "a division of data, and the sharding of a model",
}


def check(root: Path) -> list[Finding]:
    """Look at the names of every package's files and public classes."""
    sources = list(read_sources(root, "packages/*/src/**/*.py"))
    return [*classes_twice(sources), *files_twice(sources)]


def classes_twice(sources: Iterable[Source], meant: Mapping[str, str] = CLASSES_MEANT) -> list[Finding]:
    """Return the public classes whose name another has, except those `meant`, and those `meant` that none shares."""
    places: dict[str, list[str]] = {}
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{source.path}:{node.lineno}")
    return _twice("class", places, meant)


def files_twice(sources: Iterable[Source], meant: Mapping[str, str] = FILES_MEANT) -> list[Finding]:
    """Return the files whose name another has, except those `meant`, and those `meant` that none shares."""
    places: dict[str, list[str]] = {}
    for source in sources:
        name = PurePosixPath(source.path).stem
        if name not in ("__init__", "__main__"):
            places.setdefault(name, []).append(source.path)
    return _twice("file", places, meant)


def _twice(kind: str, places: Mapping[str, list[str]], meant: Mapping[str, str]) -> list[Finding]:
    twice = {name: where for name, where in places.items() if len(where) > 1}
    return [
        Finding(
            where=where[-1],
            message=f"a {kind} {name!r} stands in {where[0]} too: name one by its difference, or list it as meant",
        )
        for name, where in twice.items()
        if name not in meant
    ] + [
        Finding(
            where="tools/checks/names.py",
            message=f"a {kind} {name!r} may stand several times ({reason}), and does not: take it from the list",
        )
        for name, reason in meant.items()
        if name not in twice
    ]
