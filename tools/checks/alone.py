"""Each package installed alone from its wheel, as a user gets it; a shared environment hides an undeclared import."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from checks.commands import shown
from checks.commits import drawn_by_commit
from checks.environments import (
    TEST_TOOLS,
    build_wheels,
    fresh_environment,
    install,
    locked_versions,
    requirements_of,
)
from checks.findings import Finding
from checks.workspace import Package, read_packages, siblings

# How many packages `drawn` tries: all of them together take as long as the whole suite.
_NUM_DRAWN = 4

# What a package's README shows it used with, beside what it declares.
_SHOWN_WITH = {"data": ("lightning-fabric",)}


def check(root: Path, packages: tuple[str, ...] = (), *, drawn: bool = False) -> list[Finding]:
    """Run each package's tests, and its README's code, with nothing installed but what it declares.

    Tests marked `slow` or `costly` are left out: this looks for imports that are not declared.

    Args:
        root: The repository.
        packages: The packages to try, by folder name; all of them if none is named.
        drawn: Try only some of these, which the commit draws.
    """
    known = read_packages(root)
    build = root / "build" / "alone"
    wheels = build_wheels(root, build / "wheels")
    constraints = locked_versions(root, build / "constraints.txt")
    found: list[Finding] = []
    chosen = packages or tuple(known)
    for name in drawn_by_commit(chosen, _NUM_DRAWN) if drawn else chosen:
        found += _try_alone(root, known[name], known, wheels, constraints)
    shutil.rmtree(build / "environment", ignore_errors=True)
    return found


def _try_alone(
    root: Path, package: Package, known: dict[str, Package], wheels: dict[str, Path], constraints: Path
) -> list[Finding]:
    where = f"{package.name} alone"
    tests = [
        page
        for page in (f"tests/{package.name}", f"packages/{package.name}/README.md")
        if (root / page).exists()
    ]
    if f"tests/{package.name}" not in tests:
        return [Finding(where=where, message=f"no tests/{package.name}: a package has tests of its own")]
    environment = fresh_environment(constraints.parent / "environment")
    brought = siblings(package, known)
    requirements = requirements_of(package, brought, wheels)
    try:
        install(
            environment,
            [*requirements, *TEST_TOOLS, *_numpy([package, *brought]), *_SHOWN_WITH.get(package.name, ())],
            constraints=constraints,
        )
    except subprocess.CalledProcessError as error:
        return [Finding(where=where, message=f"does not install: uv ended with exit code {error.returncode}")]
    chosen = ["-m", "not slow and not costly"]  # what a costly test imports, its neighbours import as well
    command = [str(environment.scripts / "pytest"), "-q", "-p", "no:cacheprovider", *chosen, *tests]
    return shown(where, command, cwd=root, timeout_seconds=1200, environment=environment.variables())


def _numpy(packages: Sequence[Package]) -> tuple[str, ...]:
    """The tests of a package that brings torch may use numpy, which torch takes where it finds it."""
    return ("numpy",) if any("torch" in package.dependencies for package in packages) else ()
