"""The fast tests on the oldest torch that the packages allow."""

from pathlib import Path

from checks.commands import shown
from checks.environments import build_wheels, fresh_environment, install, locked_versions
from checks.findings import Finding

OLDEST_TORCH = "2.9"
# These look at the repository, its pages and its tools, which no version of torch changes.
_ABOUT_THE_REPOSITORY = ("tests/tools", "tests/docs")


def check(root: Path) -> list[Finding]:
    """Install every package's wheel with the oldest torch in an environment of its own, and run the fast tests."""
    build = root / "build" / "oldest"
    wheels = build_wheels(root, build / "wheels")
    others = locked_versions(root, build / "requirements.txt", without="torch")
    environment = fresh_environment(build / "environment")
    packages_given = [f"{name} @ {wheel.as_uri()}" for name, wheel in wheels.items()]
    requirements = [f"torch=={OLDEST_TORCH}.*", *packages_given, "--requirements", str(others)]
    install(environment, requirements, constraints=others)
    ignored = [f"--ignore={folder}" for folder in _ABOUT_THE_REPOSITORY]
    command = [str(environment.scripts / "pytest"), "-q", "-p", "no:cacheprovider", "tests", *ignored]
    return shown(
        f"torch {OLDEST_TORCH}", command, cwd=root, timeout_seconds=3600, environment=environment.variables()
    )
